"""The loop of a rank other than 0: run what rank 0 sends."""

from __future__ import annotations

from runtime.distributed.step_links import StepReceiver
from runtime.distributed.step_messages import Close, RankCodec, Reset, RunStep, SetRun
from runtime.errors import RankFailed
from runtime.model_executor.worker import Worker


def follow(worker: Worker, receiver: StepReceiver, rank: int) -> None:
    """Run steps until rank 0 sends no more. Nothing is read from the device here, so rank 0 is never waited for on the host.

    Raises:
        RankFailed: a step failed on this rank.
    """
    codec = RankCodec()
    while not isinstance(message := codec.decode(receiver.receive()), Close):
        match message:
            case RunStep(batch):
                try:
                    worker.submit(batch).wait()
                except Exception as error:
                    raise RankFailed(rank, batch.step, error) from error
            case SetRun(modes):
                worker.set_run(modes)
            case Reset():
                worker.reset()
