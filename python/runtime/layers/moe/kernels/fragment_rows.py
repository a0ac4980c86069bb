"""Experts for few tokens in CUDA C++: weights go straight from memory into the tensor cores' fragments (`few_rows.cu`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.kernels.fragments import COLUMNS, Weights, readable, weights_argument
from runtime.layers.moe.kernels.expert_weights import FORMATS, ExpertWeights
from runtime.layers.moe.kernels.gate import GatedAct
from runtime.layers.moe.router import Routing

OUTPUTS = 16
"""Outputs of a block of the second kernel."""
UP_COLUMNS = 8
"""Inner columns of a block of the first kernel."""
ENOUGH_BLOCKS = 1056
"""Blocks of the first kernel that fill an H200; with more, each takes several tiles of 8 columns."""
MOST_TILES = 4
TOKENS = (8, 16, 32, 64)
"""Most tokens that a kernel is compiled for."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the kernels are cut; the fastest on an H200.

    Attributes:
        up_warps, down_warps: warps of a block of each kernel, which share the columns.
        batch: loads of a lane that are in flight, for each of its two rows.
        early: whether a lane loads tokens beside the weights, which costs registers.
    """

    up_warps: int
    down_warps: int
    batch: int
    early: bool


CUTS = {
    FORMATS["dense"]: (_Cut(4, 16, 2, True), _Cut(4, 16, 6, True)),
    FORMATS["fp8"]: (_Cut(2, 16, 4, True), _Cut(2, 16, 4, True)),
    FORMATS["mxfp4"]: (_Cut(4, 8, 2, False), _Cut(4, 8, 2, False)),
}
"""By format: for one token, and for more."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """What a kernel is compiled for."""

    format: int
    act: int
    top_k: int
    words: int
    tokens: int
    bias: bool
    early: bool
    cut: _Cut
    add: bool = False
    defer: bool = False
    float_out: bool = False


class _Routing(ctypes.Structure):
    """`Routing` in the CUDA source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "weights", "masks")),
        *((name, ctypes.c_int) for name in ("first", "experts")),
    )


def supports(x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, deferred: DeferredNorm | None = None) -> bool:
    """Whether the kernels can multiply these rows by these weights on their device, and fill these buffers."""
    (_, rows, hidden), (_, _, inner) = gate_up.shape, down.shape
    return (
        x.is_cuda
        and (deferred is None or deferred.squares.shape[1] == hidden // OUTPUTS)
        and x.dtype is torch.bfloat16
        and 0 < len(x) <= TOKENS[-1]
        and hidden % OUTPUTS == 0
        and inner % UP_COLUMNS == 0
        and rows == 2 * inner
        and all(readable(w.weight, w.format, w.shape[2], w.scale_layout[3]) for w in (gate_up, down))
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
    (T, hidden), (E, _, _), top_k = x.shape, gate_up.shape, routing.ids.shape[1]
    inner, tokens = down.shape[2], next(count for count in TOKENS if count >= T)
    slots = min(E, T * top_k)
    columns = inner // UP_COLUMNS
    per_block = max(1, min(MOST_TILES, slots * columns // ENOUGH_BLOCKS))
    blocks = -(-columns // per_block)
    h = torch.empty((T * top_k, inner), dtype=x.dtype, device=x.device)
    plan = torch.empty(1 + slots * (tokens + 2), dtype=torch.int32, device=x.device)
    cut = CUTS[FORMATS[down.format]][T > 1]
    shape = (top_k, routing.masks.shape[1], tokens)
    up = _Variant(FORMATS[gate_up.format], act.kind, *shape, gate_up.bias is not None, pdl, CUTS[FORMATS[gate_up.format]][T > 1])
    last = _Variant(
        FORMATS[down.format], 0, *shape, down.bias is not None, pdl, cut, add, deferred is not None, out.dtype is torch.float32
    )  # fmt: skip
    routed = _Routing(routing.ids.data_ptr(), routing.weights.data_ptr(), routing.masks.data_ptr(), first, E)
    _up_kernel(up)(
        slots * blocks,
        (
            cuda_driver.pointer(x), _weights(gate_up), routed, cuda_driver.pointer(h), cuda_driver.pointer(plan),
            *map(cuda_driver.int32, (T, per_block, blocks)), ctypes.c_float(act.alpha), ctypes.c_float(act.limit),
        ),
        pdl,
    )  # fmt: skip
    gain, scaled, squares = (None, None, None) if deferred is None else (deferred.gain, deferred.scaled, deferred.squares)
    _down_kernel(last)(
        hidden // OUTPUTS,
        (
            cuda_driver.pointer(h), _weights(down), routed, *map(cuda_driver.pointer, (plan, out, gain, scaled, squares)),
            *map(cuda_driver.int32, (T, slots, _pieces(down, slots, cut.down_warps))),
        ),
        pdl,
    )  # fmt: skip
    return out


def _pieces(down: ExpertWeights, slots: int, warps: int) -> int:
    """Into how many pieces the columns of an expert are cut, so that few experts keep all warps of a block busy."""
    chunks = -(-down.shape[2] // (4 * COLUMNS[down.format]))
    return max(1, min(warps // slots, chunks // 2))


def _weights(weights: ExpertWeights) -> Weights:
    _, rows, columns = weights.shape
    return weights_argument(weights.weight, weights.scale, weights.bias, (rows, columns), weights.scale_layout)


@cache
def _up_kernel(variant: _Variant) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(source(variant), "experts_up", threads=32 * variant.cut.up_warps, cluster=1, shared_bytes=0)


@cache
def _down_kernel(variant: _Variant) -> cuda_driver.Kernel:
    shared = variant.cut.down_warps * OUTPUTS * variant.tokens * 4
    return cuda_driver.compile_kernel(source(variant), "experts_down", threads=32 * variant.cut.down_warps, cluster=1, shared_bytes=shared)


def source(variant: _Variant) -> str:
    """The CUDA program of one variant."""
    v = variant
    constants = dict(
        FORMAT=v.format, ACT=v.act, TOP_K=v.top_k, WORDS=v.words, TOKENS=v.tokens, BIAS=int(v.bias), EARLY=int(v.early), ADD=int(v.add),
        DEFER=int(v.defer), FLOAT_OUT=int(v.float_out), UP_WARPS=v.cut.up_warps, DOWN_WARPS=v.cut.down_warps, BATCH=v.cut.batch,
        TOKENS_EARLY=int(v.cut.early),
    )  # fmt: skip
    return fragments.source(Path(__file__).with_name("few_rows.cu"), constants)
