"""GEMMs of a few rows by e4m3 weights in CUDA C++: these go straight from memory into the tensor cores' fragments (`fragment_gemm.cu`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.config.kernel_configs import FragmentConfig
from runtime.layers.gemm.deferred_norm import norms_argument
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.kernels.scale_layout import scale_layout

MAX_ROWS = 16
"""With more rows, each block would read more of x than of the weights."""
MOST_TALL = 2


@dataclass(frozen=True, slots=True)
class _Variant:
    """What a program is compiled for besides the cut: the most rows it computes, and its epilogue."""

    rows: int
    bias: bool
    pdl: bool
    silu: bool = False
    gelu: bool = False
    scale: bool = False
    deferred: bool = False
    write: int = 0


def supports(weight: torch.Tensor, scale: torch.Tensor, gated: bool = False) -> bool:
    """Whether the kernel can multiply bfloat16 rows by this weight on its device."""
    rows, columns = weight.shape
    return (
        weight.is_cuda
        and weight.dtype is torch.float8_e4m3fn
        and rows % (16 * MOST_TALL * (1 + gated)) == 0
        and fragments.readable(weight, "fp8", columns, scale_layout(rows, columns, scale)[2])
        and torch.cuda.get_device_capability(weight.device)[0] == 9
        and cuda_driver.available()
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
        weight: [N, K], one that the kernel `supports`.
        out: [M, `epilogue.columns(N)`] contiguous; float32 with `add`, otherwise that or bfloat16.
        epilogue: without argmax; a deferred norm gets `config.parts(N)` sums of squares per row.
        weight_scale: as in `scale_layout`.
        pdl: start before the previous kernel has ended, load weights and wait (programmatic dependent launch).

    Each row of `out` depends on its own row of x only, summed in an order that K and `config` fix.
    """
    (M, K), N = x.shape, weight.shape[0]
    assert 0 < M <= MAX_ROWS, f"expected 1 to {MAX_ROWS} rows; got {M}"
    assert x.dtype is torch.bfloat16, f"expected bfloat16 rows; got {x.dtype}"
    assert weight.shape[1] == K, f"expected x of {weight.shape[1]} columns; got {K}"
    assert x.is_contiguous(), "expected a contiguous x"
    assert epilogue.argmax is None, "expected no argmax"
    epilogue.check(out, M, N, config.parts(N))
    wide = out.dtype is torch.float32
    assert wide or (out.dtype is torch.bfloat16 and not epilogue.add), f"expected a float32 out, or bfloat16 without add; got {out.dtype}"
    scale, deferred = epilogue.scale, epilogue.deferred
    variant = _Variant(
        8 if M <= 8 else MAX_ROWS, epilogue.bias is not None, pdl, epilogue.silu, epilogue.gelu,
        scale is not None, deferred is not None, 2 if epilogue.add else int(wide),
    )  # fmt: skip
    _kernel(config, variant)(
        epilogue.columns(N) // (16 * config.tall // (1 + epilogue.gated)),
        (
            cuda_driver.pointer(x),
            fragments.weights_argument(weight, weight_scale, epilogue.bias, (N, K), (0, *scale_layout(N, K, weight_scale))),
            cuda_driver.pointer(out),
            norms_argument(scale, deferred),
            cuda_driver.int32(M),
        ),
        pdl,
    )
    return out


@cache
def _kernel(config: FragmentConfig, variant: _Variant) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(source(config, variant), "fragment_gemm", threads=32 * config.warps, cluster=1, shared_bytes=0)


def source(config: FragmentConfig, variant: _Variant) -> str:
    """The CUDA program of one cut and variant."""
    v = variant
    constants = dict(
        FORMAT=1, ACT=2 if v.gelu else 0, GATED=int(v.silu or v.gelu), TOKENS=v.rows, WARPS=config.warps, BATCH=config.batch,
        TALL=config.tall, BIAS=int(v.bias), EARLY=int(v.pdl), SCALE=int(v.scale), DEFER=int(v.deferred), WRITE=v.write,
    )  # fmt: skip
    return fragments.source(Path(__file__).with_name("fragment_gemm.cu"), constants)
