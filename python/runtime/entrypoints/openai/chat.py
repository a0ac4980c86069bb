"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from runtime.entrypoints.generations import Call, Choice, Generations
from runtime.entrypoints.http.refused import TEMPLATE_REFUSED
from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import EventStream, until_gone
from runtime.entrypoints.openai.chunks import Chunks
from runtime.entrypoints.openai.logprobs import Top, chat_logprobs
from runtime.entrypoints.openai.protocol import ChatBody
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.entrypoints.openai.usage import UsageCounter
from runtime.errors import RequestError, UnsupportedField
from runtime.managers.generation import GenerationUpdate
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.text.tokenizer import Tokenizer

LONG_CHAT = 2048
"""Characters of a conversation from which its template runs in a thread."""

Json = dict[str, Any]


class ChatApi:
    """Renders conversations and answers them."""

    def __init__(self, manager: TokenizerManager, tokenizer: Tokenizer, model: ServedModel) -> None:
        self._manager = manager
        self._tokenizer = tokenizer
        self._model = model

    async def create(self, request: Request, body: ChatBody) -> Response:
        """Answer a conversation, as JSON or as a stream."""
        self._model.check(body.model)
        call = await self._call(body)
        group = await until_gone(request, Generations.start(self._manager, call))
        if body.stream:
            return EventStream(self._events(body, group, call.name), group.close)
        async with group:
            return json_response(await until_gone(request, self._answer(body, group, call.name)))

    async def _call(self, body: ChatBody) -> Call:
        name = f"chatcmpl-{uuid.uuid4().hex}"
        return Call(
            name=name,
            prompts=[await self._prompt_ids(body)],
            sampling=[body.sampling(body.limit, body.min_tokens, self._model.sampling)],
            rids=[name],
            n=body.n,
            stream=body.stream,
            top_logprobs=body.top,
            prompt_logprobs=False,
            priority=body.priority,
            cache_salt=body.cache_salt,
            params={"prompt": "messages", "input_ids": "messages", "max_new_tokens": body.limit_name},
            fill_context=body.fill_context,
            continues_prompt=body.continue_final_message,
        )

    async def _prompt_ids(self, body: ChatBody) -> list[int]:
        """Token ids of the conversation; a long one is rendered in a thread."""
        if body.chat_template is not None and not self._manager.config.server.trust_request_chat_template:
            raise UnsupportedField("chat_template", TEMPLATE_REFUSED)
        if not self._tokenizer.has_chat_template and body.chat_template is None:
            raise RequestError(
                "This model has no chat template. Use /v1/completions, or start the server with --chat-template FILE.", "messages"
            )
        messages = [message.rendered() for message in body.messages]
        if body.chat_template is None and sum(len(message["content"]) for message in messages) < LONG_CHAT:
            return self._render(body, messages)
        return await asyncio.to_thread(self._render, body, messages)

    def _render(self, body: ChatBody, messages: list[dict[str, str]]) -> list[int]:
        return self._tokenizer.encode_chat(
            messages,
            add_generation_prompt=not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs or None,
            chat_template=body.chat_template,
        )

    # ---- answers

    async def _answer(self, body: ChatBody, group: Generations, name: str) -> Json:
        texts = await group.texts()
        counter = UsageCounter(group)
        counter.add_all(texts)
        choices = [self._choice(body, index, each) for index, each in enumerate(texts[0])]
        answer = {**self._model.head(name, "chat.completion"), "choices": choices, "usage": counter.usage(), **counter.extension(body)}
        return {**answer, "prompt_token_ids": group.each[0].prompt_ids} if body.return_token_ids else answer

    def _choice(self, body: ChatBody, index: int, choice: Choice) -> Json:
        shown: Json = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(body, choice.token_ids, choice.logprobs, choice.top),
            "finish_reason": choice.finish_reason,
        }
        return {**shown, "token_ids": choice.token_ids} if body.return_token_ids else shown

    def _logprobs(self, body: ChatBody, ids: Sequence[int], chosen: Sequence[float | None], top: Sequence[Top]) -> Json | None:
        return chat_logprobs(self._tokenizer, ids, chosen, top, body.top) if body.logprobs else None

    # ---- streams

    async def _events(self, body: ChatBody, group: Generations, name: str) -> AsyncGenerator[bytes, None]:
        counter = UsageCounter(group)
        chunks = Chunks(self._model.head(name, "chat.completion.chunk"), body, counter)
        prompt_ids = {"prompt_token_ids": group.each[0].prompt_ids} if body.return_token_ids else {}
        async with group:
            for index in range(body.n):
                role = {"role": "assistant", "content": ""}
                yield chunks.choice({"index": index, "delta": role, "logprobs": None, "finish_reason": None}, **prompt_ids)
            async for prompt, update in group.updates():
                counter.add(prompt, update)
                shown = self._delta(body, update)
                if shown is not None:
                    yield chunks.choice(shown)
        yield chunks.end()

    def _delta(self, body: ChatBody, update: GenerationUpdate) -> Json | None:
        """The chunk of an update; None if it shows nothing."""
        shows_tokens = update.token_ids and (body.return_token_ids or body.logprobs)
        if not update.text and update.finish is None and not shows_tokens:
            return None
        logprobs = update.logprobs and self._logprobs(body, update.token_ids, update.logprobs.chosen, update.logprobs.top)
        shown: Json = {
            "index": update.index,
            "delta": {"content": update.text} if update.text else {},
            "logprobs": logprobs,
            "finish_reason": update.finish.reason if update.finish else None,
        }
        return {**shown, "token_ids": update.token_ids} if body.return_token_ids else shown
