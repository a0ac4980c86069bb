"""The benchmark of exactness: one choice for all sizes, and the passes that are compared."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from benchmark import exactness
from benchmark.shapes import tiny_model

from runtime.config.device_tuning import H200
from runtime.config.flag_parser import parse
from runtime.entrypoints.prepare import prepare
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.linear import Linear

GEMM = Gemm("linear", Linear.dense(torch.empty(64, 32)), None)


@dataclass(frozen=True)
class Measured:
    choice: str | None
    micros: dict[str | None, float]


def test_best_choice_is_near_the_fastest_everywhere() -> None:
    few, many = {None: 9.0, "small": 1.0, "even": 1.2, "few rows": 0.9}, {None: 8.0, "small": 20.0, "even": 11.0}
    assert exactness.best_for_all([few, many]) == "even", "neither cuBLAS nor what does not fit all sizes"


def test_one_tiling_holds_for_every_number_of_rows() -> None:
    searched, dtype = GemmTimings(H200), GEMM.linear.weight.dtype
    for rows in exactness.ROWS:
        micros = {None: 1.0, "wide": 2.0, "deep": 1.5 if rows < 64 else 9.0}
        searched.keep(dtype, GEMM.key(rows), lambda micros=micros: Measured(None, micros))  # type: ignore[arg-type, return-value]
    found = exactness.one_tiling([GEMM, GEMM], searched, H200)
    chosen = [found.known(dtype, GEMM.key(rows)) for rows in exactness.ROWS]
    assert [one and one.choice for one in chosen] == ["wide"] * 4
    assert exactness.one_tiling([GEMM], GemmTimings(H200), H200).known(dtype, GEMM.key(1)) is None


def test_searched_tilings_are_the_same_for_any_number_of_rows() -> None:
    tuning = exactness.searched_tuning(H200)
    for op in H200.gemm_candidates:
        few, many = tuning.gemm_configs(op, 1), tuning.gemm_configs(op, 128)
        assert few == many
        assert len(few) == len({*few}) > 2
        assert all(tiling.swap for tiling in few)
    assert tuning.fragment_configs(rows=1) == ()


def test_whole_tuning_gives_every_batch_the_same_cut() -> None:
    tuning = exactness.whole_tuning(H200)
    assert all(tuning.split_wins(batch, 4, 8) and tuning.split_config(128, batch) == exactness.WHOLE for batch in (1, 20, 64, 300))
    assert exactness.WHOLE.max_partial_rows == 1, "no number of rows leaves room for a second part"


@pytest.mark.parametrize("contexts", [[5], [9, 33]])
def test_passes_compute_the_same_tokens_at_all_sizes(contexts: list[int]) -> None:
    with torch.inference_mode():
        rows = [*exactness.measure(tiny_model().target_flags, contexts, 1)]
    assert len(rows) == len(exactness.SETTINGS) * len(contexts) * len(exactness.PASSES)
    assert all(row["differ"] == 0 for row in rows if (row["requests"], row["width"]) == (exactness.MOST, 1))
    assert {row["tokens"] for row in rows if row["requests"] == 16} == {64}
    assert all(row["ms"] > 0 and row["kernels"] == {} for row in rows)


def test_windows_and_single_tokens_have_near_logits() -> None:
    config, model_config = prepare(parse([*tiny_model().target_flags]).args)
    model = exactness.load(config, model_config, GemmTimings(H200))
    with torch.inference_mode():
        passes = exactness.Passes.build(config, model, H200, 20)
        alone = passes.logits(3, 1)
        assert torch.allclose(passes.logits(3, exactness.WINDOW), alone, atol=1e-4)
        assert not torch.allclose(alone[:1], alone[1:2], atol=1e-2), "requests have their own keys"
