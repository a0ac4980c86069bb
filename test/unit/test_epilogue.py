"""What follows a product is refused where it does not fit the product or itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runtime.layers.gemm.deferred_norm import NormAhead, RowScale
from runtime.layers.gemm.epilogue import NOTHING, Epilogue
from runtime.layers.gemm.wgmma_gemm import StreamedConfig, streamed_gemm

ROWS, WEIGHT_ROWS, PARTS = 3, 8, 2
BF16 = torch.bfloat16
BIAS = torch.empty(WEIGHT_ROWS, dtype=BF16)
SCALE = RowScale(torch.empty((ROWS, 5)), 1e-5)
AHEAD = NormAhead(BIAS, torch.empty((ROWS, WEIGHT_ROWS), dtype=BF16), torch.empty((ROWS, PARTS)))
FULL, HALF = torch.empty((ROWS, WEIGHT_ROWS)), torch.empty((ROWS, WEIGHT_ROWS // 2))


def check(epilogue: Epilogue, out: torch.Tensor | None) -> None:
    epilogue.check(out, ROWS, WEIGHT_ROWS, PARTS)


@pytest.mark.parametrize(
    ("epilogue", "out"),
    [
        (NOTHING, FULL),
        (NOTHING, FULL.to(BF16)),
        (Epilogue(bias=BIAS), None),
        (Epilogue(bias=BIAS, silu=True, scale=SCALE), HALF),
        (Epilogue(bias=BIAS, add=True, scale=SCALE, ahead=AHEAD), FULL),
    ],
)
def test_what_fits_is_taken(epilogue: Epilogue, out: torch.Tensor | None) -> None:
    check(epilogue, out)


@pytest.mark.parametrize(
    ("epilogue", "out", "complaint"),
    [
        (NOTHING, HALF, r"the product is 3 x 8, not of \(3, 4\)"),
        (NOTHING, FULL[:2], r"the product is 3 x 8, not of \(2, 8\)"),
        (Epilogue(silu=True), FULL, r"the product is 3 x 4, not of \(3, 8\)"),
        (Epilogue(silu=True, add=True), HALF, "gated sums are not added"),
        (Epilogue(bias=BIAS[:4], silu=True), HALF, r"a bias of \(4,\) for 8 rows"),
        (Epilogue(scale=replace(SCALE, squares=SCALE.squares[:1])), FULL, "squares of 1 rows to scale 3"),
        (Epilogue(scale=replace(SCALE, squares=SCALE.squares.double())), FULL, "squares are float32, not torch.float64"),
        (Epilogue(ahead=AHEAD), FULL, "rows that were added to"),
        (Epilogue(add=True, ahead=AHEAD), FULL.to(BF16), "float32 rows"),
        (Epilogue(add=True, ahead=AHEAD), None, "float32 rows"),
        (Epilogue(add=True, ahead=replace(AHEAD, gain=BIAS[:4])), FULL, r"for 3 x 8 sums: gain of \(4,\)"),
        (Epilogue(add=True, ahead=replace(AHEAD, scaled=AHEAD.scaled[:2])), FULL, r"scaled of \(2, 8\)"),
        (Epilogue(add=True, ahead=replace(AHEAD, squares=AHEAD.squares[:, :1])), FULL, r"squares are 3 x 2, not of \(3, 1\)"),
        (Epilogue(add=True, ahead=replace(AHEAD, squares=AHEAD.squares.to(BF16))), FULL, "squares are float32, not torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(epilogue: Epilogue, out: torch.Tensor | None, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check(epilogue, out)


@pytest.mark.parametrize(
    ("epilogue", "out"),
    [(Epilogue(silu=True), HALF), (Epilogue(add=True), FULL.to(BF16)), (NOTHING, FULL.half()), (NOTHING, FULL.double())],
)
def test_the_streamed_product_refuses_results_of_a_type_that_it_does_not_write(epilogue: Epilogue, out: torch.Tensor) -> None:
    x, weight = torch.zeros((ROWS, 64), dtype=BF16), torch.zeros((WEIGHT_ROWS, 64), dtype=BF16)
    with pytest.raises(AssertionError, match=f"out is {out.dtype}, not one of"):
        streamed_gemm(x, weight, out, StreamedConfig(16), epilogue)
