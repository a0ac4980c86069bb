"""Experts in MXFP4 on Hopper, in CUDA C++: two grouped GEMMs by WGMMA that widen weights in registers (`mxfp4_gemm.cu`), then sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from runtime.layers.gemm.wgmma_gemm import PARTS, multiply_source
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.moe.kernels.align import Aligned, align
from runtime.layers.moe.kernels.expert_weights import FORMATS, ExpertWeights, check_experts
from runtime.layers.moe.kernels.gate import CLAMPED_SWIGLU, GatedAct
from runtime.layers.moe.kernels.grouped_gemm import GROUPED_PARTS
from runtime.layers.moe.kernels.many_rows import Added, sum_pairs
from runtime.layers.moe.router import Routing

GROUP = 32
"""Columns of a row that share a scale."""
MATRIX = 64
"""Weight rows of a matrix that is loaded at once; a warpgroup multiplies by two."""
DEPTH = 128
"""Columns of a stage."""
SHARED_BYTES = 227 << 10
"""All shared memory that a block may have: stages, scales, results on their way to memory, barriers."""
MOST_STAGES, SLOTS = 8, 2
"""Of the ring of weights and rows; and tiles whose scales are there."""
STAGING_BYTES = 32 * 48
"""Of the results of a warp."""
LOADERS, LOAD_REGISTERS = 128, 40
"""Threads of the loading warpgroup, and registers of each."""
ROW_THREADS = 128
"""Of a block that prepares a row."""
MOST_GATED = 200.0
"""Largest limit of a clamped activation whose products float16 holds."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """How a block multiplies the pairs of a tile.

    Attributes:
        fewer: a tile that has no more pairs than these has instructions for so many.
        groups: warpgroups that multiply, as many as have the registers: while one waits, others convert weights.
    """

    fewer: int
    groups: int


TILES = {48: _Tile(32, 3), 128: _Tile(32, 2)}
"""By their pairs."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """What a program is compiled for."""

    pairs: int
    columns: int
    gated: bool
    act: int
    bias: bool
    early: bool

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return TILES[self.pairs].groups

    @property
    def outputs(self) -> int:
        """Columns of the output of a tile."""
        return self.groups * MATRIX * (1 if self.gated else 2)

    @property
    def stages(self) -> int:
        """Of the ring: what fits beside everything else."""
        scales = SLOTS * 2 * self.groups * MATRIX * (self.columns // GROUP)
        staging = 4 * self.groups * STAGING_BYTES
        barriers, stage = 16 * (MOST_STAGES + SLOTS) + 8, self.groups * MATRIX * DEPTH + self.pairs * DEPTH * 2
        return min((SHARED_BYTES - scales - staging - barriers) // stage, MOST_STAGES)


def supports(x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, act: GatedAct, pairs: int) -> bool:
    """Whether the kernels multiply these rows by these weights on their device."""
    return (
        x.is_cuda
        and x.dtype is torch.bfloat16
        and act.kind == CLAMPED_SWIGLU.value  # its products are small: rows between the GEMMs are float16
        and act.limit <= MOST_GATED
        and _takes(gate_up, pairs)
        and _takes(down, pairs)
        and cuda_driver.on_hopper(x)
    )


def _takes(weights: ExpertWeights, pairs: int) -> bool:
    """Whether a GEMM takes these weights. If both do, hidden and inner size are multiples of 64, so that matrices have all their rows."""
    scale, K = weights.scale, weights.shape[2]
    return (
        weights.format == "mxfp4"
        and scale is not None
        and all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (weights.weight, scale))
        and K % MATRIX == 0
        and _Variant(pairs, K, False, 0, False, False).stages >= 2
    )


def experts_in_mxfp4(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    routed: Routing,
    act: GatedAct,
    pairs: int,
    out: torch.Tensor,
    *,
    first: int = 0,
    added: Added | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """As `experts_many_rows`, for what the kernels support.

    Args:
        pairs: of a tile, one of `TILES`: about as many as an expert has.
    """
    (T, hidden), (E, _, inner), top_k = x.shape, down.shape, routed.ids.shape[1]
    check_experts(x, gate_up, down, out)
    rows, factors = prepare_rows(x, pdl=pdl)
    aligned = align(routed.ids, first, E, pairs, pdl=pdl)
    h = torch.empty((aligned.tiles * pairs, inner), dtype=torch.float16, device=x.device)
    y = torch.empty((T * top_k, hidden), dtype=x.dtype, device=x.device)
    grouped = partial(_grouped, aligned=aligned, routed=routed, act=act, pdl=pdl)
    grouped(rows, factors, gate_up, h, gated=True)
    grouped(h, None, down, y, gated=False)
    return sum_pairs(y, routed, out, first, E, added=added, pdl=pdl)


def prepare_rows(x: torch.Tensor, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 x [T, K] as float16 with the columns in the order of the kernels, and float32 [T]: what each row is multiplied by."""
    rows, factors = torch.empty_like(x, dtype=torch.float16), torch.empty(len(x), dtype=torch.float32, device=x.device)
    _rows_kernel(pdl)(len(x), (*map(cuda_driver.pointer, (x, rows, factors)), cuda_driver.int32(x.shape[1])), pdl)
    return rows, factors


def _grouped(
    x: torch.Tensor,
    factors: torch.Tensor | None,
    weights: ExpertWeights,
    out: torch.Tensor,
    *,
    gated: bool,
    aligned: Aligned,
    routed: Routing,
    act: GatedAct,
    pdl: bool,
) -> None:
    """One grouped GEMM: with `gated`, x has a row for each token and `out` for each place of `aligned`; otherwise places and pairs."""
    (E, N, K), columns = weights.shape, out.shape[1]
    assert weights.scale is not None
    variant = _Variant(aligned.rows, K, gated, act.kind if gated else 0, weights.bias is not None, pdl)
    items = aligned.tiles * -(-columns // variant.outputs)
    _kernel(variant)(
        min(items, torch.cuda.get_device_properties(x.device).multi_processor_count),
        (
            cuda_driver.pointer(x),
            _map(weights.weight.data_ptr(), E * N, K // 2),
            cuda_driver.pointer(weights.scale),
            aligned.argument,
            *map(cuda_driver.pointer, (out, weights.bias, routed.weights, factors)),
            *map(cuda_driver.int32, (N, columns, K, routed.ids.shape[1])),
            act.argument,
        ),
        pdl,
    )


@lru_cache(maxsize=1 << 12)
def _map(address: int, rows: int, row_bytes: int) -> Any:
    return cuda_driver.tensor_map(address, (row_bytes, rows), torch.uint8, (DEPTH // 2, MATRIX))


@cache
def _kernel(variant: _Variant) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(
        source(variant), "mxfp4_gemm", threads=128 * variant.groups + LOADERS, cluster=1, shared_bytes=SHARED_BYTES
    )


@cache
def _rows_kernel(early: bool) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(rows_source(early), "mxfp4_rows", threads=ROW_THREADS, cluster=1, shared_bytes=0)


def rows_source(early: bool) -> str:
    """The CUDA program that prepares rows."""
    constants = dict(FORMAT=FORMATS["dense"], ACT=0, EARLY=int(early), THREADS=ROW_THREADS)
    return fragments.source(Path(__file__).with_name("mxfp4_rows.cu"), constants)


def source(variant: _Variant) -> str:
    """The CUDA program of one variant."""
    v = variant
    assert v.pairs in TILES, f"expected tiles of {tuple(TILES)} pairs; got {v.pairs}"
    constants = dict(
        FORMAT=FORMATS["mxfp4"], ACT=v.act, EARLY=int(v.early), ROWS=v.groups * MATRIX, CLUSTER_M=1, SPLIT=1, LOADERS=LOADERS,
        LOAD_REGISTERS=LOAD_REGISTERS, BFLOAT16=int(not v.gated), PAIRS=v.pairs, FEWER=TILES[v.pairs].fewer, STAGES=v.stages, SLOTS=SLOTS,
        SCALES=v.columns // GROUP, GATED=int(v.gated), BIAS=int(v.bias),
    )  # fmt: skip
    multiply = "\n".join(multiply_source(pairs, "f16", overwrites=True, fragments=True) for pairs in (TILES[v.pairs].fewer, v.pairs))
    return fragments.source(Path(__file__).with_suffix(".cu"), constants, PARTS, GROUPED_PARTS, multiply)
