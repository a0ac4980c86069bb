"""The product of few rows at every cut that may be chosen, and the choice among them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from runtime.layers.gemm.deferred_norm import NormAhead, RowScale
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.linear import Linear
from runtime.layers.ops import RMSNorm, Stream
from runtime.models.decoder import DecoderLayer

if TYPE_CHECKING:
    from runtime.layers.gemm.triton_gemm import GemmConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16
ROWS = (3, 16, 64, 128)


def chosen_cuts(rows: int) -> list[GemmConfig]:
    from runtime.layers.gemm.autotune import candidate_configs

    return [*{c for op in ("linear", "linear_add", "gate_up", "logits") for c in candidate_configs(op, rows)}]


def odd_cuts() -> list[GemmConfig]:
    from runtime.layers.gemm.triton_gemm import GemmConfig

    ways = itertools.product(((32, 128, 4, 3), (64, 64, 4, 4)), (False, True), (False, True), (0, 4096), (False, True))
    return [GemmConfig(*cut, swap, tma, prefetch, late) for cut, swap, tma, prefetch, late in ways]


def cuts(rows: int) -> list[GemmConfig]:
    return [*chosen_cuts(rows), *odd_cuts()]


def few_cuts(rows: int) -> list[GemmConfig]:
    """Those that may be chosen, and one of each odd kind."""
    return [*chosen_cuts(rows), *{(c.swap, c.tma): c for c in odd_cuts()}.values()]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_every_cut_gives_the_same_product(rows: int, pdl: bool) -> None:
    from runtime.layers.gemm.triton_gemm import small_gemm

    if pdl and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    N, K = 1000, 2064  # neither is a multiple of a tile
    x, weight = (torch.randn((n, K), device="cuda").to(BF16) for n in (rows, N))
    want = x.double() @ weight.double().T
    gate, up = (want * K**-0.5).chunk(2, dim=1)
    gated, scaled = torch.nn.functional.silu(gate) * up, (x.float() * K**-0.5).to(BF16)
    for config in cuts(rows):
        out = torch.full((rows + 1, N), float("nan"), device="cuda")
        small_gemm(x, weight, out[:rows], config, pdl=pdl)
        assert ((out[:rows].double() - want).norm() / want.norm()) < 1e-5, config
        small_gemm(x, weight, out[:rows], config, Epilogue(add=True), pdl=pdl)
        assert ((out[:rows].double() - 2 * want).norm() / want.norm()) < 1e-5, config
        assert out[rows].isnan().all(), f"{config} writes past its rows"
        half = torch.full((rows + 1, N // 2), float("nan"), device="cuda")
        small_gemm(scaled, weight, half[:rows], config, Epilogue(silu=True), pdl=pdl)
        assert ((half[:rows].double() - gated).norm() / gated.norm()) < 1e-2, config
        assert half[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize(("rows", "N"), zip(ROWS, (1000, 1024, 1024, 1000), strict=True))
def test_every_cut_leaves_what_the_next_norm_needs_beside_the_same_sums(rows: int, N: int) -> None:
    from runtime.layers.gemm.triton_gemm import small_gemm

    K = 528  # no multiple of a tile; nor is the smaller N
    x, weight, gain = (torch.randn(shape, device="cuda").to(BF16) for shape in ((rows, K), (N, K), (N,)))
    before = torch.randn((rows, N), device="cuda") * 30
    for config in few_cuts(rows):
        want = small_gemm(x, weight, before.clone(), config, Epilogue(add=True))
        count = config.parts(N)
        h, squares = (torch.full((rows + 1, n), float("nan"), device="cuda") for n in (N, count))
        scaled = torch.full((rows + 1, N), float("nan"), device="cuda", dtype=BF16)
        h[:rows] = before
        small_gemm(x, weight, h[:rows], config, Epilogue(add=True, ahead=NormAhead(gain, scaled[:rows], squares[:rows])))
        assert torch.equal(h[:rows], want), f"{config} adds otherwise where a norm follows"
        assert torch.equal(scaled[:rows], (want * gain.float()).to(BF16)), config
        exact = torch.nn.functional.pad(want.double().square(), (0, count * config.block_n - N)).reshape(rows, count, -1).sum(2)
        torch.testing.assert_close(squares[:rows].double(), exact, rtol=1e-5, atol=0, msg=str(config))
        for written in (h, scaled, squares):
            assert written[rows].isnan().all(), f"{config} writes past its rows"


def test_squares_of_another_cut_are_refused() -> None:
    from runtime.layers.gemm.triton_gemm import GemmConfig, small_gemm

    x, weight = torch.zeros((3, 64), device="cuda", dtype=BF16), torch.zeros((96, 64), device="cuda", dtype=BF16)
    h, ahead = torch.zeros((3, 96), device="cuda"), NormAhead(weight[0], torch.empty_like(x), torch.zeros((3, 3), device="cuda"))
    with pytest.raises(AssertionError):
        small_gemm(x, weight, h, GemmConfig(32, 64, 4, 3), Epilogue(add=True, ahead=ahead))
    ahead = NormAhead(torch.zeros(96, device="cuda", dtype=BF16), h.to(BF16), torch.zeros((3, 6), device="cuda"))
    with pytest.raises(AssertionError, match="squares are 3 x 3, not of"):
        small_gemm(x, weight, h, GemmConfig(32, 64, 4, 3), Epilogue(add=True, ahead=ahead))


@pytest.mark.parametrize(("rows", "count"), zip(ROWS, (43, 1, 344, 12), strict=True))
def test_every_cut_and_epilogue_norms_the_rows_of_what_was_left_ahead(rows: int, count: int) -> None:
    from runtime.layers.gemm.triton_gemm import small_gemm

    N, K, eps = 1000, 2064, 0.25  # neither is a multiple of a tile
    h = torch.randn((rows, K), device="cuda") * torch.linspace(0.1, 9, rows, device="cuda")[:, None]
    gain, bias = (torch.randn(n, device="cuda").to(BF16) for n in (K, N))
    weight = (torch.randn((N, K), device="cuda") * K**-0.5).to(BF16)
    x = (h * gain.float()).to(BF16)
    squares = torch.full((rows + 1, count), float("inf"), device="cuda")  # what is past the rows is not read, or not used
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

    for config in few_cuts(rows):
        out = small_gemm(x, weight, old.clone(), config, Epilogue(add=True, scale=scale))
        assert near(out, want + old.double()), config
        half = small_gemm(x, weight, torch.empty((rows, N // 2), device="cuda"), config, Epilogue(bias=bias, silu=True, scale=scale))
        assert near(half, gated), config
        out = small_gemm(x, weight, torch.empty((rows, N), device="cuda"), config, Epilogue(bias=bias, scale=scale))
        assert near(out, biased), config


@pytest.mark.parametrize("count", [5, 16, 86, 344])
def test_rows_are_scaled_alike_in_any_company(count: int) -> None:
    from runtime.layers.gemm.triton_gemm import GemmConfig, small_gemm

    K = 2064
    h = torch.randn((128, K), device="cuda")
    weight, squares = torch.eye(64, K, device="cuda").to(BF16), h[:, :count].square().contiguous()
    for config in (GemmConfig(32, 128, 4, 3), GemmConfig(64, 64, 4, 4, swap=True)):

        def product(first: int, last: int, config: GemmConfig = config) -> torch.Tensor:
            out = torch.empty((last - first, 64), device="cuda")
            return small_gemm(h[first:last].to(BF16), weight, out, config, Epilogue(scale=RowScale(squares[first:last].contiguous(), 1e-5)))

        whole = product(0, 128)
        for first, last in ((0, 3), (2, 18), (60, 124), (127, 128)):
            assert torch.equal(product(first, last), whole[first:last]), f"{config}: rows {first} to {last} of {count} sums"


@pytest.mark.parametrize("rows", [3, 64])
def test_a_chain_that_starts_early_waits_for_what_is_left_ahead(rows: int) -> None:
    from runtime.layers.gemm.triton_gemm import GemmConfig, small_gemm

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    K = 1024
    down, up = ((torch.randn((n * K, K), device="cuda") * K**-0.5).to(BF16) for n in (1, 2))
    gain, x, h = (torch.randn(shape, device="cuda").to(BF16) for shape in ((K,), (rows, K), (rows, K)))
    for config in (GemmConfig(16, 256, 2, 6), GemmConfig(64, 128, 4, 4, swap=True), GemmConfig(32, 128, 4, 3, late=True)):

        def chain(pdl: bool, config: GemmConfig = config) -> torch.Tensor:
            stream, act = h.float(), x
            for _ in range(10):
                ahead = NormAhead(gain, torch.empty_like(x), torch.empty((rows, config.parts(K)), device="cuda"))
                small_gemm(act, down, stream, config, Epilogue(add=True, ahead=ahead), pdl=pdl)
                scale = RowScale(ahead.squares, 1e-5)
                act = small_gemm(ahead.scaled, up, torch.empty_like(x), config, Epilogue(silu=True, scale=scale), pdl=pdl)
            return act

        want = chain(pdl=False)
        assert want.isfinite().all()
        assert all(torch.equal(chain(pdl=True), want) for _ in range(10)), config


def test_preparing_with_timing_keeps_a_choice_for_every_product_that_then_computes_it() -> None:
    from runtime.layers.cuda_ops import CudaOps

    def layer(out: int, width: int) -> Linear:
        return Linear((torch.randn((out, width), device="cuda") * width**-0.5).to(BF16))

    norm = RMSNorm(torch.ones(512, device="cuda", dtype=BF16), 1e-5)
    blocks = [DecoderLayer(norm, layer(768, 512), None, None, layer(512, 512), norm, layer(2048, 512), layer(512, 1024)) for _ in range(2)]
    head, ops = layer(4000, 512), CudaOps()
    untouched = torch.randn((5, 512), device="cuda")
    report = ops.prepare(blocks, head, rows=(1, 5), timed=True)
    assert {key[3] for key in ops.choices} == {1, 8}
    assert len(ops.choices) == len(report) == 10
    again = CudaOps()
    assert again.prepare(blocks, head, rows=(1, 5), timed=True) == report, "another model in this process computes equal products alike"
    assert again.choices == ops.choices
    want = untouched.double() + (x := torch.randn((5, 1024), device="cuda").to(BF16)).double() @ blocks[0].down_proj.weight.double().T
    got = ops.linear_add(x, blocks[0].down_proj, Stream(untouched.clone())).h
    assert ((got.double() - want).norm() / want.norm()) < 1e-5
    other = layer(320, 512)  # a draft's, which was not timed
    assert CudaOps()._choice("linear", other, 20) is not None
    assert ops._choice("linear", other, 5) is not None
    assert ops._choice("linear", other, 20) is None, "other numbers of rows wait for no compiler"
