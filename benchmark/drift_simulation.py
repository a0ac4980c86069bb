"""Simulates the drift alarm on recorded or random windows: its samples, their cost, and the iterations until the alarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from runtime.batch import NO_SAMPLE
from runtime.model_executor.drift_alarm import DriftAlarm, Pairs
from runtime.model_executor.sample_schedule import SampleSchedules

STEPS = 3
SPOILT = 0.01
"""Share of windows of either side that a harmless difference changes. Bitwise equal passes have none."""
HARD_TEXT, FAULTY = (0.39, 0.45, 0.45), (0.04, 0.45, 0.45)
"""Acceptance by position for text that is hard to draft: eager, and through graphs with slots off by one."""
HARD_WINDOWS = 20_000
NEAR_TIES = (0.0, 0.02, 0.1, 0.4, 1.0)
"""Shares of windows whose first drafts differ because of near-ties."""
REQUESTS = (1, 4, 16, 64, 256)
EARLY = (500, 2_000)
"""Numbers of iterations after the start of a server."""

Lens = list[np.ndarray]
"""For each request int64 [n, 3], one row per window: accepted drafts through graphs, accepted eager drafts, whether the first differ."""
Windows = Callable[[int], np.ndarray]
"""Advances by a number of iterations and returns the windows of all requests, int64 [batch, 3], as in `Lens`."""
Source = Callable[[int, np.random.Generator], Windows]
"""Creates the windows of a number of requests."""


class Cost(NamedTuple):
    """How much longer, in replays, an iteration is with a sample of the draft, and additionally with one of verification."""

    draft: float
    verify: float


COSTS = (Cost(0.15, 5.0), Cost(0.3, 8.0), Cost(0.6, 16.0))


def replayed(record: Lens) -> Source:
    """Each request repeats a recorded one to its end, then another."""
    windows, lens = np.concatenate(record), np.array([len(text) for text in record])
    starts = lens.cumsum() - lens

    def begin(batch: int, rng: np.random.Generator) -> Windows:
        texts = rng.integers(0, len(lens), batch)
        at = rng.integers(0, lens[texts])  # each starts at a random position

        def after(iterations: int) -> np.ndarray:
            nonlocal at
            at += iterations
            while (over := at >= lens[texts]).any():
                at[over] -= lens[texts[over]]
                texts[over] = rng.integers(0, len(lens), over.sum())
            return _spoilt(windows[starts[texts] + at], rng)

        return after

    return begin


def _spoilt(found: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    side, at = rng.random((len(found), 2)) < SPOILT, rng.integers(0, STEPS, (len(found), 2))
    found[:, :2] = np.where(side, np.minimum(found[:, :2], at), found[:, :2])
    found[:, 2] |= (side & (at == 0)).any(axis=1)
    return found


def hard_text() -> Lens:
    """A record of random windows. Both sides are independent, so graphs may be right where eager drafts are wrong."""
    rng = np.random.default_rng(0)
    rates = np.array([FAULTY, HARD_TEXT])
    graph, eager = ((rng.random((HARD_WINDOWS, STEPS)) < own).cumprod(axis=1).sum(axis=1) for own in rates)
    both = np.minimum(graph, eager)  # after the first draft that only one side has right, drafts are not compared
    return [np.stack([np.minimum(graph, both + 1), np.minimum(eager, both + 1), rng.random(HARD_WINDOWS) < 0.9], axis=1)]


def near_ties(share: float, forced: bool) -> Source:
    """Correct graphs. In `share` of the windows the first drafts differ, and either side is right equally often or, if acceptance is
    `forced`, only graphs are ever right. The other windows are equal on both sides.
    """

    def begin(batch: int, rng: np.random.Generator) -> Windows:
        def after(iterations: int) -> np.ndarray:
            alike = (rng.random((batch, STEPS)) < np.array(HARD_TEXT)).cumprod(axis=1).sum(axis=1)
            mismatched, side = rng.random(batch) < share, rng.random(batch)
            graph, eager = side < HARD_TEXT[0], (side > 1 - HARD_TEXT[0]) & (not forced)
            return np.stack([np.where(mismatched, graph, alike), np.where(mismatched, eager, alike), mismatched], axis=1)

        return after

    return begin


class Simulation:
    """Iterations of `batch` requests.

    Attributes:
        sampled: number of samples.
        spent: for each sample, its iteration and the cost of all samples so far, in replays.
    """

    def __init__(self, source: Source, batch: int, seed: int, cost: Cost) -> None:
        self._windows, self._cost = source(batch, np.random.default_rng(seed)), cost
        self._alarm, self._schedule = DriftAlarm(STEPS), SampleSchedules()
        self._schedule.observe(1.0, False, NO_SAMPLE)  # all iterations without a sample take equally long
        self.sampled, self.spent = 0, [(0, 0.0)]

    def run(self, iterations: int) -> int | None:
        """Run until the alarm and return the number of iterations; None if there is no alarm."""
        last = 0
        for i in range(1, iterations + 1):
            self._alarm.count_iteration()
            sample = self._schedule.next(self._alarm)
            if not sample.taken:
                continue
            extra = self._cost.draft + sample.verify * self._cost.verify
            self.sampled += 1
            self.spent.append((i, self.spent[-1][1] + extra))
            self._schedule.observe(1.0 + extra, True, sample)
            graph, eager, mismatched = self._windows(i - last).T
            self._alarm.add(Pairs(graph, eager, mismatched > 0, STEPS, sample.verify))
            last = i
            if self._alarm.check():
                return i
        return None

    def spent_by(self, iteration: int) -> float:
        """The cost of samples up to an iteration, in replays."""
        return max(spent for at, spent in self.spent if at <= iteration)


def detection(source: Source, batch: int, runs: int, most: int, cost: Cost) -> dict[str, Any]:
    """Iterations until the alarm over several runs; a run without an alarm counts as `most`."""
    found = [Simulation(source, batch, seed, cost).run(most) for seed in range(runs)]
    times = np.array([most if one is None else one for one in found])
    return {
        "kind": "simulation", "requests": batch, "runs": runs, "most": most, "missed": found.count(None), "draft": cost.draft,
        "median": float(np.median(times)), "p90": float(np.quantile(times, 0.9)), "slowest": int(times.max()),
    }  # fmt: skip


def false_alarms(source: Source, batch: int, iterations: int, cost: Cost) -> dict[str, Any]:
    """Number of alarms in a long run without a fault; the test restarts after each."""
    alarms, left, sampled, spent, seed = 0, iterations, 0, 0.0, 0
    while left > 0:
        simulation = Simulation(source, batch, seed, cost)
        at = simulation.run(left)
        alarms, left, seed = alarms + (at is not None), left - (at or left), seed + 1
        sampled, spent = sampled + simulation.sampled, spent + simulation.spent[-1][1]
    return {"kind": "false alarms", "requests": batch, "iterations": iterations, "alarms": alarms, "sampled": sampled, "draft": cost.draft,
            "time_share": spent / iterations}  # fmt: skip


def start_cost(forced: bool, runs: int, cost: Cost, shares: Sequence[float], requests: Sequence[int]) -> dict[str, Any]:
    """The cost of samples, in replays, of a correct server after its start, at the batch size and near-tie share where it is highest."""
    found = list[dict[str, Any]]()
    for batch in requests:
        for share in shares:
            simulations = [Simulation(near_ties(share, forced), batch, seed, cost) for seed in range(runs)]
            alarms = sum(simulation.run(EARLY[-1]) is not None for simulation in simulations)
            spent = {str(count): np.array([one.spent_by(count) for one in simulations]) for count in EARLY}
            found.append({"requests": batch, "near_ties": share, "alarms": alarms, "spent": spent})
    row: dict[str, Any] = {"kind": "start", "draft": cost.draft, "verify": cost.verify, "runs": runs}
    row |= {"alarms": sum(one["alarms"] for one in found)}
    for count in map(str, EARLY):
        worst = max(found, key=partial(_mean_at, count))
        spent = worst["spent"][count]
        row[count] = {"requests": worst["requests"], "near_ties": worst["near_ties"], "mean": float(spent.mean()),
                      "median": float(np.median(spent)), "p90": float(np.quantile(spent, 0.9))}  # fmt: skip
        row[count]["usual"] = float(np.mean([one["spent"][count].mean() for one in found]))
    return row


def _mean_at(count: str, figures: dict[str, Any]) -> float:
    return float(figures["spent"][count].mean())
