"""What drafts lose because requests end apart: the estimate against draws."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.model_executor.end_spread import EndSpread, last_of

RATE = 0.2


def lost(left: np.ndarray, rate: float = RATE, depth: int = 1) -> float:
    """What `depth` drafts lose that are each accepted with probability `rate` if their predecessors are."""
    reach = rate ** np.arange(1, depth + 1)
    mean = 1 + float(reach.sum())
    square = 1 + float(((2 * np.arange(1, depth + 1) + 1) * reach).sum())
    return EndSpread.of(left).share_lost(mean, max(square - mean**2, 0.0))


@pytest.mark.parametrize("n", [2, 4, 16, 64, 256])
def test_the_last_of_many_is_as_late_as_in_draws(n: int) -> None:
    drawn = np.random.default_rng(n).standard_normal((4000, n)).max(axis=1).mean()
    assert last_of(n) == pytest.approx(drawn, abs=0.05)
    assert last_of(1) == 0.0


@pytest.mark.parametrize("n", [4, 16, 64])
@pytest.mark.parametrize(("rate", "depth"), [(RATE, 1), (0.69, 1), (0.69, 3), (0.9, 7)])
def test_the_last_of_requests_that_end_together_is_as_late_as_in_draws(n: int, rate: float, depth: int) -> None:
    rng, left = np.random.default_rng(n), 128
    lens = 1 + (rng.random((100, n, left, depth)) < rate).cumprod(axis=3).sum(axis=3)
    tokens = lens.cumsum(axis=2)
    last = np.minimum((left - tokens + lens) / lens, 1.0)  # the part of the last window that is needed, so that no rounding counts
    iterations = np.where(tokens < left, 1.0, np.maximum(last, 0.0)).sum(axis=2)
    drawn = (iterations.max(axis=1) - iterations.mean(axis=1)).mean() / iterations.mean()
    assert lost(np.full(n, left), rate, depth) == pytest.approx(drawn, rel=0.15)


def test_more_drafts_lose_more() -> None:
    losses = [lost(np.full(64, 128), 0.69, depth) for depth in (1, 2, 3, 5, 7)]
    assert losses == sorted(losses)
    assert losses[0] == pytest.approx(0.075, abs=0.002)
    assert losses[2] == pytest.approx(0.163, abs=0.004)


def test_requests_that_end_apart_anyway_lose_next_to_nothing() -> None:
    assert lost(np.full(16, 100)) > 0.05 > 0.002 > lost(np.arange(100, 900, 50))


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_where_requests_end_apart_no_depth_is_preferred(depth: int) -> None:
    assert lost(np.random.default_rng(0).integers(1, 1000, 64), 0.69, depth) < 0.01


def test_half_of_the_requests_decide_where_they_end_together() -> None:
    left = np.arange(1000, 9000, 500)
    left[:9] = 100
    assert lost(left) == lost(np.full(16, 100))


def test_long_answers_lose_less() -> None:
    losses = [lost(np.full(16, left)) for left in (50, 200, 1000, 8000)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.01


def test_drafts_that_are_never_or_always_accepted_part_no_requests() -> None:
    assert lost(np.full(16, 100), 0.0) == lost(np.full(16, 100), 1.0) == 0.0
