"""GEMMs of few rows in CUDA C++ whose e4m3 or int4 weights go straight from memory into tensor-core fragments (`fragment_gemm.cu`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from runtime.config.expert_tuning import WeightFormat
from runtime.config.kernel_configs import FragmentConfig
from runtime.layers.gemm.deferred_norm import norms_argument
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.gemm.few_rows_output import OutputVariant
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.kernels.scale_layout import num_columns, scale_layout

MOST_TALL = 2
EXACT_GROUP = 128
"""Columns of a group of int4 weights that are multiplied exactly, in bfloat16: those of one load of a warp."""


def supports(weight: torch.Tensor, scale: torch.Tensor, gated: bool = False) -> bool:
    """Whether the kernel can multiply bfloat16 rows by this weight on its device."""
    kind, rows, columns = _kind(weight), len(weight), num_columns(weight)
    return (
        weight.is_cuda
        and weight.dtype in (torch.float8_e4m3fn, torch.uint8)
        and rows % (16 * MOST_TALL * (1 + gated)) == 0
        and fragments.readable(weight, kind, columns, scale_layout(rows, columns, scale)[2])
        and cuda_driver.on_hopper(weight)
    )


def fragment_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    config: FragmentConfig,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    weight_scale: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """`out = epilogue(x @ weight.T)`; returns `out`.

    Args:
        x: bfloat16 [M, K] contiguous, M <= 16.
        weight: [N, K], or [N, K / 2] in int4, one that the kernel `supports`.
        out: [M, `epilogue.columns(N)`] contiguous; float32 with `add`, otherwise float32 or bfloat16.
        epilogue: without argmax; a deferred norm gets `config.parts(N)` sums of squares per row.
        weight_scale: as in `scale_layout`.
        pdl: start before the previous kernel has ended, load weights, then wait (programmatic dependent launch).
    Each row of `out` depends only on its own row of x; the order of summation depends only on K and `config`.
    """
    (M, K), N, kind = x.shape, weight.shape[0], _kind(weight)
    variant = OutputVariant.of(x, weight, out, epilogue, config.parts(N), pdl)
    weights = fragments.weights_argument(weight, weight_scale, epilogue.bias, (N, K), (0, *scale_layout(N, K, weight_scale)))
    blocks = epilogue.columns(N) // (16 * config.tall // (1 + epilogue.gated))
    exact = kind == "int4" and EXACT_GROUP * weight_scale.shape[1] == K
    _kernel(config, variant, kind, exact)(blocks, (x, weights, out, norms_argument(epilogue.scale, epilogue.deferred), M), pdl)
    return out


def _kind(weight: torch.Tensor) -> WeightFormat:
    return "int4" if weight.dtype is torch.uint8 else "fp8"


@cache
def _kernel(config: FragmentConfig, variant: OutputVariant, kind: WeightFormat, exact: bool) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(source(config, variant, kind, exact), "fragment_gemm", threads=32 * config.warps)


def source(config: FragmentConfig, variant: OutputVariant, kind: WeightFormat = "fp8", exact: bool = False) -> str:
    """The CUDA program of one tiling and variant. `exact`: whether groups of int4 weights have `EXACT_GROUP` columns."""
    cut = {"FORMAT": fragments.FORMATS[kind], "WARPS": config.warps, "TALL": config.tall, "BATCH": config.batch, "EXACT": exact}
    return variant.source(Path(__file__).with_name("fragment_gemm.cu"), cut)
