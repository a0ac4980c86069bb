"""POST /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from msgspec import structs
from starlette.responses import Response

from runtime.entrypoints.generations import Call, Generations
from runtime.entrypoints.http.rendering import encoded, off_loop
from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import EventStream
from runtime.entrypoints.openai.chunks import Chunks
from runtime.entrypoints.openai.logprobs import CompletionLogprobs, aligned, prompt_offsets
from runtime.entrypoints.openai.protocol import CompletionBody
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.entrypoints.openai.usage import UsageCounter
from runtime.managers.generation import Generation, RequestOptions
from runtime.managers.messages import TextOut, TokenLogprobs
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.sampling_params import SamplingDefaults
from runtime.text.decode_stream import PROMPT_TAIL

Json = dict[str, Any]


class CompletionApi:
    """Completes prompts."""

    def __init__(self, manager: TokenizerManager, model: ServedModel) -> None:
        self._manager, self._tokenizer, self._model = manager, manager.tokenizer, model

    async def create(self, body: CompletionBody) -> Response:
        """Complete one prompt or several, as JSON or as a stream."""
        self._model.check(body.model)
        call = _call(body, self._model.sampling)
        group = await Generations.start(self._manager, call)
        if body.stream:
            return EventStream(self._events(body, group, call.name), group.close)
        async with group:
            return json_response(await self._answer(body, group, call.name))

    async def _answer(self, body: CompletionBody, group: Generations, name: str) -> Json:
        texts = await group.texts()
        tokens = sum(len(out.token_ids) for candidates in texts for out in candidates)
        tokens += body.echo * body.candidates * sum(len(each.prompt_ids) for each in group.each)
        return await off_loop(tokens * (2 + body.top), lambda: self._rendered(body, group, texts, name))

    def _rendered(self, body: CompletionBody, group: Generations, texts: list[list[TextOut]], name: str) -> Json:
        counter = UsageCounter(group)
        choices: list[Any] = []
        for prompt, (generation, candidates) in enumerate(zip(group.each, texts, strict=True)):
            for out in candidates:
                counter.add(prompt, out)
            if body.candidates > body.n:
                candidates.sort(key=_mean_logprob, reverse=True)
            for out in candidates[: body.n]:
                out = self._after_prompt(body, prompt, generation, out) if body.echo else out
                shown = _shown(body, len(choices), out, self._logprobs(body, prompt, generation), generation.prompt_ids)
                choices.append(encoded(shown))
        counts = counter.counts()
        return {**self._model.head(name, "text_completion"), "choices": choices, "usage": counts.usage(body), **counts.extension(body)}

    async def _events(self, body: CompletionBody, group: Generations, name: str) -> AsyncGenerator[bytes, None]:
        counter = UsageCounter(group)
        chunks = Chunks(self._model.head(name, "text_completion"), body, counter.counts)
        logprobs: dict[int, CompletionLogprobs] = {}
        async for prompt, update in group.updates():
            counter.add(prompt, update)
            generation = group.each[prompt]
            tokens = len(update.token_ids) + len(generation.prompt_ids) * (update.prompt_logprobs is not None)
            render = partial(self._delta, body, generation, prompt, update, logprobs)
            shown = await off_loop(tokens * (2 + body.top), render)
            if shown is not None:
                yield chunks.choice(shown)
        yield chunks.end()

    def _delta(
        self, body: CompletionBody, generation: Generation, prompt: int, update: TextOut, logprobs: dict[int, CompletionLogprobs]
    ) -> Json | None:
        """The chunk of an update; None if it would be empty. `logprobs` has the state of each choice's text offsets."""
        index = prompt * body.n + update.index
        first = index not in logprobs
        if first:
            logprobs[index] = self._logprobs(body, prompt, generation)
        out = self._after_prompt(body, prompt, generation, update) if body.echo and first else update
        if not out.text and out.finish is None and not (out.token_ids and (body.return_token_ids or body.top >= 0)):
            return None
        return _shown(body, index, out, logprobs[index], generation.prompt_ids if first else None)

    def _logprobs(self, body: CompletionBody, prompt: int, generation: Generation) -> CompletionLogprobs:
        """The log-probabilities of one choice; their text offsets count the echoed prompt."""
        given, ids = body.prompts[prompt], generation.prompt_ids
        output = self._tokenizer.stream(body.skip_special_tokens, ids[-PROMPT_TAIL:])
        if not body.echo:
            return CompletionLogprobs(self._tokenizer, body.top, output)
        # The BOS token that the tokenizer adds is not part of the text.
        begins = isinstance(given, str) and ids[0] == self._tokenizer.bos_id and not given.startswith(self._tokenizer.token_text(ids[0]))
        offsets = prompt_offsets(ids, self._tokenizer.stream(skip_special_tokens=False), hidden=int(begins))
        return CompletionLogprobs(self._tokenizer, body.top, output, offsets, len(self._prompt_text(given, ids)))

    def _prompt_text(self, given: str | list[int], ids: list[int]) -> str:
        return given if isinstance(given, str) else self._tokenizer.decode(ids, skip_special_tokens=False)

    def _after_prompt(self, body: CompletionBody, prompt: int, generation: Generation, out: TextOut) -> TextOut:
        """A text, or its first update, with the echoed prompt before it."""
        given, ids = body.prompts[prompt], generation.prompt_ids
        logprobs = aligned(len(ids), out.prompt_logprobs)
        logprobs.extend(out.logprobs or TokenLogprobs())
        return structs.replace(out, text=self._prompt_text(given, ids) + out.text, token_ids=[*ids, *out.token_ids], logprobs=logprobs)


def _call(body: CompletionBody, defaults: SamplingDefaults) -> Call:
    name, prompts = f"cmpl-{uuid.uuid4().hex}", body.prompts
    sampling = body.sampling(max(body.max_tokens, 1), body.min_tokens, defaults)
    sampling = structs.replace(sampling, no_stop_trim=body.no_stop_trim or body.include_stop_str_in_output)
    ranked = body.candidates > body.n  # the ranking needs the log-probabilities of the chosen tokens
    return Call(
        name=name,
        prompts=prompts,
        sampling=[sampling] * len(prompts),
        rids=[name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))],
        options=RequestOptions(
            n=body.candidates,
            stream=body.stream,
            top_logprobs=max(body.top, 0) if ranked else body.top,
            prompt_logprobs=body.echo and body.top >= 0,
            priority=body.priority,
            cache_salt=body.cache_salt,
            continues_prompt=True,
            running_counts=body.wants_running_counts,
        ),
        prompt_only=range(len(prompts)) if body.only_echo else (),
        params={"input_ids": "prompt", "max_new_tokens": "max_tokens", **body.grammar_names()},
    )


def _mean_logprob(out: TextOut) -> float:
    """The score that ranks the candidates of `best_of`."""
    known = [value for value in out.logprobs.chosen if value is not None] if out.logprobs is not None else []
    return sum(known) / len(known) if known else float("-inf")


def _shown(body: CompletionBody, index: int, out: TextOut, logprobs: CompletionLogprobs, prompt_ids: list[int] | None) -> Json:
    """One choice, or an update of one."""
    lists = logprobs.take(out.token_ids, out.logprobs or TokenLogprobs()) if body.top >= 0 else None
    shown: Json = {"index": index, "text": out.text, "logprobs": lists, "finish_reason": out.finish and out.finish.reason}
    if out.finish is not None:
        shown["matched_stop"] = out.finish.matched
    if body.return_token_ids:
        shown["token_ids"] = out.token_ids
        if prompt_ids is not None:
            shown["prompt_token_ids"] = prompt_ids
    return shown
