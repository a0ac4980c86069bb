"""The other ranks as rank 0's worker sees them: each step goes to them before it runs here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from runtime.batch import BatchResult, Pending, ScheduleBatch
from runtime.distributed.step_links import StepSender
from runtime.distributed.step_messages import Close, RankCodec, Reset, RunStep, SetRun
from runtime.errors import RankFailed, ServerFault


class StepWait:
    """The step that rank 0 waits for, which another thread may ask about."""

    def __init__(self) -> None:
        self._waits: tuple[int, float] | None = None

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Within, rank 0 waits for `step`."""
        self._waits = step, time.monotonic()
        try:
            yield
        finally:
            self._waits = None

    def longer_than(self, seconds: float) -> str:
        """A sentence about a step that is awaited for longer; "" where there is none. Any thread may ask."""
        waits = self._waits
        if waits is None or time.monotonic() - waits[1] <= seconds:
            return ""
        return f"step {waits[0]} does not end: rank 0 has waited {seconds:g} s for it"


class Followers:
    """Sends every step once, encoded, to all other ranks.

    Args:
        ended: called after the last message was sent.

    Attributes:
        wait: the step that rank 0 waits for.
    """

    def __init__(self, sender: StepSender, ended: Callable[[], None]) -> None:
        self._sender, self._ended = sender, ended
        self.wait = StepWait()
        self._codec = RankCodec()
        self._set = SetRun(())

    def run(self, batch: ScheduleBatch, modes: tuple[str, ...]) -> None:
        """Have the other ranks run a step, whose depth is chosen, with the graph runners in these modes."""
        wanted = SetRun(modes)
        if wanted != self._set:
            self._set = wanted
            self._sender.send(self._codec.encode(wanted))
        # A compiled grammar stays in its process: the other ranks compile the text that comes with the sampling parameters.
        if any(init.grammar is not None for init in batch.new_rows):
            batch = replace(batch, new_rows=[replace(init, grammar=None) for init in batch.new_rows])
        self._sender.send(self._codec.encode(RunStep(batch)))

    def reset(self) -> None:
        """Have them forget every request."""
        self._sender.send(self._codec.encode(Reset()))

    def close(self) -> None:
        """Let them end."""
        self._sender.send(self._codec.encode(Close()))
        self._sender.close()
        self._ended()


@dataclass(frozen=True, slots=True)
class SharedPending:
    """A step of several ranks: what it raises ends the server, because the ranks may differ after it."""

    pending: Pending
    step: int
    waiting: StepWait

    def wait(self) -> BatchResult:
        """Wait for rank 0's part."""
        try:
            with self.waiting.of(self.step):
                return self.pending.wait()
        except ServerFault:
            raise
        except Exception as error:
            raise RankFailed(0, self.step, error) from error
