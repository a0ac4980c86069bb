"""The WGMMA GEMM for more rows than a block computes: parallel tiles, clusters that share loads, and consecutive tiles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.wgmma_gemm import WIDE_ROWS, WgmmaConfig, _kernel, _Variant, wgmma_gemm
from runtime.layers.kernels.argmax_kernel import argmax_chunks

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("wgmma_gemm"), pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
ROWS = (129, 150, 192, 200, 256, 257, 300, 384, 500, 512, 1000, 2047, 2048)
SIZES = ((1072, 2088), (6160, 328), (144, 72))
"""(N, K). The first two are not multiples of any tile or box. The second has more tiles than the GPU has blocks, the third fewer columns
than the stages hold."""
SHARED_WEIGHTS = [WgmmaConfig(tile, cluster_m=blocks) for tile, blocks in ((256, 2), (224, 2), (240, 3), (96, 2), (64, 4))]
SHARED_ROWS = [WgmmaConfig(tile, cluster_n=blocks) for tile, blocks in ((224, 2), (96, 2), (32, 4))]
WIDE = [WgmmaConfig(112, cluster_n=2, rows=WIDE_ROWS), WgmmaConfig(192, cluster_m=2, rows=WIDE_ROWS), WgmmaConfig(64, rows=WIDE_ROWS)]
WHOLE = [WgmmaConfig(128), *SHARED_WEIGHTS, *SHARED_ROWS, WgmmaConfig(128, cluster_m=2, cluster_n=2), *WIDE]
IN_PARTS = [WgmmaConfig(64, 2), WgmmaConfig(256, 4, 2), WgmmaConfig(128, 2, 2), WgmmaConfig(120, 3), WgmmaConfig(128, 4)]
BF16 = torch.bfloat16
SCALED_BY = (16, 6)
"""Numbers of sums of squares per row: one that is read in fours, and one that is read singly."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the kernels that the tests need, in parallel."""
    keys = []
    for config in [*WHOLE, *IN_PARTS]:
        plain = _Variant(config.rows, "NARROW", BF16, True, True)
        keys += [(config, plain), (config, replace(plain, scale=True)), (config, replace(plain, write="ADD"))]
        keys += [(config, replace(plain, write="ADD", bias=False)), (config, replace(plain, write="ADD", bias=False, deferred=True))]
        if config in WHOLE:
            keys += [(config, replace(plain, write=write, scale=scale)) for write in ("SILU", "GELU") for scale in (False, True)]
            keys += [(config, replace(plain, write="FLOAT", argmax=True, store=store)) for store in (False, True)]
            keys += [(config, replace(plain, write="FLOAT"))]

    def one(key: tuple[WgmmaConfig, _Variant]) -> None:
        torch.cuda.synchronize()  # gives the thread torch's context
        _kernel(*key)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, keys))


class Case:
    """Random x, weight and bias, and their GEMM in float64. The rows after `x` in memory are NaN."""

    def __init__(self, rows: int, size: tuple[int, int]) -> None:
        (self.n, self.k), self.rows = size, rows
        around = torch.full((rows + 2, self.k), float("nan"), device="cuda", dtype=BF16)
        self.x = around[:-2].copy_(torch.randn((rows, self.k), device="cuda") * self.k**-0.25)
        self.weight = (torch.randn(size, device="cuda") * self.k**-0.25).to(BF16)
        self.bias = torch.randn(self.n, device="cuda").to(BF16)
        self.sums = self.x.double() @ self.weight.double().T

    def out(self, columns: int, dtype: torch.dtype = BF16, fill: float = float("nan")) -> torch.Tensor:
        """An output with one additional row, which the GEMM must not write."""
        return torch.full((self.rows + 1, columns), fill, device="cuda", dtype=dtype)

    def run(self, out: torch.Tensor, config: WgmmaConfig, epilogue: Epilogue) -> torch.Tensor:
        """Run the GEMM, check that the last row of `out` is unchanged, and return the others."""
        before = out[self.rows].nan_to_num(7.0)
        wgmma_gemm(self.x, self.weight, out[: self.rows], config, epilogue, pdl=True)
        assert torch.equal(out[self.rows].nan_to_num(7.0), before), f"{config} writes past its rows"
        return out[: self.rows]


@pytest.fixture(params=[(rows, size) for rows in ROWS for size in SIZES], ids=lambda p: f"{p[0]} rows {p[1][0]}x{p[1][1]}")
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(request.param[0])
    return Case(*request.param)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest relative error of a row; NaN fails any comparison."""
    return float(((got.double() - want).norm(dim=1) / want.norm(dim=1)).max())


def test_every_tiling_computes_the_same_gemm(case: Case) -> None:
    want = case.sums + case.bias.double()
    for config in [*WHOLE, *IN_PARTS]:
        added = case.run(case.out(case.n, torch.float32, 3.0), config, Epilogue(bias=case.bias, add=True))
        assert off(added, want + 3.0) < 3e-5, config
        assert off(case.run(case.out(case.n), config, Epilogue(bias=case.bias)), want) < 6e-3, config
    for config in WHOLE:
        floats = case.run(case.out(case.n, torch.float32), config, Epilogue(bias=case.bias))
        assert off(floats, want) < 3e-5, config


def test_gates_and_ups_meet(case: Case) -> None:
    gate, up = (case.sums + case.bias.double()).chunk(2, dim=1)
    for config in WHOLE:
        silu = case.run(case.out(case.n // 2), config, Epilogue(bias=case.bias, silu=True))
        assert off(silu, F.silu(gate) * up) < 6e-3, config
        gelu = case.run(case.out(case.n // 2), config, Epilogue(bias=case.bias, gelu=True))
        assert off(gelu, F.gelu(gate, approximate="tanh") * up) < 6e-3, config


def test_an_add_prepares_the_deferred_norm(case: Case) -> None:
    gain, start = torch.randn(case.n, device="cuda").to(BF16), torch.randn((case.rows, case.n), device="cuda")
    for config in [*WHOLE, *IN_PARTS]:
        plain = start.clone()
        wgmma_gemm(case.x, case.weight, plain, config, Epilogue(add=True), pdl=True)
        h, scaled = case.out(case.n, torch.float32), case.out(case.n)
        h[:-1] = start
        squares = case.out(config.parts(case.n), torch.float32)
        case.run(h, config, Epilogue(add=True, deferred=DeferredNorm(gain, scaled[:-1], squares[:-1])))
        assert torch.equal(h[:-1], plain), config
        assert torch.equal(scaled[:-1], (h[:-1] * gain).to(BF16)), config
        assert off(squares[:-1].double().sum(1, keepdim=True), (h[:-1].double() ** 2).sum(1, keepdim=True)) < 1e-6, config
        assert scaled[-1].isnan().all(), f"{config} writes past its rows"
        assert squares[-1].isnan().all(), f"{config} writes past its rows"


@pytest.mark.parametrize("count", SCALED_BY)
def test_a_deferred_norm_divides_rows_by_their_root_mean_square(case: Case, count: int) -> None:
    squares = torch.rand((case.rows, count), device="cuda") * 50
    scale = (squares.double().sum(1, keepdim=True) / case.k + 1e-5).rsqrt()
    want = case.sums * scale + case.bias.double()
    gate, up = want.chunk(2, dim=1)
    for config in [*WHOLE, *IN_PARTS]:
        epilogue = Epilogue(bias=case.bias, scale=RowScale(squares, 1e-5))
        assert off(case.run(case.out(case.n), config, epilogue), want) < 6e-3, config
        if config in WHOLE:
            assert off(case.run(case.out(case.n // 2), config, replace(epilogue, silu=True)), F.silu(gate) * up) < 6e-3, config


def test_the_argmax_of_each_row_is_that_of_the_stored_logits(case: Case) -> None:
    case.weight[case.n // 2] = case.weight[case.n // 3]  # equal logits: the first one must win
    for config in WHOLE:
        shape = (2, case.rows, config.parts(case.n))
        stored, alone = (torch.full(shape, -7, dtype=torch.int32, device="cuda") for _ in range(2))
        logits = case.run(case.out(case.n, torch.float32), config, Epilogue(bias=case.bias, argmax=stored))
        wgmma_gemm(case.x, case.weight, None, config, Epilogue(bias=case.bias, argmax=alone), pdl=True)
        assert torch.equal(stored, alone), config
        assert torch.equal(logits, case.run(case.out(case.n, torch.float32), config, Epilogue(bias=case.bias))), config
        got = argmax_chunks(stored, torch.empty(case.rows, dtype=torch.int64, device="cuda"), True)
        assert torch.equal(got, logits.argmax(dim=1)), config


@pytest.mark.parametrize("config", [*WHOLE, *IN_PARTS], ids=str)
def test_a_row_depends_on_no_other(config: WgmmaConfig) -> None:
    case = Case(300, SIZES[0])
    first = case.run(case.out(case.n), config, Epilogue(bias=case.bias)).clone()
    kept = case.x[140].clone()
    case.x.fill_(float("nan"))
    case.x[140] = kept
    assert torch.equal(case.run(case.out(case.n), config, Epilogue(bias=case.bias))[140], first[140])


@pytest.mark.parametrize("rows", [192, 256, 300, 2048])
def test_early_launches_in_a_graph_change_no_bit_of_a_chain(rows: int) -> None:
    hidden, middle = 1024, 2048
    gain = (torch.rand(hidden, device="cuda") + 0.5).to(BF16)
    layers = [
        [(torch.randn(shape, device="cuda") * shape[1] ** -0.5).to(BF16) for shape in ((2 * middle, hidden), (hidden, middle))]
        for _ in range(6)
    ]
    start = torch.randn((rows, hidden), device="cuda")
    squares_of_start = start.square().sum(1, keepdim=True)

    def chain(down: WgmmaConfig, up: WgmmaConfig, pdl: bool) -> torch.Tensor:
        h, scaled, squares = start.clone(), (start * gain).to(BF16), squares_of_start
        for gate_up_weight, down_weight in layers:
            gated = torch.empty((rows, middle), device="cuda", dtype=BF16)
            wgmma_gemm(scaled, gate_up_weight, gated, up, Epilogue(silu=True, scale=RowScale(squares, 1e-5)), pdl=pdl)
            scaled, squares = torch.empty_like(scaled), torch.empty((rows, down.parts(hidden)), device="cuda")
            wgmma_gemm(gated, down_weight, h, down, Epilogue(add=True, deferred=DeferredNorm(gain, scaled, squares)), pdl=pdl)
        return h

    def reference() -> torch.Tensor:
        h = start.double()
        for gate_up_weight, down_weight in layers:
            x = h * gain.double() * (h.square().mean(1, keepdim=True) + 1e-5).rsqrt()
            gate, up = (x @ gate_up_weight.double().T).chunk(2, dim=1)
            h = h + (F.silu(gate) * up) @ down_weight.double().T
        return h

    pairs = (WHOLE[2], WHOLE[3]), (IN_PARTS[1], WHOLE[1]), (IN_PARTS[4], WHOLE[5]), (WHOLE[4], WHOLE[0]), SHARED_ROWS[1::-1], WIDE[2::-2]
    for down, up in pairs:
        want = chain(down, up, False)
        assert off(want, reference()) < 2e-2, (down, up)
        chain(down, up, True)  # compile
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(down, up, True)
        for _ in range(10):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want), (down, up)
