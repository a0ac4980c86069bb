"""Depths of sparse models by the bytes that an iteration reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.model_executor.depth import DepthControl, choose_depth, depths_by_bytes
from runtime.model_executor.depth_bytes import StepBytes, least_batches

GB = 1 << 30
QWEN3_30B = StepBytes(fixed=int(2.3 * GB), expert=int(0.422 * GB), num_experts=128, top_k=8, draft=int(0.35 * GB))
SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]


def test_distinct_experts_follow_random_routing() -> None:
    assert QWEN3_30B.distinct(1) == pytest.approx(8)
    assert QWEN3_30B.distinct(4) == pytest.approx(29.1, abs=0.1)
    assert QWEN3_30B.distinct(4096) == pytest.approx(128)


@pytest.mark.parametrize("requests", [1, 2, 4])
def test_few_requests_of_a_sparse_model_run_without_drafts(requests: int) -> None:
    assert QWEN3_30B.best(requests, (0, 1, 3, 5)) == 0


@pytest.mark.parametrize("requests", [8, 16, 64, 256])
def test_many_requests_of_a_sparse_model_run_with_drafts(requests: int) -> None:
    assert QWEN3_30B.best(requests, (0, 1, 3, 5)) == 5
    assert QWEN3_30B.best(requests, (0, 1, 3)) == 3


def test_a_chosen_depth_is_never_slower_by_bytes() -> None:
    for requests in range(1, 257):
        depth = QWEN3_30B.best(requests, (0, 1, 3, 5))
        accepted = (1.0, 1.7, 2.2, 2.56, 2.82, 3.01)[depth]
        assert accepted / QWEN3_30B.total(requests, depth) >= 1 / QWEN3_30B.total(requests, 0)


def test_the_table_serves_every_batch_from_the_least_batch_of_each_depth() -> None:
    least = least_batches(QWEN3_30B, (0, 1, 3), 64)
    assert least[0] == 1
    assert 4 < least[3] <= 8
    table = depths_by_bytes(3, QWEN3_30B, None, 64, SIZES, True)
    limits = {depth: batches.running for depth, batches in table.items()}
    chosen = [choose_depth(size, limits, {depth: batches.least for depth, batches in table.items()}) for size in range(1, 65)]
    assert chosen == [3 if size >= least[3] else 1 if size >= least[1] else 0 for size in range(1, 65)]
    assert min(table[3].captured) >= least[3]
    assert table[0].captured == SIZES


def test_measured_sharing_of_experts_moves_the_least_batches() -> None:
    table = depths_by_bytes(3, QWEN3_30B, None, 64, SIZES, True)
    control = DepthControl({d: b.running for d, b in table.items()}, 65, None, {d: b.least for d, b in table.items()})
    start = dict(control.least)
    control.correct(0.5)
    assert control.least == start, "a dense model, or another way to choose"
    control.costs = QWEN3_30B
    control.correct(0.95)
    assert control.least == start, "too little to count"
    control.correct(0.5)
    assert control.least == least_batches(replace(QWEN3_30B, spread=0.5), (0, 1, 3), 64)
    assert (start[3], control.least[3]) == (7, 11)
    control.correct(0.0)
    assert control.least == start, "smaller batches have no graphs"
    assert replace(QWEN3_30B, spread=0.5).distinct(9) == pytest.approx(QWEN3_30B.distinct(5))


def test_a_depth_that_never_pays_stays_unused() -> None:
    costs = StepBytes(fixed=0, expert=GB, num_experts=256, top_k=1, draft=100 * GB)
    least = least_batches(costs, (0, 1, 3), 16)
    assert least == {0: 1, 1: 17, 3: 17}
    table = depths_by_bytes(3, costs, None, 16, [1, 8, 16], True)
    assert set(table) == {0, 3}
    control = DepthControl({d: b.running for d, b in table.items()}, 17, None, {d: b.least for d, b in table.items()})
    assert [control.choose(size) for size in (1, 8, 16)] == [0, 0, 0]
