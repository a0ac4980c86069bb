"""Rank 0's interface to its followers: each step is sent to them before it runs on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from runtime.batch import BatchResult, Pending, ScheduleBatch, no_ints
from runtime.distributed.parallel_group import ParallelGroup
from runtime.distributed.rank_sockets import ResultSocket
from runtime.distributed.rank_watch import PERIOD, RankWatch
from runtime.distributed.step_links import StepSender
from runtime.distributed.step_messages import Answer, Close, RankCodec, RankMessage, Reset, RunStep, SetRun
from runtime.errors import RankFailed, ServerFault


class StepWait:
    """Tracks how long rank 0 has been waiting for one phase of a step; another thread may query it.

    Args:
        what: the verb in the error, "step 7 does not ...".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._waits: int | None = None
        self._seen, self._periods = self._waits, 0

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Rank 0 waits for `step` in the `with` block."""
        self._waits = step
        try:
            yield
        finally:
            self._waits = None

    def longer_than(self, periods: int) -> str:
        """An error text if the last `periods` half seconds found the same wait, else "". Called every half second by one thread.

        Counting calls instead of reading a clock tolerates a suspended machine.
        """
        seen, self._seen = self._seen, self._waits
        self._periods = self._periods + 1 if seen is not None and seen == self._seen else 0
        return f"step {seen} does not {self._what}: rank 0 has waited {periods * PERIOD:g} s for it" if self._periods >= periods else ""


class Followers:
    """Sends every step once, encoded, to all other ranks.

    Args:
        senders: each reaches some of the other ranks, all together reach every one.
        results: receives the results of the other attention groups; None if there is one group.

    Attributes:
        watch: the heartbeats of the other ranks; through it they also learn why rank 0 is about to exit.
        start: tracks sending and launching of a step.
        wait: tracks waiting for the results of a step.
    """

    def __init__(self, senders: Sequence[StepSender], watch: RankWatch, results: ResultSocket | None) -> None:
        self._senders, self.watch, self._results = senders, watch, results
        self.start, self.wait = StepWait("start"), StepWait("end")
        self._codec = RankCodec()
        self._set = SetRun(())

    def begin(self, group: ParallelGroup) -> None:
        """Wait until all ranks have built their workers, and expect heartbeats from then on. Called before the first step."""
        group.gather(None)
        self.watch.start()

    def run(self, batch: ScheduleBatch, modes: tuple[str, ...]) -> None:
        """Send a step whose depth is already chosen to the other ranks, with the run modes of the graph runners."""
        wanted = SetRun(modes)
        if wanted != self._set:
            self._set = wanted
            self._send(wanted)
        self._send(RunStep(_for_followers(batch)))

    def ask(self, step: int) -> None:
        """Ask the other attention groups for the results of a step."""
        self._send(Answer(step))

    def answers(self, step: int) -> list[BatchResult]:
        """Wait for the results of the other attention groups, in the order of the groups."""
        assert self._results is not None, "there is one attention group"
        return self._results.receive(step)

    def reset(self) -> None:
        """Make the other ranks forget all requests."""
        self._send(Reset())

    def close(self) -> None:
        """Tell the other ranks to exit."""
        self._send(Close())
        for sender in self._senders:
            sender.close()
        if self._results is not None:
            self._results.close()
        self.watch.close()

    def _send(self, message: RankMessage) -> None:
        frame = self._codec.encode(message)
        for sender in self._senders:
            sender.send(frame)


def _for_followers(batch: ScheduleBatch) -> ScheduleBatch:
    """The step without what only rank 0 reads, and without compiled grammars, which cannot be sent: the other ranks compile their texts,
    which are part of the sampling parameters.
    """
    if batch.sections:
        return replace(batch, sections=[_for_followers(section) for section in batch.sections])
    new_rows = [replace(init, grammar=None, tokens=no_ints()) for init in batch.new_rows]
    return replace(batch, new_rows=new_rows) if new_rows else batch


@dataclass(frozen=True, slots=True)
class SharedPending:
    """A step of several ranks. An exception in it ends the server, because the ranks may no longer agree."""

    pending: Pending
    step: int
    followers: Followers

    def wait(self) -> BatchResult:
        """Wait for rank 0's part."""
        try:
            with self.followers.wait.of(self.step):
                return self.pending.wait()
        except ServerFault as error:
            self.followers.watch.end(str(error))
            raise
        except Exception as error:
            fault = RankFailed(0, self.step, error)
            self.followers.watch.end(str(fault))
            raise fault from error


@dataclass(frozen=True, slots=True)
class GroupsPending:
    """A step of several attention groups. The other groups send their results when rank 0 asks, after the next step.

    Attributes:
        observe: called with the other groups' results.
    """

    own: SharedPending
    observe: Callable[[Sequence[BatchResult]], None]

    def wait(self) -> BatchResult:
        """Wait for the results of all groups."""
        step, followers = self.own.step, self.own.followers
        followers.ask(step)
        own = self.own.wait()
        with followers.wait.of(step):
            others = followers.answers(step)
        self.observe(others)
        return BatchResult(no_ints(), no_ints(), sections=[own, *others])
