"""A hand-driven scheduler: runs prompts through a Worker with every choice made by the test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.batch import BatchResult, ForwardMode, RowInit, ScheduleBatch, Worker
from runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1 << 20)


class Driver:
    """Owner of the pages and rows of one worker. Each request has all its pages from the start, scattered at random."""

    def __init__(self, worker: Worker, seed: int = 0) -> None:
        self.worker, self.limits = worker, worker.limits
        self.rng = np.random.default_rng(seed)
        self.step = 0
        self.free_pages = (self.rng.permutation(self.limits.max_total_tokens // self.limits.page_size) + 1).astype(np.int32).tolist()
        self.kv: dict[int, int] = {}
        self.out: dict[int, list[int]] = {}
        self.accepts: list[np.ndarray] = []
        self.held: dict[int, list[int]] = {}

    def prefill(
        self, prompts: dict[int, Sequence[int]], chunk: int = 1 << 30, sampling: SamplingParams = GREEDY, room: int = 64, logprobs: int = -1
    ) -> list[BatchResult]:
        """Take rows for prompts {row: ids} and run them, at most `chunk` tokens of each at a time, all rows side by side."""
        page = self.limits.page_size
        done = dict.fromkeys(prompts, 0)
        results = []
        first = True
        while any(done[r] < len(p) for r, p in prompts.items()):
            rows = [r for r, p in prompts.items() if done[r] < len(p)]
            lens = [min(chunk, len(prompts[r]) - done[r]) for r in rows]
            tokens = [t for r, n in zip(rows, lens, strict=True) for t in prompts[r][done[r] : done[r] + n]]
            ends = [done[r] + n == len(prompts[r]) for r, n in zip(rows, lens, strict=True)]
            following = [-1 if e else prompts[r][done[r] + n] for r, n, e in zip(rows, lens, ends, strict=True)]
            batch = ScheduleBatch(
                step=self._tick(),
                mode=ForwardMode.EXTEND,
                rows=np.array(rows, dtype=np.int32),
                len_bounds=np.array([done[r] for r in rows], dtype=np.int32),
                top_logprobs=np.full(len(rows), logprobs, dtype=np.int32),
                prefix_lens=np.array([done[r] for r in rows], dtype=np.int32),
                extend_lens=np.array(lens, dtype=np.int32),
                token_ids=np.array(tokens, dtype=np.int32),
                next_tokens=np.array(following, dtype=np.int32),
            )
            if first:
                batch.new_rows = [self._init(r, prompts[r], sampling) for r in rows]
                pages = [(r, c, self.free_pages.pop()) for r in rows for c in range(-(-(len(prompts[r]) + room) // page))]
                for r, _, p in pages:
                    self.held.setdefault(r, []).append(p)
                batch.page_rows, batch.page_cols, batch.page_ids = (np.array(c, dtype=np.int32) for c in zip(*pages, strict=True))
                first = False
            result = self.worker.submit(batch).wait()
            results.append(result)
            at = 0
            for r, n, accepted in zip(rows, lens, result.accept_lens.tolist(), strict=True):
                done[r] += n
                self.kv[r] = done[r]
                self.out.setdefault(r, []).extend(result.token_ids[at : at + accepted].tolist())
                at += accepted
        return results

    def decode(self, rows: Sequence[int], slack: int = 0, logprobs: int = -1) -> BatchResult:
        """One step for `rows`; `slack` is added to the host's length bounds, as when a step is in flight."""
        batch = ScheduleBatch(
            step=self._tick(),
            mode=ForwardMode.DECODE,
            rows=np.array(rows, dtype=np.int32),
            len_bounds=np.array([self.kv[r] + slack for r in rows], dtype=np.int32),
            top_logprobs=np.full(len(rows), logprobs, dtype=np.int32),
        )
        result = self.worker.submit(batch).wait()
        self.accepts.append(result.accept_lens)
        at = 0
        for r, n in zip(rows, result.accept_lens.tolist(), strict=True):
            self.kv[r] += n
            self.out[r].extend(result.token_ids[at : at + n].tolist())
            at += n
        return result

    def release(self, row: int) -> None:
        """Give a row and its pages back."""
        self.free_pages = self.held.pop(row) + self.free_pages
        del self.kv[row]

    def generate(self, prompts: dict[int, Sequence[int]], tokens: int, **prefill: object) -> dict[int, list[int]]:
        """Prefill and decode until every row has `tokens` tokens; returns the first `tokens` of each."""
        self.prefill(prompts, **prefill)  # type: ignore[arg-type]
        while any(len(self.out[r]) < tokens for r in prompts):
            self.decode([r for r in prompts if len(self.out[r]) < tokens])
        return {r: self.out[r][:tokens] for r in prompts}

    def _init(self, row: int, prompt: Sequence[int], sampling: SamplingParams) -> RowInit:
        history = np.array(prompt, dtype=np.int32) if sampling.penalised else None
        self.out[row] = []
        seed = sampling.seed if sampling.seed is not None else row
        return RowInit(row, len(prompt), sampling, seed, np.array([1], dtype=np.int32), history)

    def _tick(self) -> int:
        self.step += 1
        return self.step
