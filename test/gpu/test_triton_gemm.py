"""The Triton GEMM with every tiling that may be chosen, and the choice among them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from runtime.config.device_tuning import H200
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.linear import Linear, Partition
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import Stream
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.scheme import Storage

if TYPE_CHECKING:
    from runtime.layers.gemm.triton_gemm import TritonConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16
ROWS = (3, 16, 64, 128)


def chosen_tilings(rows: int) -> list[TritonConfig]:
    return [*{c for op in ("linear", "linear_add", "gate_up", "logits") for c in H200.gemm_configs(op, rows)}]


def odd_tilings() -> list[TritonConfig]:
    from runtime.layers.gemm.triton_gemm import TritonConfig

    ways = itertools.product(((32, 128, 4, 3), (64, 64, 4, 4)), (False, True), (False, True), (0, 4096), (False, True))
    return [TritonConfig(*tiling, swap, tma, prefetch, late) for tiling, swap, tma, prefetch, late in ways]


def tilings(rows: int) -> list[TritonConfig]:
    return [*chosen_tilings(rows), *odd_tilings()]


def few_tilings(rows: int) -> list[TritonConfig]:
    """The tilings that may be chosen, and one of each odd kind."""
    return [*chosen_tilings(rows), *{(c.swap, c.tma): c for c in odd_tilings()}.values()]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_every_tiling_computes_the_same_gemm(rows: int, pdl: bool) -> None:
    from runtime.layers.gemm.triton_gemm import triton_gemm

    if pdl and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    N, K = 1000, 2064  # neither is a multiple of a tile
    x, weight = (torch.randn((n, K), device="cuda").to(BF16) for n in (rows, N))
    want = x.double() @ weight.double().T
    gate, up = (want * K**-0.5).chunk(2, dim=1)
    gated, scaled = torch.nn.functional.silu(gate) * up, (x.float() * K**-0.5).to(BF16)
    for config in tilings(rows):
        out = torch.full((rows + 1, N), float("nan"), device="cuda")
        triton_gemm(x, weight, out[:rows], config, pdl=pdl)
        assert ((out[:rows].double() - want).norm() / want.norm()) < 1e-5, config
        triton_gemm(x, weight, out[:rows], config, Epilogue(add=True), pdl=pdl)
        assert ((out[:rows].double() - 2 * want).norm() / want.norm()) < 1e-5, config
        assert out[rows].isnan().all(), f"{config} writes past its rows"
        half = torch.full((rows + 1, N // 2), float("nan"), device="cuda")
        triton_gemm(scaled, weight, half[:rows], config, Epilogue(silu=True), pdl=pdl)
        assert ((half[:rows].double() - gated).norm() / gated.norm()) < 1e-2, config
        assert half[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize(("rows", "N"), list(zip(ROWS, (1000, 1024, 1024, 1000), strict=True)))
def test_every_tiling_prepares_the_deferred_norm_beside_the_same_sums(rows: int, N: int) -> None:
    from runtime.layers.gemm.triton_gemm import triton_gemm

    K = 528  # not a multiple of a tile; nor is the smaller N
    x, weight, gain = (torch.randn(shape, device="cuda").to(BF16) for shape in ((rows, K), (N, K), (N,)))
    before = torch.randn((rows, N), device="cuda") * 30
    for config in few_tilings(rows):
        want = triton_gemm(x, weight, before.clone(), config, Epilogue(add=True))
        count = config.parts(N)
        h, squares = (torch.full((rows + 1, n), float("nan"), device="cuda") for n in (N, count))
        scaled = torch.full((rows + 1, N), float("nan"), device="cuda", dtype=BF16)
        h[:rows] = before
        triton_gemm(x, weight, h[:rows], config, Epilogue(add=True, deferred=DeferredNorm(gain, scaled[:rows], squares[:rows])))
        assert torch.equal(h[:rows], want), f"{config} adds differently when a norm is deferred"
        assert torch.equal(scaled[:rows], (want * gain.float()).to(BF16)), config
        exact = torch.nn.functional.pad(want.double().square(), (0, count * config.block_n - N)).reshape(rows, count, -1).sum(2)
        torch.testing.assert_close(squares[:rows].double(), exact, rtol=1e-5, atol=0, msg=str(config))
        for written in (h, scaled, squares):
            assert written[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("block", [(128, 128), (32, 64), None])
def test_scaled_tilings_compute_the_same_gemm(block: tuple[int, int] | None, rows: int) -> None:
    from runtime.layers.gemm.triton_gemm import triton_gemm

    N, K = 1000, 2064  # neither is a multiple of a tile
    x = torch.randn((rows, K), device="cuda").to(BF16)
    weight = (torch.randn((N, K), device="cuda") * 50).to(torch.float8_e4m3fn)
    if block is None:
        scale = torch.rand(N, device="cuda") / 50
        wide = weight.double() * scale.double()[:, None]
    else:
        scale = torch.rand((-(-N // block[0]), -(-K // block[1])), device="cuda") / 50
        wide = weight.double() * scale.double().repeat_interleave(block[0], 0)[:N].repeat_interleave(block[1], 1)[:, :K]
    want, eps = x.double() @ wide.T, 0.25
    gate, up = (want * K**-0.5).chunk(2, dim=1)
    gated, squares = torch.nn.functional.silu(gate) * up, torch.rand((rows, 12), device="cuda") * K
    normed = want / (squares.double().sum(1) / K + eps).sqrt()[:, None]
    for config in H200.scaled_configs(rows):
        out = torch.full((rows + 1, N), float("nan"), device="cuda")
        triton_gemm(x, weight, out[:rows], config, weight_scale=scale)
        assert ((out[:rows].double() - want).norm() / want.norm()) < 1e-5, config
        triton_gemm(x, weight, out[:rows], config, Epilogue(add=True), weight_scale=scale, pdl=True)
        assert ((out[:rows].double() - 2 * want).norm() / want.norm()) < 1e-5, config
        triton_gemm(x, weight, out[:rows], config, Epilogue(scale=RowScale(squares, eps)), weight_scale=scale)
        assert ((out[:rows].double() - normed).norm() / normed.norm()) < 1e-5, config
        assert out[rows].isnan().all(), f"{config} writes past its rows"
        half = torch.empty((rows, N // 2), device="cuda")
        triton_gemm((x.float() * K**-0.5).to(BF16), weight, half, config, Epilogue(silu=True), weight_scale=scale)
        assert ((half.double() - gated).norm() / gated.norm()) < 1e-2, config


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 16])
@pytest.mark.parametrize("block", [(128, 128), (32, 64), "row"])
def test_fragments_compute_the_same_gemm(block: tuple[int, int] | str, rows: int) -> None:
    from runtime.config.kernel_configs import FragmentConfig
    from runtime.layers.gemm.fragment_gemm import fragment_gemm, supports

    N, K = 1024, 2064  # the last columns are less than one load of a warp
    x, weight = torch.randn((rows, K), device="cuda").to(BF16), (torch.randn((N, K), device="cuda") * 50).to(torch.float8_e4m3fn)
    wide = weight.double()
    if isinstance(block, str):
        scale = torch.rand(N, device="cuda") / 50
        wide = wide * scale.double()[:, None]
    else:
        scale = torch.rand((-(-N // block[0]), -(-K // block[1])), device="cuda") / 50
        wide = wide * scale.double().repeat_interleave(block[0], 0)[:N].repeat_interleave(block[1], 1)[:, :K]
    if not supports(weight, scale, gated=True):
        pytest.skip("needs compute capability 9 and NVRTC")
    small = (x.float() / wide.std().item() * K**-0.5).to(BF16)
    want, eps, (gate, up) = x.double() @ wide.T, 0.25, (small.double() @ wide.T).chunk(2, dim=1)
    gated, squares = torch.nn.functional.silu(gate) * up, torch.rand((rows, 150), device="cuda") * K
    normed = want / (squares.double().sum(1) / K + eps).sqrt()[:, None]
    gain = torch.randn(N, device="cuda").to(BF16)
    for config in {*H200.fragment_configs(rows), FragmentConfig(4, 2, tall=2)}:
        for pdl in (False, True):
            out, parts = torch.full((rows + 1, N), float("nan"), device="cuda"), config.parts(N)
            fragment_gemm(x, weight, out[:rows], config, weight_scale=scale, pdl=pdl)
            assert ((out[:rows].double() - want).norm() / want.norm()) < 1e-5, config
            deferred = DeferredNorm(gain, torch.empty((rows, N), device="cuda", dtype=BF16), torch.empty((rows, parts), device="cuda"))
            fragment_gemm(x, weight, out[:rows], config, Epilogue(add=True, deferred=deferred), weight_scale=scale, pdl=pdl)
            assert ((out[:rows].double() - 2 * want).norm() / want.norm()) < 1e-5, config
            assert torch.equal(deferred.scaled, (out[:rows] * gain.float()).to(BF16)), config
            exact = out[:rows].double().square().reshape(rows, parts, -1).sum(2)
            torch.testing.assert_close(deferred.squares.double(), exact, rtol=1e-5, atol=0, msg=str(config))
            fragment_gemm(x, weight, out[:rows], config, Epilogue(scale=RowScale(squares, eps)), weight_scale=scale, pdl=pdl)
            assert ((out[:rows].double() - normed).norm() / normed.norm()) < 1e-5, config
            assert out[rows].isnan().all(), f"{config} writes past its rows"
            half = torch.full((rows + 1, N // 2), float("nan"), device="cuda", dtype=BF16)
            fragment_gemm(small, weight, half[:rows], config, Epilogue(silu=True), weight_scale=scale, pdl=pdl)
            assert ((half[:rows].double() - gated).norm() / gated.norm()) < 1e-2, config
            assert half[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize("rows", [8, 16])
def test_fragments_take_rows_of_any_magnitude(rows: int) -> None:
    from runtime.config.kernel_configs import FragmentConfig
    from runtime.layers.gemm.fragment_gemm import fragment_gemm, supports

    N, K = 256, 2064
    x, numbers = torch.randn((rows, K), device="cuda"), torch.randn((N, K), device="cuda") * 50
    for row, magnitude in enumerate((3e37, 3e4, 1e-30)):
        x[row] *= magnitude
    x[1, 7], numbers[:, 7] = 3e8, 0  # much larger than the other entries, and multiplied by zero
    x[3], x[4, 9], x[5, 9], x[6, 70] = 0, torch.nan, torch.inf, -torch.inf
    numbers[:, [9, 70]] = 2
    x, weight = x.to(BF16), numbers.to(torch.float8_e4m3fn)
    scale = torch.rand((2, 17), device="cuda") * 2e-6
    if not supports(weight, scale):
        pytest.skip("needs compute capability 9 and NVRTC")
    wide = weight.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :K]
    want = x.double() @ wide.T
    good = [row for row in range(rows) if row not in (3, 4, 5, 6)]
    for config in {*H200.fragment_configs(rows), FragmentConfig(4, 2, tall=2)}:
        out = torch.empty((rows, N), device="cuda")
        fragment_gemm(x, weight, out, config, weight_scale=scale)
        errors = (out.double() - want).norm(dim=1) / want.norm(dim=1)
        assert (errors[good] < 1e-5).all(), (config, errors)
        assert (out[3] == 0).all(), config
        assert out[4].isnan().all(), config
        assert (out[5] == torch.inf).all(), config
        assert (out[6] == -torch.inf).all(), config


@pytest.mark.parametrize("rows", [1, 130, 1000])
@pytest.mark.parametrize("group", [None, 128])
def test_quantized_rows_follow_the_definition(group: int | None, rows: int) -> None:
    from runtime.layers.gemm.quantized_rows import quantize_rows

    x = torch.randn((rows, 1536), device="cuda").to(BF16)
    values, scales = quantize_rows(x, group, padding=16)
    assert values.shape[0] % 16 == 0
    wide = x.float().reshape(rows, -1, group or 1536)
    want = wide.abs().amax(2) / 448
    torch.testing.assert_close(scales[:rows], want, rtol=1e-6, atol=0)
    error = (values[:rows].float().reshape(wide.shape) * want[..., None] - wide).abs()
    assert (error <= wide.abs() / 16 + want[..., None] / 1024 + 1e-6).all(), "e4m3 keeps three bits behind the first"
    assert not values[rows:].float().any()


@pytest.mark.parametrize("block", [128, None])
def test_quantized_prompts_are_near_those_in_16_bits(block: int | None) -> None:
    from runtime.layers.gemm.quantized_rows import quantized_gemm, supports

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("scales of blocks need compute capability 9")
    N, K = 1536, 2048
    weight = (torch.randn((N, K), device="cuda") * 50).to(torch.float8_e4m3fn)
    scale = torch.rand(N if block is None else (N // block, K // block), device="cuda") / 50
    wide = scale[:, None] if block is None else scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    assert supports(weight, scale)
    for rows in (130, 512):
        x = torch.randn((rows, K), device="cuda").to(BF16)
        want = x.double() @ (weight.double() * wide.double()).T
        out = quantized_gemm(x, weight, scale)
        assert out.shape == (rows, N)
        assert (out.double() - want).norm() / want.norm() < 0.05


def test_prompts_quantize_their_rows_unless_told_not_to() -> None:
    from runtime.layers.cuda_ops import CudaOps
    from runtime.layers.quantization.fp8 import BlockFp8, quantize_blocks

    size = 4096
    linear = Linear(Storage(*quantize_blocks(torch.randn((size, size), device="cuda"))), None, BlockFp8("weight_scale_inv", stored=True))
    norm = RMSNorm(torch.ones(size, device="cuda", dtype=BF16), 1e-5)
    ops, exact = CudaOps(GemmTimings(H200)), CudaOps(GemmTimings(H200.without_fp8_activations()))
    lines = [found.autotune([Gemm("linear_add", linear, norm)], rows=(1,)) for found in (ops, exact)]
    assert [any(name.startswith("prompts fp8") for name in report) for report in lines] == [True, False]
    x, h = torch.randn((512, size), device="cuda").to(BF16), torch.zeros((512, size), device="cuda")
    decoded = ops.linear(x, linear)
    assert torch.equal(exact.linear(x, linear, in_prompt=True), decoded)
    stream = ops.linear_add(x, linear, Stream(h, in_prompt=True))
    assert stream.in_prompt, "the layers after it are of the same pass"
    for prompt in (ops.linear(x, linear, in_prompt=True), stream.h):
        assert ((prompt.float() - decoded.float()).norm() / decoded.float().norm()) < 0.05


@pytest.mark.parametrize("block", [128, 64, None])
def test_widened_weights_are_exact_up_to_rounding(block: int | None) -> None:
    from runtime.layers.gemm.widen import widen

    N, K = 1000, 2064
    weight = (torch.randn((N, K), device="cuda") * 50).to(torch.float8_e4m3fn)
    scale = torch.rand(N if block is None else (-(-N // block), -(-K // block)), device="cuda")
    wide = scale[:, None] if block is None else scale.repeat_interleave(block, 0)[:N].repeat_interleave(block, 1)[:, :K]
    assert torch.equal(widen(weight, scale, BF16), (weight.float() * wide).to(BF16))


def test_squares_of_another_tiling_are_refused() -> None:
    from runtime.layers.gemm.triton_gemm import TritonConfig, triton_gemm

    x, weight = torch.zeros((3, 64), device="cuda", dtype=BF16), torch.zeros((96, 64), device="cuda", dtype=BF16)
    h, deferred = torch.zeros((3, 96), device="cuda"), DeferredNorm(weight[0], torch.empty_like(x), torch.zeros((3, 3), device="cuda"))
    with pytest.raises(AssertionError):
        triton_gemm(x, weight, h, TritonConfig(32, 64, 4, 3), Epilogue(add=True, deferred=deferred))
    deferred = DeferredNorm(torch.zeros(96, device="cuda", dtype=BF16), h.to(BF16), torch.zeros((3, 6), device="cuda"))
    with pytest.raises(AssertionError):
        triton_gemm(x, weight, h, TritonConfig(32, 64, 4, 3), Epilogue(add=True, deferred=deferred))


@pytest.mark.parametrize(("rows", "count"), list(zip(ROWS, (43, 1, 344, 12), strict=True)))
def test_every_tiling_and_epilogue_applies_a_deferred_norm(rows: int, count: int) -> None:
    from runtime.layers.gemm.triton_gemm import triton_gemm

    N, K, eps = 1000, 2064, 0.25  # neither is a multiple of a tile
    h = torch.randn((rows, K), device="cuda") * torch.linspace(0.1, 9, rows, device="cuda")[:, None]
    gain, bias = (torch.randn(n, device="cuda").to(BF16) for n in (K, N))
    weight = (torch.randn((N, K), device="cuda") * K**-0.5).to(BF16)
    x = (h * gain.float()).to(BF16)
    squares = torch.full((rows + 1, count), float("inf"), device="cuda")  # values after the last row must have no effect
    squares[:rows] = h.square().reshape(rows, count, -1).sum(2)
    scale = RowScale(squares[:rows], eps)
    norms = (h.double().square().mean(1, keepdim=True) + eps).rsqrt()
    want = x.double() * norms @ weight.double().T
    biased = want + bias.double()
    gate, up = biased.chunk(2, dim=1)
    gated = torch.nn.functional.silu(gate) * up
    old = torch.randn((rows, N), device="cuda")

    def near(got: torch.Tensor, exact: torch.Tensor) -> bool:
        return bool(((got.double() - exact).norm(dim=1) < 1e-5 * exact.norm(dim=1)).all())

    for config in few_tilings(rows):
        out = triton_gemm(x, weight, old.clone(), config, Epilogue(add=True, scale=scale))
        assert near(out, want + old.double()), config
        half = triton_gemm(x, weight, torch.empty((rows, N // 2), device="cuda"), config, Epilogue(bias=bias, silu=True, scale=scale))
        assert near(half, gated), config
        out = triton_gemm(x, weight, torch.empty((rows, N), device="cuda"), config, Epilogue(bias=bias, scale=scale))
        assert near(out, biased), config


@pytest.mark.parametrize("count", [5, 16, 86, 344])
def test_a_row_scale_does_not_depend_on_other_rows(count: int) -> None:
    from runtime.layers.gemm.triton_gemm import TritonConfig, triton_gemm

    K = 2064
    h = torch.randn((128, K), device="cuda")
    weight, squares = torch.eye(64, K, device="cuda").to(BF16), h[:, :count].square().contiguous()
    for config in (TritonConfig(32, 128, 4, 3), TritonConfig(64, 64, 4, 4, swap=True)):

        def product(first: int, last: int, config: TritonConfig = config) -> torch.Tensor:
            out = torch.empty((last - first, 64), device="cuda")
            return triton_gemm(
                h[first:last].to(BF16), weight, out, config, Epilogue(scale=RowScale(squares[first:last].contiguous(), 1e-5))
            )

        whole = product(0, 128)
        for first, last in ((0, 3), (2, 18), (60, 124), (127, 128)):
            assert torch.equal(product(first, last), whole[first:last]), f"{config}: rows {first} to {last} of {count} sums"


@pytest.mark.parametrize("rows", [3, 64])
def test_a_chain_that_starts_early_waits_for_what_is_left_ahead(rows: int) -> None:
    from runtime.layers.gemm.triton_gemm import TritonConfig, triton_gemm

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    K = 1024
    down, up = ((torch.randn((n * K, K), device="cuda") * K**-0.5).to(BF16) for n in (1, 2))
    gain, x, h = (torch.randn(shape, device="cuda").to(BF16) for shape in ((K,), (rows, K), (rows, K)))
    for config in (TritonConfig(16, 256, 2, 6), TritonConfig(64, 128, 4, 4, swap=True), TritonConfig(32, 128, 4, 3, late=True)):

        def chain(pdl: bool, config: TritonConfig = config) -> torch.Tensor:
            stream, act = h.float(), x
            for _ in range(10):
                deferred = DeferredNorm(gain, torch.empty_like(x), torch.empty((rows, config.parts(K)), device="cuda"))
                triton_gemm(act, down, stream, config, Epilogue(add=True, deferred=deferred), pdl=pdl)
                scale = RowScale(deferred.squares, 1e-5)
                act = triton_gemm(deferred.scaled, up, torch.empty_like(x), config, Epilogue(silu=True, scale=scale), pdl=pdl)
            return act

        want = chain(pdl=False)
        assert want.isfinite().all()
        assert all(torch.equal(chain(pdl=True), want) for _ in range(10)), config


def layer(out: int, width: int) -> Linear:
    return Linear.dense((torch.randn((out, width), device="cuda") * width**-0.5).to(BF16))


def test_gemms_that_only_cublas_supports_are_not_autotuned() -> None:
    from runtime.layers.cuda_ops import CudaOps

    norm, down = RMSNorm(torch.ones(512, device="cuda", dtype=BF16), 1e-5), layer(512, 264)
    ops = CudaOps(GemmTimings(H200))
    report = ops.autotune([Gemm("gate_up", layer(528, 512), norm), Gemm("linear_add", down, norm)], rows=(1, 5))
    assert len(report) == len(ops.choices) == 2
    h, x = torch.randn((5, 512), device="cuda"), torch.randn((5, 264), device="cuda").to(BF16)
    want = h.double() + x.double() @ down.weight.double().T
    got = ops.linear_add(x, down, Stream(h.clone())).h
    assert ((got.double() - want).norm() / want.norm()) < 1e-2


def test_autotune_keeps_a_choice_for_every_gemm_that_then_computes_it() -> None:
    from runtime.layers.cuda_ops import CudaOps

    norm = RMSNorm(torch.ones(512, device="cuda", dtype=BF16), 1e-5)
    gemms = []
    for _ in range(2):
        gemms += [Gemm("linear", layer(768, 512), norm), Gemm("linear_add", layer(512, 512), norm)]
        gemms += [Gemm("gate_up", layer(2048, 512), norm), Gemm("linear_add", layer(512, 1024), norm)]
    gemms.append(Gemm("logits", layer(4000, 512), norm))
    timings, down = GemmTimings(H200), gemms[3].linear
    ops = CudaOps(timings)
    untouched = torch.randn((5, 512), device="cuda")
    report = ops.autotune(gemms, rows=(1, 5))
    assert {key[-1] for key in ops.choices} == {1, 8}
    assert len(ops.choices) == len(report) == 10
    again = CudaOps(timings)
    assert again.autotune(gemms, rows=(1, 5)) == report, "models that share timings compute equal GEMMs alike"
    assert again.choices == ops.choices
    want = untouched.double() + (x := torch.randn((5, 1024), device="cuda").to(BF16)).double() @ down.weight.double().T
    got = ops.linear_add(x, down, Stream(untouched.clone())).h
    assert ((got.double() - want).norm() / want.norm()) < 1e-5
    other = layer(320, 512)  # the layer of a draft, which was not timed
    assert CudaOps(GemmTimings(H200)).choice("linear", other, 20) is not None
    assert ops.choice("linear", other, 5) is not None
    assert ops.choice("linear", other, 20) is None, "other numbers of rows wait for no compiler"


def test_a_partial_sum_is_reduced_before_it_is_added_and_defers_no_norm() -> None:
    from runtime.layers.cuda_ops import CudaOps

    class Two:
        rank, size, fused = 0, 2, None

        def all_reduce(self, out: torch.Tensor) -> torch.Tensor:
            return out + 1

        def agree(self, value):
            return value

    weight, x, h = (torch.randn(shape, device="cuda") for shape in ((512, 256), (5, 256), (5, 512)))
    linear = Linear(Storage(weight.to(BF16)), None, DENSE, Partition.ROW, Two())
    norm = RMSNorm(torch.ones(512, device="cuda", dtype=BF16), 1e-5)
    stream = CudaOps(GemmTimings(H200)).linear_add(x.to(BF16), linear, Stream(h.clone()), norm)
    assert stream.deferred is None
    want = h.double() + x.to(BF16).double() @ linear.weight.double().T + 1
    assert ((stream.h.double() - want).norm() / want.norm()) < 1e-2
