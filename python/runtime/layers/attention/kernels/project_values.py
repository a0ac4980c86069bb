"""Values of absorbed latent attention in CUDA C++: blocks prefetch their weights while attention still runs (`project_values.cu`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from runtime.layers.absorption import TOKEN_TILES, token_tile
from runtime.layers.gemm.few_rows_output import OutputVariant
from runtime.layers.kernels import cuda_driver

TALL = 2
ROWS = 16 * TALL
"""Value columns of a head per block."""
COLUMNS = 64
"""Latent columns per warp."""
MOST_WARPS = 16


def supports(attended: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel supports these rows on their device: few tokens in bfloat16, with widths that are multiples of the tiles."""
    return (
        attended.is_cuda
        and attended.dtype is value.dtype is torch.bfloat16
        and 0 < len(attended) <= TOKEN_TILES[-1]
        and attended.is_contiguous()
        and value.shape[1] % ROWS == 0
        and value.shape[2] % COLUMNS == 0
        and value.shape[2] <= COLUMNS * MOST_WARPS
        and value.stride(2) == 1
        and value.stride(0) % 8 == 0
        and all(x.data_ptr() % 16 == 0 for x in (attended, value))
        and cuda_driver.on_hopper(attended)
    )


def project_values(attended: torch.Tensor, value: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Multiply weighted sums of latents by the value half of `kv_b_proj`.

    Args:
        attended: [T, H, kv_rank] contiguous, which the kernel `supports`.
        value: [H, value_dim, kv_rank]; heads may be strided.
        pdl: start before the previous kernel has ended, load weights, then wait (programmatic dependent launch).

    Returns:
        [T, H, value_dim] contiguous. Each token depends only on its own row, and the order of summation only on `kv_rank`.
    """
    (T, H, rank), width = attended.shape, value.shape[1]
    assert value.shape == (H, width, rank), f"expected values [{H}, value_dim, {rank}]; got {tuple(value.shape)}"
    assert value.stride(1) == rank, "the rows of a head's values must be adjacent"
    out = torch.empty((T, H, width), dtype=attended.dtype, device=attended.device)
    _kernel(rank, width, token_tile(T), pdl)(H * (width // ROWS), (attended, value, out, T, value.stride(0)), pdl)
    return out


@cache
def _kernel(rank: int, width: int, tokens: int, pdl: bool) -> cuda_driver.Kernel:
    text, threads, size = source(rank, width, tokens, pdl), 32 * (rank // COLUMNS), ROWS * rank * 2
    return cuda_driver.compile_kernel(text, "project_values", threads=threads, shared_bytes=size)


def source(rank: int, width: int, tokens: int, pdl: bool) -> str:
    """The CUDA program for latents and values of these widths and at most this many tokens."""
    cut = {"FORMAT": 0, "WARPS": rank // COLUMNS, "TALL": TALL, "WIDTH": width}
    return OutputVariant(tokens, bias=False, pdl=pdl).source(Path(__file__).with_name("project_values.cu"), cut)
