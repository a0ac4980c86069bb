"""POST /v1/messages and /v1/messages/count_tokens, converted to and from chats."""

from __future__ import annotations

import uuid

from starlette.responses import Response

from runtime.entrypoints.anthropic.conversion import CHAT_NAMES, chat_fields, prompt_fields
from runtime.entrypoints.anthropic.protocol import CountBody, MessagesBody
from runtime.entrypoints.anthropic.writer import MessageWriter
from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import EventStream
from runtime.entrypoints.openai.chat_conversion import ChatConversion
from runtime.entrypoints.openai.chats import Chats
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.managers.tokenizer_manager import TokenizerManager


class MessagesApi:
    """Answers conversations in Anthropic's form."""

    def __init__(self, chats: Chats, manager: TokenizerManager, model: ServedModel) -> None:
        self._chats, self._manager, self._model = chats, manager, model
        self._conversion = ChatConversion(CHAT_NAMES)

    async def create(self, body: MessagesBody) -> Response:
        """Answer a conversation, as JSON or as a stream of events."""
        self._model.check(body.model)
        chat_body = self._conversion.body(chat_fields(body, self._manager.max_context_len))
        with self._conversion.naming():
            chat = await self._chats.start(chat_body)
        writer = MessageWriter(f"msg_{uuid.uuid4().hex}", self._model.name, len(chat.prompt_ids))
        if body.stream:
            return EventStream(self._conversion.events(chat, writer), chat.group.close)
        async with chat.group:
            await self._conversion.collect(chat, writer)
        return json_response(writer.message)

    async def count_tokens(self, body: CountBody) -> Response:
        """Count the tokens of a conversation."""
        self._model.check(body.model)
        chat_body = self._conversion.body(prompt_fields(body))
        with self._conversion.naming():
            ids = await self._chats.prompt_ids(chat_body, any_length=True)
        return json_response({"input_tokens": len(ids)})
