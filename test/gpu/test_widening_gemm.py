"""The GEMM that converts e4m3 weights on the way to the tensor cores: its results, and that it writes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import WideningConfig
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.gemm.widening_gemm import TOKENS, WideningVariant, _kernel, ring_stages, supports, widening_configs, widening_gemm
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import Stream
from runtime.layers.quantization.fp8 import BlockFp8, quantize_blocks
from runtime.layers.quantization.scheme import Storage

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("widening_gemm"), pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ROWS = (1, 17, 32, 64, 100, 128, 256, 512)
SHAPES = ((5120, 2048), (2048, 4096), (1008, 2064))
"""Shapes of weights. The last one is not a multiple of a tile or stage, nor is half of its rows."""
SPLITS = (1, 3, 8)
EPS = 0.25


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile most of the kernels that the tests need, in parallel."""
    keys = [
        (WideningConfig(split), variant)
        for split in SPLITS
        for tokens in TOKENS
        for stages in sorted({ring_stages(tokens, columns, split) for _, columns in SHAPES})
        for pdl in (False, True)
        for variant in (
            WideningVariant(tokens, stages, "FLOAT", True, pdl),
            WideningVariant(tokens, stages, "NARROW", False, pdl, scale=True),
            WideningVariant(tokens, stages, "ADD", False, pdl),
            WideningVariant(tokens, stages, "ADD", True, pdl, deferred=True),
            WideningVariant(tokens, stages, "SILU", True, pdl, scale=True),
            WideningVariant(tokens, stages, "GELU", False, pdl),
        )
    ]

    def one(key: tuple[WideningConfig, WideningVariant]) -> None:
        torch.cuda.synchronize()  # gives the thread torch's context
        _kernel(*key)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, keys))


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def matrices(N: int, K: int, block: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 weights, scales, and the scaled weights in float64, whose entries have magnitude K ** -0.5."""
    weight = (torch.randn((N, K), device="cuda") * 50).to(E4M3)
    if block is None:
        scale = (torch.rand(N, device="cuda") + 0.1) / 50 * K**-0.5
        return weight, scale, weight.double() * scale.double()[:, None]
    scale = (torch.rand((-(-N // block[0]), -(-K // block[1])), device="cuda") + 0.1) / 50 * K**-0.5
    wide = scale.double().repeat_interleave(block[0], 0)[:N].repeat_interleave(block[1], 1)[:, :K]
    return weight, scale, weight.double() * wide


def guarded(rows: int, columns: int, dtype: torch.dtype, value: float = float("nan")) -> torch.Tensor:
    """An output with one additional row, which the kernel must not write."""
    return torch.full((rows + 1, columns), value, device="cuda", dtype=dtype)


def cuts() -> Iterator[tuple[WideningConfig, bool]]:
    yield from ((WideningConfig(split), pdl) for split in SPLITS for pdl in (False, True))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_every_cut_computes_the_same_gemm(N: int, K: int, rows: int) -> None:
    weight, scale, wide = matrices(N, K, (128, 128))
    assert supports(weight, scale, gated=True)
    x, bias = torch.randn((rows, K), device="cuda").to(BF16), torch.randn(N, device="cuda").to(BF16)
    want = x.double() @ wide.T
    squares = torch.rand((rows, 60), device="cuda") * K
    normed = want * (squares.double().sum(1, keepdim=True) / K + EPS).rsqrt()
    for config, pdl in cuts():
        out = guarded(rows, N, torch.float32)
        widening_gemm(x, weight, out[:rows], config, Epilogue(bias=bias), weight_scale=scale, pdl=pdl)
        assert off(out[:rows], want + bias.double()) < 1e-5, config
        assert out[rows].isnan().all(), f"{config} writes past its rows"
        narrow = guarded(rows, N, BF16)
        epilogue = Epilogue(scale=RowScale(squares, EPS))
        widening_gemm(x, weight, narrow[:rows], config, epilogue, weight_scale=scale, pdl=pdl)
        assert off(narrow[:rows], normed) < 5e-3, config
        assert narrow[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_an_add_prepares_the_deferred_norm(N: int, K: int, rows: int) -> None:
    weight, scale, wide = matrices(N, K, (128, 128))
    x, bias, gain = torch.randn((rows, K), device="cuda").to(BF16), *(torch.randn(N, device="cuda").to(BF16) for _ in range(2))
    want = x.double() @ wide.T + 3.0
    for config, pdl in cuts():
        plain = guarded(rows, N, torch.float32, 3.0)
        widening_gemm(x, weight, plain[:rows], config, Epilogue(add=True), weight_scale=scale, pdl=pdl)
        assert off(plain[:rows], want) < 1e-5, config
        assert (plain[rows] == 3.0).all(), f"{config} writes past its rows"
        h, scaled, squares = guarded(rows, N, torch.float32, 3.0), guarded(rows, N, BF16), guarded(rows, config.parts(N), torch.float32)
        deferred = DeferredNorm(gain, scaled[:rows], squares[:rows])
        widening_gemm(x, weight, h[:rows], config, Epilogue(bias=bias, add=True, deferred=deferred), weight_scale=scale, pdl=pdl)
        assert off(h[:rows], want + bias.double()) < 1e-5, config
        assert torch.equal(scaled[:rows], (h[:rows] * gain).to(BF16)), config
        assert off(squares[:rows].double().sum(1), h[:rows].double().square().sum(1)) < 1e-6, config
        assert (h[rows] == 3.0).all(), f"{config} writes past its rows"
        assert scaled[rows].isnan().all(), f"{config} writes past its rows"
        assert squares[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_gates_and_ups_meet(N: int, K: int, rows: int) -> None:
    weight, scale, wide = matrices(N, K, (8, 128))
    x, bias = torch.randn((rows, K), device="cuda").to(BF16), torch.randn(N, device="cuda").to(BF16)
    want, squares = x.double() @ wide.T, torch.rand((rows, 7), device="cuda") * K
    normed = want * (squares.double().sum(1, keepdim=True) / K + EPS).rsqrt() + bias.double()
    silu = torch.nn.functional.silu(normed[:, : N // 2]) * normed[:, N // 2 :]
    gelu = torch.nn.functional.gelu(want[:, : N // 2], approximate="tanh") * want[:, N // 2 :]
    for config, pdl in cuts():
        for epilogue, expected in ((Epilogue(bias=bias, silu=True, scale=RowScale(squares, EPS)), silu), (Epilogue(gelu=True), gelu)):
            out = guarded(rows, N // 2, BF16)
            widening_gemm(x, weight, out[:rows], config, epilogue, weight_scale=scale, pdl=pdl)
            assert off(out[:rows], expected) < 5e-3, config
            assert out[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize("block", [None, (32, 128), (128, 4096)])
@pytest.mark.parametrize("rows", [32, 100, 200])
def test_scales_of_any_layout_are_applied(rows: int, block: tuple[int, int] | None) -> None:
    N, K = 1008, 2064
    weight, scale, wide = matrices(N, K, block)
    x = torch.randn((rows, K), device="cuda").to(BF16)
    for split in SPLITS:
        out = widening_gemm(x, weight, torch.empty((rows, N), device="cuda"), WideningConfig(split), Epilogue(), weight_scale=scale)
        assert off(out, x.double() @ wide.T) < 1e-5, split


def test_every_finite_weight_is_exact() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], device="cuda").to(torch.uint8)
    N, K = 256, 256
    weight = codes.repeat(-(-N * K // len(codes)))[: N * K].reshape(N, K).view(E4M3)
    x = torch.zeros((32, K), device="cuda", dtype=BF16)
    for first in range(0, K, 32):
        x.zero_()
        x[torch.arange(32), torch.arange(first, first + 32)] = 1
        out = widening_gemm(x, weight, torch.empty((32, N), device="cuda"), WideningConfig(2), weight_scale=torch.ones(N, device="cuda"))
        assert torch.equal(out, weight.float().T[first : first + 32])


@pytest.mark.parametrize("split", SPLITS)
def test_rows_do_not_depend_on_each_other(split: int) -> None:
    weight, scale, _ = matrices(2048, 4096, (128, 128))
    x = torch.randn((128, 4096), device="cuda").to(BF16)
    x[5, 9], x[7] = torch.nan, torch.inf
    config = WideningConfig(split)
    outs = [widening_gemm(x[:n], weight, torch.empty((n, 2048), device="cuda"), config, weight_scale=scale) for n in (17, 64, 100, 128)]
    kept = [row for row in range(17) if row not in (5, 7)]
    assert outs[0][kept].isfinite().all()
    assert outs[0][5].isnan().all()
    for out in outs[1:]:
        assert torch.equal(out[kept], outs[0][kept])


@pytest.mark.parametrize("rows", [17, 64, 128, 512])
@pytest.mark.parametrize(("N", "K"), [(5120, 2048), (2048, 4096), (28672, 4096)])
def test_early_launches_change_no_bit_of_a_chain(N: int, K: int, rows: int) -> None:
    weight, scale, _ = matrices(N, K, (128, 128))
    back, back_scale, _ = matrices(K, N, (128, 128))
    x = torch.randn((rows, K), device="cuda").to(BF16)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for there, home in zip(widening_configs(rows, N, K, num_sms, H200), widening_configs(rows, K, N, num_sms, H200), strict=False):
        results = []
        for pdl in (False, True):
            y = x
            for _ in range(10):
                wide = widening_gemm(y, weight, torch.empty((rows, N), device="cuda", dtype=BF16), there, weight_scale=scale, pdl=pdl)
                y = widening_gemm(wide, back, torch.empty((rows, K), device="cuda", dtype=BF16), home, weight_scale=back_scale, pdl=pdl)
            results.append(y)
        assert results[0].isfinite().all()
        assert torch.equal(*results), (there, home)


def scaled_linear(out: int, width: int) -> Linear:
    weights = torch.randn((out, width), device="cuda") * width**-0.5
    return Linear(Storage(*quantize_blocks(weights)), None, BlockFp8("weight_scale_inv", stored=True))


def test_decode_passes_of_many_rows_have_a_choice_and_prompts_keep_theirs() -> None:
    from runtime.layers.cuda_ops import CudaOps
    from runtime.layers.gemm.autotune import candidates, group_gemms

    norm = RMSNorm(torch.ones(2048, device="cuda", dtype=BF16), 1e-6)
    head, qkv, o_proj = scaled_linear(4096, 2048), scaled_linear(5120, 2048), scaled_linear(2048, 4096)
    gemms = Gemm("linear", qkv, norm), Gemm("linear_add", o_proj, norm), Gemm("logits", head, norm)
    groups = group_gemms(gemms, (16, 32, 64, 128, 256, 512, 2048))
    offered = {(group.gemm.op, group.rows): [type(choice) for choice in candidates(group, 132, H200)] for group in groups}
    widening = {key for key, choices in offered.items() if WideningConfig in choices}
    assert widening == {(op, rows) for op in ("linear", "linear_add") for rows in (32, 64, 128, 256, 512)}
    assert not any(rows > 128 for op, rows in offered if op == "logits")
    assert not any(rows == 2048 for _, rows in offered)
    ops = CudaOps(GemmTimings(H200))
    report = ops.autotune(gemms, rows=(64, 256))
    if report["prompts fp8 5120x2048"].startswith("e4m3 rows"):
        assert ops.choice("linear", qkv, 200, in_prompt=True) is None
    assert ops.choice("linear", qkv, 60, in_prompt=True) == ops.choice("linear", qkv, 60), "prompts of few rows use what decode passes have"


@pytest.mark.parametrize("rows", [17, 64, 100, 200])
def test_a_deferred_norm_between_two_of_them_is_the_norm(rows: int) -> None:
    from runtime.layers.cuda_ops import CudaOps
    from runtime.layers.gemm.tilings import m_bucket

    norm = RMSNorm(torch.rand(2048, device="cuda").add(0.5).to(BF16), 1e-6)
    qkv, o_proj = scaled_linear(5120, 2048), scaled_linear(2048, 4096)
    x, h = torch.randn((rows, 4096), device="cuda").to(BF16), torch.randn((rows, 2048), device="cuda") * 30
    ops = CudaOps(GemmTimings(H200))
    ops.choices = {
        Gemm("linear_add", o_proj, norm).key(m_bucket(rows)): WideningConfig(8),
        Gemm("linear", qkv, norm).key(m_bucket(rows)): WideningConfig(3),
    }
    stream = ops.linear_add(x, o_proj, Stream(h.clone()), norm)
    assert stream.deferred is not None

    def wide(linear: Linear) -> torch.Tensor:
        scale = linear.storage.scale
        assert scale is not None
        return linear.weight.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)

    added = h.double() + x.double() @ wide(o_proj).T
    assert off(stream.h, added) < 1e-5
    normed = added * (added.square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    assert off(ops.norm_linear(stream, norm, qkv), normed @ wide(qkv).T) < 1e-2
