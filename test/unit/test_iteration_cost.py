"""The cost model of iterations: what it interpolates from few points, and what it learns while serving."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.model_executor.iteration_cost import CostPoint, IterationCost


def true_seconds(size: int, depth: int) -> float:
    """Weights, rows of the verify pass, and draft passes."""
    return 4e-3 + 6e-5 * size * (depth + 1) + depth * (3e-4 + 1e-6 * size)


POINTS = [CostPoint(size, depth, true_seconds(size, depth)) for size in (1, 16, 64) for depth in (0, 3, 7)]


def test_measured_points_are_kept_and_others_interpolated() -> None:
    cost = IterationCost(POINTS)
    for point in POINTS:
        assert cost.seconds(point.size, point.depth) == pytest.approx(point.seconds)
    for size in (2, 5, 32, 48, 128, 256):
        for depth in (0, 1, 2, 3, 5, 7):
            assert cost.seconds(size, depth) == pytest.approx(true_seconds(size, depth), rel=0.05)


@pytest.mark.parametrize(
    "points", [POINTS[:1], POINTS[:2], POINTS[3:5], [CostPoint(1, 0, 0.1), CostPoint(1, 3, 0.003), CostPoint(4, 3, 0.003)]]
)
def test_few_or_strange_points_still_give_positive_times(points: list[CostPoint]) -> None:
    cost = IterationCost(points)
    assert all(cost.seconds(size, depth) > 0 for size in (1, 7, 256) for depth in range(8))
    assert cost.seconds(256, 7) >= cost.seconds(1, 0) * 0.02


def test_a_slower_machine_scales_every_depth() -> None:
    cost, rng = IterationCost(POINTS), np.random.default_rng(0)
    for _ in range(400):
        cost.observe(16, 3, 2000, 1.5 * true_seconds(16, 3) * (1 + 0.03 * rng.standard_normal()))
    for size, depth in ((16, 0), (16, 3), (16, 7), (1, 0)):
        assert cost.seconds(size, depth, 2000) == pytest.approx(1.5 * true_seconds(size, depth), rel=0.12)


def test_the_time_of_context_is_added_to_every_depth() -> None:
    cost, rng = IterationCost(POINTS), np.random.default_rng(0)
    context = 1.5e-7
    for step in range(600):
        kv_tokens = 8000 + 150 * step
        cost.observe(8, 3, kv_tokens, (true_seconds(8, 3) + context * kv_tokens) * (1 + 0.02 * rng.standard_normal()))
    for depth in (0, 3, 7):
        assert cost.seconds(8, depth, 100_000) == pytest.approx(true_seconds(8, depth) + context * 100_000, rel=0.1)


def test_a_wrong_point_is_corrected_by_runs_at_that_depth() -> None:
    wrong = [CostPoint(p.size, p.depth, p.seconds * (1.4 if p.depth == 0 else 1.0)) for p in POINTS]
    cost = IterationCost(wrong)
    for step in range(2000):
        depth = 0 if step % 8 == 0 else 3
        cost.observe(16, depth, 0, true_seconds(16, depth))
    assert cost.seconds(16, 0) / cost.seconds(16, 3) == pytest.approx(true_seconds(16, 0) / true_seconds(16, 3), rel=0.05)


def test_one_outlier_changes_little() -> None:
    cost = IterationCost(POINTS)
    for _ in range(100):
        cost.observe(16, 0, 0, true_seconds(16, 0))
    cost.observe(16, 0, 0, 100.0)
    assert cost.seconds(16, 0) == pytest.approx(true_seconds(16, 0), rel=0.03)


def test_two_short_first_times_correct_all_depths_that_did_not_run() -> None:
    """One may be short because the result before it was read late."""
    cost = IterationCost([CostPoint(p.size, p.depth, p.seconds * (3 if p.depth else 1)) for p in POINTS])
    for _ in range(10):
        cost.observe(16, 0, 0, true_seconds(16, 0))
    for seconds, correct in ((0.5, False), (1.0, True)):
        cost.observe(16, 3, 0, seconds * true_seconds(16, 3))
        for depth in (3, 7):
            assert (cost.seconds(16, depth) == pytest.approx(true_seconds(16, depth), rel=0.01)) is correct
    cost.observe(16, 7, 0, 2.9 * true_seconds(16, 7))
    assert cost.seconds(16, 7) == pytest.approx(3 * true_seconds(16, 7), rel=0.02), "its own times count once it runs"
    assert cost.seconds(1, 7) == pytest.approx(3 * true_seconds(1, 7), rel=0.02), "few requests were measured at another time"


def test_the_error_between_measured_sizes_says_nothing_about_these() -> None:
    """GEMM kernels change at powers of two, so 24 windows of four tokens may take as long as 32."""
    cost, rng = IterationCost(POINTS), np.random.default_rng(0)
    for step in range(200):
        size, slower = (24, 1.08) if step % 2 else (64, 1.0)
        cost.observe(size, 3, 0, slower * true_seconds(size, 3) * (1 + 0.02 * rng.standard_normal()))
    assert cost.seconds(24, 3) == pytest.approx(1.08 * true_seconds(24, 3), rel=0.02)
    assert cost.seconds(20, 3) / cost.seconds(64, 3) == pytest.approx(1.08 * true_seconds(20, 3) / true_seconds(64, 3), rel=0.02)
    for depth in (0, 7):
        assert cost.seconds(16, 3) / cost.seconds(16, depth) == pytest.approx(true_seconds(16, 3) / true_seconds(16, depth), rel=0.01)


def test_sizes_far_from_measured_ones_are_corrected_apart() -> None:
    """Where iterations take long, few sizes are measured at start-up."""
    cost, rng = IterationCost([point for point in POINTS if point.size in (1, 64)]), np.random.default_rng(0)
    slower = {8: 0.9, 32: 1.1}
    for step in range(400):
        size = (8, 32)[step % 2]
        cost.observe(size, 3, 0, slower[size] * true_seconds(size, 3) * (1 + 0.02 * rng.standard_normal()))
    for size in slower:
        assert cost.seconds(size, 3) == pytest.approx(slower[size] * true_seconds(size, 3), rel=0.02)


def test_a_delay_that_is_over_is_forgotten_for_depths_that_do_not_run() -> None:
    cost, rng = IterationCost(POINTS), np.random.default_rng(0)

    def run(depth: int, count: int, slowdown: float = 1.0) -> None:
        for _ in range(count):
            cost.observe(1, depth, 0, slowdown * true_seconds(1, depth) * (1 + 0.03 * rng.standard_normal()))

    run(3, 400)
    run(5, 350, 3.2)
    run(7, 100)
    assert cost.seconds(1, 7) == pytest.approx(true_seconds(1, 7), rel=0.05), "the depth that runs is learned soon"
    run(7, 8000)
    for depth in (0, 3, 5, 7):
        assert cost.seconds(1, depth) == pytest.approx(true_seconds(1, depth), rel=0.1)
