"""MXFP4 and int4 experts by WGMMA with weights converted in registers, compared with their definition."""

from __future__ import annotations

import pytest
import torch

from gpu.moe_layers import masks, routed
from gpu.test_grouped_gemm import Layer as AnyLayer
from gpu.test_grouped_gemm import with_counts, worst
from runtime.config.expert_tuning import WIDENED_TILES
from runtime.layers.moe.kernels.gated_act import CLAMPED_SWIGLU, GELU_TANH, SILU
from runtime.layers.moe.router import Routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EXPERTS, TOP_K, ROUNDING = 12, 4, 1e-2
SIZES = {
    "mxfp4": [(512, 384), (2880, 192), (64, 2880), (448, 704), (2880, 1472)],
    "int4": [(512, 384), (2944, 256), (128, 2944), (384, 640), (2048, 1408), (7168, 128)],
    "int4-32": [(512, 384), (64, 960), (448, 704), (2048, 1536)],
}
"""Hidden and inner sizes: whole stages and tiles of weights; half stages; fewer columns than a stage; partial tiles; long rows."""
CASES = [(name, size) for name, sizes in SIZES.items() for size in sizes]
PAIRS, SOME_PAIRS = tuple(WIDENED_TILES["mxfp4"]), (16, 80, 160)


class Layer(AnyLayer):
    """A random sparse layer in MXFP4 or int4."""

    def __init__(self, name: str, hidden: int, inner: int, experts: int = EXPERTS, act: int = SILU) -> None:
        super().__init__(name, hidden, inner, experts, CLAMPED_SWIGLU if name == "mxfp4" else act)


@pytest.mark.parametrize("rows", [1, 16, 63, 300, 1100])
@pytest.mark.parametrize(("name", "size"), CASES, ids=str)
def test_every_tile_matches_the_definition(name: str, size: tuple[int, int], rows: int) -> None:
    layer = Layer(name, *size)
    for hot in (None, TOP_K, TOP_K + 1):  # all experts have some tokens; few experts have all or most tokens
        routing, x = routed(rows, EXPERTS, TOP_K, hot), layer.x(rows)
        want = layer.want(x, routing)
        for pairs in PAIRS if size == SIZES[name][0] else SOME_PAIRS:
            for pdl in (False, True):
                assert worst(layer.run_widened(x, routing, pairs, pdl=pdl), want) < ROUNDING, (pairs, hot, pdl)


COUNTS = (
    [48] * 6,
    [0, 1, 0, 32, 33, 0],
    [31, 47, 48, 49, 96, 0],
    [127, 128, 129, 95, 96, 97],
    [0, 0, 0, 1500, 0, 0],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 1],
)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "int4"])
def test_any_counts_of_pairs_match_the_definition(name: str, counts: list[int]) -> None:
    layer, tokens = Layer(name, 512, 384, experts=len(counts)), sum(counts) + 5
    routing, x = with_counts(counts, tokens), layer.x(tokens)
    want = layer.want(x, routing)
    for pairs in SOME_PAIRS:
        out = layer.run_widened(x, routing, pairs)
        assert (out[routing.ids[:, 0] == len(counts)] == 0).all(), pairs
        if sum(counts):
            assert worst(out, want) < ROUNDING, pairs


@pytest.mark.parametrize("name", ["mxfp4", "int4"])
def test_experts_of_other_ranks_are_left_out(name: str) -> None:
    layer, rows, first = Layer(name, 512, 384), 200, 5
    ids = torch.rand((rows, EXPERTS + 2 * first), device="cuda").argsort(dim=1)[:, :TOP_K].to(torch.int32)
    routing = Routing(ids, torch.rand((rows, TOP_K), device="cuda"), masks(ids, EXPERTS + 2 * first))
    x = layer.x(rows)
    for pairs in SOME_PAIRS:
        assert worst(layer.run_widened(x, routing, pairs, first=first), layer.want(x, routing, first)) < ROUNDING, pairs


@pytest.mark.parametrize("pairs", SOME_PAIRS)
def test_scales_of_any_size_are_applied(pairs: int) -> None:
    layer, rows = Layer("mxfp4", 512, 384), 150
    for weights_, wide in ((layer.gate_up, layer.wide_gate_up), (layer.down, layer.wide_down)):
        assert weights_.scale is not None
        scale = torch.randint(0, 121, weights_.scale.shape, device="cuda", dtype=torch.uint8)
        scale[:, ::3] = torch.randint(100, 121, scale[:, ::3].shape, device="cuda", dtype=torch.uint8)
        wide *= torch.exp2(scale.float() - weights_.scale.float()).repeat_interleave(32, 2)
        weights_.scale.copy_(scale)
    routing, x = routed(rows, EXPERTS, TOP_K), layer.x(rows)
    x[::5] *= 1e4
    x[1::5] *= 1e-6
    assert worst(layer.run_widened(x, routing, pairs), layer.want(x, routing)) < ROUNDING


@pytest.mark.parametrize("act", [SILU, GELU_TANH])
def test_rows_beyond_the_range_of_float16_are_scaled(act: int) -> None:
    layer, rows = Layer("int4-32", 512, 384, act=act), 150
    routing, x = routed(rows, EXPERTS, TOP_K), layer.x(rows)
    x[::3] *= 3e4
    x[1::3] *= 1e-4
    want = layer.want(x, routing)
    assert want.abs().max() > 1e6
    for pairs in SOME_PAIRS:
        assert worst(layer.run_widened(x, routing, pairs), want) < ROUNDING, pairs


@pytest.mark.parametrize(("name", "inner"), [("mxfp4", 192), ("int4-32", 192)])
def test_results_repeat(name: str, inner: int) -> None:
    layer = Layer(name, 2880 if name == "mxfp4" else 960, inner)
    routing, x = routed(500, EXPERTS, TOP_K), layer.x(500)
    for pairs in SOME_PAIRS:
        first = layer.run_widened(x, routing, pairs)
        assert all(torch.equal(layer.run_widened(x, routing, pairs, pdl=True), first) for _ in range(20)), pairs
