"""A call of /generate or of the offline engine, and its outputs in SGLang's form."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from msgspec import structs

from runtime.entrypoints.generations import Call, Generations
from runtime.entrypoints.native.protocol import GenerateBody
from runtime.entrypoints.openai.logprobs import Top, aligned, finite
from runtime.managers.generation import RequestOptions
from runtime.managers.messages import TextOut, TokenLogprobs
from runtime.managers.telemetry.spec_stats import SpecStats
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.sampling_params import SamplingDefaults, SamplingParams
from runtime.text.tokenizer import Tokenizer


class Output(TypedDict):
    """The output of one prompt, in the form of SGLang's engine."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of one call, which arrived at `began` (`time.monotonic`)."""

    tokenizer: Tokenizer
    body: GenerateBody
    group: Generations
    began: float

    @classmethod
    async def start(cls, manager: TokenizerManager, body: GenerateBody) -> Outputs:
        """Start the generations of a call. Raises the errors of `Generations.start`."""
        began, call = time.monotonic(), native_call(body, manager.config.model.preferred_sampling_params)
        return cls(manager.tokenizer, body, await Generations.start(manager, call), began)

    async def growing(self) -> AsyncGenerator[tuple[int, TextOut], None]:
        """Yield the index of a prompt and one of its texts so far, for each update. A text's lists grow in place, because copies would
        cost more with each update.
        """
        texts: dict[tuple[int, int], TextOut] = {}
        async for prompt, update in self.group.updates():
            key = prompt, update.index
            texts[key] = _grown(texts[key], update) if key in texts else update
            yield prompt, texts[key]

    def of(self, prompt: int, out: TextOut) -> Output:
        """The output of one text of a prompt so far."""
        generation, asked = self.group.each[prompt], self.body.logprobs[prompt]
        meta = meta_info(generation.choice_name(out.index), out)
        if out.finish is not None:
            meta["e2e_latency"] = time.monotonic() - self.began
        if asked.top >= 0:
            output, ids, start = out.logprobs or TokenLogprobs(), generation.prompt_ids, asked.start
            if start < 0:  # as in SGLang: the last token of the prompt, without its log-probability
                ids, start, known = ids[-1:], 0, aligned(1, None)
            else:
                known = TokenLogprobs() if out.prompt_logprobs is None else aligned(len(ids), out.prompt_logprobs)
            meta["output_token_logprobs"] = self._triples(out.token_ids, output.chosen)
            meta["input_token_logprobs"] = self._triples(ids[start:], known.chosen[start:])
            if asked.top > 0:
                meta["output_top_logprobs"] = [self._top(each[: asked.top]) for each in output.top]
                meta["input_top_logprobs"] = [self._top(each[: asked.top]) or None for each in known.top[start:]]
        return {"text": out.text, "output_ids": list(out.token_ids), "meta_info": meta}

    def cells(self, prompt: int, out: TextOut) -> int:
        """How many token ids and log-probabilities `of` returns."""
        tokens = len(out.token_ids) + len(self.group.each[prompt].prompt_ids) * (out.prompt_logprobs is not None)
        return tokens * (2 + self.body.logprobs[prompt].top)

    def _triples(self, ids: Sequence[int], logprobs: Sequence[float | None]) -> list[list[Any]]:
        """(log-probability, id, text or null) of each token."""
        text = self.tokenizer.token_text if self.body.return_text_in_logprobs else lambda _: None
        return [[None if value is None else finite(value), token, text(token)] for token, value in zip(ids, logprobs, strict=False)]

    def _top(self, top: Top) -> list[list[Any]]:
        return self._triples([token for token, _ in top], [value for _, value in top])


def native_call(body: GenerateBody, defaults: SamplingDefaults) -> Call:
    """The call for `body`; `defaults` apply to sampling fields that are absent."""
    prompts, asked = body.prompts, body.logprobs
    return Call(
        name=body.rid if isinstance(body.rid, str) else "",
        prompts=prompts,
        sampling=[one.params(defaults) for one in body.samplings],
        rids=_rids(body.rid, len(prompts)),
        options=RequestOptions(
            n=body.n,
            stream=body.stream,
            top_logprobs=max(one.top for one in asked),
            prompt_logprobs=any(one.start >= 0 for one in asked),
            priority=body.priority,
            cache_salt=body.cache_salt,
            continues_prompt=True,
            running_counts=body.stream,
        ),
        prompt_only=[index for index, one in enumerate(body.samplings) if one.only_prompt],
        params={"prompt": body.prompt_field} | {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__},
    )


def _rids(given: str | list[str] | None, count: int) -> list[str]:
    """One request id per prompt."""
    if isinstance(given, list):
        return given
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    return [given] if count == 1 else [f"{given}-{index}" for index in range(count)]


def _grown(out: TextOut, update: TextOut) -> TextOut:
    """`out` with an update appended to it, whose counts it then has."""
    out.token_ids.extend(update.token_ids)
    if out.logprobs is not None and update.logprobs is not None:
        out.logprobs.extend(update.logprobs)
    logprobs, prompt_logprobs = out.logprobs or update.logprobs, out.prompt_logprobs or update.prompt_logprobs
    whole = out.text + update.text
    return structs.replace(update, text=whole, token_ids=out.token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def meta_info(rid: str, last: TextOut) -> dict[str, Any]:
    """Counts, finish reason and acceptance of the text with the id `rid` after its update `last`."""
    progress = last.progress
    return {
        "id": rid,
        "finish_reason": _finish_reason(last),
        "prompt_tokens": progress.prompt_tokens,
        "completion_tokens": progress.completion_tokens,
        "cached_tokens": progress.cached_tokens,
        "queue_time": progress.queue_seconds,
        **progress.decode.shares(),
        **(_acceptance(progress.spec) if progress.spec is not None and progress.spec.verify_steps else {}),
    }


def _finish_reason(update: TextOut) -> dict[str, Any] | None:
    finish = update.finish
    if finish is None:
        return None
    if finish.reason == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.reason == "length":
        return {"type": "length", "length": update.progress.completion_tokens}
    return {"type": "abort", "message": finish.message or "aborted"}


def _acceptance(spec: SpecStats) -> dict[str, Any]:
    return {
        "spec_verify_ct": spec.verify_steps,
        "spec_accept_length": spec.accept_length,
        "spec_accept_rate": spec.accept_rate,
        "spec_accept_token_num": spec.accepted_tokens,
        "spec_draft_token_num": spec.draft_tokens,
        "spec_accepted_by_position": spec.accepted_by_position,
        "spec_drafted_by_position": spec.drafted_by_position,
    }
