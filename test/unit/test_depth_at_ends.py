"""The depth that is chosen for requests that end together: drafts of different depths move their ends apart by different amounts."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.model_executor.depth_controller import DecodeRows, DepthController
from runtime.model_executor.depth_option import Option
from runtime.model_executor.depth_probes import DepthProbes
from runtime.model_executor.end_spread import EndSpread
from runtime.model_executor.iteration_cost import CostPoint, IterationCost

DEPTHS = (0, 1, 2, 3, 5, 7)
UNCAPPED = 1 << 15
MEASURED = {
    1: (3.86, 4.42, 4.70, 5.09, 5.95, 6.7),
    16: (4.48, 4.98, 5.54, 5.97, 7.40, 8.5),
    64: (4.85, 6.28, 8.92, 9.28, 13.28, 15.67),
    128: (5.67, 9.76, 12.44, 15.1, 20.7, 25.4),
}
"""Milliseconds of an iteration of the 8B model on an H200 by requests, for each of `DEPTHS`."""
CONTEXT_SECONDS = 2.7e-8
"""Seconds for each token of context, on the same machine."""


def first_choice(size: int, left: np.ndarray, rate: float, caps: np.ndarray | None = None) -> Option:
    """The option for prompts of 128 tokens half way through their answers; `rate`: acceptance of every draft."""
    context = CONTEXT_SECONDS * (128 + float(left.mean()) / 2)
    points = [CostPoint(s, d, 1e-3 * ms + context * s) for s, row in MEASURED.items() for d, ms in zip(DEPTHS, row, strict=True)]
    caps = np.full(size, UNCAPPED) if caps is None else caps
    rows = DecodeRows(caps, np.ones(size, dtype=np.bool_), 0, left=left)
    depths = [depth for depth in DEPTHS if depth <= 3 or size < 64]
    return DepthController(DEPTHS, IterationCost(points), (rate,) * 7).choose(rows, dict.fromkeys(depths, size))


@pytest.mark.parametrize(
    ("size", "left", "rate", "depth"),
    [
        (16, 128, 0.3, 1),
        (16, 128, 0.69, 3),
        (16, 1000, 0.69, 3),
        (16, 1000, 0.9, 7),
        (64, 128, 0.3, 0),
        (64, 128, 0.69, 1),
        (64, 1000, 0.69, 3),
        (64, 128, 0.9, 3),
        (128, 128, 0.69, 0),
        (128, 1000, 0.69, 2),
        (128, 128, 0.9, 3),
    ],
)
def test_requests_that_end_together_run_at_the_depth_that_ends_them_first(size: int, left: int, rate: float, depth: int) -> None:
    """The fastest fixed depth in a simulation of such requests."""
    assert first_choice(size, np.full(size, left), rate).depth == depth


@pytest.mark.parametrize(("size", "rate", "depth"), [(64, 0.69, 3), (128, 0.69, 2)])
def test_requests_that_end_apart_run_at_the_fastest_depth(size: int, rate: float, depth: int) -> None:
    option = first_choice(size, np.random.default_rng(0).integers(1, 250, size), rate)
    assert (option.depth, option.margin < 0.02) == (depth, True)


def test_requests_with_different_caps_count_as_one_mixture() -> None:
    caps, rng = np.arange(16) % 4, np.random.default_rng(0)
    option = first_choice(16, np.full(16, 128), 0.69, caps)
    assert option.depth > 0
    drafts = np.minimum(caps, option.depth)
    lens = 1 + ((rng.random((4000, 16, 3)) < 0.69) & (np.arange(3) < drafts[:, None])).cumprod(axis=2).sum(axis=2)
    alone = MEASURED[1][DEPTHS.index(option.depth)] / MEASURED[16][DEPTHS.index(option.depth)]
    lost = EndSpread.of(np.full(16, 128)).share_lost(float(lens.mean()), float(lens.var())) * alone
    assert option.tokens == pytest.approx(16 * lens.mean(), rel=0.02)
    assert option.margin == pytest.approx(lost, rel=0.05)


def test_a_depth_whose_gain_is_lost_at_the_ends_is_tried_seldom() -> None:
    probes = DepthProbes((0, 1, 3))
    options = [Option(0, 0.5, 1.0), Option(1, 1.0, 1.0), Option(3, 1.1, 1.0, margin=0.2)]
    depths = [probes.next(options, options[1], 64, True, step) for step in range(2000)]
    assert 0 < depths.count(3) < 40
