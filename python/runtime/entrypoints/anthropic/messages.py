"""POST /v1/messages and /v1/messages/count_tokens: a conversion of chats."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from runtime.entrypoints.anthropic.conversion import CHAT_NAMES, chat_fields, prompt_fields
from runtime.entrypoints.anthropic.protocol import CountBody, MessagesBody
from runtime.entrypoints.anthropic.writer import MessageWriter
from runtime.entrypoints.http.responses import INTERNAL, anthropic_error, json_response
from runtime.entrypoints.http.sse import EventStream, named_events, until_gone
from runtime.entrypoints.openai.chat_conversion import ChatConversion
from runtime.entrypoints.openai.chats import Chat, Chats
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.errors import ServingError
from runtime.managers.tokenizer_manager import TokenizerManager

log = logging.getLogger(__name__)


class MessagesApi:
    """Answers conversations in Anthropic's form."""

    def __init__(self, chats: Chats, manager: TokenizerManager, model: ServedModel) -> None:
        self._chats, self._manager, self._model = chats, manager, model
        self._conversion = ChatConversion(CHAT_NAMES)

    async def create(self, request: Request, body: MessagesBody) -> Response:
        """Answer a conversation, as JSON or as a stream of events."""
        self._model.check(body.model)
        chat_body = self._conversion.body(chat_fields(body, self._manager.max_context_len))
        with self._conversion.naming():
            chat = await until_gone(request, self._chats.start(chat_body))
        writer = MessageWriter(f"msg_{uuid.uuid4().hex}", self._model.name, len(chat.prompt_ids))
        if body.stream:
            return EventStream(self._events(chat, writer), chat.close)
        async with chat:
            await until_gone(request, self._collect(chat, writer))
        return json_response(writer.message)

    async def count_tokens(self, request: Request, body: CountBody) -> Response:
        """Count the tokens of a conversation."""
        self._model.check(body.model)
        chat_body = self._conversion.body(prompt_fields(body))
        with self._conversion.naming():
            ids = await until_gone(request, self._chats.prompt_ids(chat_body, any_length=True))
        return json_response({"input_tokens": len(ids)})

    async def _collect(self, chat: Chat, writer: MessageWriter) -> None:
        """Run to the end."""
        with self._conversion.naming():
            async for update in chat.updates():
                writer.update(update)
        writer.end(chat.counts())

    async def _events(self, chat: Chat, writer: MessageWriter) -> AsyncGenerator[bytes, None]:
        try:
            async with chat:
                yield named_events(writer.start())
                with self._conversion.naming():
                    async for update in chat.updates():
                        if events := writer.update(update):
                            yield named_events(events)
            yield named_events(writer.end(chat.counts()))
        except ServingError as error:
            yield named_events([anthropic_error(error.status, str(error))])
        except Exception:
            log.exception("a stream failed")
            yield named_events([anthropic_error(500, INTERNAL)])
