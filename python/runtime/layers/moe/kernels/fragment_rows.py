"""Experts for few tokens in CUDA C++: weights go straight from memory into the tensor cores' fragments (`few_rows.cu`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.kernels.fragments import COLUMNS, readable, weights_argument
from runtime.layers.moe.kernels.expert_weights import FORMATS, ExpertWeights
from runtime.layers.moe.kernels.gate import GatedAct
from runtime.layers.moe.router import Routing

MOST_TOKENS = 64
WARPS = 16
"""Of a block of the GEMMs; a multiprocessor holds one."""
DEPTHS = (4, 3, 2)
"""Stages of the ring that a warp copies weights into, the most that fit."""
SHARED_BYTES = 206 * 1024
"""Rings and tokens of a block, at most."""
STAGE_BYTES = {"dense": 2048, "fp8": 2048 + 64, "mxfp4": 2048 + 256}
STAGE_CHUNKS = 2
SEGMENTS = 8
"""Sets of tokens that a block goes through, at most."""
SUM_THREADS = 64
SUM_COLUMNS = 4 * SUM_THREADS
SQUARE_COLUMNS = 16
"""Columns of a sum of squares for a deferred norm."""
ROW_OFFSETS = {"dense": 64, "fp8": 16, "mxfp4": 32}
"""Bytes by which the next token in shared memory lies further on the 128 bytes of its banks."""


@dataclass(frozen=True, slots=True)
class _Gemm:
    """What one of the GEMMs is compiled for; the names in capitals are the constants of the CUDA source."""

    format: int
    act: int
    top_k: int
    experts: int
    gated: bool
    bias: bool
    even: bool
    tiles: int
    depth: int
    early: bool


@dataclass(frozen=True, slots=True)
class _Sums:
    """What the kernel that sums the pairs of a token is compiled for."""

    top_k: int
    add: bool
    defer: bool
    float_out: bool
    early: bool


class _Routing(ctypes.Structure):
    """`Routing` in the CUDA sources."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("ids", "weights")), *((name, ctypes.c_int) for name in ("first", "experts")))


def supports(x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, deferred: DeferredNorm | None = None) -> bool:
    """Whether the kernels can multiply these rows by these weights on their device, and fill these buffers."""
    (E, rows, hidden), (_, _, inner) = gate_up.shape, down.shape
    return (
        x.is_cuda
        and (deferred is None or deferred.squares.shape[1] == hidden // SQUARE_COLUMNS)
        and x.dtype is torch.bfloat16
        and 0 < len(x) <= MOST_TOKENS
        and hidden % 16 == 0
        and inner % 8 == 0
        and rows == 2 * inner
        and E <= 512
        and all(_fits(w, 1, DEPTHS[-1]) and readable(w.weight, w.format, w.shape[2], w.scale_layout[3]) for w in (gate_up, down))
        and (gate_up.format != "fp8" or all(w.scale_layout[3] % 128 == 0 for w in (gate_up, down)))
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and cuda_driver.available()
    )


def experts_by_fragments(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    routing: Routing,
    act: GatedAct,
    out: torch.Tensor,
    *,
    first: int = 0,
    add: bool = False,
    deferred: DeferredNorm | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`experts_in_triton`, for what the kernels `supports`; `deferred.squares` has hidden / 16 columns.

    Sums run in an order that the shapes and the routing of all tokens fix.
    """
    (T, hidden), (E, _, inner), top_k = x.shape, down.shape, routing.ids.shape[1]
    h = torch.empty((T * top_k, inner), dtype=x.dtype, device=x.device)
    y = torch.empty((T * top_k, hidden), dtype=torch.float32, device=x.device)
    routed = _Routing(routing.ids.data_ptr(), routing.weights.data_ptr(), first, E)
    _gemm(x, gate_up, h, routed, T, top_k, act, gated=True, pdl=pdl)
    _gemm(h, down, y, routed, T, top_k, act, gated=False, pdl=pdl)
    gain, scaled, squares = (None, None, None) if deferred is None else (deferred.gain, deferred.scaled, deferred.squares)
    _sum_kernel(_Sums(top_k, add, deferred is not None, out.dtype is torch.float32, pdl))(
        T * -(-hidden // SUM_COLUMNS),
        (cuda_driver.pointer(y), routed, *map(cuda_driver.pointer, (out, gain, scaled, squares)), cuda_driver.int32(hidden)),
        pdl,
    )
    return out


def _gemm(
    x: torch.Tensor, w: ExpertWeights, out: torch.Tensor, routed: _Routing, T: int, top_k: int, act: GatedAct, *, gated: bool, pdl: bool
) -> None:  # fmt: skip
    """One of the GEMMs. The second one starts before the first has ended, and reads the routing at once."""
    E, rows, columns = w.shape
    pairs = T * top_k
    tiles = 2 if T > 8 and _fits(w, 2, DEPTHS[1]) else 1
    depth = next(depth for depth in DEPTHS if _fits(w, tiles, depth))
    kind, per_stage = FORMATS[w.format], STAGE_CHUNKS * 4 * COLUMNS[w.format]
    variant = _Gemm(
        kind, act.kind if gated else 0, top_k, -(-E // 32) * 32, gated, w.bias is not None, columns % per_stage == 0, tiles, depth, pdl
    )
    kernel = _gemm_kernel(variant, _shared_bytes(w, tiles, depth))
    blocks = kernel.clusters_at_once
    assert min(E, pairs) + pairs // (8 * tiles) <= (SEGMENTS - 2) * blocks, f"{E} experts are too many"
    hit = E * (1 - (1 - top_k / max(E, top_k)) ** T)  # by tokens that choose at random
    split = _split(-(-hit * rows // 16 // blocks), -(-columns // per_stage))
    arguments = weights_argument(w.weight, w.scale, w.bias, (rows, columns), w.scale_layout)
    kernel(
        blocks,
        (
            cuda_driver.pointer(x), arguments, routed, cuda_driver.pointer(out), *map(cuda_driver.int32, (T, split, _stride(w))),
            ctypes.c_float(act.alpha), ctypes.c_float(act.limit),
        ),
        pdl,
    )  # fmt: skip


def _split(units: float, stages: int) -> int:
    """Warps that share a unit of work, where a block has so many units of so many stages of columns."""
    return min((1, 2, 4, 8, 16), key=lambda warps: -(-units // (WARPS // warps)) * -(-stages // warps))


def _fits(w: ExpertWeights, tiles: int, depth: int) -> bool:
    return _shared_bytes(w, tiles, depth) <= SHARED_BYTES


def _shared_bytes(w: ExpertWeights, tiles: int, depth: int) -> int:
    """Of rings of so many stages, and of so many times eight tokens."""
    return WARPS * depth * STAGE_BYTES[w.format] + 8 * tiles * _stride(w)


def _stride(w: ExpertWeights) -> int:
    """Bytes of a token in shared memory."""
    per_stage = STAGE_CHUNKS * 4 * COLUMNS[w.format]
    size = -(-w.shape[2] // per_stage) * 2 * per_stage
    return size + (ROW_OFFSETS[w.format] - size) % 128


@cache
def _gemm_kernel(variant: _Gemm, shared_bytes: int) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(
        gemm_source(variant), "experts_few_rows", threads=32 * WARPS, cluster=1, shared_bytes=shared_bytes
    )  # fmt: skip


@cache
def _sum_kernel(variant: _Sums) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(sum_source(variant), "pair_sums", threads=SUM_THREADS, cluster=1, shared_bytes=0)


def gemm_source(variant: _Gemm) -> str:
    """The CUDA program of a GEMM."""
    v = variant
    constants = dict(
        FORMAT=v.format, ACT=v.act, EARLY=int(v.early), TOP_K=v.top_k, TOKENS=MOST_TOKENS, EXPERTS=v.experts, GATED=int(v.gated),
        BIAS=int(v.bias), EVEN=int(v.even), TILES=v.tiles, WARPS=WARPS, DEPTH=v.depth,
    )  # fmt: skip
    return fragments.source(Path(__file__).with_name("few_rows.cu"), constants)


def sum_source(variant: _Sums) -> str:
    """The CUDA program that sums the pairs of a token."""
    v = variant
    constants = dict(
        FORMAT=0, ACT=0, EARLY=int(v.early), TOP_K=v.top_k, ADD=int(v.add), DEFER=int(v.defer), FLOAT_OUT=int(v.float_out),
        THREADS=SUM_THREADS,
    )  # fmt: skip
    return fragments.source(Path(__file__).with_name("pair_sums.cu"), constants)
