"""Acceptance is counted as its definition says, and drift is told from chance."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from runtime.model_executor.acceptance import AcceptanceCounters, side_by_side
from runtime.worker_info import AcceptanceCounts


def draw_lens(rng: np.random.Generator, rates: tuple[float, ...], count: int) -> np.ndarray:
    hits = rng.random((count, len(rates))) < np.array(rates)
    return 1 + hits.cumprod(axis=1).sum(axis=1)


def test_counters_follow_the_definition_at_any_depth() -> None:
    rng = np.random.default_rng(0)
    counters = AcceptanceCounters(4)
    drafted, reached, accepted, total, windows = [0] * 4, [0] * 4, [0] * 4, 0, 0
    for depth in (4, 0, 2, 3, 4, 1):
        lens = rng.integers(1, depth + 2, size=17)
        counters.add(lens.astype(np.int32), depth)
        for length in lens.tolist():
            windows, total = windows + 1, total + length
            for position in range(depth):
                drafted[position] += 1
                reached[position] += length >= position + 1
                accepted[position] += length >= position + 2
    shown = counters.stats()
    assert (shown.drafted, shown.reached, shown.accepted) == (drafted, reached, accepted)
    assert shown.iterations == windows
    assert shown.drafted_tokens == sum(drafted)
    assert counters.mean_accept_len == pytest.approx(total / windows)
    assert shown.rates == pytest.approx([a / r for a, r in zip(accepted, reached, strict=True)])
    assert msgspec.json.decode(msgspec.json.encode(shown), type=AcceptanceCounts) == shown


def test_merging_is_counting_together() -> None:
    parts = [AcceptanceCounters(3), AcceptanceCounters(3)]
    whole = AcceptanceCounters(3)
    for part, lens in zip(parts, ([1, 2, 4], [4, 4, 3, 1]), strict=True):
        part.add(lens)
        whole.add(lens)
    parts[0].merge(parts[1])
    assert parts[0] == whole
    assert parts[1] != whole


def test_nothing_counted_is_one_token_per_iteration() -> None:
    empty = AcceptanceCounters(0)
    empty.add([1, 1])
    assert empty.mean_accept_len == AcceptanceCounters(3).mean_accept_len == 1.0


def test_identical_runs_print_without_marks() -> None:
    first, second = AcceptanceCounters(2), AcceptanceCounters(2)
    for counters in (first, second):
        counters.add([1, 2, 3, 3])
    table = side_by_side(first, second)
    assert "differs" not in table
    assert "3/4 0.7500" in table
    second.add([1])
    assert side_by_side(first, second).count("differs") == 1
