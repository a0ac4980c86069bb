"""Experts for many tokens on Hopper, in CUDA C++: two grouped GEMMs by WGMMA (`grouped_gemm.cu`), then each token's weighted sum."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.config.kernel_configs import WgmmaExpertsConfig
from runtime.layers.gemm.quantized_rows import quantize_rows
from runtime.layers.gemm.wgmma_gemm import PARTS, ROW_BYTES, multiply_source
from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.cuda_program import program
from runtime.layers.moe.kernels.align import Aligned, align
from runtime.layers.moe.kernels.expert_pass import ExpertPass
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.many_rows import Added, sum_pairs

GROUPED_PARTS = Path(__file__).with_name("grouped_parts.cu")
"""The part common to grouped GEMMs."""
SHARED_BYTES = 227 << 10
"""Maximum shared memory of a block: stages, then staged results, then barriers."""
BARRIER_BYTES = 256
MOST_STAGES = BARRIER_BYTES // 16
LOADERS = 128
"""Threads of the loading warpgroup."""
GATHER_REGISTERS, LOAD_REGISTERS = 40, 32
"""Registers per loading thread if all of them gather rows of x, and if only one issues TMA loads."""
SCALE_BLOCK = 128
"""Rows and columns of e4m3 weights that share a scale; also the columns of a row between the GEMMs that do."""
FP8_TILE = (128, 2 * SCALE_BLOCK)
"""Pairs and weight rows of an e4m3 tile: a thread has registers for its sums and the sums of one block of scales."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """The compile-time parameters of a program."""

    rows: int
    tile: int
    cluster: int
    dtype: torch.dtype
    fp8: bool
    gated: bool
    act: int
    bias: bool
    early: bool

    @property
    def outputs(self) -> int:
        """Output columns per tile."""
        return self.tile // 2 if self.gated else self.tile

    @property
    def stage_bytes(self) -> int:
        """Bytes of x and of the weights in one stage."""
        return (self.rows + self.tile) * ROW_BYTES

    @property
    def stored(self) -> int:
        """Output columns per staging pass."""
        return next(columns for columns in (64, 32, 16) if self.outputs % columns == 0)

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as fit with the staged results."""
        staged = self.rows * (self.stored * 2 + 16)
        return min((SHARED_BYTES - BARRIER_BYTES - staged) // self.stage_bytes, MOST_STAGES)


def supports(x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, config: WgmmaExpertsConfig) -> bool:
    """Whether the kernels support these rows and weights on their device; with e4m3 weights, rows are rounded to e4m3."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and _takes(gate_up, x.dtype, config.rows, config.gate_up_tile, 2)
        and _takes(down, x.dtype, config.rows, config.down_tile, 1)
        and cuda_driver.on_hopper(x)
    )


def _takes(weights: ExpertWeights, dtype: torch.dtype, rows: int, tile: int, halves: int) -> bool:
    """Whether a GEMM supports these weights, whose rows are this many stacked matrices."""
    _, N, K = weights.shape
    if not weights.weight.is_contiguous() or N % (8 * halves) or K % 8:
        return False
    if weights.format == "dense":
        return weights.weight.dtype is dtype
    return (
        weights.format == "fp8"
        and (rows, tile) == FP8_TILE
        and N % (SCALE_BLOCK * halves) == K % SCALE_BLOCK == 0
        and weights.scale_layout[2:] == (SCALE_BLOCK, SCALE_BLOCK)
    )


def experts_by_wgmma(experts: ExpertPass, config: WgmmaExpertsConfig, added: Added | None = None) -> torch.Tensor:
    """Like `experts_many_rows`, for arguments that the kernels support. With e4m3 weights, rows of x are rounded to e4m3 with one scale per
    row, and rows between the GEMMs with one scale per `SCALE_BLOCK` columns.
    """
    x, gate_up, down, routed, _, out, first, pdl, *_ = experts
    (T, hidden), (E, _, inner), top_k = x.shape, down.shape, routed.ids.shape[1]
    experts.check()
    fp8, x_scale, h_scale = gate_up.format == "fp8", None, None
    aligned = align(routed.ids, first, E, config.rows, pdl=pdl)
    places = aligned.tiles * config.rows
    h = torch.empty((places, inner), dtype=torch.float8_e4m3fn if fp8 else x.dtype, device=x.device)
    y = torch.empty((T * top_k, hidden), dtype=x.dtype, device=x.device)
    if fp8:
        x, x_scale = quantize_rows(x, pdl=pdl)
        h_scale = torch.empty((inner // SCALE_BLOCK, places), dtype=torch.float32, device=x.device)
    _grouped(experts, config, aligned, x, x_scale, h, h_scale, gated=True)
    _grouped(experts, config, aligned, h, h_scale, y, None, gated=False)
    return sum_pairs(y, routed, out, first, E, added=added, pdl=pdl)


def _grouped(
    experts: ExpertPass,
    config: WgmmaExpertsConfig,
    aligned: Aligned,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    *,
    gated: bool,
) -> None:
    """Launch one grouped GEMM of a pass. With `gated`, x has a row per token and `out` a row per place of `aligned`; otherwise x has a row
    per place and `out` a row per pair. Both are e4m3 if they have scales.
    """
    weights, act, routed, dtype, pdl = experts.gate_up if gated else experts.down, experts.act, experts.routed, experts.x.dtype, experts.pdl
    (E, N, K), columns = weights.shape, out.shape[1]
    tile = config.gate_up_tile if gated else config.down_tile
    fp8 = x_scale is not None
    variant = _Variant(config.rows, tile, config.cluster, dtype, fp8, gated, act.kind if gated else 0, weights.bias is not None, pdl)
    kernel, depth = _kernel(variant), ROW_BYTES // x.element_size()
    items = aligned.tiles * -(-columns // (variant.outputs * config.cluster))
    kernel(
        min(items, kernel.clusters_at_once) * config.cluster,
        (
            x if gated else cuda_driver.tensor_map(x.data_ptr(), (K, len(x)), x.dtype, (depth, config.rows)),
            cuda_driver.tensor_map(weights.weight.data_ptr(), (K, E * N), weights.weight.dtype, (depth, tile // 2)),
            aligned.argument,
            _Scales(
                *(None if t is None else t.data_ptr() for t in (weights.scale, x_scale, out_scale)),
                *(N // SCALE_BLOCK, K // SCALE_BLOCK, aligned.tiles * config.rows),
            ),
            out, weights.bias, routed.weights, N, columns, K, routed.ids.shape[1], act.argument,
        ),
        pdl,
    )  # fmt: skip


class _Scales(ctypes.Structure):
    """`Scales` in `grouped_gemm.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "rows", "out")),
        *((name, ctypes.c_int) for name in ("scale_rows", "scale_columns", "places")),
    )


@cache
def _kernel(variant: _Variant) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(
        source(variant), "grouped_gemm", threads=2 * variant.rows + LOADERS, cluster=variant.cluster, shared_bytes=SHARED_BYTES
    )


def source(variant: _Variant) -> str:
    """The CUDA program of one variant."""
    v = variant
    assert v.rows in (128, 192), f"expected tiles of 128 or 192 pairs; got {v.rows}"
    assert v.tile % 32 == 0, f"expected a multiple of 32 weight rows; got {v.tile}"
    assert not v.fp8 or (v.rows, v.tile) == FP8_TILE, f"expected a tile of {FP8_TILE} with e4m3; got {v.rows, v.tile}"
    constants = dict(
        ROWS=v.rows, TILE=v.tile, SPLIT=1, CLUSTER_M=v.cluster, CLUSTER_N=1, LOADERS=LOADERS,
        LOAD_REGISTERS=GATHER_REGISTERS if v.gated else LOAD_REGISTERS,
        STAGES=v.stages, STORED=v.stored, ELEMENT=1 if v.fp8 else 2, GATED=v.gated, ACT=v.act,
        BFLOAT16=v.dtype is torch.bfloat16, BIAS=v.bias, EARLY=v.early,
    )  # fmt: skip
    dtype = "e4m3" if v.fp8 else "bf16" if v.dtype is torch.bfloat16 else "f16"
    multiply = multiply_source(v.tile // 2 if v.fp8 else v.tile, dtype, overwrites=True)
    return program(constants, PARTS, GROUPED_PARTS, multiply, Path(__file__).with_suffix(".cu"))
