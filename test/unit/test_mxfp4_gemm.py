"""The programs of MXFP4's grouped GEMMs, without a GPU: what they are compiled for, and that they fit a multiprocessor."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.gate import CLAMPED_SWIGLU, GatedAct
from runtime.layers.moe.kernels.mxfp4_gemm import (
    SHARED_BYTES,
    SLOTS,
    STAGING_BYTES,
    TILES,
    _takes,
    _Variant,
    source,
    supports,
)


def layer(rows: int, columns: int) -> ExpertWeights:
    return ExpertWeights(torch.zeros((2, rows, columns // 2), dtype=torch.uint8), torch.zeros((2, rows, columns // 32), dtype=torch.uint8))


@pytest.mark.parametrize("columns", [64, 448, 2880, 4096])
@pytest.mark.parametrize("pairs", TILES)
def test_programs_fit_shared_memory(pairs: int, columns: int) -> None:
    for gated in (False, True):
        variant = _Variant(pairs, columns, gated, CLAMPED_SWIGLU.value, True, True)
        groups, scales = variant.groups, columns // 32
        stage = 2 * groups * 64 * 64 + pairs * 256
        parts = variant.stages * stage + SLOTS * 2 * groups * 64 * scales + 4 * groups * STAGING_BYTES
        assert parts + 16 * (variant.stages + SLOTS) <= SHARED_BYTES
        assert stage % 1024 == 0, "the swizzle counts from there"
        assert variant.stages >= 2
        text = source(variant)
        assert f"#define STAGES {variant.stages}\n" in text
        assert f"#define SCALES {scales}\n" in text


@pytest.mark.parametrize("pairs", TILES)
def test_each_number_of_pairs_has_its_instruction(pairs: int) -> None:
    text = source(_Variant(pairs, 2880, True, CLAMPED_SWIGLU.value, True, True))
    for count in (TILES[pairs].fewer, pairs):
        assert text.count(f"wgmma.mma_async.sync.aligned.m64n{count}k16.f32.f16.f16") == 1


def test_shapes_that_matrices_do_not_divide_are_left_to_other_kernels() -> None:
    assert _takes(layer(128, 64), 48)
    assert not _takes(layer(128, 96), 48), "a stage would end inside a group of scales"
    assert not _takes(layer(128, 8192), 48), "no two stages fit beside so many scales"
    assert not supports(torch.zeros((100, 64), dtype=torch.bfloat16), layer(256, 64), layer(64, 128), GatedAct(), 48), "no GPU"
