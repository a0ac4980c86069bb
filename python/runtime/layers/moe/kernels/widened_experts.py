"""Experts with 8- or 4-bit weights on Hopper: two grouped CUDA C++ GEMMs that convert weights in registers (`widened_experts.cu`), then
sums."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from runtime.config.expert_tuning import WIDENED_TILES, WeightFormat
from runtime.layers.gemm.wgmma_gemm import PARTS, multiply_source
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.kernels.fragments import FORMATS
from runtime.layers.moe.kernels.align import Aligned, align
from runtime.layers.moe.kernels.expert_pass import ExpertPass
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.gated_act import CLAMPED_SWIGLU, GatedAct
from runtime.layers.moe.kernels.grouped_gemm import GROUPED_PARTS
from runtime.layers.moe.kernels.many_rows import Added, sum_pairs
from runtime.layers.moe.kernels.widened_rows import prepare_rows
from runtime.layers.quantization.mxfp4 import ROWS

MATRIX = 64
"""Weight rows of a matrix that is loaded at once; a warpgroup multiplies by two matrices."""
DEPTH = 128
"""Columns per stage."""
SHARED_BYTES = 227 << 10
"""Maximum shared memory of a block: stages, scales, staged results, barriers."""
MOST_STAGES, SLOTS = 8, 2
"""Maximum stages of the ring of weights and rows, and number of tiles whose scales of groups are in shared memory at once."""
STAGE_SCALES = 8
"""Float32 scales per e4m3 stage."""
INT4_SCALE = 4
"""Bytes of an int4 scale and zero point."""
STAGING_BYTES = 32 * 48
"""Staging buffer for the results of a warp, in bytes."""
LOADERS, LOAD_REGISTERS = 128, 40
"""Threads of the loading warpgroup, and registers of each."""
X_STRIP = 16
"""Rows of x that are loaded at once, of half the columns of a stage."""
MOST_GATED = 200.0
"""Largest clamp limit for which float16 can represent the activation's products."""
CODE_BITS: Mapping[WeightFormat, int] = {"fp8": 8, "mxfp4": 4, "int4": 4}
"""Bits per weight in each format that the kernels convert."""
FILES: Mapping[WeightFormat, tuple[str, ...]] = {
    "fp8": ("e4m3_weights.cu",),
    "mxfp4": ("row_scales.cu", "mxfp4_weights.cu", "row_widener.cu"),
    "int4": ("stage_scales.cu", "int4_weights.cu", "row_widener.cu"),
}
"""The CUDA files of each format."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """The division of a tile of pairs.

    Attributes:
        groups: number of multiplying warpgroups, limited by registers: while one waits, others convert weights.
        fewer: tiles with at most this many pairs use smaller instructions, whose code takes room in the instruction cache; 0 if there are
            none.
    """

    groups: int
    fewer: int = 0


TILES: Mapping[WeightFormat, dict[int, _Tile]] = {
    "fp8": {16: _Tile(2), 32: _Tile(2, 24), 48: _Tile(2, 24)},
    **{kind: {pairs: _Tile(3 if pairs <= 80 else 2) for pairs in WIDENED_TILES[kind]} for kind in ("mxfp4", "int4")},
}
"""Tiles by number of pairs. Sums of e4m3 need twice the registers, because each stage's sums are scaled before they are added."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """The compile-time parameters of a program; an e4m3 program is valid for any number of columns.

    Attributes:
        row_scales: bytes of the scales of a row; 0 for e4m3.
        group: columns that share an int4 scale; 0 for other formats.
    """

    format: WeightFormat
    pairs: int
    row_scales: int
    group: int
    gated: bool
    act: int
    bias: bool
    early: bool

    @property
    def tile(self) -> _Tile:
        """The division of a tile."""
        return TILES[self.format][self.pairs]

    @property
    def bfloat16(self) -> bool:
        """Whether results are bfloat16: those of the second GEMM, and rows between the GEMMs whose activation is not clamped, as MXFP4's
        is.
        """
        return not self.gated or self.format != "mxfp4"

    @property
    def operands(self) -> Literal["bf16", "f16"]:
        """The dtype that the tensor cores multiply: prepared rows are float16, and so are MXFP4's rows between the GEMMs."""
        return "f16" if self.gated or self.format != "fp8" else "bf16"

    @property
    def prepared(self) -> bool:
        """Whether `prepare_rows` has scaled rows of x: the tokens, and int4's rows between the GEMMs."""
        return self.gated or self.format == "int4"

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as fit in the remaining shared memory."""
        rows = 2 * self.tile.groups * MATRIX
        scales = {"fp8": MOST_STAGES * STAGE_SCALES * 4, "mxfp4": SLOTS * rows * self.row_scales}.get(self.format, 0)
        staging, barriers = 4 * self.tile.groups * STAGING_BYTES, 16 * (MOST_STAGES + SLOTS) + 8
        row_bytes = DEPTH * CODE_BITS[self.format] // 8 + self.stage_scales
        return min((SHARED_BYTES - scales - staging - barriers) // (rows * row_bytes + self.pairs * DEPTH * 2), MOST_STAGES)

    @property
    def stage_scales(self) -> int:
        """Bytes of a row's int4 scales in a stage; 0 for other formats."""
        return DEPTH // self.group * INT4_SCALE if self.group else 0


def supports(x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, act: GatedAct, pairs: int) -> bool:
    """Whether the kernels support these rows and weights on their device."""
    return x.is_cuda and x.dtype is torch.bfloat16 and _takes(gate_up, down, act, pairs) and cuda_driver.on_hopper(x)


def _takes(gate_up: ExpertWeights, down: ExpertWeights, act: GatedAct, pairs: int) -> bool:
    """Whether both GEMMs support these weights: hidden and inner size are multiples of 64, so that matrices are full."""
    if gate_up.format != down.format or gate_up.format not in CODE_BITS:
        return False
    if gate_up.format == "mxfp4" and not (act.kind == CLAMPED_SWIGLU and act.limit <= MOST_GATED):
        return False  # products may be too large: rows between the GEMMs are float16
    return all(_readable(weights, pairs) for weights in (gate_up, down))


def _readable(weights: ExpertWeights, pairs: int) -> bool:
    """Whether a GEMM reads these weights and their scales."""
    scale, K = weights.scale, weights.shape[2]
    assert scale is not None
    if K % MATRIX or not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (weights.weight, scale)):
        return False
    if weights.format != "fp8":
        return _variant(weights, pairs, False, 0, False).stages >= 2
    _, _, rows, columns = weights.scale_layout
    return rows % MATRIX == 0 and columns % DEPTH == 0  # one scale must cover the rows of a matrix and the columns of a stage


def _variant(weights: ExpertWeights, pairs: int, gated: bool, act: int, early: bool) -> _Variant:
    """The program for these weights."""
    assert weights.scale is not None
    row_scales = 0 if weights.format == "fp8" else weights.scale.shape[2:].numel() * weights.scale.itemsize
    return _Variant(weights.format, pairs, row_scales, weights.group, gated, act, weights.bias is not None, early)


def widened_experts(experts: ExpertPass, pairs: int, added: Added | None = None) -> torch.Tensor:
    """Like `experts_many_rows`, for arguments that the kernels support.

    Args:
        pairs: pairs per tile, a key of `TILES`: about as many as an expert has.
    """
    x, gate_up, down, routed, _, out, first, pdl, *_ = experts
    (T, hidden), (E, _, inner), top_k = x.shape, down.shape, routed.ids.shape[1]
    experts.check()
    aligned = align(routed.ids, first, E, pairs, pdl=pdl)
    rows, factors = prepare_rows(x, aligned, top_k, pdl=pdl)
    between = torch.float16 if gate_up.format == "mxfp4" else torch.bfloat16
    h = torch.empty((aligned.tiles * pairs, inner), dtype=between, device=x.device)
    y = torch.empty((T * top_k, hidden), dtype=x.dtype, device=x.device)
    _grouped(experts, aligned, rows, factors, h, gated=True)
    h, factors = prepare_rows(h, aligned, 0, pdl=pdl) if gate_up.format == "int4" else (h, None)
    _grouped(experts, aligned, h, factors, y, gated=False)
    return sum_pairs(y, routed, out, first, E, added=added, pdl=pdl)


def _grouped(
    experts: ExpertPass, aligned: Aligned, x: torch.Tensor, factors: torch.Tensor | None, out: torch.Tensor, *, gated: bool
) -> None:
    """Launch one grouped GEMM of a pass. x has a row per place of `aligned`, and with `gated` so has `out`, which otherwise has a row per
    pair.
    """
    weights, act, routed, pdl = experts.gate_up if gated else experts.down, experts.act, experts.routed, experts.pdl
    (E, N, K), columns = weights.shape, out.shape[1]
    assert weights.scale is not None
    _kernel(_variant(weights, aligned.rows, gated, act.kind if gated else 0, pdl))(
        min(aligned.tiles * (columns // MATRIX), torch.cuda.get_device_properties(x.device).multi_processor_count),
        (
            cuda_driver.tensor_map(x.data_ptr(), (K, len(x)), x.dtype, (DEPTH // 2, X_STRIP)),
            _map(weights.weight.data_ptr(), E * N, K * CODE_BITS[weights.format] // 8, weights.format),
            _scales(weights) if weights.format == "fp8" else weights.scale, aligned.argument,
            out, weights.bias, routed.weights, factors, N, columns, K, act.argument,
        ),
        pdl,
    )  # fmt: skip


class _Scales(ctypes.Structure):
    """`Scales` in `e4m3_weights.cu`."""

    _fields_ = (("at", ctypes.c_void_p), *((name, ctypes.c_int) for name in ("expert_scales", "row_scales", "row_shift", "column_shift")))


def _scales(weights: ExpertWeights) -> _Scales:
    expert_scales, row_scales, rows, columns = weights.scale_layout
    assert weights.scale is not None
    return _Scales(weights.scale.data_ptr(), expert_scales, row_scales, rows.bit_length() - 1, columns.bit_length() - 1)


def _map(address: int, rows: int, row_bytes: int, kind: WeightFormat) -> Any:
    """The TMA map of weights. For MXFP4 a row of the map is eight weight rows, which are stored together, in elements of eight bytes."""
    strip, dtype = (ROWS, torch.int64) if kind == "mxfp4" else (1, torch.uint8)
    return cuda_driver.tensor_map(address, (row_bytes, rows // strip), dtype, (DEPTH * CODE_BITS[kind] // 8, MATRIX // strip))


@cache
def _kernel(variant: _Variant) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(
        source(variant), "widened_experts", threads=128 * variant.tile.groups + LOADERS, shared_bytes=SHARED_BYTES
    )


def source(variant: _Variant) -> str:
    """The CUDA program of one variant."""
    v, tiles = variant, TILES[variant.format]
    assert v.pairs in tiles, f"expected tiles of {tuple(tiles)} pairs; got {v.pairs}"
    fewer = v.tile.fewer or v.pairs
    constants = dict(
        FORMAT=FORMATS[v.format], ACT=v.act, EARLY=v.early, ROWS=v.tile.groups * MATRIX, CLUSTER_M=1, CLUSTER_N=1, SPLIT=1,
        X_STRIP=X_STRIP, LOADERS=LOADERS, LOAD_REGISTERS=LOAD_REGISTERS, BFLOAT16=v.bfloat16, CODE_BITS=CODE_BITS[v.format],
        PAIRS=v.pairs, FEWER=fewer, STAGES=v.stages, SLOTS=SLOTS, SCALES=v.row_scales, STAGE_SCALES=STAGE_SCALES, GROUP=v.group,
        SCALE_COPY=math.gcd(v.row_scales, v.stage_scales), GATED=v.gated, BIAS=v.bias, PREPARED=v.prepared,
    )  # fmt: skip
    multiply = "\n".join(multiply_source(pairs, v.operands, overwrites=True, fragments=True) for pairs in sorted({fewer, v.pairs}))
    here = Path(__file__)
    parts = map(here.with_name, ("widened_tiles.cu", *FILES[v.format]))
    return fragments.source(here.with_suffix(".cu"), constants, PARTS, GROUPED_PARTS, multiply, *parts)
