"""One request of a client: an async iterator over the updates of its texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from runtime.errors import ServingError
from runtime.managers.messages import AnswerOptions, Finish, TextOut
from runtime.managers.request_context import CURRENT_REQUEST

Release = Callable[["Generation"], None]


class RequestOptions(AnswerOptions, frozen=True, kw_only=True):
    """`AnswerOptions` of a prompt with n texts.

    Attributes:
        n: number of texts.
        fill_context: generate to the end of the context, whatever `max_new_tokens` says.
        prompt_only: compute the prompt and generate nothing. A step of a prompt always yields a token, which is dropped and not counted.
    """

    n: int = 1
    fill_context: bool = False
    prompt_only: bool = False


NO_OPTIONS = RequestOptions()


class Generation:
    """The answer to one request: an async iterator of updates that ends when all n choices have finished.

    Iterating raises the `ServingError` that ended the request early. `close()`, or leaving `async with`, aborts it.

    Args:
        rid: the request id.
        call: an id that the requests of one call share; empty for none.
        prompt_ids: the tokens of the prompt.
        options: as the client chose them.
        max_unread: number of messages to keep for a slow reader.
        release: aborts the unfinished choices of a generation.
        client: the client in the fair queue.

    Attributes:
        n: number of choices.
        choice_rids: request ids of the unfinished choices in the scheduler.
        context: the HTTP request that it belongs to; None outside of one.
        unread: messages that the reader has not taken yet.
    """

    def __init__(
        self, rid: str, call: str, prompt_ids: list[int], options: RequestOptions, max_unread: int, release: Release, client: str = ""
    ) -> None:
        self.rid = rid
        self.call = call
        self.prompt_ids = prompt_ids
        self.n = options.n
        self._prompt_only = options.prompt_only
        self.client = client
        self.context = CURRENT_REQUEST.get()
        self.choice_rids: set[str] = set()
        self.max_unread = max_unread
        self._release = release
        self.unread = 0
        self._updates: dict[int, list[TextOut]] = {}  # by choice
        self._error: ServingError | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TextOut:
        """The next update of one choice: of one step, or of several if the reader is behind. The last one of a choice has a finish
        reason.
        """
        await self.replied()
        if not self._updates:
            raise StopAsyncIteration
        index = next(iter(self._updates))
        outs = self._updates.pop(index)
        self.unread -= len(outs)
        return msgspec.structs.replace(TextOut.joined(outs), index=index)

    async def replied(self) -> None:
        """Wait until there is an update to read, or none will come. Raises the `ServingError` that ended the request early."""
        while not self._updates:
            if self._error is not None:
                raise self._error
            if not self.choice_rids:
                return
            self._changed.clear()
            await self._changed.wait()

    def choice_name(self, index: int) -> str:
        """The id of one choice for clients: the request id, with the index after it if there are several."""
        return self.rid if self.n == 1 else f"{self.rid}-{index}"

    def wanted(self, out: TextOut) -> TextOut:
        """A message about a choice, without its output if the prompt is only computed."""
        if not self._prompt_only:
            return out
        finish = Finish(reason="length") if out.finish is not None and out.finish.reason != "abort" else out.finish
        progress = msgspec.structs.replace(out.progress, completion_tokens=0)
        return msgspec.structs.replace(out, text="", token_ids=[], logprobs=None, progress=progress, finish=finish)

    def close(self) -> None:
        """Abort the unfinished choices, if there are any."""
        self._release(self)

    def put(self, index: int, out: TextOut) -> bool:
        """Keep a message about a choice for the reader, who gets all unread ones as one update; False if too many are unread."""
        if self.unread >= self.max_unread:
            return False
        self._updates.setdefault(index, []).append(out)
        self.unread += 1
        self._changed.set()
        return True

    def fail(self, error: ServingError) -> None:
        """End with `error` after the unread updates."""
        self._error = self._error or error
        self._changed.set()
