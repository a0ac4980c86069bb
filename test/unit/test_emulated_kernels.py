"""CUDA C++ kernels for few rows, emulated on the CPU, against their definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from emulated import COMPILER, emulated, guarded
from runtime.config.kernel_configs import FragmentConfig
from runtime.layers.gemm import fragment_gemm, resident_gemm
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import Epilogue

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
BF16 = torch.bfloat16
SMS = 4


@pytest.fixture(scope="module", autouse=True)
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with emulated(tmp_path_factory.mktemp("kernels"), [fragment_gemm, resident_gemm], SMS):
        yield


def relative(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


def scaled(N: int, K: int, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 weights, their scales, and what they represent in float64."""
    weight = (torch.randn((N, K)) * 50).to(torch.float8_e4m3fn)
    scale = torch.rand((-(-N // block[0]), -(-K // block[1]))) / 50
    wide = weight.double() * scale.double().repeat_interleave(block[0], 0)[:N].repeat_interleave(block[1], 1)[:, :K]
    return guarded(weight), guarded(scale), wide


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_fragments_compute_the_same_gemm(rows: int) -> None:
    N, K = 64, 720  # the last columns are less than one load of a warp
    x, (weight, scale, wide) = guarded(torch.randn((rows, K)).to(BF16)), scaled(N, K, (32, 64))
    want = x.double() @ wide.T
    for config in (FragmentConfig(4, 2), FragmentConfig(8, 2, tall=2)):
        out = torch.full((rows, N), float("nan"))
        fragment_gemm.fragment_gemm(x, weight, out, config, weight_scale=scale)
        assert relative(out, want) < 1e-5, config


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_resident_weights_compute_the_same_gemm(rows: int) -> None:
    N, K, eps = 64, 576, 0.25
    x, weight = guarded(torch.randn((rows, K)).to(BF16)), guarded(torch.randn((N, K)).to(BF16))
    config = resident_gemm.resident_config(N, K, SMS)
    assert config is not None
    want, squares, gain = x.double() @ weight.double().T, torch.rand((rows, 150)) * K, torch.randn(N).to(BF16)
    normed = want / (squares.double().sum(1) / K + eps).sqrt()[:, None]
    out = torch.full((rows, N), float("nan"))
    resident_gemm.resident_gemm(x, weight, out, config, Epilogue(scale=RowScale(squares, eps)))
    assert relative(out, normed) < 1e-5
    deferred = DeferredNorm(gain, torch.empty((rows, N), dtype=BF16), torch.empty((rows, config.parts(N))))
    resident_gemm.resident_gemm(x, weight, out, config, Epilogue(add=True, deferred=deferred))
    assert relative(out, normed + want) < 1e-5
    assert torch.equal(deferred.scaled, (out * gain.float()).to(BF16))
