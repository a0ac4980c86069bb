"""The int8 copy of an LM head: its bounds hold, and passes that need only the most likely tokens use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.layers.bounded_head import BOUNDED_ROWS, BoundedHead, split_rows, upper_bounds
from runtime.layers.candidate_head import ROWS_AT_ONCE
from runtime.layers.linear import Linear
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.parity import check_parity
from runtime.sampling_params import SamplingParams
from unit.driver import Driver, EveryNth
from unit.predicting import VOCAB, plain, speculating
from unit.storm import SIZES, Storm, same_life

BF16 = torch.bfloat16
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.9)
PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + 3 * r).tolist() for r in (1, 2, 3)}


def states(kind: str, count: int, hidden: int) -> torch.Tensor:
    """Rows of which all columns are alike, one is a thousand times larger, most are zero, or all are tiny."""
    x = torch.randn((count, hidden))
    if kind == "outlier":
        x[:, 3] *= 1000
    if kind == "sparse":
        x[:, 2:] = 0
    return (x * 1e-30 if kind == "tiny" else x).to(BF16)


@pytest.mark.parametrize("kind", ["normal", "outlier", "sparse", "tiny"])
@pytest.mark.parametrize("weights", ["normal", "outlier", "zeros"])
def test_no_logit_exceeds_its_bound(kind: str, weights: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn((ROWS_AT_ONCE + 300, 64))
    if weights == "outlier":
        weight[:, 5] *= 100
    if weights == "zeros":
        weight[::3] = 0
    x, head = states(kind, 40, 64), BoundedHead(Linear.dense(weight.to(BF16)))
    rows = split_rows(x, head.largest)
    bounds = upper_bounds(rows, head)
    logits = x.double() @ head.own.weight.double().T
    columns = logits[:, torch.arange(len(weight)) * head.stride % len(weight)]
    assert bool((columns <= bounds.double() + rows.error[:, None]).all())
    # A bound is within twice the slack of the logit, or all of them would be useless.
    loose = 2 * (rows.norm[:, None] * head.slack + rows.error[:, None]).double() + 1e-5 * columns.abs()
    assert bool((bounds - columns <= loose).all())


def test_the_halves_of_a_row_have_sixteen_bits() -> None:
    torch.manual_seed(1)
    x = states("normal", 50, 512)
    rows = split_rows(x, 1.0)
    halves = rows.halves.unflatten(0, (-1, 2)).double()
    again = rows.step[:, None] * (254 * halves[:, 0] + halves[:, 1])
    assert float((again - x).abs().max() / x.abs().max()) < 1 / 64000
    assert float((again - x).norm(dim=1).sub(rows.error).max()) < 0


def test_few_tokens_need_to_be_scored() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn((40000, 1024)).to(BF16), torch.randn((64, 1024)).to(BF16)
    head = BoundedHead(Linear.dense(weight))
    rows = split_rows(x, head.largest)
    best = (x.float() @ weight.float().T).amax(1, keepdim=True)
    needed = (upper_bounds(rows, head) + rows.error[:, None] >= best).sum(1)
    assert float(needed.float().median()) <= 8
    assert int(needed.max()) <= 64


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_never_proved(value: float) -> None:
    x = torch.ones((2, 64), dtype=BF16)
    x[1, 7] = value
    rows = split_rows(x, 1.0)
    assert bool(rows.error[0].isfinite())
    assert not bool(rows.error[1].isfinite())


def test_a_cpu_scores_every_token() -> None:
    ops, head = TorchOps(), Linear.dense(torch.randn((1000, 64)))
    assert ops.bounded_head(head) is None
    x, tokens = torch.randn((5, 64)), torch.empty(5, dtype=torch.int64)
    assert ops.greedy_by_copy(x, BoundedHead(head), tokens) is tokens
    assert torch.equal(tokens, ops.greedy(x, head))


# ---- passes without logits


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Heads have bounds where asked for. Returns the row counts of the passes that use them."""
    used = list[int]()

    def greedy_by_copy(ops: TorchOps, x: torch.Tensor, head: BoundedHead, tokens: Any = None, logits: Any = None) -> torch.Tensor:
        used.append(len(x))
        return ops.greedy(x, head.own, tokens, logits)

    monkeypatch.setattr(TorchOps, "bounded_head", lambda self, head: with_choices(BoundedHead(head)))
    monkeypatch.setattr(TorchOps, "greedy_by_copy", greedy_by_copy)
    return used


def with_choices(head: BoundedHead) -> BoundedHead:
    head.choices[1] = None  # type: ignore[assignment] - as if it was faster for one row
    return head


def build(tmp_path: Path, drafts: bool = True, sizes: tuple[int, ...] = SIZES, **runtime: Any) -> Any:
    if not drafts:
        return plain("eager", list(sizes), **runtime)
    return speculating(tmp_path, "EAGLE", "eager", list(sizes), runtime=runtime)


def greedy_runs(worker: Any) -> int:
    """Passes that found only the most likely tokens."""
    return sum(runner.replayed for runner in worker.parts.verifier.greedy.values())


@pytest.mark.parametrize("whole", [False, True], ids=["three graphs", "one graph"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("samplings", [(GREEDY,), (GREEDY, WARM)], ids=["greedy", "mixed"])
def test_a_life_is_the_same_with_and_without_bounds(
    tmp_path: Path, bounded: list[int], whole: bool, drafts: bool, samplings: tuple[SamplingParams, ...]
) -> None:
    worker = build(tmp_path, drafts, iteration_graph=whole, head_bounds=True)
    life = Storm(worker, 3, samplings).run(3)
    assert max(bounded, default=0) <= BOUNDED_ROWS
    assert bool(bounded) == (samplings == (GREEDY,))
    assert whole or bool(greedy_runs(worker)) == bool(bounded)
    used = len(bounded)
    same_life(Storm(build(tmp_path, drafts, iteration_graph=whole), 3, samplings).run(3), life)
    assert len(bounded) == used


@pytest.mark.parametrize("whole", [False, True], ids=["three graphs", "one graph"])
def test_log_probabilities_come_from_passes_with_logits(tmp_path: Path, bounded: list[int], whole: bool) -> None:
    drivers = []
    for bounds in (True, False):
        drivers.append(Driver(build(tmp_path, sizes=(1, 2, 4), iteration_graph=whole, head_bounds=bounds)))
        captured = len(bounded)
        drivers[-1].generate(PROMPTS, 12, logprobs=2)
        assert greedy_runs(drivers[-1].worker) == 0
        assert len(bounded) == captured
    assert drivers[0].out == drivers[1].out
    for a, b in zip(*(driver.results for driver in drivers), strict=True):
        for name in ("chosen", "top_ids", "top"):
            np.testing.assert_array_equal(getattr(a.logprobs, name), getattr(b.logprobs, name))


def test_eager_samples_verify_the_same_passes(tmp_path: Path, bounded: list[int]) -> None:
    worker = build(tmp_path, sizes=(1, 2, 4), head_bounds=True)
    worker.parts.monitor.schedule = EveryNth(2)
    driver = Driver(worker)
    driver.generate(PROMPTS, 40)
    assert greedy_runs(worker) == len(driver.accepts)
    assert worker.info().acceptance.eager_sample.iterations > 0
    other = Driver(build(tmp_path, sizes=(1, 2, 4)))
    other.generate(PROMPTS, 40)
    assert driver.out == other.out


def test_a_copy_that_is_never_faster_leaves_no_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchOps, "bounded_head", lambda self, head: BoundedHead(head))
    worker = build(tmp_path, sizes=(1, 2, 4), head_bounds=True)
    assert not worker.parts.verifier.greedy
    Driver(worker).generate(PROMPTS, 12)


def test_many_rows_have_no_graphs_without_logits(tmp_path: Path, bounded: list[int]) -> None:
    worker = build(tmp_path, head_bounds=True)
    for runner in worker.parts.verifier.greedy.values():
        assert all(size * runner.spec.width <= BOUNDED_ROWS for size in runner.sizes)
    check_parity(worker)
