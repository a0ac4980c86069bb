"""What drafts lose because requests end apart: the estimate against draws."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.model_executor.end_spread import last_of, share_lost

RATE = 0.2


@pytest.mark.parametrize("n", [2, 4, 16, 64, 256])
def test_the_last_of_many_is_as_late_as_in_draws(n: int) -> None:
    drawn = np.random.default_rng(n).standard_normal((4000, n)).max(axis=1).mean()
    assert last_of(n) == pytest.approx(drawn, abs=0.05)
    assert last_of(1) == 0.0


@pytest.mark.parametrize("n", [4, 16, 64])
def test_the_last_of_requests_that_end_together_is_as_late_as_in_draws(n: int) -> None:
    rng, left = np.random.default_rng(n), 128
    lens = 1 + (rng.random((300, n, left)) < RATE)
    iterations = (lens.cumsum(axis=2) < left).sum(axis=2) + 1
    lost = (iterations.max(axis=1) - iterations.mean(axis=1)).mean() / iterations.mean()
    assert share_lost(np.full(n, left), RATE) == pytest.approx(lost, rel=0.15)


def test_requests_that_end_apart_anyway_lose_next_to_nothing() -> None:
    assert share_lost(np.full(16, 100), RATE) > 0.05 > 0.002 > share_lost(np.arange(100, 900, 50), RATE)


def test_half_of_the_requests_decide_where_they_end_together() -> None:
    left = np.arange(1000, 9000, 500)
    left[:9] = 100
    assert share_lost(left, RATE) == share_lost(np.full(16, 100), RATE)


def test_long_answers_lose_less() -> None:
    losses = [share_lost(np.full(16, left), RATE) for left in (50, 200, 1000, 8000)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.01


def test_drafts_that_are_never_or_always_accepted_part_no_requests() -> None:
    assert share_lost(np.full(16, 100), 0.0) == share_lost(np.full(16, 100), 1.0) == 0.0
