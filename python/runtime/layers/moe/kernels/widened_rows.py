"""Rows of x for the grouped GEMMs that convert weights, `widened_experts.py`: sorted by expert, in float16 (`widened_rows.cu`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.kernels.fragments import FORMATS

if TYPE_CHECKING:  # requires Triton, which is installed with a GPU only
    from runtime.layers.moe.kernels.align import Aligned

THREADS = 128
"""Threads per block. Each warp prepares one row."""


def prepare_rows(x: torch.Tensor, aligned: Aligned, top_k: int, *, pdl: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert bfloat16 x [T, K] to a float16 row for each place of `aligned`, with columns in the kernels' order, scaled by row; also
    returns the float32 factors that undo it. Rows and factors of places without a pair are undefined.

    Args:
        top_k: pairs of a row; 0 if x has a row for each place, with columns in the kernels' order.
    """
    places = aligned.tiles * aligned.rows
    rows = torch.empty((places, x.shape[1]), dtype=torch.float16, device=x.device)
    factors = torch.empty(places, dtype=torch.float32, device=x.device)
    args = (x, aligned.argument, rows, factors, places, x.shape[1], aligned.rows, top_k)
    _kernel(top_k == 0, pdl)(-(-places // (THREADS // 32)), args, pdl)
    return rows, factors


@cache
def _kernel(is_sorted: bool, early: bool) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(source(is_sorted, early), "widened_rows", threads=THREADS)


def source(is_sorted: bool, early: bool) -> str:
    """The CUDA program, for x with a row for each place or for each token."""
    constants = dict(FORMAT=FORMATS["dense"], ACT=0, EARLY=early, SORTED=is_sorted, THREADS=THREADS)
    here = Path(__file__)
    return fragments.source(here.with_suffix(".cu"), constants, here.with_name("grouped_parts.cu"))
