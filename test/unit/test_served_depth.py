"""The depth controller in a whole server: requests come and go, prompts run between decode steps, and steps after them show no time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from runtime.config.synthetic_acceptance import synthetic_acceptance
from runtime.model_executor.depth import split_by_depth
from runtime.model_executor.depth_controller import DecodeRows, DepthController, Observed
from runtime.model_executor.depth_costs import SIZES
from runtime.model_executor.iteration_cost import CostPoint, IterationCost
from runtime.sampling_params import MAX_DRAFT_STEPS
from runtime.speculative.catch_up import GUESS_EVERY, WIDTH

DEPTHS, LENGTH = (0, 1, 2, 3, 5, 7), 128
TABLE = split_by_depth(DEPTHS, None, 256, [*range(1, 9), *range(16, 257, 8)], padding=True)
ITERATIONS = {
    0: {1: 4.26, 4: 4.3, 8: 4.28, 16: 4.4, 32: 4.9, 64: 5.8, 128: 7.8, 256: 12.6},
    1: {1: 4.6, 4: 4.7, 8: 4.8, 16: 5.1, 32: 5.7, 64: 7.4, 128: 12.0, 256: 20.9},
    3: {1: 5.5, 4: 5.6, 8: 6.0, 16: 6.6, 32: 8.4, 64: 12.0, 128: 20.5, 256: 36.7},
}
"""Milliseconds of an iteration of the 8B shape on an H200 by requests: duration of the runs of benchmark.depth_curve less that of their
prompts, by steps."""
PROMPT_TOKEN, PROMPT_STEP, CONTEXT_TOKEN = 20e-6, 5e-3, 1e-8
"""Seconds of a prompt token, of a prompt step at the least, and of a token of context in an iteration."""
CHANGING = "3.5, 1.2, 3.5"
LOADS = list(itertools.product((1, 2, 4, 8, 16, 32, 64, 128, 256), ("1.2", "1.6", "2.5", "3.5", CHANGING)))
"""Concurrency and acceptance."""


def some_loads(first: int) -> list[tuple[int, str]]:
    """Every second of `LOADS` from `first` on, and all whose acceptance changes. `test_recorded_server` serves the others."""
    return [load for i, load in enumerate(LOADS) if i % 2 == first or load[1] == CHANGING]


@functools.cache
def without_context(size: int, depth: int) -> float:
    """Seconds of an iteration of requests without context."""
    at = {k: float(np.interp(size, list(points), list(points.values()))) for k, points in ITERATIONS.items()}
    return 1e-3 * (at[0] if depth == 0 else at[1] + (at[3] - at[1]) * (depth - 1) / 2)


def seconds(size: int, depth: int, kv_tokens: int = 0) -> float:
    return without_context(size, depth) + CONTEXT_TOKEN * kv_tokens


@functools.cache
def sizes_of(live: int) -> dict[int, int]:
    """Requests with padding by depth; where some depths have a graph of them, only those."""
    padded = {k: next((s for s in own.captured if s >= live), live) for k, own in TABLE.items() if live <= own.running}
    return {k: size for k, size in padded.items() if size in TABLE[k].captured} or padded


@functools.cache
def all_greedy(live: int) -> tuple[np.ndarray, np.ndarray]:
    """The draft limits of so many requests, and which of them are greedy."""
    return np.full(live, MAX_DRAFT_STEPS), np.ones(live, dtype=np.bool_)


@functools.cache
def deepest(live: int, most: int) -> int:
    """The largest depth up to `most` that so many requests may have."""
    return max(k for k in sizes_of(live) if k <= most)


def window_lens(rng: np.random.Generator, live: int, depth: int, rate: float) -> np.ndarray:
    """Tokens that each request emits, each draft accepted with probability `rate`."""
    if depth == 0:
        return np.ones(live, dtype=np.int64)
    accepted = np.zeros((live, depth + 1), dtype=np.bool_)  # the draft after the last one is never accepted
    np.less(rng.random((live, depth)), rate, out=accepted[:, :depth])
    return 1 + accepted.argmin(axis=1)


@functools.cache
def first_rates(acceptance: str) -> list[float]:
    """Acceptance of each draft, in parts of a run that write as many tokens as each other."""
    return [synthetic_acceptance(length, 3)[0] for length in acceptance.split(", ")]


def first_rate(acceptance: str, done: float) -> float:
    """Acceptance of each draft; `done`: share of all tokens that are written."""
    rates = first_rates(acceptance)
    return rates[min(int(done * len(rates)), len(rates) - 1)]


@dataclass
class Load:
    """`requests` requests of as many prompt tokens as tokens, `concurrency` at a time."""

    concurrency: int
    requests: int
    acceptance: str

    def serve(self, seed: int, control: DepthController | None = None, fixed: int = 0) -> float:
        """Tokens per second, with a controller or at a fixed depth. Prompts run before all else, as in the scheduler."""
        rng, clock, waiting, tokens, after_prompts, plain = np.random.default_rng(seed), 0.0, self.requests, 0, False, 0
        left, kv_tokens = np.zeros(0, dtype=np.int64), 0
        while waiting or len(left):
            if new := min(self.concurrency - len(left), waiting, 64):
                clock += max(PROMPT_STEP, new * LENGTH * PROMPT_TOKEN)
                left, kv_tokens = np.append(left, np.full(new, LENGTH - 1)), kv_tokens + new * (LENGTH + 1)
                waiting, tokens, after_prompts = waiting - new, tokens + new, True
                continue
            live, sizes = len(left), sizes_of(len(left))
            if control:
                rows = DecodeRows(*all_greedy(live), kv_tokens, left=left)
                depth = control.choose(rows, sizes).depth
            else:
                depth = deepest(live, fixed)
            took, rate = seconds(sizes[depth], depth, kv_tokens), first_rate(self.acceptance, tokens / (self.requests * LENGTH))
            lens = window_lens(rng, live, depth, rate)
            if control:
                seen = None if after_prompts else took * (1 + 0.02 * rng.standard_normal())
                control.observe(Observed(depth, lens, rows.caps, rows.greedy, sizes[depth], kv_tokens, seen))
                plain = plain + 1 if depth == 0 else 0
                if plain and plain % (GUESS_EVERY * WIDTH) == 0:
                    control.observe_guesses(rows.greedy, rng.random(live) < rate, rows.copied)
            emitted, after_prompts, clock = np.minimum(lens, left), False, clock + took
            new, left = int(emitted.sum()), left - emitted
            tokens, kv_tokens = tokens + new, kv_tokens + new
            if ended := live - int(np.count_nonzero(left)):
                left, kv_tokens = left[left > 0], kv_tokens - ended * 2 * LENGTH
        return self.requests * LENGTH / clock


def measured(rng: np.random.Generator, seconds: Callable[[int, int], float] = seconds) -> DepthController:
    """A controller as after the measurement at start-up. `seconds`: of an iteration, by requests and depth."""
    points = [
        CostPoint(sizes_of(size)[depth], depth, seconds(size, depth) * (1 + 0.02 * rng.standard_normal()))
        for size in SIZES
        for depth in sizes_of(size)
    ]
    return DepthController(DEPTHS, IterationCost(points))


@functools.cache
def serve_without_drafts(concurrency: int, requests: int, seed: int) -> float:
    """Tokens per second without drafts, whatever the acceptance."""
    return Load(concurrency, requests, CHANGING).serve(seed)


def shares(at_depth: Callable[[int, int], float], chosen: Callable[[int], float], runs: int) -> tuple[float, float]:
    """Throughput of new controllers over that of the best fixed depth, and over that without drafts; means of so many runs.

    Args:
        at_depth: tokens per second by seed and fixed depth.
        chosen: tokens per second of a new controller by seed.
    """
    first = {depth: at_depth(0, depth) for depth in DEPTHS}
    rivals = {depth for depth in DEPTHS if depth == 0 or first[depth] > 0.9 * max(first.values())}  # runs differ by about a percent
    fixed = {depth: np.mean([first[depth], *(at_depth(seed, depth) for seed in range(1, runs))]) for depth in rivals}
    mean = np.mean([chosen(seed) for seed in range(runs)])
    return float(mean / max(fixed.values())), float(mean / fixed[0])


@pytest.mark.parametrize(("concurrency", "acceptance"), some_loads(1))
def test_a_whole_server_is_near_its_best_depth_from_the_start(concurrency: int, acceptance: str) -> None:
    """Runs are short, so that what the controller learns at first counts; single runs of few requests vary by about a percent."""
    load, rng = Load(concurrency, max(3 * concurrency, 24), acceptance), np.random.default_rng(concurrency)
    of_best, of_plain = shares(
        lambda seed, depth: load.serve(seed, fixed=depth) if depth else serve_without_drafts(concurrency, load.requests, seed),
        lambda seed: load.serve(seed, measured(rng)),
        max(min(16, 128 // concurrency), 1),
    )
    assert of_best >= 0.97
    assert of_plain >= 0.99
