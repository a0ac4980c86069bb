"""Several ranks of one model as threads of the test: a group without processes, and workers that follow rank 0."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from runtime.batch import BatchResult
from runtime.distributed.parallel_group import ALONE, ParallelGroup, split_ranks
from runtime.distributed.step_messages import GroupResult, RankCodec
from runtime.model_executor.follower_loop import run_follower
from runtime.model_executor.followers import Followers

T = TypeVar("T")
PATIENCE = 60.0


@dataclass
class Meeting:
    """What the threads of a group share.

    Attributes:
        values: of this exchange and of the one before it, in turn: a thread that waits for an exchange has read the one before it, so
            that one barrier an exchange is enough.
    """

    size: int

    def __post_init__(self) -> None:
        self.values = [[None] * self.size, [None] * self.size]
        self.barrier = threading.Barrier(self.size, action=self.values.reverse, timeout=PATIENCE)


class ThreadGroup(ParallelGroup):
    """`ParallelGroup` of threads."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self.meeting = meeting

    def gather(self, value: T) -> list[T]:
        values: list[Any] = self.meeting.values[0]
        values[self.rank] = value
        self.meeting.barrier.wait()
        return list(values)

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.gather(x.clone()))

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def split(self, parts: int) -> tuple[Any, Any]:
        found = []
        for lists in split_ranks(self.size, parts):
            own = next(ranks for ranks in lists if self.rank in ranks)
            meeting = self.gather(Meeting(len(own)))[own[0]]
            found.append(ThreadGroup(own.index(self.rank), len(own), meeting) if len(own) > 1 else ALONE)
        return found[0], found[1]

    def agree(self, value: T) -> T:
        return self.gather(value)[0]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.gather(x.clone())
        return sum(others, start=first)

    def gather_columns(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        out = torch.cat(self.gather(x.clone()), dim=1)
        assert out.shape[1] == columns
        return out


class QueueResults:
    """Carries the results of attention groups to rank 0."""

    def __init__(self, groups: int) -> None:
        self.queues = [queue.Queue[bytes]() for _ in range(groups - 1)]

    def send(self, result: GroupResult) -> None:
        self.queues[result.group - 1].put(RankCodec().encode(result))

    def receive(self, step: int) -> list[BatchResult]:
        found = [RankCodec().decode_result(one.get(timeout=PATIENCE)) for one in self.queues]
        assert {result.step for result in found} == {step}
        return [result.result for result in found]

    def close(self) -> None:
        pass


class QueueLink:
    """Carries encoded steps to the followers."""

    def __init__(self, size: int) -> None:
        self.queues = [queue.Queue[bytes]() for _ in range(size - 1)]

    def send(self, message: bytes) -> None:
        for one in self.queues:
            one.put(message)

    def close(self) -> None:
        pass


class NoWatch:
    """In place of `RankWatch`: threads send no heartbeats."""

    def start(self) -> None:
        pass

    def end(self, why: str) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class QueueEnd:
    queue: queue.Queue[bytes]

    def receive(self) -> bytes:
        return self.queue.get(timeout=PATIENCE)


@contextmanager
def ranks(
    size: int, build: Callable[..., Any], change: Callable[[int, Any], None] = lambda rank, worker: None, groups: int = 1
) -> Iterator[Any]:
    """Rank 0's worker; the others follow it. `build(group=, followers=)` builds each; `change` may spoil one.

    groups: attention groups that `build` makes.
    """
    meeting, link, results = Meeting(size), QueueLink(size), QueueResults(groups)
    groups = [ThreadGroup(rank, size, meeting) for rank in range(size)]

    def serve(rank: int) -> None:
        worker = build(group=groups[rank], followers=None)
        change(rank, worker)
        groups[rank].gather(None)
        try:
            run_follower(worker, QueueEnd(link.queues[rank - 1]), rank, results)
        finally:
            worker.close()

    with ThreadPoolExecutor(size) as pool:
        others = [pool.submit(serve, rank) for rank in range(1, size)]
        worker = build(group=groups[0], followers=Followers([link], NoWatch(), results))
        try:
            yield worker
        except BaseException:
            meeting.barrier.abort()
            raise
        finally:
            worker.close()
        for other in others:
            other.result(PATIENCE)
