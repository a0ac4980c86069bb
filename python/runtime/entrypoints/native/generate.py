"""POST /generate."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from runtime.entrypoints.generations import Call, Choice, Generations
from runtime.entrypoints.http.rendering import encoded, off_loop
from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import DONE, EventStream, event, until_gone
from runtime.entrypoints.native.meta_info import meta_info
from runtime.entrypoints.native.protocol import AskedLogprobs, GenerateBody
from runtime.entrypoints.openai.logprobs import Top, aligned, finite
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.managers.generation import RequestOptions
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.sampling_params import GRAMMAR_KINDS, SamplingDefaults
from runtime.text.tokenizer import Tokenizer

Json = dict[str, Any]


class GenerateApi:
    """Generates in SGLang's native form."""

    def __init__(self, manager: TokenizerManager, tokenizer: Tokenizer, model: ServedModel) -> None:
        self._manager = manager
        self._tokenizer = tokenizer
        self._model = model

    async def generate(self, request: Request, body: GenerateBody) -> Response:
        """Generate: one object, an array for several prompts or n > 1, or a stream of outputs so far."""
        self._model.check(body.model)
        began = time.monotonic()
        group = await until_gone(
            request, Generations.start(self._manager, _call(body, self._manager.config.model.preferred_sampling_params))
        )
        if body.stream:
            return EventStream(self._events(body, group, began), group.close)
        async with group:
            texts = await until_gone(request, group.texts())
        pairs = [(prompt, choice) for prompt, choices in enumerate(texts) for choice in choices]
        cells = sum(self._cells(body, group, prompt, choice) for prompt, choice in pairs)
        outputs = await off_loop(cells, lambda: [encoded(self._output(body, group, prompt, choice, began)) for prompt, choice in pairs])
        return json_response(outputs[0] if body.single else outputs)

    async def _events(self, body: GenerateBody, group: Generations, began: float) -> AsyncGenerator[bytes, None]:
        """Every event holds a whole text so far, as SGLang's do."""
        so_far = [[Choice() for _ in range(each.n)] for each in group.each]
        single, n = body.single, body.n
        async with group:
            async for prompt, update in group.updates():
                choice = so_far[prompt][update.index]
                choice.add(update)
                render = partial(self._output, body, group, prompt, choice, began)
                output = await off_loop(self._cells(body, group, prompt, choice), render)
                yield event(output if single else {**output, "index": prompt * n + update.index})
        yield DONE

    def _cells(self, body: GenerateBody, group: Generations, prompt: int, choice: Choice) -> int:
        """How many values an output shows."""
        tokens = len(choice.token_ids) + len(group.each[prompt].prompt_ids) * (choice.prompt_logprobs is not None)
        return tokens * (2 + body.logprobs[prompt].top)

    def _output(self, body: GenerateBody, group: Generations, prompt: int, choice: Choice, began: float) -> Json:
        generation = group.each[prompt]
        choice = choice.prompt_only() if body.samplings[prompt].only_prompt else choice
        assert choice.last is not None
        meta = meta_info(generation.rid, choice.last)
        if choice.last.finish is not None:
            meta["e2e_latency"] = time.monotonic() - began
        asked = body.logprobs[prompt]
        if asked.top >= 0:
            meta.update(self._logprobs(body, asked, choice, generation.prompt_ids))
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _logprobs(self, body: GenerateBody, asked: AskedLogprobs, choice: Choice, prompt_ids: list[int]) -> Json:
        meta: Json = {"output_token_logprobs": self._triples(body, choice.token_ids, choice.logprobs)}
        known, start = choice.prompt_logprobs if asked.start >= 0 else None, asked.start
        chosen, top = aligned(len(prompt_ids), known.chosen, known.top) if known is not None else ([], [])
        if known is not None:
            meta["input_token_logprobs"] = self._triples(body, prompt_ids[start:], chosen[start:])
        if asked.top > 0:
            meta["output_top_logprobs"] = [self._top(body, each[: asked.top]) for each in choice.top]
            meta["input_top_logprobs"] = [self._top(body, each[: asked.top]) or None for each in top[max(start, 0) :]]
        return meta

    def _triples(self, body: GenerateBody, ids: Sequence[int], logprobs: Sequence[float | None]) -> list[list[Any]]:
        """(log-probability, id, text or null) of each token."""
        return [
            [None if value is None else finite(value), token, self._tokenizer.token_text(token) if body.return_text_in_logprobs else None]
            for token, value in zip(ids, logprobs, strict=False)
        ]

    def _top(self, body: GenerateBody, top: Top) -> list[list[Any]]:
        return self._triples(body, [token for token, _ in top], [value for _, value in top])


def _call(body: GenerateBody, defaults: SamplingDefaults) -> Call:
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
        ),
        params={"prompt": "input_ids" if body.text is None else "text"}
        | {name: f"sampling_params.{name}" for name in ("max_new_tokens", *GRAMMAR_KINDS)},
    )


def _rids(given: str | list[str] | None, count: int) -> list[str]:
    """One name per prompt."""
    if isinstance(given, list):
        return given
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    return [given] if count == 1 else [f"{given}-{index}" for index in range(count)]
