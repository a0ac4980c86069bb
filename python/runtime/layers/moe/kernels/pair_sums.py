"""The sum over each token's experts, in CUDA C++ on Hopper (`pair_sums.cu`), optionally added to the output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.layers.gemm.deferred_norm import DeferredNorm, deferred_buffers
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.moe.kernels.routing_argument import RoutingArgument

THREADS = 64
COLUMNS = 4 * THREADS
"""Threads and columns per block."""
SQUARE_COLUMNS = 16
"""Columns per sum of squares for a deferred norm."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """The compile-time parameters of a program."""

    top_k: int
    add: bool
    defer: bool
    float_out: bool
    early: bool


def pair_sums(
    y: torch.Tensor, routed: RoutingArgument, top_k: int, out: torch.Tensor, *, add: bool, deferred: DeferredNorm | None, pdl: bool
) -> torch.Tensor:
    """`out[t] = sum(y[pair])` over the pairs of each token with experts in this process, in order; returns `out`.

    Args:
        y: float32 [T * top_k, hidden], each row times the weight of its pair; hidden is a multiple of 16.
        add: `out[t] += ...`.
        deferred: receives hidden / 16 sums of squares per row of `out`.
    """
    T, hidden = out.shape
    _kernel(_Variant(top_k, add, deferred is not None, out.dtype is torch.float32, pdl))(
        T * -(-hidden // COLUMNS), (y, routed, out, *deferred_buffers(deferred), hidden), pdl
    )
    return out


@cache
def _kernel(variant: _Variant) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(source(variant), "pair_sums", threads=THREADS)


def source(variant: _Variant) -> str:
    """The CUDA program of one variant."""
    v = variant
    constants = dict(FORMAT=0, ACT=0, EARLY=v.early, TOP_K=v.top_k, ADD=v.add, DEFER=v.defer, FLOAT_OUT=v.float_out, THREADS=THREADS)
    return fragments.source(Path(__file__).with_suffix(".cu"), constants)
