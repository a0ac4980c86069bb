"""GEMMs with int4 weights against their definition: on a GPU, or some under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

from int4_weights import random_int4
from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import FragmentConfig, TritonConfig, WideningConfig
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import Epilogue

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, DTYPE = ("cpu", torch.float16) if INTERPRETED else ("cuda", torch.bfloat16)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
ROWS = (1, 16, 100) if INTERPRETED else (1, 3, 8, 16, 32, 64, 128, 130, 300, 512)
N, K = 192, 640
"""The columns are no multiple of some tiles, and 20 groups of 32 or 5 of 128."""
ROUNDING = 4e-3
"""Relative error of weights that are rounded to the dtype of x."""


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
Kernel = TritonConfig | FragmentConfig | WideningConfig


def run(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, config: Kernel, epilogue: Epilogue, pdl: bool
) -> None:
    """The GEMM by the kernel of `config`."""
    from runtime.layers.gemm.fragment_gemm import fragment_gemm
    from runtime.layers.gemm.triton_gemm import triton_gemm
    from runtime.layers.gemm.widening_gemm import widening_gemm

    if isinstance(config, TritonConfig):
        triton_gemm(x, weight, out, config, epilogue, weight_scale=scale, pdl=pdl)
    elif isinstance(config, FragmentConfig):
        fragment_gemm(x, weight, out, config, epilogue, weight_scale=scale, pdl=pdl)
    else:
        widening_gemm(x, weight, out, config, epilogue, weight_scale=scale, pdl=pdl)


def tilings(rows: int, group: int) -> tuple[Kernel, ...]:
    found = H200.int4_configs(rows) if rows <= 128 else ()
    if INTERPRETED:
        return found[:1]
    fragments = H200.int4_fragment_configs(rows) if HOPPER else ()
    return *found, *fragments, *((WideningConfig(1), WideningConfig(3)) if HOPPER and rows <= 512 else ())


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16])
def test_a_weight_is_widened_to_its_value(group: int, dtype: torch.dtype) -> None:
    from runtime.layers.gemm.widen import widen

    weight, scale, want = random_int4(50, K, group, DEVICE)
    torch.testing.assert_close(widen(weight, scale, dtype), want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("pdl", [False] if INTERPRETED else [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", ROWS)
def test_every_tiling_and_epilogue(rows: int, group: int, pdl: bool) -> None:
    torch.manual_seed(rows)
    weight, scale, values = random_int4(N, K, group, DEVICE)
    x, bias = torch.randn((rows, K), device=DEVICE).to(DTYPE), torch.randn(N, device=DEVICE).to(DTYPE)
    want = x.float() @ values.T + bias.float()
    gate, up = want.chunk(2, dim=1)
    for config in tilings(rows, group):
        out = torch.full((rows + 1, N), float("nan"), device=DEVICE)
        run(x, weight, scale, out[:rows], config, Epilogue(bias=bias), pdl)
        assert error(out[:rows], want) < ROUNDING, config
        run(x, weight, scale, out[:rows], config, Epilogue(bias=bias, add=True), pdl)
        assert error(out[:rows], 2 * want) < ROUNDING, config
        assert out[rows].isnan().all(), f"{config} writes past its rows"
        half = torch.full((rows + 1, N // 2), float("nan"), device=DEVICE, dtype=DTYPE)
        run(x, weight, scale, half[:rows], config, Epilogue(bias=bias, silu=True), pdl)
        assert error(half[:rows], torch.nn.functional.silu(gate) * up) < 2 * ROUNDING, config
        assert half[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize("rows", ROWS)
def test_norms_before_and_after(rows: int) -> None:
    torch.manual_seed(rows)
    weight, scale, values = random_int4(N, K, 128, DEVICE)
    x, gain = torch.randn((rows, K), device=DEVICE).to(DTYPE), torch.randn(N, device=DEVICE).to(DTYPE)
    squares = torch.rand((rows, 5), device=DEVICE) + 0.5
    product = x.float() @ values.T * torch.rsqrt(squares.sum(1) / K + 1e-5)[:, None]
    for config in tilings(rows, 128):
        out = before = torch.randn((rows, N), device=DEVICE)
        want = before + product
        deferred = DeferredNorm(gain, torch.empty_like(out, dtype=DTYPE), torch.empty((rows, config.parts(N)), device=DEVICE))
        epilogue = Epilogue(add=True, scale=RowScale(squares, 1e-5), deferred=deferred)
        run(x, weight, scale, out, config, epilogue, False)
        assert error(out, want) < ROUNDING, config
        assert error(deferred.scaled, want * gain.float()) < 2 * ROUNDING, config
        assert error(deferred.squares.sum(1), want.square().sum(1)) < 2 * ROUNDING, config
