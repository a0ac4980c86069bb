"""The loop of a follower: runs the steps that rank 0 sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.batch import Pending
from runtime.distributed.rank_sockets import ResultPusher
from runtime.distributed.step_links import StepReceiver
from runtime.distributed.step_messages import Answer, Close, GroupResult, RankCodec, Reset, RunStep, SetRun
from runtime.errors import RankFailed
from runtime.model_executor.worker import Worker


def run_follower(worker: Worker, receiver: StepReceiver, rank: int, results: ResultPusher | None) -> None:
    """Run steps until rank 0 ends.

    Followers read no results from the device, so their host never waits for rank 0. The exception is the first rank of another attention
    group, which reads a step when rank 0 asks for its result; if steps overlap, it does so after the next step.

    Raises:
        RankFailed: a step failed on this rank.
    """
    codec, group, unread = RankCodec(), worker.answering_group, deque[Pending]()
    while not isinstance(message := codec.decode(receiver.receive()), Close):
        match message:
            case RunStep(batch):
                with _failing(rank, batch.step):
                    pending = worker.submit(batch)
                    if group is not None and batch.sections:
                        unread.append(pending)
                    else:
                        pending.wait()
            case Answer(step):
                if group is not None:
                    assert results is not None, "every other group has a link to rank 0"
                    with _failing(rank, step):
                        results.send(GroupResult(step, group, unread.popleft().wait()))
            case SetRun(modes):
                worker.set_run(modes)
            case Reset():
                worker.reset()


@contextmanager
def _failing(rank: int, step: int) -> Iterator[None]:
    """Convert exceptions within to `RankFailed`, which names the rank and the step."""
    try:
        yield
    except Exception as error:
        raise RankFailed(rank, step, error) from error
