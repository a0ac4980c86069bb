"""OpenAI's endpoints: requests to generations, generations to answers and streams."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response

from runtime.entrypoints.body_limits import read_json
from runtime.entrypoints.generations import Choice, Generations, Tally
from runtime.entrypoints.openai_logprobs import CompletionLogprobs, aligned, chat_logprobs
from runtime.entrypoints.openai_protocol import ChatRequest, CompletionRequest, OpenAIRequest, parse_chat, parse_completion
from runtime.entrypoints.responses import json_response
from runtime.entrypoints.sse import DONE, EventStream, event, until_gone
from runtime.errors import InvalidField, ModelNotFound, RequestError
from runtime.managers.tokenizer_manager import Generation, GenerationUpdate, TokenizerManager
from runtime.text.tokenizer import Tokenizer

LONG_CHAT = 2048
"""Characters of a conversation from which its template runs in a thread."""
COMPLETION_NAMES = {"input_ids": "prompt", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
CHAT_NAMES = {"input_ids": "messages", "min_new_tokens": "min_tokens", "prompt": "messages"}

Json = dict[str, object]


class OpenAIApi:
    """/v1/models, /v1/chat/completions and /v1/completions."""

    def __init__(self, manager: TokenizerManager, tokenizer: Tokenizer) -> None:
        self.manager = manager
        self.tokenizer = tokenizer
        self.model = manager.config.model.served_model_name
        self.created = int(time.time())

    # ---- models

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{model}; 404 for another one."""
        self.check_model(request.path_params["model"])
        return json_response(self._card())

    def _card(self) -> Json:
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "talon",
            "root": self.model,
            "max_model_len": self.manager.max_context_len,
        }

    def check_model(self, asked: str | None) -> None:
        """Raise `ModelNotFound` unless `asked` is the model served or is left out."""
        if asked is not None and asked != self.model:
            raise ModelNotFound(asked, self.model)

    # ---- chat

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = parse_chat(await read_json(request), trust_template=self.manager.config.server.trust_request_chat_template)
        self.check_model(asked.model)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        with spelled({**CHAT_NAMES, "max_new_tokens": asked.limit_name}):
            prompt = await self.chat_ids(asked)
            group = await until_gone(request, self._start(asked, [prompt], asked.n, name))
        if asked.stream:
            return EventStream(self._chat_events(asked, group, name), group.close)
        async with group:
            return json_response(await until_gone(request, self._chat_answer(asked, group, name)))

    async def chat_ids(self, asked: ChatRequest) -> list[int]:
        """Token ids of the conversation; a long one is rendered in a thread."""
        if not self.tokenizer.has_chat_template and asked.chat_template is None:
            raise RequestError("this model has no chat template: give one with --chat-template, or use /v1/completions", param="messages")
        if asked.chat_template is None and sum(len(message["content"]) for message in asked.messages) < LONG_CHAT:
            return self._render(asked)
        return await asyncio.to_thread(self._render, asked)

    def _render(self, asked: ChatRequest) -> list[int]:
        return self.tokenizer.encode_chat(
            asked.messages,
            add_generation_prompt=not asked.continue_final_message,
            continue_final_message=asked.continue_final_message,
            template_kwargs=asked.template_kwargs or None,
            chat_template=asked.chat_template,
        )

    async def _chat_answer(self, asked: ChatRequest, group: Generations, name: str) -> Json:
        tally = Tally([len(each.prompt_ids) for each in group.each])
        (choices,) = await group.texts(tally)
        answer = {**self._head(name, "chat.completion"), "choices": [self._chat_choice(asked, i, each) for i, each in enumerate(choices)]}
        if asked.return_token_ids:
            answer["prompt_token_ids"] = group.each[0].prompt_ids
        return {**answer, "usage": tally.usage()}

    def _chat_choice(self, asked: ChatRequest, index: int, choice: Choice) -> Json:
        shown: Json = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._chat_logprobs(asked, choice.token_ids, choice.logprobs, choice.top),
            "finish_reason": choice.finish_reason,
        }
        return {**shown, "token_ids": choice.token_ids} if asked.return_token_ids else shown

    def _chat_logprobs(
        self, asked: ChatRequest, ids: Sequence[int], chosen: Sequence[float | None], top: Sequence[Sequence[tuple[int, float]]]
    ) -> Json | None:
        return chat_logprobs(self.tokenizer, ids, chosen, top, asked.top_logprobs) if asked.top_logprobs >= 0 else None

    async def _chat_events(self, asked: ChatRequest, group: Generations, name: str) -> AsyncGenerator[bytes, None]:
        chunk = _Chunks(self._head(name, "chat.completion.chunk"), asked, Tally([len(group.each[0].prompt_ids)]))
        async with group:
            for index in range(asked.n):
                first: Json = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                prompt_ids = {"prompt_token_ids": group.each[0].prompt_ids} if asked.return_token_ids else {}
                yield chunk.choice(first, **prompt_ids)
            async for prompt, update in group.updates():
                chunk.tally.add(prompt, update)
                shown = self._chat_delta(asked, update)
                if shown is not None:
                    yield chunk.choice(shown)
        for last in chunk.end():
            yield last

    def _chat_delta(self, asked: ChatRequest, update: GenerationUpdate) -> Json | None:
        """The chunk of an update; None when there is nothing in it to show."""
        wanted = update.token_ids and (asked.return_token_ids or asked.top_logprobs >= 0)
        if not update.text and update.finish is None and not wanted:
            return None
        logprobs = update.logprobs and self._chat_logprobs(asked, update.token_ids, update.logprobs.chosen, update.logprobs.top)
        shown: Json = {
            "index": update.index,
            "delta": {"content": update.text} if update.text else {},
            "logprobs": logprobs,
            "finish_reason": update.finish.reason if update.finish else None,
        }
        return {**shown, "token_ids": update.token_ids} if asked.return_token_ids else shown

    # ---- completions

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = parse_completion(await read_json(request))
        self.check_model(asked.model)
        name = f"cmpl-{uuid.uuid4().hex}"
        with spelled(COMPLETION_NAMES):
            group = await until_gone(request, self._start(asked, asked.prompts, asked.best_of, name, prompt_logprobs=asked.echo))
        if asked.stream:
            return EventStream(self._completion_events(asked, group, name), group.close)
        async with group:
            return json_response(await until_gone(request, self._completion_answer(asked, group, name)))

    async def _completion_answer(self, asked: CompletionRequest, group: Generations, name: str) -> Json:
        tally = Tally([len(each.prompt_ids) for each in group.each], output=not asked.drop_output)
        texts = await group.texts(tally)
        choices: list[Json] = []
        for prompt, (generation, candidates) in enumerate(zip(group.each, texts, strict=True)):
            if asked.best_of > asked.n:
                candidates.sort(key=lambda each: each.mean_logprob, reverse=True)
            for choice in candidates[: asked.n]:
                choices.append(self._completion_choice(asked, prompt, generation, choice, len(choices)))
        return {**self._head(name, "text_completion"), "choices": choices, "usage": tally.usage()}

    def _completion_choice(self, asked: CompletionRequest, prompt: int, generation: Generation, choice: Choice, index: int) -> Json:
        assert choice.last is not None
        whole = _Piece(choice.text, choice.token_ids, choice.logprobs, choice.top)
        if asked.drop_output:
            whole = _Piece("", [], [], [])
        if asked.echo:
            whole = self._echoed(asked, prompt, generation, choice.last, whole)
        logprobs = CompletionLogprobs(self.tokenizer, asked.top_logprobs) if asked.top_logprobs >= 0 else None
        finish = "length" if asked.drop_output else choice.finish_reason
        return self._completion_shown(asked, index, whole, logprobs, finish, generation.prompt_ids)

    async def _completion_events(self, asked: CompletionRequest, group: Generations, name: str) -> AsyncGenerator[bytes, None]:
        tally = Tally([len(each.prompt_ids) for each in group.each], output=not asked.drop_output)
        chunk = _Chunks(self._head(name, "text_completion"), asked, tally)
        begun: dict[int, CompletionLogprobs] = {}
        async with group:
            async for prompt, update in group.updates():
                chunk.tally.add(prompt, update)
                shown = self._completion_delta(asked, group.each[prompt], prompt, update, begun)
                if shown is not None:
                    yield chunk.choice(shown)
        for last in chunk.end():
            yield last

    def _completion_delta(
        self, asked: CompletionRequest, generation: Generation, prompt: int, update: GenerationUpdate, begun: dict[int, CompletionLogprobs]
    ) -> Json | None:
        """The chunk of an update; None when there is nothing in it to show. `begun` holds what each choice has come to."""
        index = prompt * asked.n + update.index
        first = index not in begun
        logprobs = begun.setdefault(index, CompletionLogprobs(self.tokenizer, asked.top_logprobs))
        chosen, top = (update.logprobs.chosen, update.logprobs.top) if update.logprobs else ([], [])
        piece = _Piece("", [], [], []) if asked.drop_output else _Piece(update.text, update.token_ids, chosen, top)
        if asked.echo and first:
            piece = self._echoed(asked, prompt, generation, update, piece)
        wanted = piece.ids and (asked.return_token_ids or asked.top_logprobs >= 0)
        if not piece.text and update.finish is None and not wanted:
            return None
        finish = update.finish and ("length" if asked.drop_output else update.finish.reason)
        return self._completion_shown(
            asked, index, piece, logprobs if asked.top_logprobs >= 0 else None, finish, generation.prompt_ids if first else None
        )

    def _echoed(self, asked: CompletionRequest, prompt: int, generation: Generation, update: GenerationUpdate, piece: _Piece) -> _Piece:
        """`piece` with the prompt before it."""
        given, ids = asked.prompts[prompt], generation.prompt_ids
        text = given if isinstance(given, str) else self.tokenizer.decode(ids, skip_special_tokens=False)
        known = update.prompt_logprobs
        chosen, top = aligned(len(ids), known.chosen, known.top) if known is not None else ([None] * len(ids), [()] * len(ids))
        return _Piece(text + piece.text, [*ids, *piece.ids], [*chosen, *piece.chosen], [*top, *piece.top])

    def _completion_shown(
        self,
        asked: CompletionRequest,
        index: int,
        piece: _Piece,
        logprobs: CompletionLogprobs | None,
        finish: str | None,
        prompt_ids: list[int] | None,
    ) -> Json:
        lists = logprobs.take(piece.ids, piece.chosen, piece.top) if logprobs is not None else None
        shown: Json = {"index": index, "text": piece.text, "logprobs": lists, "finish_reason": finish}
        if asked.return_token_ids:
            shown["token_ids"] = piece.ids
            if prompt_ids is not None:
                shown["prompt_token_ids"] = prompt_ids
        return shown

    # ---- both

    async def _start(
        self, asked: OpenAIRequest, prompts: Sequence[str | list[int]], n: int, name: str, *, prompt_logprobs: bool = False
    ) -> Generations:
        """Start all or none."""
        limit = self.manager.config.scheduler.max_queued_requests + self.manager.limits.max_running_requests
        if len(prompts) * n > limit:
            raise InvalidField("prompt", f"{len(prompts)} prompts times {n}", f"at most {limit} texts in one call")
        group = Generations()
        ranked = isinstance(asked, CompletionRequest) and asked.best_of > asked.n
        try:
            for i, prompt in enumerate(prompts):
                generation = await self.manager.generate(
                    prompt,
                    asked.sampling,
                    n=n,
                    fill_context=asked.fill_context,
                    stream=asked.stream,
                    top_logprobs=max(asked.top_logprobs, 0) if ranked else asked.top_logprobs,
                    prompt_logprobs=prompt_logprobs and asked.top_logprobs >= 0,
                    priority=asked.priority,
                    cache_salt=asked.cache_salt,
                    rid=name if len(prompts) == 1 else f"{name}-{i}",
                    call=name,
                )
                group.each.append(generation)
        except BaseException:
            group.close()
            raise
        return group

    def _head(self, name: str, kind: str) -> Json:
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model}


class _Piece:
    """A stretch of text with its tokens."""

    __slots__ = ("chosen", "ids", "text", "top")

    def __init__(self, text: str, ids: Sequence[int], chosen: Sequence[float | None], top: Sequence[Sequence[tuple[int, float]]]) -> None:
        self.text = text
        self.ids = ids
        self.chosen = chosen
        self.top = top


class _Chunks:
    """Makes the events of one stream."""

    def __init__(self, head: Json, asked: OpenAIRequest, tally: Tally) -> None:
        self.head = head
        self.asked = asked
        self.tally = tally

    def choice(self, shown: Json, **more: object) -> bytes:
        """One choice's news; with usage so far where asked for."""
        chunk: Json = {**self.head, "choices": [shown], **more}
        if self.asked.include_usage:
            chunk["usage"] = self.tally.usage() if self.asked.continuous_usage else None
        return event(chunk)

    def end(self) -> list[bytes]:
        """The usage chunk where asked for, and the end mark."""
        return [event({**self.head, "choices": [], "usage": self.tally.usage()}), DONE] if self.asked.include_usage else [DONE]


@contextmanager
def spelled(names: Mapping[str, str]) -> Iterator[None]:
    """Within, a `RequestError` that names one of the manager's fields leaves with the protocol's name for it."""
    try:
        yield
    except RequestError as error:
        named = names.get(error.param or "")
        if named is not None and error.param is not None:
            error.args = (str(error).replace(error.param, named, 1),)
            error.param = named
        raise
