"""The programs of the grouped GEMMs that widen weights, without a GPU: what they are compiled for, and that they fit a multiprocessor."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from runtime.config.device_tuning import H200
from runtime.config.expert_tuning import WIDENED_TILES, WeightFormat
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.gated_act import CLAMPED_SWIGLU, GELU_TANH, SILU, GatedAct
from runtime.layers.moe.kernels.widened_experts import (
    SHARED_BYTES,
    SLOTS,
    STAGE_SCALES,
    STAGING_BYTES,
    TILES,
    _scales,
    _takes,
    _Variant,
    source,
    supports,
)

CUTS: list[tuple[WeightFormat, int]] = [(kind, pairs) for kind, tiles in TILES.items() for pairs in tiles]
CLAMPED = GatedAct(CLAMPED_SWIGLU)


def mxfp4(rows: int, columns: int) -> ExpertWeights:
    codes = torch.zeros((2, rows // 8, columns // 32, 8, 16), dtype=torch.uint8)
    return ExpertWeights(codes, torch.zeros((2, rows, columns // 32), dtype=torch.uint8))


def int4(rows: int, columns: int, group: int) -> ExpertWeights:
    return ExpertWeights(torch.zeros((2, rows, columns // 2), dtype=torch.uint8), torch.zeros((2, rows, columns // group, 2)).half())


def e4m3(rows: int, columns: int, *scales: int) -> ExpertWeights:
    """`scales`: of an expert."""
    return ExpertWeights(torch.zeros((2, rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn), torch.zeros((2, *scales)))


def variant(kind: WeightFormat, pairs: int, columns: int, gated: bool, act: int = CLAMPED_SWIGLU, group: int = 128) -> _Variant:
    """A program; `group` of int4."""
    row_scales = {"fp8": 0, "mxfp4": columns // 32, "int4": columns // group * 4}[kind]
    return _Variant(kind, pairs, row_scales, group if kind == "int4" else 0, gated, act, True, True)


@pytest.mark.parametrize("columns", [64, 448, 2880, 4096])
@pytest.mark.parametrize(("kind", "pairs"), CUTS)
def test_programs_fit_shared_memory(kind: WeightFormat, pairs: int, columns: int) -> None:
    for gated in (False, True):
        program = variant(kind, pairs, columns, gated)
        groups, code_bytes = program.tile.groups, 128 if kind == "fp8" else 64
        rows, stage = 2 * groups * 64, 2 * groups * 64 * code_bytes + pairs * 256
        stages = program.stages
        scales = {"fp8": stages * STAGE_SCALES * 4, "mxfp4": SLOTS * rows * columns // 32, "int4": stages * rows * 4}[kind]
        assert stages * stage + scales + 4 * groups * STAGING_BYTES + 16 * (stages + SLOTS) <= SHARED_BYTES
        assert stage % 1024 == 0, "the swizzle counts from there"
        assert stages >= 2
        assert f"#define STAGES {stages}\n" in source(program)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("pairs", WIDENED_TILES["int4"])
def test_int4_programs_have_enough_stages_for_rows_of_any_length(pairs: int, group: int) -> None:
    for columns in (128, 2048, 7168):
        program = variant("int4", pairs, columns, True, SILU, group)
        assert program.stages >= 3
        assert f"#define SCALE_COPY {512 // group}\n" in source(program)


def test_int4_scales_of_a_cut_stage_are_copied_one_by_one() -> None:
    assert "#define SCALE_COPY 8\n" in source(variant("int4", 80, 960, True, group=32))
    assert "#define SCALE_COPY 4\n" in source(variant("int4", 80, 960, True, group=64))
    assert "#define SCALE_COPY 4\n" in source(variant("int4", 80, 992, True, group=32))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("kind", "pairs"), CUTS)
def test_each_number_of_pairs_has_its_instruction(kind: WeightFormat, pairs: int, gated: bool) -> None:
    program = variant(kind, pairs, 2880, gated)
    text, operands = source(program), "bf16.bf16" if kind == "fp8" and not gated else "f16.f16"
    for count in {program.tile.fewer or pairs, pairs}:
        assert text.count(f"wgmma.mma_async.sync.aligned.m64n{count}k16.f32.{operands}") == 1


def test_shapes_of_mxfp4_that_matrices_do_not_divide_are_left_to_other_kernels() -> None:
    assert _takes(mxfp4(128, 64), mxfp4(64, 64), CLAMPED, 48)
    assert not _takes(mxfp4(192, 64), mxfp4(64, 96), CLAMPED, 48), "a stage would end inside a group of scales"
    assert not _takes(mxfp4(128, 8192), mxfp4(8192, 64), CLAMPED, 48), "no two stages fit beside so many scales"
    assert not _takes(mxfp4(128, 64), mxfp4(64, 64), GatedAct(SILU), 48), "float16 may not hold what is between the GEMMs"
    assert not supports(torch.zeros((100, 64), dtype=torch.bfloat16), mxfp4(128, 64), mxfp4(64, 64), CLAMPED, 48), "no GPU"


def test_int4_needs_sizes_that_matrices_divide() -> None:
    for act in (SILU, CLAMPED_SWIGLU, GELU_TANH):
        assert _takes(int4(768, 2048, 128), int4(2048, 384, 128), GatedAct(act), 48)
    assert _takes(int4(768, 960, 32), int4(960, 384, 32), GatedAct(SILU), 160)
    assert _takes(int4(768, 2048, 32), int4(2048, 384, 32), GatedAct(SILU), 160)
    assert _takes(int4(768, 7168, 32), int4(7168, 384, 32), GatedAct(SILU), 160)
    assert not _takes(int4(192, 128, 32), int4(128, 96, 32), GatedAct(SILU), 48), "matrices do not divide the inner size"


def test_e4m3_needs_one_scale_for_a_matrix_and_a_stage() -> None:
    down = e4m3(256, 384, 2, 3)
    for act in (SILU, CLAMPED_SWIGLU, GELU_TANH):
        assert _takes(e4m3(768, 256, 6, 2), down, GatedAct(act), 32)
    assert _takes(e4m3(768, 256, 1, 1), e4m3(256, 384, 1, 1), CLAMPED, 32), "one scale for all"
    assert _takes(e4m3(384, 256, 6, 2), e4m3(256, 192, 2, 2), CLAMPED, 32), "rows of blocks that are cut between ranks"
    assert not _takes(e4m3(768, 256, 768), down, CLAMPED, 32), "a scale for each row"
    assert not _takes(e4m3(768, 256, 24, 2), down, CLAMPED, 32), "blocks of 32 rows"
    assert not _takes(e4m3(768, 256, 6, 4), down, CLAMPED, 32), "blocks of 64 columns"
    assert not _takes(e4m3(1440, 256, 12, 2), e4m3(256, 720, 2, 6), CLAMPED, 32), "an inner size of 720"
    assert not _takes(mxfp4(768, 256), down, CLAMPED, 32), "two formats"
    dense = ExpertWeights(torch.zeros((2, 128, 64), dtype=torch.bfloat16))
    assert not _takes(dense, dense, CLAMPED, 32)


def test_scales_of_e4m3_are_found_by_shifts() -> None:
    found = _scales(e4m3(1408, 448, 11, 4))
    assert (found.expert_scales, found.row_scales, found.row_shift, found.column_shift) == (44, 4, 7, 7)
    found = _scales(e4m3(384, 256, 1, 1))
    assert (found.expert_scales, found.row_scales, 384 >> found.row_shift, 255 >> found.column_shift) == (1, 1, 0, 0)


def test_every_tile_of_the_tuning_has_a_program() -> None:
    assert {kind: list(tiles) for kind, tiles in TILES.items()} == {kind: list(tiles) for kind, tiles in WIDENED_TILES.items()}
    assert H200.experts.widened.keys() <= TILES.keys()
