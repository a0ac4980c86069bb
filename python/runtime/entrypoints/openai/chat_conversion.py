"""Runs requests of other protocols as chats, writes answers in their form, and names their fields in errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from runtime.entrypoints.http.body_schema import read_body
from runtime.entrypoints.http.sse import named_events, stream_failure
from runtime.entrypoints.openai.chat_updates import ChatUpdate
from runtime.entrypoints.openai.chats import Chat
from runtime.entrypoints.openai.protocol import ChatBody
from runtime.entrypoints.openai.usage import TokenCounts
from runtime.errors import RequestError, ServingError

Events = list[dict[str, Any]]


class AnswerWriter(Protocol):
    """Writes an answer in the form of a protocol. Each method returns the events that describe its changes."""

    def start(self) -> Events:
        """The first events."""
        ...

    def update(self, update: ChatUpdate) -> Events:
        """Add the deltas of an update."""
        ...

    def end(self, counts: TokenCounts) -> Events:
        """Complete the answer."""
        ...

    def fail(self, error: ServingError) -> Events:
        """End with an error."""
        ...


class ChatConversion:
    """Creates chat bodies and passes answers to a writer.

    Args:
        names: the other protocol's field name by chat body field; nested fields come before the field that contains them.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    def body(self, fields: dict[str, Any]) -> ChatBody:
        """The chat body with these fields; None counts as absent."""
        with self.naming():
            return read_body(ChatBody, fields)

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
        """Run the chat to its end."""
        with self.naming():
            async for update in chat.updates():
                writer.update(update)
        writer.end(chat.counts())

    async def events(self, chat: Chat, writer: AnswerWriter, ended: Callable[[], None] = lambda: None) -> AsyncGenerator[bytes, None]:
        """Yield the events of an answer; `ended` is called before the last ones."""
        try:
            yield named_events(writer.start())
            with self.naming():
                async for update in chat.updates():
                    if events := writer.update(update):
                        yield named_events(events)
            last = writer.end(chat.counts())
        except Exception as error:
            last = writer.fail(stream_failure(error))
        ended()
        yield named_events(last)
