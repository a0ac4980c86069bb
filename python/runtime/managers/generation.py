"""One request of a client: the texts that grow for it, as an async iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from runtime.errors import ServingError
from runtime.managers.messages import Finish, TextOut, TokenLogprobs
from runtime.managers.request_context import CURRENT_REQUEST
from runtime.managers.telemetry.progress import Progress

Release = Callable[["Generation"], None]


class GenerationUpdate(msgspec.Struct, frozen=True):
    """One step of one choice.

    Attributes:
        index: the choice, 0..n - 1.
        text: new text, maybe empty.
        token_ids: new tokens, including a stop token that ended the choice.
        progress: counts of this choice so far.
        finish: why the choice ended; exactly one update of each choice has it.
        logprobs, prompt_logprobs: of `token_ids` and of the prompt, if requested.
        pooled: what a pooling request asked for, with its only update.
    """

    index: int
    text: str
    token_ids: list[int]
    progress: Progress
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    pooled: list[float] | None = None

    @classmethod
    def of(cls, index: int, out: TextOut) -> GenerationUpdate:
        """`out` as the next step of choice `index`."""
        return cls(index, out.text, out.token_ids, out.progress, out.finish, out.logprobs, out.prompt_logprobs, out.pooled)


class Generation:
    """The answer to one request: an async iterator of `GenerationUpdate` that ends when all n choices have finished.

    Iterating raises the `ServingError` that ended the request early. `close()`, or leaving `async with`, aborts it.

    Args:
        rid: the name of the request.
        call: a name that the requests of one call share; empty for none.
        prompt_ids: the tokens of the prompt.
        n: number of choices.
        max_unread: updates to keep for a slow reader.
        release: aborts what still runs of a generation.
        client: for whom it counts in the queue.

    Attributes:
        wires: names of the choices under way, as the scheduler knows them.
        context: the HTTP request that it belongs to; None outside of one.
    """

    def __init__(self, rid: str, call: str, prompt_ids: list[int], n: int, max_unread: int, release: Release, client: str = "") -> None:
        self.rid = rid
        self.call = call
        self.prompt_ids = prompt_ids
        self.n = n
        self.client = client
        self.context = CURRENT_REQUEST.get()
        self.wires: set[str] = set()
        self.max_unread = max_unread
        self._release = release
        self._unread: deque[GenerationUpdate] = deque()
        self._error: ServingError | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GenerationUpdate:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if not self.wires:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._unread.popleft()

    def close(self) -> None:
        """Abort what still runs; harmless when nothing does."""
        self._release(self)

    def put(self, update: GenerationUpdate) -> bool:
        """Keep an update for the reader; False if too many are unread."""
        if len(self._unread) >= self.max_unread:
            return False
        self._unread.append(update)
        self._changed.set()
        return True

    def fail(self, error: ServingError) -> None:
        """End with `error` after the unread updates."""
        self._error = self._error or error
        self._changed.set()
