"""Time the worker alone, without scheduler or HTTP: one steady decode iteration at each batch size, pipelined as the server runs it.

python -m benchmark.engine_steps --batch-sizes 1,4,16,32 --context 1500 --steps 100 --out FOLDER [launch_server flags]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from benchmark.engine_loop import build
from benchmark.record import Record
from runtime.batch import ForwardMode, RowInit, ScheduleBatch, Worker
from runtime.sampling_params import SamplingParams


class Rows:
    """Rows 1..B of a worker, each with all the pages it will need."""

    def __init__(self, worker: Worker, context: int, room: int, sampling: SamplingParams) -> None:
        self.worker, self.limits, self.context, self.sampling = worker, worker.limits, context, sampling
        self.pages_per_row = -(-(context + room) // self.limits.page_size)
        self.kv: dict[int, int] = {}
        self.step = 0

    def prefill(self, row: int) -> float:
        """Run one prompt in chunks; returns seconds to its first token."""
        rng, chunk = np.random.default_rng(row), self.limits.max_extend_tokens
        first_page = (row - 1) * self.pages_per_row + 1
        started, done = time.perf_counter(), 0
        while done < self.context:
            n = min(chunk, self.context - done)
            last = done + n == self.context
            batch = self._batch(ForwardMode.EXTEND, [row], [done])
            batch.prefix_lens, batch.extend_lens = batch.len_bounds, np.array([n], dtype=np.int32)
            batch.token_ids = rng.integers(10, self.limits.vocab_size - 10, n).astype(np.int32)
            batch.next_tokens = np.array([-1 if last else 11], dtype=np.int32)
            if not done:
                batch.new_rows = [RowInit(row, self.context, self.sampling, row, np.empty(0, dtype=np.int32))]
                batch.page_rows = np.full(self.pages_per_row, row, dtype=np.int32)
                batch.page_cols = np.arange(self.pages_per_row, dtype=np.int32)
                batch.page_ids = batch.page_cols + np.int32(first_page)
            self.worker.submit(batch).wait()
            done += n
        self.kv[row] = self.context
        return time.perf_counter() - started

    def decode(self, rows: list[int], steps: int) -> tuple[float, float]:
        """Pipelined steps; returns (seconds a step, tokens a request and step)."""
        tokens, flight = 0, None
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        started = time.perf_counter()
        ahead = self.limits.max_accept_len
        for i in range(steps + 1):
            pending = None
            if i < steps:
                bounds = [self.kv[r] + (ahead if flight else 0) for r in rows]
                pending = self.worker.submit(self._batch(ForwardMode.DECODE, rows, bounds))
            if flight is not None:
                lens = flight.wait().accept_lens
                tokens += int(lens.sum())
                for r, n in zip(rows, lens.tolist(), strict=True):
                    self.kv[r] += n
            flight = pending
        return (time.perf_counter() - started) / steps, tokens / steps / len(rows)

    def _batch(self, mode: ForwardMode, rows: list[int], bounds: list[int]) -> ScheduleBatch:
        self.step += 1
        return ScheduleBatch(
            step=self.step,
            mode=mode,
            rows=np.array(rows, dtype=np.int32),
            len_bounds=np.array(bounds, dtype=np.int32),
            top_logprobs=np.full(len(rows), -1, dtype=np.int32),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch-sizes", default="1,4,16,32", help="comma-separated")
    parser.add_argument("--context", type=int, default=1500, help="prompt tokens of each request")
    parser.add_argument("--steps", type=int, default=100, help="timed steps")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--trace", action="store_true", help="write a torch trace of 12 steps at each batch size")
    parser.add_argument("--case", default="", help="a name for this setting in the result file")
    parser.add_argument("--out", type=Path, help="folder of the results; default: the project's own")
    own, flags = parser.parse_known_args()
    started = time.perf_counter()
    _, worker = build(flags)
    ready = time.perf_counter() - started
    sizes = [int(s) for s in own.batch_sizes.split(",")]
    rows = Rows(
        worker, own.context, (own.steps + 40) * len(sizes) * worker.limits.max_accept_len + 64, SamplingParams(temperature=own.temperature)
    )
    ttft = [rows.prefill(r) for r in range(1, max(sizes) + 1)]
    record = Record("engine_steps", ("case", "batch"), own.out)
    for size in sizes:
        live = list(range(1, size + 1))
        rows.decode(live, 8)
        seconds, accepted = rows.decode(live, own.steps)
        row = {"case": own.case, "batch": size, "context": own.context, "step_ms": round(seconds * 1e3, 4),
               "accept_len": round(accepted, 3), "tokens_per_s": round(size * accepted / seconds, 1),
               "prefill_ms": round(min(ttft) * 1e3, 2)}  # fmt: skip
        record.add(row)
        print(json.dumps(row), flush=True)
        if own.trace:
            worker.start_profile(str(own.out or "build"))
            rows.decode(live, 12)
            print("trace", worker.stop_profile(), flush=True)
    print(f"prefill of {own.context} tokens: {min(ttft) * 1e3:.1f} ms; ready after {ready:.1f} s")
    record.add({"case": own.case, "batch": 0, "ready_seconds": round(ready, 2), "info": json.loads(json.dumps(worker.info(), default=str))})
    worker.close()


if __name__ == "__main__":
    main()
