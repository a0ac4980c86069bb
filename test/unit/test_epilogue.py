"""Epilogues that do not fit their GEMM are refused before anything is launched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runtime.config.kernel_configs import FragmentConfig, ResidentConfig
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.gemm.fragment_gemm import fragment_gemm
from runtime.layers.gemm.resident_gemm import leaves_space, resident_config, resident_gemm
from runtime.layers.gemm.wgmma_gemm import WgmmaConfig, wgmma_gemm

ROWS, WEIGHT_ROWS, PARTS = 3, 8, 2
BF16 = torch.bfloat16
BIAS = torch.empty(WEIGHT_ROWS, dtype=BF16)
SCALE = RowScale(torch.empty((ROWS, 5)), 1e-5)
DEFERRED = DeferredNorm(BIAS, torch.empty((ROWS, WEIGHT_ROWS), dtype=BF16), torch.empty((ROWS, PARTS)))
ARGMAX = torch.empty((2, ROWS, PARTS), dtype=torch.int32)
FULL, HALF = torch.empty((ROWS, WEIGHT_ROWS)), torch.empty((ROWS, WEIGHT_ROWS // 2))


def fits(epilogue: Epilogue, out: torch.Tensor | None) -> bool:
    try:
        epilogue.check(out, ROWS, WEIGHT_ROWS, PARTS)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    ("epilogue", "out"),
    [
        (NO_EPILOGUE, FULL),
        (NO_EPILOGUE, FULL.to(BF16)),
        (Epilogue(bias=BIAS, argmax=ARGMAX), None),
        (Epilogue(bias=BIAS, argmax=ARGMAX), FULL),
        (Epilogue(bias=BIAS, silu=True, scale=SCALE), HALF),
        (Epilogue(bias=BIAS, add=True, scale=SCALE, deferred=DEFERRED), FULL),
    ],
)
def test_epilogues_that_fit_are_accepted(epilogue: Epilogue, out: torch.Tensor | None) -> None:
    assert fits(epilogue, out)


@pytest.mark.parametrize(
    ("epilogue", "out"),
    [
        (NO_EPILOGUE, HALF),
        (NO_EPILOGUE, FULL[:2]),
        (NO_EPILOGUE, None),
        (Epilogue(argmax=ARGMAX[:, :2]), FULL),
        (Epilogue(argmax=ARGMAX), FULL.to(BF16)),
        (Epilogue(argmax=ARGMAX, add=True), FULL),
        (Epilogue(argmax=ARGMAX, silu=True), HALF),
        (Epilogue(silu=True), FULL),
        (Epilogue(silu=True, add=True), HALF),
        (Epilogue(bias=BIAS[:4], silu=True), HALF),
        (Epilogue(scale=replace(SCALE, squares=SCALE.squares[:1])), FULL),
        (Epilogue(scale=replace(SCALE, squares=SCALE.squares.double())), FULL),
        (Epilogue(deferred=DEFERRED), FULL),
        (Epilogue(add=True, deferred=DEFERRED), FULL.to(BF16)),
        (Epilogue(add=True, deferred=DEFERRED), None),
        (Epilogue(add=True, deferred=replace(DEFERRED, gain=BIAS[:4])), FULL),
        (Epilogue(add=True, deferred=replace(DEFERRED, scaled=DEFERRED.scaled[:2])), FULL),
        (Epilogue(add=True, deferred=replace(DEFERRED, squares=DEFERRED.squares[:, :1])), FULL),
        (Epilogue(add=True, deferred=replace(DEFERRED, squares=DEFERRED.squares.to(BF16))), FULL),
    ],
)
def test_epilogues_that_do_not_fit_are_refused(epilogue: Epilogue, out: torch.Tensor | None) -> None:
    assert not fits(epilogue, out)


@pytest.mark.parametrize(
    ("epilogue", "out"),
    [(Epilogue(silu=True), HALF), (Epilogue(add=True), FULL.to(BF16)), (NO_EPILOGUE, FULL.half()), (NO_EPILOGUE, FULL.double())],
)
def test_wgmma_refuses_output_dtypes_that_it_does_not_store(epilogue: Epilogue, out: torch.Tensor) -> None:
    x, weight = torch.zeros((ROWS, 64), dtype=BF16), torch.zeros((WEIGHT_ROWS, 64), dtype=BF16)
    with pytest.raises(AssertionError):
        wgmma_gemm(x, weight, out, WgmmaConfig(16), epilogue)


@pytest.mark.parametrize(
    ("rows", "epilogue", "out"),
    [
        (17, NO_EPILOGUE, torch.empty((17, WEIGHT_ROWS))),
        (ROWS, Epilogue(add=True), FULL.to(BF16)),
        (ROWS, NO_EPILOGUE, FULL.half()),
        (ROWS, Epilogue(argmax=ARGMAX[:, :, :1]), FULL),
        (ROWS, Epilogue(add=True, deferred=DEFERRED), FULL),
    ],
)
def test_fragments_refuse_what_they_do_not_compute(rows: int, epilogue: Epilogue, out: torch.Tensor) -> None:
    x, weight = torch.zeros((rows, 64), dtype=BF16), torch.zeros((WEIGHT_ROWS, 64), dtype=torch.float8_e4m3fn)
    with pytest.raises(AssertionError):
        fragment_gemm(x, weight, out, FragmentConfig(4, 2), epilogue, weight_scale=torch.ones(WEIGHT_ROWS))


@pytest.mark.parametrize(
    ("rows", "epilogue", "out", "reason"),
    [
        (17, NO_EPILOGUE, torch.empty((17, 16)), "1 to 16 rows"),
        (ROWS, Epilogue(add=True), torch.empty((ROWS, 16), dtype=BF16), "without add"),
        (ROWS, NO_EPILOGUE, torch.empty((ROWS, 16)).half(), "float32 out"),
        (ROWS, NO_EPILOGUE, torch.empty((ROWS, 8)), "out of shape"),
        (ROWS, Epilogue(argmax=torch.empty((2, ROWS, 1), dtype=torch.int32)), torch.empty((ROWS, 16)), "no argmax"),
        (ROWS, Epilogue(silu=True), torch.empty((ROWS, 16)), "out of shape"),
    ],
)
def test_resident_weights_refuse_what_they_do_not_compute(rows: int, epilogue: Epilogue, out: torch.Tensor, reason: str) -> None:
    x, weight = torch.zeros((rows, 64), dtype=BF16), torch.zeros((16, 64), dtype=BF16)
    with pytest.raises(AssertionError, match=reason):
        resident_gemm(x, weight, out, ResidentConfig(4, 2, 1), epilogue)


@pytest.mark.parametrize(("weight_rows", "columns"), [(2048, 4096), (2880, 4096), (4096, 4096), (5120, 2048), (6144, 4096), (16, 64)])
def test_blocks_with_resident_weights_all_run_at_once(weight_rows: int, columns: int) -> None:
    config = resident_config(weight_rows, columns, 132)
    assert config is not None
    assert config.parts(weight_rows) <= config.blocks * 132
    assert config.depth > 0
    assert config.blocks * (config.warps * config.depth * 2048 + 1152) <= 228 << 10
    assert config.depth <= -(-columns // (64 * config.warps)), "no more than the weights of a block"


@pytest.mark.parametrize(
    ("weight_rows", "columns", "expected"), [(5120, 768, True), (1344, 2048, True), (2048, 5120, False), (5120, 2048, False)]
)
def test_small_resident_weights_leave_space_for_the_next_kernel(weight_rows: int, columns: int, expected: bool) -> None:
    config = resident_config(weight_rows, columns, 132)
    assert config is not None
    assert leaves_space(columns, config) is expected


@pytest.mark.parametrize(("weight_rows", "columns"), [(28672, 4096), (2050, 4096), (2048, 4100)])
def test_other_weights_are_not_resident(weight_rows: int, columns: int) -> None:
    assert resident_config(weight_rows, columns, 132) is None
