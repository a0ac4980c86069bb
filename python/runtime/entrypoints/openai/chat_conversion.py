"""Chats of other protocols: made from their bodies and written in their form; errors name the fields that the client knows."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from pydantic import ValidationError

from runtime.entrypoints.http.body_schema import BodySchema
from runtime.entrypoints.http.responses import INTERNAL
from runtime.entrypoints.http.sse import named_events
from runtime.entrypoints.openai.chat_updates import ChatUpdate
from runtime.entrypoints.openai.chats import Chat
from runtime.entrypoints.openai.protocol import ChatBody
from runtime.entrypoints.openai.usage import TokenCounts
from runtime.errors import RequestError, ServingError

log = logging.getLogger(__name__)
Events = list[dict[str, Any]]


class AnswerWriter(Protocol):
    """Writes an answer in the form of a protocol. Each method returns the events of what it did."""

    def start(self) -> Events:
        """The first events."""
        ...

    def update(self, update: ChatUpdate) -> Events:
        """Add the deltas of an update."""
        ...

    def end(self, counts: TokenCounts) -> Events:
        """Close the answer."""
        ...

    def fail(self, error: ServingError) -> Events:
        """End with an error."""
        ...


class ChatConversion:
    """Makes chat bodies, and has answers written.

    Args:
        names: fields of a chat body under the names that the other protocol has for them; a field comes before the one it is in.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        self._schema = BodySchema(ChatBody)

    def body(self, fields: Mapping[str, Any]) -> ChatBody:
        """The chat body with these fields; those that are None are left out."""
        with self.naming():
            try:
                return ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
            except ValidationError as error:
                raise self._schema.refusal(error.errors()) from None

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Rename the field at fault in errors raised inside."""
        try:
            yield
        except RequestError as error:
            for ours, theirs in self._names.items():
                if f"{error.param}.".startswith(f"{ours}."):
                    error.param = theirs + (error.param or "")[len(ours) :]
                    break
            raise

    async def collect(self, chat: Chat, writer: AnswerWriter) -> None:
        """Run to the end."""
        with self.naming():
            async for update in chat.updates():
                writer.update(update)
        writer.end(chat.counts())

    async def events(self, chat: Chat, writer: AnswerWriter, ended: Callable[[], None] = lambda: None) -> AsyncGenerator[bytes, None]:
        """The stream of an answer; `ended` is called before the last events."""
        try:
            async with chat:
                yield named_events(writer.start())
                with self.naming():
                    async for update in chat.updates():
                        if events := writer.update(update):
                            yield named_events(events)
            last = writer.end(chat.counts())
        except ServingError as error:
            last = writer.fail(error)
        except Exception:
            log.exception("a stream failed")
            last = writer.fail(ServingError(INTERNAL))
        ended()
        yield named_events(last)
