"""A seeded life of a worker: requests come, share prefixes, grow, are cut short, retracted and resumed, in batches of every odd size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from runtime.sampling_params import SamplingParams
from runtime.speculative.eagle_worker import EagleWorker
from unit.driver import GREEDY, Driver, poison

BATCHES = (1, 2, 3, 7, 9, 31, 33)
SIZES = [1, 2, 4, 8, 16, 32, 40]
SENTINEL = 977.0
"""What free KV pages are filled with; finite, since keys past a request's end are read and masked."""


def runners(worker: Any) -> dict[str, Any]:
    """The graph runners of a worker, by name."""
    return {runner.spec.name.replace(" ", "_"): runner for runner in worker.runners}


def drafting(runners: Iterable[Any]) -> list[Any]:
    """Those of the graph runners of a fixed depth that iterations with drafts use."""
    return [runner for runner in runners if runner.spec.name != "target decode" and "K=0" not in runner.spec.name]


def pools(worker: Any) -> list[Any]:
    """KV pools: the target's, then the draft's if there is one."""
    return [worker.parts.target.runner.kv_pool, *(model.runner.kv_pool for model in worker.parts.drafter.models())]


def draft_state(worker: Any) -> Any:
    """The draft's state by request row, or None where it has none."""
    return worker.parts.drafter.state if isinstance(worker.parts.drafter, EagleWorker) else None


@dataclass
class End:
    """A request as it was when its row was taken away."""

    prompt: list[int]
    out: list[int]
    kv: list[torch.Tensor]


class Poison:
    """Before every step, fills with nonsense what no live row may read, and checks that no step wrote to free pages."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.marked = torch.zeros(len(pools(worker)[0].k[0]), dtype=torch.bool)  # by page

    def __call__(self, driver: Driver) -> None:
        free, live = list(driver.free_pages), set(driver.kv)
        self.worker.run_between_steps(lambda: self._between_steps(free, live))

    @torch.inference_mode()
    def _between_steps(self, free: list[int], live: set[int]) -> None:
        poison(self.worker.parts.inputs.tensors)
        for runner in self.worker.runners:
            poison(runner.buffers)
        rows = self.worker.parts.target.rows
        idle = torch.tensor([r for r in range(1, len(rows.kv_lens)) if r not in live], dtype=torch.int64)
        rows.kv_lens[idle] = 1 << 20
        rows.last_tokens[idle] = -1
        state = draft_state(self.worker)
        if state is not None:
            state.hidden[idle], state.scores[idle], state.probs[idle], state.guesses[idle] = torch.nan, torch.nan, torch.nan, -1
            state.hidden[0] = 1e4
        states = self.worker.parts.target.runner.states
        if states is not None:
            states.applied[idle] = 1 << 19
            for layer in states.layers:
                for tensor in (layer.matrices, layer.tail, layer.window, layer.gates):
                    tensor[idle] = torch.nan
        self._check_free_pages(free)

    def _check_free_pages(self, free: list[int]) -> None:
        free_now = torch.zeros_like(self.marked)
        free_now[torch.tensor(free, dtype=torch.int64)] = True
        kept, new = (free_now & self.marked).nonzero()[:, 0], (free_now & ~self.marked).nonzero()[:, 0]
        for pool in pools(self.worker):
            for tensor in (*pool.k, *pool.v):
                if len(kept):
                    lowest, highest = tensor.index_select(0, kept).aminmax()  # NaN, if there is one
                    assert lowest == highest == SENTINEL, "a step wrote to a free page"
                tensor.index_fill_(0, new, SENTINEL)
        self.marked = free_now


@dataclass
class Storm:
    """Runs `turns` turns over a worker; two workers given one seed live the same life if they compute the same.

    Attributes:
        mixing: whether requests decode beside the prompts of others: in their pass, where the worker mixes.
        reached: how often each kind of event came about.
    """

    worker: Any
    seed: int
    samplings: tuple[SamplingParams, ...] = (GREEDY,)
    poison: bool = True
    most: int = 36
    mixing: bool = False
    trace: list[tuple[list[int], list[int]]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.poisoner = Poison(self.worker)
        self.driver = Driver(self.worker, self.seed, before=lambda: self.poisoner(self.driver) if self.poison else None)
        self.limit: dict[int, int] = {}
        self.prompt_lens: dict[int, int] = {}
        self.sampling: dict[int, SamplingParams] = {}
        self.waiting: list[tuple[list[int], int, SamplingParams, list[int]]] = []
        self.count = 0
        self.sizes: list[int] = []

    @property
    def accept_lens(self) -> list[int]:
        """Of every request and step."""
        return [n for _, lens in self.trace for n in lens]

    def run(self, turns: int) -> Storm:
        for _ in range(turns):
            self.sizes = self.sizes or self.rng.permutation(BATCHES).tolist()
            size = self.sizes.pop()
            self._admit(size)
            self._step(size)
            self._end_some()
        return self

    # ---- what happens

    def _admit(self, least: int) -> None:
        free = [r for r in range(1, self.driver.limits.max_running_requests + 1) if r not in self.driver.kv]
        self.rng.shuffle(free)
        wanted = max(int(self.rng.integers(0, 12)), least - len(self.driver.kv))
        chosen = free[: max(0, min(wanted, self.most - len(self.driver.kv)))]
        prompts: dict[int, list[int]] = {}
        resumed: dict[int, int] = {}
        shared: dict[int, tuple[int, int]] = {}
        for row in chosen:
            if self.waiting and self.rng.random() < 0.7:
                prompts[row], resumed[row], self.sampling[row], self.driver.out[row] = self.waiting.pop()
                self.prompt_lens[row] = resumed[row]
            else:
                prompts[row], prefix = self._new_prompt()
                if prefix is not None:
                    shared[row] = prefix
                self.sampling[row] = self._next_sampling()
                self.prompt_lens[row] = len(prompts[row])
            self.limit[row] = int(self.rng.integers(4, 30))
        if chosen:
            chunk = int(self.rng.choice([3, 7, 16, 1 << 30]))
            self.reached += {
                "resumed": len(resumed),
                "prefix hit": len(shared),
                "chunk tail": sum(len(p) > chunk for p in prompts.values()),
            }
            along = self._decoding_beside(sorted(self.driver.kv))
            seen, slack = len(self.driver.results), int(self.rng.integers(0, self.driver.limits.max_accept_len + 1)) if self.mixing else 0
            self.driver.prefill(
                prompts, chunk, {r: self.sampling[r] for r in chosen}, resumed=resumed, shared=shared, along=along, slack=slack
            )
            for result in self.driver.results[seen:]:
                self._note([], result)

    def _decoding_beside(self, living: list[int]) -> Callable[[], list[int]]:
        """Which rows decode beside each piece of the prompts to come: some live ones that are not done, often all, often none."""

        def choose() -> list[int]:
            if not self.mixing:
                return []
            rows = [row for row in living if len(self.driver.out[row]) < self.limit[row]]
            rows = self.rng.permutation(rows).tolist()[: int(self.rng.choice([0, 1, 3, len(rows)]))]
            self.reached["decoded beside prompts"] += bool(rows)
            return rows

        return choose

    def _next_sampling(self) -> SamplingParams:
        """The next of `samplings`, with a seed of its own."""
        chosen = self.samplings[self.count % len(self.samplings)]
        self.count += 1
        return SamplingParams(**{f: getattr(chosen, f) for f in chosen.__struct_fields__} | {"seed": 1000 + self.count})

    def _new_prompt(self) -> tuple[list[int], tuple[int, int] | None]:
        """Random, or one that agrees with a living request up to some position and the token after it, whose KV it then shares."""
        fresh = self.rng.integers(0, 97, int(self.rng.integers(2, 40))).tolist()
        if not self.driver.kv or self.rng.random() < 0.6 or self.worker.parts.target.runner.states is not None:
            return fresh, None  # a prefix is useless without its recurrent state
        row = int(self.rng.choice(sorted(self.driver.kv)))
        known = (self.driver.prompts[row][: self.prompt_lens[row]] + self.driver.out[row])[
            : self.driver.kv[row] - self.driver.unfollowed[row]
        ]
        if len(known) < 2:
            return fresh, None
        count = int(self.rng.integers(1, len(known)))
        self._pin(row)
        return known[: count + 1] + fresh, (row, count)

    def _pin(self, row: int) -> None:
        """Pages that were shared never return to the free ones."""
        self.driver.held[row] = []

    def _step(self, size: int) -> None:
        rows = self.rng.permutation(sorted(self.driver.kv))[:size].tolist()
        self.reached[f"batch of {len(rows)}"] += 1
        slack = int(self.rng.integers(0, self.driver.limits.max_accept_len + 1))
        pending = self.driver.launch(rows, slack)
        if self.driver.limits.overlap and self.rng.random() < 0.3:
            # one request is aborted with the step in flight, and its row goes to another one
            gone = rows[0]
            self.reached["aborted in flight"] += 1
            self.driver.release(gone)
            prompt = self.rng.integers(0, 97, 6).tolist()
            after = self.driver.launch(rows[1:], self.driver.limits.max_accept_len) if len(rows) > 1 else None
            result = self.driver.collect(pending, rows)
            self._note(rows, result)
            if after is not None:
                self._note(rows[1:], self.driver.collect(after, rows[1:]))
            self.prompt_lens[gone], self.limit[gone] = 6, 10
            self.sampling[gone] = self.samplings[0]
            self.driver.prefill({gone: prompt}, sampling=self.samplings[0])
            return
        self._note(rows, self.driver.collect(pending, rows))

    def _note(self, rows: list[int], result: Any) -> None:
        self.trace.append((rows, result.accept_lens.tolist()))
        self.trace.append(([], result.token_ids.tolist()))

    def _end_some(self) -> None:
        for row in sorted(self.driver.kv):
            out, finished = self.driver.out[row], len(self.driver.out[row]) >= self.limit[row]
            if not finished and self.rng.random() > 0.06:
                continue
            self.reached["finished" if finished else "retracted"] += 1
            prompt = self.driver.prompts[row][: self.prompt_lens[row]]
            if not finished:  # retracted: back later with what it has
                self.waiting.append((prompt + out, len(prompt), self.sampling[row], list(out)))
            self.ends.append(End(prompt, list(out), self._kv(row)))
            self.driver.release(row)

    def _kv(self, row: int) -> list[torch.Tensor]:
        """All committed KV of the target, its recurrent states, and all KV that the draft followed."""
        target, *drafts = pools(self.worker)
        kv_len = self.driver.kv[row]
        lens = [kv_len, *(kv_len - self.driver.unfollowed[row] for _ in drafts)]
        slots = [torch.from_numpy(self.driver.slots(row, length)) for length in lens]
        kv = [t.flatten(0, 1)[at].clone() for at, pool in zip(slots, (target, *drafts), strict=True) for t in (*pool.k, *pool.v)]
        states = self.worker.parts.target.runner.states
        return kv if states is None else kv + [t[row].clone() for layer in states.layers for t in (layer.matrices, layer.tail)]

    def living(self) -> list[torch.Tensor]:
        """KV of every request that is alive, and what its row goes on from when it drafts next."""
        if self.worker.parts.drafter.models():
            self.driver.catch_up()
            self.driver.unfollowed.update(dict.fromkeys(self.driver.kv, 0))
        rows, drafter, state = self.worker.parts.target.rows, self.worker.parts.drafter, draft_state(self.worker)
        kept = [rows.kv_lens, rows.last_tokens]
        if state is not None and drafter.model.lookahead:
            kept += [state.hidden, state.guesses, *([state.scores] if state.topk > 1 else [])]
        return [t for row in sorted(self.driver.kv) for t in (*self._kv(row), *(k[row] for k in kept))]


def same_life(a: Storm, b: Storm, equal: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal) -> None:
    """Assert that two storms went alike: tokens, accept lengths, KV and what the living go on from, bit for bit, or as `equal` says."""
    same_past(a, b, equal)
    assert all(equal(s, t) for s, t in zip(a.living(), b.living(), strict=True)), "a living request goes on from something else"


def same_past(a: Storm, b: Storm, equal: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal) -> None:
    """`same_life` without the living, whose drafts may have to catch up, which one of several ranks cannot do alone."""
    assert a.trace == b.trace
    assert [(e.prompt, e.out) for e in a.ends] == [(e.prompt, e.out) for e in b.ends]
    for x, y in zip(a.ends, b.ends, strict=True):
        assert all(equal(s, t) for s, t in zip(x.kv, y.kv, strict=True)), "KV differs"
