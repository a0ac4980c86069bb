"""The second GEMM of a sparse MLP for few tokens, with the sum over each token's experts, in CUDA C++ (`down_sums.cu`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.routing_argument import RoutingArgument

MOST_PAIRS = 32
"""Pairs of token and expert that a warp holds in its registers."""
MOST_TOKENS = 8
WARPS, DEPTH = 16, 3
"""Warps of a block, and stages that each of them copies weights into: they fit beside a block of the GEMM before."""
ROWS = 16
"""Columns of the output that a block computes."""
SHARED_BYTES = WARPS * DEPTH * 2048


@dataclass(frozen=True, slots=True)
class _Variant:
    """What the kernel is compiled for."""

    top_k: int
    bias: bool
    add: bool
    deferred: bool
    float_out: bool
    early: bool


def supports(down: ExpertWeights, tokens: int, top_k: int) -> bool:
    """Whether the kernel takes these weights and so many tokens; the device is one that `experts_by_fragments` supports."""
    _, hidden, inner = down.shape
    return down.format == "dense" and hidden % ROWS == 0 and inner % 8 == 0 and tokens <= MOST_TOKENS and tokens * top_k <= MOST_PAIRS


def down_sums(
    h: torch.Tensor,
    down: ExpertWeights,
    routing: RoutingArgument,
    top_k: int,
    out: torch.Tensor,
    *,
    add: bool = False,
    deferred: DeferredNorm | None = None,
    pdl: bool = False,
) -> None:
    """`out[t] (+)= sum(down @ h[pair])` over the pairs of each token that this process computed, and their biases times their weights.

    Args:
        h: bfloat16 [T * top_k, inner], each row times the weight of its pair.
        down: weights that the kernel `supports`.
        out: [T, hidden] contiguous, float32 or bfloat16.
        add: add to `out` instead of overwriting it.
        deferred: what is also written for the norm that reads `out` next; `squares` has hidden / 16 columns.
        pdl: as in `triton_gemm`; the routing was read by the kernel before, after its wait.
    """
    (_, hidden, inner), tokens = down.shape, len(out)
    variant = _Variant(top_k, down.bias is not None, add, deferred is not None, out.dtype is torch.float32, pdl)
    gain, scaled, squares = (None, None, None) if deferred is None else (deferred.gain, deferred.scaled, deferred.squares)
    weights = fragments.weights_argument(down.weight, None, down.bias, (hidden, inner), down.scale_layout)
    arguments = (
        cuda_driver.pointer(h),
        weights,
        routing,
        *map(cuda_driver.pointer, (out, gain, scaled, squares)),
        cuda_driver.int32(tokens),
    )
    _kernel(variant)(hidden // ROWS, arguments, pdl)


@cache
def _kernel(variant: _Variant) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(source(variant), "down_sums", threads=32 * WARPS, cluster=1, shared_bytes=SHARED_BYTES)


def source(variant: _Variant) -> str:
    """The CUDA program of one variant."""
    v = variant
    constants = dict(
        FORMAT=0, ACT=0, EARLY=int(v.early), TOP_K=v.top_k, WARPS=WARPS, DEPTH=DEPTH, ADD=int(v.add), DEFER=int(v.deferred),
        FLOAT_OUT=int(v.float_out), BIAS=int(v.bias),
    )  # fmt: skip
    return fragments.source(Path(__file__).with_name("down_sums.cu"), constants)
