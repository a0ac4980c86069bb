"""The WGMMA GEMM with tilings of every kind: its results, and that it writes nothing else."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from runtime.config.device_tuning import H200
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.gemm import GemmOp
from runtime.layers.gemm.tilings import wgmma_configs
from runtime.layers.gemm.wgmma_gemm import WgmmaConfig, _kernel, _Variant, supports, wgmma_gemm
from runtime.layers.kernels.argmax_kernel import argmax_chunks

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("wgmma_gemm"), pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
ROWS = (1, 3, 8, 33, 64, 65, 128)
N, K = 1072, 2088  # neither is a multiple of a tile, of a box or of a part of one
WHOLE = [*(WgmmaConfig(tile) for tile in (16, 48, 224, 256)), WgmmaConfig(48, cluster_n=2)]
SUMS = [WgmmaConfig(8), *WHOLE, WgmmaConfig(120)]
IN_PARTS = [WgmmaConfig(*cut) for cut in ((16, 2), (64, 2), (96, 3), (256, 8))]
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile most of the kernels that the tests need, in parallel."""
    keys = []
    for rows, config in itertools.product((64, 128), [*SUMS, *IN_PARTS]):
        for pdl in (False, True):
            keys += [(config, _Variant(rows, "ADD", BF16, True, pdl)), (config, _Variant(rows, "NARROW", BF16, True, pdl))]
        keys += [
            (config, _Variant(rows, "ADD", BF16, False, True, deferred=True)),
            (config, _Variant(rows, "NARROW", BF16, True, True, scale=True)),
        ]
        if config in WHOLE:
            keys += [(config, _Variant(rows, "SILU", BF16, True, True, scale=scale)) for scale in (False, True)]
            keys += [(config, _Variant(rows, "FLOAT", BF16, False, True, argmax=True, store=store)) for store in (False, True)]
            keys += [(config, _Variant(rows, "FLOAT", BF16, False, False))]

    def one(key: tuple[WgmmaConfig, _Variant]) -> None:
        torch.cuda.synchronize()  # gives the thread torch's context
        _kernel(*key)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, keys))


def matrices(rows: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = (torch.randn((n, K), device="cuda").mul_(K**-0.25).to(dtype) for n in (rows, N))
    return x, weight


def tile_argmax(
    x: torch.Tensor, weight: torch.Tensor, config: WgmmaConfig, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    partial = torch.empty((2, len(x), config.parts(len(weight))), dtype=torch.int32, device="cuda")
    wgmma_gemm(x, weight, out, config, Epilogue(argmax=partial), pdl=pdl)
    return partial


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_every_tiling_computes_the_same_gemm(rows: int, pdl: bool) -> None:
    x, weight = matrices(rows)
    assert supports(weight, silu=True)
    bias = torch.randn(N, device="cuda").to(BF16)
    want = x.double() @ weight.double().T
    for config in [*SUMS, *IN_PARTS]:
        h = torch.full((rows + 1, N), 3.0, device="cuda")
        wgmma_gemm(x, weight, h[:rows], config, Epilogue(bias=bias, add=True), pdl=pdl)
        assert off(h[:rows], want + bias.double() + 3.0) < 1e-5, config
        assert (h[rows] == 3.0).all(), f"{config} writes past its rows"
        narrow = torch.full((rows + 1, N), float("nan"), device="cuda", dtype=BF16)
        wgmma_gemm(x, weight, narrow[:rows], config, Epilogue(bias=bias), pdl=pdl)
        assert off(narrow[:rows], want + bias.double()) < 5e-3, config
        assert narrow[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize("rows", ROWS)
def test_gates_and_ups_meet(rows: int) -> None:
    x, weight = matrices(rows)
    bias = torch.randn(N, device="cuda").to(BF16)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    for config in WHOLE:
        out = torch.full((rows + 1, N // 2), float("nan"), device="cuda", dtype=BF16)
        wgmma_gemm(x, weight, out[:rows], config, Epilogue(bias=bias, silu=True), pdl=True)
        assert off(out[:rows], want) < 5e-3, config
        assert out[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize("rows", ROWS)
def test_an_add_prepares_the_deferred_norm(rows: int) -> None:
    x, weight = matrices(rows)
    gain = torch.randn(N, device="cuda").to(BF16)
    for config in [*SUMS, *IN_PARTS]:
        h = torch.full((rows, N), 3.0, device="cuda")
        plain = wgmma_gemm(x, weight, h.clone(), config, Epilogue(add=True))
        scaled = torch.full((rows + 1, N), float("nan"), device="cuda", dtype=BF16)
        squares = torch.full((rows + 1, config.parts(N)), float("nan"), device="cuda")
        wgmma_gemm(x, weight, h, config, Epilogue(add=True, deferred=DeferredNorm(gain, scaled[:rows], squares[:rows])), pdl=True)
        assert torch.equal(h, plain), config
        assert torch.equal(scaled[:rows], (h * gain).to(BF16)), config
        assert off(squares[:rows].double().sum(1), (h.double() ** 2).sum(1)) < 1e-6, config
        assert scaled[rows].isnan().all(), f"{config} writes past its rows"
        assert squares[rows].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize("count", [1, 6, 64, 200])
@pytest.mark.parametrize("rows", ROWS)
def test_a_deferred_norm_divides_rows_by_their_root_mean_square(rows: int, count: int) -> None:
    x, weight = matrices(rows)
    bias, squares = torch.randn(N, device="cuda").to(BF16), torch.rand((rows, count), device="cuda") * 50
    scale = (squares.double().sum(1, keepdim=True) / K + 1e-5).rsqrt()
    want = x.double() @ weight.double().T * scale + bias.double()
    for config in [*SUMS, *IN_PARTS]:
        out = torch.full((rows, N), float("nan"), device="cuda", dtype=BF16)
        wgmma_gemm(x, weight, out, config, Epilogue(bias=bias, scale=RowScale(squares, 1e-5)), pdl=True)
        assert off(out, want) < 5e-3, config
    gate, up = want.chunk(2, dim=1)
    for config in WHOLE:
        half = torch.full((rows, N // 2), float("nan"), device="cuda", dtype=BF16)
        wgmma_gemm(x, weight, half, config, Epilogue(bias=bias, silu=True, scale=RowScale(squares, 1e-5)), pdl=True)
        assert off(half, torch.nn.functional.silu(gate) * up) < 5e-3, config


@pytest.mark.parametrize("rows", ROWS)
def test_the_argmax_of_each_row_is_that_of_the_stored_logits(rows: int) -> None:
    x, weight = matrices(rows)
    weight[700] = weight[500]  # equal logits in different tiles: the first one must win
    weight[500:].mul_(4)
    for config in WHOLE:
        logits = torch.full((rows + 1, N), float("nan"), device="cuda")
        stored = tile_argmax(x, weight, config, out=logits[:rows], pdl=True)
        alone = tile_argmax(x, weight, config, pdl=True)
        assert torch.equal(stored, alone), config
        assert torch.equal(logits[:rows], wgmma_gemm(x, weight, torch.empty_like(logits[:rows]), config)), config
        assert logits[rows].isnan().all(), f"{config} writes past its rows"
        got = argmax_chunks(stored, torch.empty(rows, dtype=torch.int64, device="cuda"), True)
        assert torch.equal(got, logits[:rows].argmax(dim=1)), config


def test_the_argmax_orders_infinities_zeros_and_nan_as_torch_does() -> None:
    weight = torch.eye(64, device="cuda", dtype=BF16)
    special = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0]
    x = torch.full((len(special), 64), -2.0, device="cuda", dtype=BF16)
    for row, value in enumerate(special):  # times the identity, a row stays itself if no other entry is infinite or NaN
        x[row, 40] = value
    logits = torch.empty((len(special), 64), device="cuda")
    partial = tile_argmax(x, weight, WgmmaConfig(16), out=logits)
    got = argmax_chunks(partial, torch.empty(len(special), dtype=torch.int64, device="cuda"), False)
    assert torch.equal(got, logits.argmax(dim=1))


@pytest.mark.parametrize("config", [*SUMS, *IN_PARTS], ids=str)
def test_a_row_depends_on_no_other(config: WgmmaConfig) -> None:
    x, weight = matrices(64)
    alone = wgmma_gemm(x[7:8], weight, torch.empty((1, N), device="cuda", dtype=BF16), config)
    x[:7], x[8:] = float("nan"), float("inf")
    among = wgmma_gemm(x, weight, torch.empty((64, N), device="cuda", dtype=BF16), config)
    assert torch.equal(among[7:8], alone)


def test_half_precision_and_weights_of_several_waves() -> None:
    x = torch.randn((40, 192), device="cuda", dtype=torch.float16)
    weight = torch.randn((16 * 700, 192), device="cuda", dtype=torch.float16)
    out = wgmma_gemm(x, weight, torch.empty((40, 16 * 700), device="cuda"), WgmmaConfig(16), pdl=True)
    assert off(out, x.double() @ weight.double().T) < 1e-5


def test_replays_of_a_captured_chain_follow_their_inputs() -> None:
    x, weight = matrices(5)
    square = torch.randn((K, N), device="cuda").mul_(N**-0.5).to(BF16)
    static, middle, out = torch.empty_like(x), torch.empty((5, N), device="cuda", dtype=BF16), torch.empty((5, K), device="cuda")

    def chain() -> None:
        wgmma_gemm(static, weight, middle, WgmmaConfig(64, 2), pdl=True)
        wgmma_gemm(middle, square, out, WgmmaConfig(48), pdl=True)

    static.copy_(x)
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            chain()
    for _ in range(3):
        static.copy_(torch.randn_like(x))
        graph.replay()
        want = (static.double() @ weight.double().T).to(BF16).double() @ square.double().T
        assert off(out, want) < 5e-3


@pytest.mark.parametrize("op", ["linear", "linear_add", "gate_up", "logits"])
@pytest.mark.parametrize("weight_rows", [576, 960, 3072, 4096, 6144, 28672, 49152, 128256, 151936])
@pytest.mark.parametrize("num_sms", [78, 114, 132])
def test_the_tilings_offered_are_valid(op: GemmOp, weight_rows: int, num_sms: int) -> None:
    for config in wgmma_configs(op, 128, weight_rows, num_sms, H200):
        assert 0 < config.tile <= 256
        assert config.tile % (16 if op == "gate_up" else 8 * config.split) == 0
        programs = -(-weight_rows // config.tile) * config.split
        assert op in ("gate_up", "logits") or programs <= num_sms, "a program more than there are multiprocessors waits for a whole one"


def test_unsupported_weights_are_refused() -> None:
    good = torch.zeros((64, 64), device="cuda", dtype=BF16)
    assert supports(good)
    for weight in (good.float(), good[:60], good[:, :60].contiguous(), good[:, :32], good.cpu()):
        assert not supports(weight)
    assert not supports(good[:40], silu=True)
