"""CPU time of one scheduler step without a device: a worker that answers at once, streaming requests.

python -m benchmark.host_cost
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import numpy as np

from benchmark.engine_loop import EngineLoop
from runtime.batch import BatchResult, ScheduleBatch, StepStats, WorkerLimits
from runtime.config.flag_parser import parse
from runtime.entrypoints.prepare import prepare
from runtime.worker_info import WorkerInfo

SIZES = (1, 16, 64, 256)
STEPS, ROUNDS = 40, 7


@dataclass(frozen=True)
class Done:
    """A step that has ended."""

    result: BatchResult

    def wait(self) -> BatchResult:
        return self.result


class NullWorker:
    """Answers every decode row with the same tokens: one without drafts, two with."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.limits = WorkerLimits(
            max_total_tokens=1 << 20,
            max_running_requests=max(SIZES),
            max_context_len=1 << 14,
            max_extend_tokens=8192,
            page_size=1,
            vocab_size=32_000,
            tokens_per_step=num_draft_tokens,
            max_accept_len=num_draft_tokens,
            prefix_lookahead=int(num_draft_tokens > 1),
        )

    def info(self) -> WorkerInfo:
        return WorkerInfo()

    def submit(self, batch: ScheduleBatch) -> Done:
        drafts = self.limits.max_accept_len - 1
        ended = (batch.next_tokens < 0).astype(np.int32)
        accept_lens = np.concatenate([ended, np.full(batch.num_decodes, 2 if drafts else 1, np.int32)])
        stats = StepStats(graph=True, padded_size=batch.num_decodes, draft_tokens=drafts)
        return Done(BatchResult(np.full(int(accept_lens.sum()), 7, np.int32), accept_lens, stats=stats))


def microseconds(requests: int, num_draft_tokens: int) -> float:
    """The best of several rounds."""
    config, _ = prepare(parse(["--device", "cpu", "--log-level", "warning"]).args)
    scheduler = msgspec.structs.replace(config.scheduler, chunked_prefill_size=8192)
    loop = EngineLoop(msgspec.structs.replace(config, scheduler=scheduler), NullWorker(num_draft_tokens), overlap=True)
    loop.start(requests, 8, 4000)
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        loop.run(STEPS)
        best = min(best, (time.process_time() - started) / STEPS)
    return best * 1e6


if __name__ == "__main__":
    for size in SIZES:
        plain, drafts = microseconds(size, 1), microseconds(size, 4)
        print(f"{size:4d} requests: {plain:6.0f} us plain, {drafts:6.0f} us with 3 drafts")
