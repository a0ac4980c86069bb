"""GEMMs that prefetch their weights into shared memory, and when the autotuner times them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from runtime.config.device_tuning import H200
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 13, 16])
@pytest.mark.parametrize(("N", "K"), [(2048, 4096), (2880, 4096), (4096, 4096), (6144, 4096), (5120, 2048), (2048, 5120), (272, 192)])
def test_resident_weights_compute_the_same_gemm(N: int, K: int, rows: int) -> None:
    from runtime.layers.gemm.resident_gemm import resident_config, resident_gemm, supports

    x, weight = (torch.randn((n, K), device="cuda").to(BF16) for n in (rows, N))
    if not supports(weight):
        pytest.skip("needs compute capability 9 and NVRTC")
    config = resident_config(N, K, torch.cuda.get_device_properties(0).multi_processor_count)
    assert config is not None
    want, bias, eps = x.double() @ weight.double().T, torch.randn(N, device="cuda").to(BF16), 0.25
    squares = torch.rand((rows, 150), device="cuda") * K
    normed = want / (squares.double().sum(1) / K + eps).sqrt()[:, None]
    gain, parts = torch.randn(N, device="cuda").to(BF16), config.parts(N)
    for pdl in (False, True):
        out = torch.full((rows + 1, N), float("nan"), device="cuda")
        resident_gemm(x, weight, out[:rows], config, Epilogue(bias=bias), pdl=pdl)
        assert ((out[:rows].double() - want - bias.double()).norm() / want.norm()) < 1e-5
        resident_gemm(x, weight, out[:rows], config, pdl=pdl)
        deferred = DeferredNorm(gain, torch.empty((rows, N), device="cuda", dtype=BF16), torch.empty((rows, parts), device="cuda"))
        resident_gemm(x, weight, out[:rows], config, Epilogue(add=True, deferred=deferred), pdl=pdl)
        assert ((out[:rows].double() - 2 * want).norm() / want.norm()) < 1e-5
        assert torch.equal(deferred.scaled, (out[:rows] * gain.float()).to(BF16))
        exact = out[:rows].double().square().reshape(rows, parts, -1).sum(2)
        torch.testing.assert_close(deferred.squares.double(), exact, rtol=1e-5, atol=0)
        narrow = torch.full((rows + 1, N), float("nan"), device="cuda", dtype=BF16)
        resident_gemm(x, weight, narrow[:rows], config, Epilogue(scale=RowScale(squares, eps)), pdl=pdl)
        assert ((narrow[:rows].double() - normed).norm() / normed.norm()) < 1e-2
        assert out[rows].isnan().all()
        assert narrow[rows].isnan().all()


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 16])
@pytest.mark.parametrize(("N", "K"), [(3072, 576), (6144, 1024), (272, 192)])
def test_resident_weights_gate_their_results(N: int, K: int, rows: int) -> None:
    from runtime.layers.gemm.resident_gemm import resident_config, resident_gemm, supports

    x, weight = (torch.randn((n, K), device="cuda").to(BF16) for n in (rows, N))
    if not supports(weight):
        pytest.skip("needs compute capability 9 and NVRTC")
    config = resident_config(N, K, torch.cuda.get_device_properties(0).multi_processor_count)
    assert config is not None
    bias, squares, eps = torch.randn(N, device="cuda").to(BF16), torch.rand((rows, 150), device="cuda") * K, 0.25
    gate, up = (x.double() @ weight.double().T / (squares.double().sum(1) / K + eps).sqrt()[:, None] + bias.double()).chunk(2, 1)
    for activation, want in (("silu", F.silu(gate) * up), ("gelu", F.gelu(gate, approximate="tanh") * up)):
        epilogue = Epilogue(**{activation: True}, bias=bias, scale=RowScale(squares, eps))
        for pdl in (False, True):
            out = torch.full((rows + 1, N // 2), float("nan"), device="cuda", dtype=BF16)
            resident_gemm(x, weight, out[:rows], config, epilogue, pdl=pdl)
            assert ((out[:rows].double() - want).norm() / want.norm()) < 5e-3
            assert out[rows].isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13, 16])
@pytest.mark.parametrize("name", ["block", "row"])
@pytest.mark.parametrize(("N", "K"), [(5120, 2048), (2048, 4096), (2048, 2080), (1536, 3072)])
def test_fully_resident_weights_compute_the_same_gemm(name: str, N: int, K: int, rows: int) -> None:
    from runtime.layers.gemm.fully_resident_gemm import fully_resident_config, fully_resident_gemm, supports

    x = torch.randn((rows, K), device="cuda").to(BF16)
    weight = (torch.randn((N, K), device="cuda") * 50).to(torch.float8_e4m3fn)
    wide = weight.double()
    if name == "row":
        scale = torch.rand(N, device="cuda") / 50
        wide *= scale.double()[:, None]
    else:
        scale = torch.rand((-(-N // 128), -(-K // 128)), device="cuda") / 50
        wide *= scale.double().repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    if not supports(weight, scale):
        pytest.skip("needs compute capability 9 and NVRTC")
    config = fully_resident_config(weight, rows, torch.cuda.get_device_properties(0).multi_processor_count)
    assert config is not None
    want, bias, eps = x.double() @ wide.T, torch.randn(N, device="cuda").to(BF16), 0.25
    squares, gain = torch.rand((rows, 150), device="cuda") * K, torch.randn(N, device="cuda").to(BF16)
    normed = want / (squares.double().sum(1) / K + eps).sqrt()[:, None]
    for pdl in (False, True):
        out = torch.full((rows + 1, N), float("nan"), device="cuda")
        fully_resident_gemm(x, weight, out[:rows], config, Epilogue(bias=bias), weight_scale=scale, pdl=pdl)
        assert ((out[:rows].double() - want - bias.double()).norm() / want.norm()) < 1e-5
        fully_resident_gemm(x, weight, out[:rows], config, weight_scale=scale, pdl=pdl)
        fully_resident_gemm(x, weight, out[:rows], config, Epilogue(add=True), weight_scale=scale, pdl=pdl)
        assert ((out[:rows].double() - 2 * want).norm() / want.norm()) < 1e-5
        narrow = torch.full((rows + 1, N), float("nan"), device="cuda", dtype=BF16)
        fully_resident_gemm(x, weight, narrow[:rows], config, Epilogue(scale=RowScale(squares, eps)), weight_scale=scale, pdl=pdl)
        assert ((narrow[:rows].double() - normed).norm() / normed.norm()) < 1e-2
        assert out[rows].isnan().all()
        assert narrow[rows].isnan().all()
        if config.tall == 1:
            parts = config.parts(N)
            deferred = DeferredNorm(gain, torch.empty((rows, N), device="cuda", dtype=BF16), torch.empty((rows, parts), device="cuda"))
            fully_resident_gemm(x, weight, out[:rows], config, Epilogue(add=True, deferred=deferred), weight_scale=scale, pdl=pdl)
            assert torch.equal(deferred.scaled, (out[:rows] * gain.float()).to(BF16))
            exact = out[:rows].double().square().reshape(rows, parts, -1).sum(2)
            torch.testing.assert_close(deferred.squares.double(), exact, rtol=1e-5, atol=0)


def test_rows_do_not_depend_on_each_other() -> None:
    from runtime.layers.gemm.resident_gemm import resident_config, resident_gemm, supports

    x, weight = (torch.randn((n, 4096), device="cuda").to(BF16) for n in (16, 2048))
    if not supports(weight):
        pytest.skip("needs compute capability 9 and NVRTC")
    config = resident_config(2048, 4096, torch.cuda.get_device_properties(0).multi_processor_count)
    assert config is not None
    outs = [resident_gemm(x[:rows], weight, torch.empty((rows, 2048), device="cuda"), config) for rows in range(1, 17)]
    assert all(torch.equal(out, outs[-1][: len(out)]) for out in outs)


def test_the_projection_behind_attention_is_timed_with_resident_weights() -> None:
    from runtime.config.kernel_configs import ResidentConfig
    from runtime.layers.cuda_ops import CudaOps
    from runtime.layers.gemm.resident_gemm import supports

    linears = [Linear.dense(torch.empty((2048, 4096), dtype=BF16, device="cuda").normal_(std=1 / 64)) for _ in range(3)]
    if not supports(linears[0].weight):
        pytest.skip("needs compute capability 9 and NVRTC")
    norm = RMSNorm(torch.ones(2048, dtype=BF16, device="cuda"), 1e-5)
    timings = GemmTimings(H200)
    ops = CudaOps(timings)
    gemms = [Gemm("linear_add", linear, norm, after_attention=True) for linear in linears]
    ops.autotune(gemms, (1, 32))
    few, many = (timings.known(BF16, gemms[0].key(rows)) for rows in (1, 32))
    assert few is not None
    assert many is not None
    assert any(isinstance(choice, ResidentConfig) for choice in few.micros)
    assert not any(isinstance(choice, ResidentConfig) for choice in many.micros)


@pytest.mark.parametrize(("rows_of_weights", "columns", "tried"), [(1344, 2048, True), (5120, 2048, False), (5120, 768, True)])
def test_a_gemm_is_timed_with_resident_weights_if_there_is_space(rows_of_weights: int, columns: int, tried: bool) -> None:
    from runtime.config.kernel_configs import ResidentConfig
    from runtime.layers.cuda_ops import CudaOps
    from runtime.layers.gemm.resident_gemm import supports

    linears = [Linear.dense(torch.empty((rows_of_weights, columns), dtype=BF16, device="cuda").normal_(std=1 / 64)) for _ in range(3)]
    if not supports(linears[0].weight):
        pytest.skip("needs compute capability 9 and NVRTC")
    norm = RMSNorm(torch.ones(columns, dtype=BF16, device="cuda"), 1e-6)
    gemms, timings = [Gemm("linear", linear, norm) for linear in linears], GemmTimings(H200)
    CudaOps(timings).autotune(gemms, (1,))
    timed = timings.known(BF16, gemms[0].key(1))
    assert timed is not None
    assert any(isinstance(choice, ResidentConfig) for choice in timed.micros) is tried


@pytest.mark.parametrize(("rows_of_weights", "columns", "tried"), [(3072, 576, True), (28672, 4096, False)])
def test_small_gate_and_up_projections_are_timed_with_resident_weights(rows_of_weights: int, columns: int, tried: bool) -> None:
    from runtime.config.kernel_configs import ResidentConfig
    from runtime.layers.cuda_ops import CudaOps
    from runtime.layers.gemm.resident_gemm import supports

    linear = Linear.dense(torch.empty((rows_of_weights, columns), dtype=BF16, device="cuda").normal_(std=1 / 64))
    if not supports(linear.weight):
        pytest.skip("needs compute capability 9 and NVRTC")
    gemm, timings = Gemm("gate_up", linear, RMSNorm(torch.ones(columns, dtype=BF16, device="cuda"), 1e-6)), GemmTimings(H200)
    CudaOps(timings).autotune([gemm], (1,))
    timed = timings.known(BF16, gemm.key(1))
    assert timed is not None
    assert any(isinstance(choice, ResidentConfig) for choice in timed.micros) is tried
