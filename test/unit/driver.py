"""A hand-driven scheduler: runs prompts through a Worker with every choice made by the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from runtime.batch import BatchResult, EagerSample, Logprobs, Pending, RowInit, ScheduleBatch, Worker
from runtime.model_executor.depth import DepthControl
from runtime.model_executor.drift_alarm import DriftAlarm
from runtime.pooling import Pooling
from runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1 << 20)
Sampling = SamplingParams | Mapping[int, SamplingParams]


def poison(tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill them with NaN or -1, with which no pass gives a valid result."""
    for tensor in tensors.values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def parts_of(result: BatchResult, prompts: int) -> tuple[BatchResult, BatchResult]:
    """The result of the first `prompts` requests of a step, and of the decode rows after them."""
    cut = int(result.accept_lens[:prompts].sum())

    def part(requests: slice, tokens: slice) -> BatchResult:
        found = result.logprobs
        logprobs = None if found is None else Logprobs(found.chosen[tokens], found.top_ids[tokens], found.top[tokens])
        return replace(result, token_ids=result.token_ids[tokens], accept_lens=result.accept_lens[requests], logprobs=logprobs)

    return part(slice(0, prompts), slice(0, cut)), part(slice(prompts, None), slice(cut, None))


def planned(control: DepthControl, requests: int, new_rows: Sequence[RowInit] = ()) -> int:
    """The depth of a step in which the first rows decode."""
    rows = np.arange(1, requests + 1, dtype=np.int32)
    batch = ScheduleBatch(1, rows, rows, rows, new_rows=list(new_rows))
    control.choose(batch)
    return batch.depth


class EveryNth:
    """Samples for tests: one iteration in `n` is sampled, with verification or without; `after` says how many have run already."""

    def __init__(self, n: int, after: int = 0, verify: bool = True) -> None:
        self.n, self.iterations, self.verify = n, after, verify

    def next(self, alarm: DriftAlarm, possible: bool = True) -> EagerSample:
        self.iterations += 1
        return EagerSample(possible and self.iterations % self.n == 0, self.verify)

    def observe(self, seconds: float | None, disturbed: bool, after: EagerSample) -> None:
        """Times change nothing."""


class Driver:
    """Owner of the pages and rows of one worker. Each request has all its pages from the start, scattered at random.

    Attributes:
        before: called ahead of every step; a test poisons unused memory there.
        accepts: of every decode step, and `results` its whole result.
    """

    def __init__(self, worker: Worker, seed: int = 0, before: Callable[[], None] = lambda: None) -> None:
        self.worker, self.limits, self.before = worker, worker.limits, before
        self.rng = np.random.default_rng(seed)
        self.step = 0
        self.free_pages = (self.rng.permutation(self.limits.max_total_tokens // self.limits.page_size) + 1).astype(np.int32).tolist()
        self.kv: dict[int, int] = {}
        self.out: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}
        self.unfollowed: dict[int, int] = {}
        self.accepts: list[np.ndarray] = []
        self.results: list[BatchResult] = []
        self.held: dict[int, list[int]] = {}

    def prefill(
        self,
        prompts: Mapping[int, Sequence[int]],
        chunk: int = 1 << 30,
        sampling: Sampling = GREEDY,
        room: int = 64,
        logprobs: int = -1,
        shared: Mapping[int, tuple[int, int]] | None = None,
        resumed: Mapping[int, int] | None = None,
        prompt_logprobs: bool = False,
        along: Callable[[], Sequence[int]] = lambda: (),
        slack: int = 0,
        pooling: Mapping[int, Pooling] | None = None,
    ) -> list[BatchResult]:
        """Take rows for prompts {row: ids} and run them, at most `chunk` tokens of each at a time, all rows side by side.

        Args:
            along: asked before each piece which other rows decode in its pass. A worker that does not mix runs them in a step before it.
            slack: as for `launch`, of those rows.
            shared: {row: (other row, n)}: the KV of the first n positions is the other row's, that behind whole pages a copy.
            pooling: {row: what its prompt is reduced to}.
            resumed: {row: prompt length} of requests that lost their row and come back with prompt and output so far.
        """
        shared, resumed = shared or {}, resumed or {}
        done = {r: shared.get(r, (0, 0))[1] for r in prompts}
        results = []
        pages = [entry for r in prompts for entry in self._take_pages(r, len(prompts[r]) + room, shared.get(r))]
        copies = [entry for r in prompts for entry in self._copies(r, *shared.get(r, (0, 0)))]
        new_rows = [self._init(r, prompts[r], sampling, resumed.get(r)) for r in prompts]
        while any(done[r] < len(p) for r, p in prompts.items()):
            rows = [r for r, p in prompts.items() if done[r] < len(p)]
            lens = [min(chunk, len(prompts[r]) - done[r]) for r in rows]
            tokens = [t for r, n in zip(rows, lens, strict=True) for t in prompts[r][done[r] : done[r] + n]]
            ends = [done[r] + n == len(prompts[r]) for r, n in zip(rows, lens, strict=True)]
            following = [-1 if e else prompts[r][done[r] + n] for r, n, e in zip(rows, lens, ends, strict=True)]
            decoding = list(along())
            if decoding and not self.limits.mixed:
                self.decode(decoding, slack, logprobs)
                decoding = []
            bounds = self._bounds(decoding, slack)
            batch = ScheduleBatch(
                step=self._tick(),
                rows=np.array([*rows, *decoding], dtype=np.int32),
                len_bounds=np.array([*(done[r] for r in rows), *bounds], dtype=np.int32),
                top_logprobs=np.full(len(rows) + len(decoding), logprobs, dtype=np.int32),
                prefix_lens=np.array([done[r] for r in rows], dtype=np.int32),
                extend_lens=np.array(lens, dtype=np.int32),
                token_ids=np.array(tokens, dtype=np.int32),
                next_tokens=np.array(following, dtype=np.int32),
                prompt_logprobs=np.full(len(rows), prompt_logprobs),
                new_rows=new_rows,
                pooling={i: p for i, r in enumerate(rows) if (p := (pooling or {}).get(r)) and (ends[i] or p.whole_prompt)},
            )
            if pages:
                batch.page_rows, batch.page_cols, batch.page_ids = (np.array(c, dtype=np.int32) for c in zip(*pages, strict=True))
            if copies:
                columns = (np.array(c, dtype=np.int32) for c in zip(*copies, strict=True))
                batch.copy_sources, batch.copy_targets, batch.copy_counts = columns
            new_rows, pages, copies = [], [], []
            self.before()
            result, decoded = parts_of(self.worker.submit(batch).wait(), len(rows))
            results.append(result)
            if decoding:
                self._take(decoding, decoded)
            at = 0
            for r, n, accepted in zip(rows, lens, result.accept_lens.tolist(), strict=True):
                done[r] += n
                self.kv[r] = done[r]
                self.out[r].extend(result.token_ids[at : at + accepted].tolist())
                at += accepted
        return results

    def launch(self, rows: Sequence[int], slack: int = 0, logprobs: int = -1) -> Pending:
        """Submit one step for `rows`; `slack` is added to the host's length bounds, as when a step is in flight."""
        bounds = np.array(self._bounds(rows, slack), dtype=np.int32)
        batch = ScheduleBatch(self._tick(), np.array(rows, dtype=np.int32), bounds, np.full(len(rows), logprobs, dtype=np.int32))
        self.before()
        return self.worker.submit(batch)

    def _bounds(self, rows: Sequence[int], slack: int) -> list[int]:
        """Upper bounds of the KV lengths of decode rows."""
        page, reach = self.limits.page_size, self.limits.tokens_per_step + slack
        assert all(self.kv[r] + reach <= len(self.pages[r]) * page for r in rows), "the test gave too little room"
        return [self.kv[r] + slack for r in rows]

    def collect(self, pending: Pending, rows: Sequence[int]) -> BatchResult:
        """Read a step of `rows`; those that were released meanwhile get nothing."""
        result = pending.wait()
        self._take(rows, result)
        return result

    def _take(self, rows: Sequence[int], result: BatchResult) -> None:
        """Keep what a decode step of `rows` emitted."""
        self.accepts.append(result.accept_lens)
        self.results.append(result)
        at = 0
        for r, n in zip(rows, result.accept_lens.tolist(), strict=True):
            if r in self.kv:
                self.kv[r] += n
                self.unfollowed[r] = result.stats.unfollowed
                self.out[r].extend(result.token_ids[at : at + n].tolist())
            at += n

    def decode(self, rows: Sequence[int], slack: int = 0, logprobs: int = -1) -> BatchResult:
        """One step for `rows`, submitted and read."""
        return self.collect(self.launch(rows, slack, logprobs), rows)

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Let the draft follow steps without drafts, as before a step with some."""
        rows, bounds = np.array(list(self.kv), dtype=np.int32), np.array(list(self.kv.values()), dtype=np.int32)
        parts = self.worker.parts  # type: ignore[attr-defined]
        self.worker.run_between_steps(lambda: parts.drafter.before_iteration(rows, bounds, 1, parts.target.rows.needs(rows)))  # type: ignore[attr-defined]

    def release(self, row: int) -> None:
        """Give a row and its pages back."""
        self.free_pages = self.held.pop(row) + self.free_pages
        del self.kv[row]

    def slots(self, row: int, count: int) -> np.ndarray:
        """int64 [count]: the KV slots of a row's first positions."""
        at = np.arange(count)
        return np.array(self.pages[row], dtype=np.int64)[at // self.limits.page_size] * self.limits.page_size + at % self.limits.page_size

    def generate(self, prompts: Mapping[int, Sequence[int]], tokens: int, **prefill: object) -> dict[int, list[int]]:
        """Prefill and decode until every row has `tokens` tokens; returns the first `tokens` of each."""
        logprobs = int(prefill.get("logprobs", -1))  # type: ignore[call-overload]
        self.prefill(prompts, **prefill)  # type: ignore[arg-type]
        while any(len(self.out[r]) < tokens for r in prompts):
            self.decode([r for r in prompts if len(self.out[r]) < tokens], logprobs=logprobs)
        return {r: self.out[r][:tokens] for r in prompts}

    def mean_accept_len(self) -> float:
        """Over all decode steps so far."""
        return float(np.concatenate(self.accepts).mean())

    def _take_pages(self, row: int, positions: int, shared: tuple[int, int] | None) -> list[tuple[int, int, int]]:
        page = self.limits.page_size
        reused: list[int] = []
        if shared is not None:
            reused = self.pages[shared[0]][: shared[1] // page]
        own = [self.free_pages.pop() for _ in range(-(-positions // page) - len(reused))]
        self.held[row] = own
        self.pages[row] = reused + own
        return [(row, col, p) for col, p in enumerate(self.pages[row])]

    def _copies(self, row: int, other: int, count: int) -> list[tuple[int, int, int]]:
        """Source, target and positions of the page that `row` shares in part."""
        whole, rest = divmod(count, self.limits.page_size)
        return [(self.pages[other][whole], self.pages[row][whole], rest)] if rest else []

    def _init(self, row: int, prompt: Sequence[int], sampling: Sampling, prompt_len: int | None) -> RowInit:
        chosen = sampling if isinstance(sampling, SamplingParams) else sampling[row]
        history = np.array(prompt, dtype=np.int32) if chosen.penalised or self.limits.needs_history else None
        self.prompts[row] = list(prompt)
        self.unfollowed[row] = 0
        if prompt_len is None:
            self.out[row] = []
        seed = chosen.seed if chosen.seed is not None else row
        ends = [1] if chosen.min_new_tokens else []  # nothing ends these requests
        tokens = np.array(prompt, dtype=np.int32)
        return RowInit(row, prompt_len or len(prompt), chosen, seed, np.array(ends, dtype=np.int32), history, tokens=tokens)

    def _tick(self) -> int:
        self.step += 1
        return self.step
