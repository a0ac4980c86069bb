"""GEMMs of few rows in CUDA C++ that prefetch their weights into shared memory before x is ready (`resident_gemm.cu`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from runtime.config.kernel_configs import ResidentConfig
from runtime.layers.gemm.deferred_norm import norms_argument
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.gemm.few_rows_output import OutputVariant
from runtime.layers.kernels import cuda_driver

ROWS, COLUMNS = 16, 64
"""Weight rows per block; columns per stage."""
STAGE_BYTES = 2 * ROWS * COLUMNS
SHARED_BYTES, BLOCK_BYTES = 228 << 10, 227 << 10
"""Shared memory per SM, and the maximum per block, on Hopper."""
FIXED_BYTES = 1024 + 128
"""Shared memory per block in addition to its stages."""
WARPS = {1: 16, 2: 8, 3: 4}
"""Warps per block, by blocks per SM."""


def resident_config(weight_rows: int, columns: int, num_sms: int) -> ResidentConfig | None:
    """The configuration in which all blocks run concurrently and prefetch as much of their weights as fits; None if there is none."""
    blocks = -(-weight_rows // (ROWS * num_sms))
    if blocks not in WARPS or weight_rows % ROWS or columns % COLUMNS:
        return None
    warps = WARPS[blocks]
    space = min(BLOCK_BYTES, SHARED_BYTES // blocks) - FIXED_BYTES
    return ResidentConfig(warps, min(-(-columns // (COLUMNS * warps)), space // (warps * STAGE_BYTES)), blocks)


def leaves_space(columns: int, config: ResidentConfig) -> bool:
    """Whether the blocks of an SM hold all their weights, and more than half of the shared memory remains free."""
    stages = config.warps * config.depth
    return stages * COLUMNS >= columns and 2 * config.blocks * (stages * STAGE_BYTES + FIXED_BYTES) < SHARED_BYTES


def supports(weight: torch.Tensor) -> bool:
    """Whether the kernel can multiply bfloat16 rows by this weight on its device."""
    return weight.is_cuda and weight.dtype is torch.bfloat16 and weight.is_contiguous() and cuda_driver.on_hopper(weight)


def resident_gemm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: ResidentConfig, epilogue: Epilogue = NO_EPILOGUE, *, pdl: bool = False
) -> torch.Tensor:
    """`out = epilogue(x @ weight.T)`; returns `out`.

    Args:
        x: bfloat16 [M, K] contiguous, M <= 16.
        weight: [N, K], one that the kernel `supports`; N a multiple of 16, K of 64.
        out: [M, `epilogue.columns(N)`] contiguous; float32 with `add`, otherwise float32 or bfloat16.
        epilogue: without argmax; a deferred norm gets `config.parts(N)` sums of squares per row.
        pdl: start before the previous kernel has ended, load weights, then wait (programmatic dependent launch).
    Each row of `out` depends only on its own row of x; the order of summation depends only on K and `config`.
    """
    (M, K), N = x.shape, weight.shape[0]
    assert N % ROWS == 0, f"expected a multiple of {ROWS} weight rows; got {N}"
    assert K % COLUMNS == 0, f"expected a multiple of {COLUMNS} columns; got {K}"
    variant = OutputVariant.of(x, weight, out, epilogue, config.parts(N), pdl)
    norms = norms_argument(epilogue.scale, epilogue.deferred)
    _kernel(config, variant)(N // ROWS, (x, weight, epilogue.bias, out, norms, M, N, K), pdl)
    return out


@cache
def _kernel(config: ResidentConfig, variant: OutputVariant) -> cuda_driver.Kernel:
    size = config.warps * config.depth * STAGE_BYTES
    return cuda_driver.compile_kernel(source(config, variant), "resident_gemm", threads=32 * config.warps, shared_bytes=size)


def source(config: ResidentConfig, variant: OutputVariant) -> str:
    """The CUDA program of one tiling and variant."""
    cut = {"FORMAT": 0, "WARPS": config.warps, "TALL": 1, "DEPTH": config.depth, "BLOCKS": config.blocks}
    return variant.source(Path(__file__).with_name("resident_gemm.cu"), cut)
