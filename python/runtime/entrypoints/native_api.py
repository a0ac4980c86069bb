"""SGLang's native endpoints: /generate, /tokenize, /detokenize."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from runtime.entrypoints.body_limits import read_json
from runtime.entrypoints.generations import Choice, Generations, Tally
from runtime.entrypoints.meta_info import meta_info
from runtime.entrypoints.native_protocol import DETOKENIZE, TOKENIZE, NativeRequest, parse_generate
from runtime.entrypoints.openai_logprobs import aligned, finite
from runtime.entrypoints.responses import json_response
from runtime.entrypoints.sse import DONE, EventStream, event, until_gone
from runtime.errors import InvalidField, RequestError
from runtime.managers.tokenizer_manager import Generation, TokenizerManager
from runtime.text.tokenizer import Tokenizer

Json = dict[str, object]


class NativeApi:
    """The native endpoints."""

    def __init__(self, manager: TokenizerManager, tokenizer: Tokenizer) -> None:
        self.manager = manager
        self.tokenizer = tokenizer

    # ---- /generate

    async def generate(self, request: Request) -> Response:
        """POST /generate: the answer, a list of answers for several prompts or n > 1, or a stream of answers so far."""
        began = time.monotonic()
        asked = parse_generate(await read_json(request))
        group = await until_gone(request, self._start(asked))
        if asked.stream:
            return EventStream(self._events(asked, group, began), group.close)
        async with group:
            tally = Tally([len(each.prompt_ids) for each in group.each])
            texts = await until_gone(request, group.texts(tally))
        pairs = [(generation, choice) for generation, choices in zip(group.each, texts, strict=True) for choice in choices]
        answers = [self._answer(asked, generation, choice, began) for generation, choice in pairs]
        return json_response(answers[0] if asked.single else answers)

    async def _start(self, asked: NativeRequest) -> Generations:
        """Start all or none."""
        limit = self.manager.config.scheduler.max_queued_requests + self.manager.limits.max_running_requests
        if len(asked.prompts) * asked.n > limit:
            raise InvalidField("text", f"{len(asked.prompts)} prompts times {asked.n}", f"at most {limit} texts in one call")
        rids = asked.rids or [uuid.uuid4().hex for _ in asked.prompts]
        group = Generations()
        try:
            for prompt, sampling, rid in zip(asked.prompts, asked.sampling, rids, strict=True):
                generation = await self.manager.generate(
                    prompt,
                    sampling,
                    n=asked.n,
                    stream=asked.stream,
                    top_logprobs=asked.top_logprobs,
                    prompt_logprobs=asked.prompt_logprobs_from >= 0,
                    priority=asked.priority,
                    cache_salt=asked.cache_salt,
                    rid=rid,
                    call=asked.call,
                )
                group.each.append(generation)
        except BaseException:
            group.close()
            raise
        return group

    async def _events(self, asked: NativeRequest, group: Generations, began: float) -> AsyncGenerator[bytes, None]:
        """Every event holds a whole text so far, as SGLang's do."""
        so_far = [[Choice() for _ in range(each.n)] for each in group.each]
        async with group:
            async for prompt, update in group.updates():
                choice = so_far[prompt][update.index]
                choice.add(update)
                answer = self._answer(asked, group.each[prompt], choice, began)
                yield event(answer if asked.single else {**answer, "index": prompt * asked.n + update.index})
        yield DONE

    def _answer(self, asked: NativeRequest, generation: Generation, choice: Choice, began: float) -> Json:
        assert choice.last is not None
        update = choice.last
        meta = meta_info(generation.rid, update)
        if update.finish is not None:
            meta["e2e_latency"] = time.monotonic() - began
        if asked.top_logprobs >= 0:
            meta.update(self._logprobs(asked, choice, generation.prompt_ids))
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _logprobs(self, asked: NativeRequest, choice: Choice, prompt_ids: list[int]) -> Json:
        meta: Json = {"output_token_logprobs": self._triples(asked, choice.token_ids, choice.logprobs)}
        known, start = choice.prompt_logprobs, asked.prompt_logprobs_from
        chosen, top = aligned(len(prompt_ids), known.chosen, known.top) if known is not None else ([], [])
        if known is not None:
            meta["input_token_logprobs"] = self._triples(asked, prompt_ids[start:], chosen[start:])
        if asked.top_logprobs > 0:
            meta["output_top_logprobs"] = [self._top(asked, each) for each in choice.top]
            meta["input_top_logprobs"] = [self._top(asked, each) or None for each in top[max(start, 0) :]]
        return meta

    def _triples(self, asked: NativeRequest, ids: Sequence[int], logprobs: Sequence[float | None]) -> list[list[object]]:
        """(log-probability, id, text or null) of each token."""
        return [
            [None if value is None else finite(value), token, self.tokenizer.token_text(token) if asked.texts_in_logprobs else None]
            for token, value in zip(ids, logprobs, strict=False)
        ]

    def _top(self, asked: NativeRequest, top: Sequence[tuple[int, float]]) -> list[list[object]]:
        kept = top[: asked.top_logprobs]
        return self._triples(asked, [token for token, _ in kept], [value for _, value in kept])

    # ---- /tokenize, /detokenize

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: ids of a text, of several, or of a conversation."""
        given = TOKENIZE.read(await read_json(request))
        prompt, messages = given.get("prompt"), given.get("messages")
        if (prompt is None) == (messages is None):
            raise InvalidField("prompt", None if prompt is None else "given", "given, or messages, but not both")
        if isinstance(messages, list):
            tokens: list[int] | list[list[int]] = await asyncio.to_thread(self._chat_ids, given, messages)
        else:
            special = given.get("add_special_tokens", True) is True
            many = [await self.manager.tokenize(text, special) for text in (prompt if isinstance(prompt, tuple) else (str(prompt),))]
            tokens = many if isinstance(prompt, tuple) else many[0]
        count = [len(one) if isinstance(one, list) else 1 for one in tokens]
        counts = count if isinstance(prompt, tuple) else sum(count)
        return json_response({"tokens": tokens, "count": counts, "max_model_len": self.manager.max_context_len})

    def _chat_ids(self, given: Json, messages: list[dict[str, str]]) -> list[int]:
        if not self.tokenizer.has_chat_template:
            raise RequestError("this model has no chat template: give one with --chat-template, or send a prompt", param="messages")
        kwargs = given.get("chat_template_kwargs")
        generation = given.get("add_generation_prompt", True) is True
        assert kwargs is None or isinstance(kwargs, dict)
        return self.tokenizer.encode_chat(messages, add_generation_prompt=generation, template_kwargs=kwargs)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, or the texts of several lists."""
        given = DETOKENIZE.read(await read_json(request))
        tokens = given["tokens"]
        assert isinstance(tokens, list)
        lists = tokens if isinstance(tokens[0], list) else [tokens]
        highest, limit = max(max(ids) for ids in lists), self.manager.limits.vocab_size
        if highest >= limit:
            raise InvalidField("tokens", highest, f"made of token ids from 0 to {limit - 1}")
        skip = given.get("skip_special_tokens", True) is True
        texts = await asyncio.to_thread(lambda: [self.tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists])
        return json_response({"text": texts if isinstance(tokens[0], list) else texts[0]})
