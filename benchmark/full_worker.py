"""A worker with a full KV pool that runs its largest steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from benchmark.engine_loop import build
from runtime.batch import EagerSample, RowInit, ScheduleBatch, no_ints
from runtime.model_executor.drift_alarm import DriftAlarm
from runtime.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

MIB = 1 << 20
PAGES_AT_ONCE = 1 << 18
PLAIN = SamplingParams(temperature=0.0)
FILTERED = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01)
PENALISED = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, min_new_tokens=4)


class FirstStep:
    """A sample schedule that takes one eager sample, after the first iteration."""

    def __init__(self) -> None:
        self._iterations = 0

    def next(self, alarm: DriftAlarm, possible: bool = True) -> EagerSample:
        """See `SampleSchedules.next`."""
        self._iterations += 1
        return EagerSample(possible and self._iterations == 1, verify=True)

    def observe(self, seconds: float | None, disturbed: bool, after: EagerSample) -> None:
        """See `SampleSchedules.observe`; times are ignored."""


class FullWorker:
    """A worker built from server flags; all rows get the same number of pages."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.worker: Any = build(flags)[1]
        self.limits = limits = self.worker.limits
        self.rows = np.arange(1, limits.max_running_requests + 1, dtype=np.int32)
        columns = -(-(limits.max_context_len + 2 * limits.tokens_per_step) // limits.page_size)
        self.pages = min(limits.max_total_tokens // limits.page_size // len(self.rows), columns)
        self.kv = np.zeros(len(self.rows) + 1, dtype=np.int32)
        self.step = 0
        self.sampled = False

    def row(self, steps: int, penalised: int) -> dict[str, Any]:
        """Fill the pool, run, and return the values of a result row."""
        on_gpu = torch.cuda.is_available()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.worker.parts.monitor.schedule = FirstStep()  # at the largest size
        self.prompts()
        self.lengthen(2 * steps)
        for _ in range(steps):
            self.decode([])
        self.decode([self._init(int(r), PENALISED if r <= penalised else FILTERED) for r in self.rows])
        for _ in range(steps - 1):
            self.decode([])
        figures = self._memory(before) if on_gpu else {"unused": 0.0, "retries": 0}
        info = self.worker.info()
        plan = info.memory_mib
        planned = {"weights_and_context_mib": plan.get("weights and context"), "activations_mib": plan.get("activations")}
        self.worker.close()
        return {**planned, "kv_mib": plan.get("KV cache"), **figures, "graphs": msgspec.to_builtins(info.graphs),
                "requests": len(self.rows), "tokens_each": int(self.kv[1:].min()), "plan_mib": plan}  # fmt: skip

    def prompts(self) -> None:
        """Run the largest prompt steps: as many rows as possible, the first with all remaining tokens."""
        waiting = self.rows.tolist()
        while waiting:
            rows = waiting[: max(self.limits.max_extend_tokens // 2, 1)]
            waiting = waiting[len(rows) :]
            lens = np.ones(len(rows), dtype=np.int32)
            left = self.limits.max_extend_tokens - len(rows)
            most = min(self.pages * self.limits.page_size, self.limits.max_context_len) - 4 * self.limits.tokens_per_step - 1
            for i in range(len(rows)):
                lens[i] += (more := max(min(left, most), 0))
                left -= more
            self._extend(rows, lens)

    def lengthen(self, steps: int) -> None:
        """Set all rows to the greatest length that pages and context allow before `steps` more decode steps. The content of KV does not
        matter.
        """
        limits = self.limits
        room = min(self.pages * limits.page_size, limits.max_context_len) - (steps + 2) * limits.tokens_per_step
        self.kv[1:] = np.maximum(self.kv[1:], room)
        self.worker.parts.target.rows.kv_lens[1:] = torch.from_numpy(self.kv[1:]).to(self.worker.parts.target.device)

    def decode(self, new_rows: list[RowInit]) -> None:
        """Run one step of all rows, with all log-probabilities if they are sampled."""
        k = MAX_TOP_LOGPROBS if new_rows or self.sampled else -1
        batch = ScheduleBatch(
            step=self._tick(), rows=self.rows, len_bounds=self.kv[self.rows],
            top_logprobs=np.full(len(self.rows), k, dtype=np.int32), new_rows=new_rows,
        )  # fmt: skip
        self.sampled = k >= 0
        self.kv[self.rows] += self.worker.submit(batch).wait().accept_lens

    def _extend(self, rows: list[int], lens: np.ndarray) -> None:
        row_of = np.repeat(np.array(rows, dtype=np.int32), self.pages)
        columns = np.tile(np.arange(self.pages, dtype=np.int32), len(rows))
        zeros, which = np.zeros(len(rows), dtype=np.int32), np.array(rows, dtype=np.int32)
        for start in range(0, len(row_of), PAGES_AT_ONCE):
            part = slice(start, start + PAGES_AT_ONCE)
            self.worker.parts.target.page_table.write(
                *(torch.from_numpy(a).to(self.worker.parts.target.device, torch.int64) for a in (row_of[part], columns[part])),
                torch.from_numpy((row_of[part] - 1) * self.pages + columns[part] + 1).to(self.worker.parts.target.device, torch.int32),
            )
        batch = ScheduleBatch(
            step=self._tick(), rows=which, len_bounds=zeros,
            top_logprobs=zeros + MAX_TOP_LOGPROBS, new_rows=[self._init(r, PLAIN) for r in rows], prefix_lens=zeros, extend_lens=lens,
            token_ids=np.random.default_rng(0).integers(10, self.limits.vocab_size - 10, int(lens.sum())).astype(np.int32),
            next_tokens=zeros - 1, prompt_logprobs=np.arange(len(rows)) == 0,
        )  # fmt: skip
        self.worker.submit(batch).wait()
        self.kv[which] = lens

    def _init(self, row: int, sampling: SamplingParams) -> RowInit:
        history = np.arange(8, dtype=np.int32) if sampling.penalised or self.limits.needs_history else None
        return RowInit(row, 8, sampling, row, no_ints(), history)

    def _tick(self) -> int:
        self.step += 1
        return self.step

    def _memory(self, before: int) -> dict[str, Any]:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        return {
            "total_mib": total / MIB,
            "peak_mib": (torch.cuda.max_memory_allocated() - before) / MIB,
            "torch_reserved_mib": torch.cuda.memory_reserved() / MIB,
            "outside_mib": (total - free - torch.cuda.memory_reserved()) / MIB,
            "unused_mib": free / MIB,
            "unused": free / total,
            "retries": stats["num_alloc_retries"],
        }
