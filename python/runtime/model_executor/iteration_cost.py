"""The time of an iteration by batch size, depth and context: measured at start-up, refined while serving. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

MEMORY = 200
"""Iterations over which the scale and the cost of context are averaged."""
CELL_RATE, FIRST_RUNS = 0.02, 5
"""Fraction of an error assigned to a single batch size and depth, at first 1 / (runs + `FIRST_RUNS`); the scale gets most of the rest."""
RECENT, FORGET, SURE = 512, 500, 8
"""Corrections of single depths are forgotten unless they are well known. A run counts for about `RECENT` iterations of its range of batch
sizes. Differences between depths that ran at least `SURE` times recently are kept; what these have in common, and the corrections of other
depths, decay within about `FORGET` iterations, and the scale absorbs what remains. Such a correction may come from a temporary delay of the
machine, which makes one depth seem slow compared with depths that do not run and would never be corrected.
"""
MAX_CELL, MAX_LATE = math.log(3.0), math.log(1.25)
"""Logarithms of the largest correction of a single batch size and depth, and of the largest positive error that one iteration counts as: a
delay of the machine only adds time, and a depth that seems slow is rarely tried again."""
CLEARLY_SHORT = 1.1
"""If the first two times of a depth with drafts are both shorter than at start-up by this factor, the machine was busy at start-up. Two
times are needed because one may be short if the previous result was read late."""
OUTLIER = 2.0
"""Times are clamped to within this factor of the expected time."""
CONTEXT_UNIT = 32768
"""Tokens of context assumed to cost about as much as one plain iteration, until measured."""
PRIOR_SCALE, PRIOR_CONTEXT = 1.0, 0.1
"""Weights, in iterations, of the start-up measurement and of a context cost of zero."""
START_ERROR = 0.03
"""Relative error of a time measured at start-up from few iterations, without the host's work for real requests."""

MIN_FIXED = 0.1
"""Minimum constant term of the fit, as a fraction of the shortest measured time."""
SWEEPS = 100
"""Coordinate-descent iterations of the fit to the start-up measurements."""


@dataclass(frozen=True, slots=True)
class CostPoint:
    """The measured time of iterations of `size` requests, including padding, at one depth and a short context."""

    size: int
    depth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DistinctExperts:
    """Estimates how many distinct experts of a sparse layer the tokens of a pass are routed to.

    Attributes:
        independence: how independently tokens choose experts, 0 to 1; neighbouring tokens of a text share some.
    """

    num_experts: int
    top_k: int
    independence: float = 1.0

    def distinct(self, tokens: int) -> float:
        """Expected number of distinct experts of `tokens` tokens in one layer."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** (1 + self.independence * (tokens - 1)))


class IterationCost:
    """Predicts the time of an iteration: scale * table(size, depth) + context tokens * seconds per token.

    The table interpolates the points measured at start-up. `observe` refines scale and seconds per token by least squares with exponential
    forgetting, and slowly also each range of batch sizes and depth: a measured size alone, or the other sizes between two powers of two,
    because what is learned about these is mostly the error of interpolating. `correct` sets how many experts of a sparse model are read.
    """

    def __init__(self, points: Sequence[CostPoint], experts: DistinctExperts | None = None) -> None:
        """
        Args:
            points: at least one; any sizes and depths.
            experts: the experts of a sparse model; None for a dense model.
        """
        self.points, self._experts = tuple(points), experts
        self._sizes = frozenset(point.size for point in points)
        self._fit = self._fitted()
        self._ratios = {depth: self._ratios_at(depth) for depth in sorted({point.depth for point in self.points})}
        self._table: dict[tuple[int, int, int, DistinctExperts | None], float] = {}
        self._cells: dict[tuple[int, int, int], float] = {}
        self._runs: dict[tuple[int, int, int], float] = {}
        self._short: dict[tuple[int, int, int], float] = {}  # first times that were clearly short, as log(time / expected)
        self._unseen: dict[int, float] = {}  # correction of depths with drafts that have not run yet, by range
        self._sums = [0.0] * 5  # sums of 1, u, u^2, y, u * y for the regression y = scale + u * context
        self._scale, self._context = 1.0, 0.0
        self._unit = self._measured(1, 0) / CONTEXT_UNIT

    def seconds(self, size: int, depth: int, kv_tokens: int = 0, width: int = 0) -> float:
        """The expected time of an iteration of `size` requests, including padding, with `kv_tokens` of context in total.

        `width`: mean tokens of ragged windows; 0 for full windows.
        """
        return self._scale * self._at(size, depth, width) + self._context * self._unit * kv_tokens

    def error(self, size: int, depth: int) -> float:
        """Relative error of the expected time of a depth; it falls with each of its iterations."""
        return START_ERROR / math.sqrt(1 + self._runs.get((self._range(size), depth, 0), 0))

    def observe(self, size: int, depth: int, kv_tokens: int, seconds: float, width: int = 0) -> None:
        """Learn from the time of one iteration."""
        key = (self._range(size), depth, width)
        if self._was_busy(key, size, kv_tokens, seconds):
            return
        self._cells.setdefault(key, 0.0)
        expected, base = self.seconds(size, depth, kv_tokens, width), self._at(size, depth, width)
        seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        u, y = self._unit * kv_tokens / base, seconds / base
        added = (1.0, u, u * u, y, u * y)
        self._sums = [total * (1 - 1 / MEMORY) + new for total, new in zip(self._sums, added, strict=True)]
        n, su, suu, sy, suy = self._sums
        n, suu, sy = n + PRIOR_SCALE, suu + PRIOR_CONTEXT, sy + PRIOR_SCALE
        context = max((n * suy - su * sy) / (n * suu - su * su), 0.0)
        self._scale, self._context = max((sy - su * context) / n, 1e-3), context
        self._forget(key[0])
        cell = self._cells[key]
        runs = self._runs[key] = self._runs.get(key, 0.0) + 1
        cell += max(CELL_RATE, 1 / (runs + FIRST_RUNS)) * min(math.log(seconds / expected), MAX_LATE)
        self._cells[key] = min(max(cell, -MAX_CELL), MAX_CELL)

    def _range(self, size: int) -> int:
        """The range of batch sizes whose corrections apply to `size`: negative for a measured size, which is alone in its range."""
        return -size if size in self._sizes else size.bit_length()

    def _forget(self, sizes: int) -> None:
        """Decay the corrections of single depths in a range of batch sizes, as described at `FORGET`."""
        keys = [key for key in self._cells if key[0] == sizes]
        for key in keys:
            self._runs[key] = self._runs.get(key, 0.0) * (1 - 1 / RECENT)
        total = sum(self._runs[key] for key in keys)
        common = sum(self._runs[key] * self._cells[key] for key in keys) / total if total else 0.0
        for key in keys:
            known = min(self._runs[key] / SURE, 1.0)
            self._cells[key] -= (known * common + (1 - known) * self._cells[key]) / FORGET

    def _was_busy(self, key: tuple[int, int, int], size: int, kv_tokens: int, seconds: float) -> bool:
        """Whether one of the first times of a depth with drafts is clearly shorter than at start-up, although that of depth 0 is not. If
        the next one is too, the longer of the two becomes the correction, also of other depths with drafts until they run.
        """
        sizes, depth, width = key
        if not depth or key in self._runs or self._runs.get((sizes, 0, 0), 0) < FIRST_RUNS:
            return False
        expected = self._scale * self._measured(size, depth, width) + self._context * self._unit * kv_tokens
        before, error = self._short.pop(key, None), max(math.log(max(seconds, 1e-9) / expected), -MAX_CELL)
        if error > -math.log(CLEARLY_SHORT):
            return False
        if before is None:
            self._short[key] = error
        else:
            self._runs[key], self._cells[key] = 2, max(before, error)
            self._unseen[sizes] = self._cells[key]
        return True

    def correct(self, independence: float) -> None:
        """Update `DistinctExperts.independence` by a measurement."""
        if self._experts is not None:
            self._experts = replace(self._experts, independence=round(independence, 1))

    def _at(self, size: int, depth: int, width: int) -> float:
        sizes = self._range(size)
        unseen = self._unseen.get(sizes, 0.0) if depth else 0.0
        return self._measured(size, depth, width) * math.exp(self._cells.get((sizes, depth, width), unseen))

    def _measured(self, size: int, depth: int, width: int = 0) -> float:
        """The table as measured at start-up, but with the current `DistinctExperts`.

        For ragged windows, the time of full windows less the modelled time of the rows that they do not have.
        """
        key = size, depth, width, self._experts
        if key not in self._table:
            ratios = [float(np.interp(math.log2(size), *ratio)) for ratio in self._ratios.values()]
            ratio = float(np.interp(depth, list(self._ratios), ratios))
            self._table[key] = self._modelled(size, depth, width) * ratio
        return self._table[key]

    def _ratios_at(self, depth: int) -> tuple[list[float], list[float]]:
        """The points of one depth: logarithms of their sizes, and measured times over fitted ones."""
        own = sorted((p for p in self.points if p.depth == depth), key=lambda point: point.size)
        return [math.log2(p.size) for p in own], [p.seconds / self._modelled(p.size, depth) for p in own]

    def _modelled(self, size: int, depth: int, width: int = 0) -> float:
        return float(self._features(size, depth, width) @ self._fit)

    def _features(self, size: int, depth: int, width: int = 0) -> npt.NDArray[np.float64]:
        """The terms of a time: constant (launches and weights), rows of the target's pass, draft passes, rows of draft passes, experts."""
        rows = size * (width or depth + 1)
        experts = 0.0 if self._experts is None else self._experts.distinct(rows)
        return np.array([1.0, rows, depth, depth * size, experts])

    def _fitted(self) -> npt.NDArray[np.float64]:
        """Non-negative least squares of relative errors by coordinate descent; the constant term is at least `MIN_FIXED`."""
        x = np.array([self._features(p.size, p.depth) / p.seconds for p in self.points])
        gram, wanted = x.T @ x, x.sum(0)
        least = np.array([MIN_FIXED * min(p.seconds for p in self.points), 0.0, 0.0, 0.0, 0.0])
        fit = least.copy()
        for _ in range(SWEEPS):
            for i, step in enumerate(gram.diagonal()):
                if step > 0:
                    fit[i] = max(fit[i] + (wanted[i] - gram[i] @ fit) / step, least[i])
        return fit
