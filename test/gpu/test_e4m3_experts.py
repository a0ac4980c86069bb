"""e4m3 experts by WGMMA with weights converted in registers, compared with their definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gpu.moe_layers import Kind, expert_pass, masks, routed, weights
from gpu.test_grouped_gemm import HOPPER, with_counts, worst
from gpu.test_grouped_gemm import Layer as AnyLayer
from runtime.config.device_tuning import H200
from runtime.layers.moe.kernels.gated_act import CLAMPED_SWIGLU, GELU_TANH, SILU, GatedAct
from runtime.layers.moe.kernels.run_experts import run_experts
from runtime.layers.moe.kernels.widened_experts import TILES
from runtime.layers.moe.router import Routing

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("e4m3_experts"), pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
EXPERTS, TOP_K, ROUNDING = 12, 4, 1e-2
SIZES = [(512, 384), (2048, 192), (64, 2880), (448, 704)]
"""Hidden and inner sizes: whole stages and tiles of weights; half a stage; fewer columns than a stage; partial tiles and blocks."""
PAIRS = list(TILES["fp8"])
BLOCKS = Kind("fp8", (128, 128))


class Layer(AnyLayer):
    """A random sparse layer in e4m3."""

    def __init__(self, hidden: int, inner: int, experts: int = EXPERTS, act: int = SILU, kind: Kind = BLOCKS) -> None:
        torch.manual_seed(hidden + inner)
        self.gate_up, self.wide_gate_up = weights(kind, experts, 2 * inner, hidden)
        self.down, self.wide_down = weights(kind, experts, hidden, inner)
        self.act, self.hidden = GatedAct(act), hidden


@pytest.mark.parametrize("rows", [1, 16, 65, 300, 1024])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_tile_matches_the_definition(size: tuple[int, int], rows: int) -> None:
    layer = Layer(*size)
    for hot in (None, TOP_K, TOP_K + 1):  # all experts have some tokens; few experts have all or most tokens
        routing, x = routed(rows, EXPERTS, TOP_K, hot), layer.x(rows)
        want = layer.want(x, routing)
        for pairs in PAIRS:
            for pdl in (False, True):
                assert worst(layer.run_widened(x, routing, pairs, pdl=pdl), want) < ROUNDING, (pairs, hot, pdl)


COUNTS = (
    [32] * 6,
    [0, 1, 0, 16, 17, 0],
    [15, 31, 32, 33, 64, 0],
    [47, 48, 49, 95, 96, 97],
    [30, 48, 50, 159, 160, 161],
    [0, 0, 0, 1500, 0, 0],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 1],
)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_any_counts_of_pairs_match_the_definition(counts: list[int]) -> None:
    layer, tokens = Layer(512, 384, experts=len(counts)), sum(counts) + 5
    routing, x = with_counts(counts, tokens), layer.x(tokens)
    want = layer.want(x, routing)
    for pairs in PAIRS:
        out = layer.run_widened(x, routing, pairs)
        assert (out[routing.ids[:, 0] == len(counts)] == 0).all(), pairs
        if sum(counts):
            assert worst(out, want) < ROUNDING, pairs


@pytest.mark.parametrize(
    "size",
    [(2048, 768, 128), (3072, 768, 256), (7168, 256, 256)],
    ids=["qwen3-30b-a3b", "minimax-m2.5-tp2", "deepseek-v3-tp8"],
)
def test_layers_of_public_models_match_the_definition(size: tuple[int, int, int]) -> None:
    hidden, inner, experts = size
    layer = Layer(hidden, inner, experts)
    for rows in (65, 256):
        routing, x = routed(rows, experts, 8), layer.x(rows)
        want = layer.want(x, routing)
        for pairs in PAIRS:
            assert worst(layer.run_widened(x, routing, pairs, pdl=True), want) < ROUNDING, (pairs, rows)


@pytest.mark.parametrize("block", [(64, 128), (1 << 12, 1 << 12)], ids=str)
def test_other_blocks_of_scales_match_the_definition(block: tuple[int, int]) -> None:
    layer = Layer(512, 192, kind=Kind("fp8", block))
    routing, x = routed(150, EXPERTS, TOP_K), layer.x(150)
    for pairs in PAIRS:
        assert worst(layer.run_widened(x, routing, pairs), layer.want(x, routing)) < ROUNDING, pairs


@pytest.mark.parametrize("act", [SILU, CLAMPED_SWIGLU, GELU_TANH])
def test_biases_and_activations_match_the_definition(act: int) -> None:
    layer = Layer(512, 384, act=act, kind=Kind("fp8", (128, 128), bias=True))
    routing, x = routed(150, EXPERTS, TOP_K), layer.x(150)
    for pairs in PAIRS:
        assert worst(layer.run_widened(x, routing, pairs), layer.want(x, routing)) < ROUNDING, pairs


def test_experts_of_other_ranks_are_left_out() -> None:
    layer, rows, first = Layer(512, 384), 200, 5
    ids = torch.rand((rows, EXPERTS + 2 * first), device="cuda").argsort(dim=1)[:, :TOP_K].to(torch.int32)
    routing = Routing(ids, torch.rand((rows, TOP_K), device="cuda"), masks(ids, EXPERTS + 2 * first))
    x = layer.x(rows)
    for pairs in PAIRS:
        assert worst(layer.run_widened(x, routing, pairs, first=first), layer.want(x, routing, first)) < ROUNDING, pairs


@pytest.mark.parametrize("pairs", PAIRS)
def test_scales_and_rows_of_any_size_are_applied(pairs: int) -> None:
    layer, rows = Layer(512, 384), 150
    for weights_, wide in ((layer.gate_up, layer.wide_gate_up), (layer.down, layer.wide_down)):
        assert weights_.scale is not None
        factor = torch.exp2(torch.randint(-20, 5, weights_.scale.shape, device="cuda").float())
        factor[:, ::3] = 0.0
        wide *= factor.repeat_interleave(128, 1).repeat_interleave(128, 2)
        weights_.scale.mul_(factor)
    routing, x = routed(rows, EXPERTS, TOP_K), layer.x(rows)
    x[::5] *= 1e4  # values between the GEMMs exceed the range of float16
    x[1::5] *= 1e-6
    out, want = layer.run_widened(x, routing, pairs), layer.want(x, routing)
    assert out[::5].abs().max() > 1e5
    assert worst(out, want) < ROUNDING


def test_codes_of_every_size_are_exact() -> None:
    layer, rows = Layer(512, 384), 100
    for weights_, wide in ((layer.gate_up, layer.wide_gate_up), (layer.down, layer.wide_down)):
        codes = torch.randint(256, weights_.weight.shape, device="cuda", dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        codes[:, :, ::2] &= 0x87  # subnormal numbers
        assert weights_.scale is not None
        scale = torch.full_like(weights_.scale, 2.0**-10)
        weights_.weight.view(torch.uint8).copy_(codes)
        weights_.scale.copy_(scale)
        wide.copy_(weights_.weight.float() * 2.0**-10)
    routing, x = routed(rows, EXPERTS, TOP_K), layer.x(rows)
    x[:, 1::2] = 0  # only subnormal numbers in the first GEMM
    for pairs in PAIRS:
        assert worst(layer.run_widened(x, routing, pairs), layer.want(x, routing)) < ROUNDING, pairs


def test_results_repeat() -> None:
    layer = Layer(2048, 768)
    routing, x = routed(500, EXPERTS, TOP_K), layer.x(500)
    for pairs in PAIRS:
        first = layer.run_widened(x, routing, pairs)
        assert all(torch.equal(layer.run_widened(x, routing, pairs, pdl=True), first) for _ in range(20)), pairs


@pytest.mark.parametrize("kind", [BLOCKS, Kind("fp8"), Kind("fp8", (64, 32))], ids=str)
def test_every_layout_of_scales_has_a_kernel(kind: Kind) -> None:
    layer = Layer(512, 384, kind=kind)
    for rows in (65, 300, 1024):
        routing, x = routed(rows, EXPERTS, TOP_K), layer.x(rows)
        out = torch.empty((rows, 512), device="cuda")
        run_experts(expert_pass(layer, x, routing, out), H200.without_fp8_activations().experts)
        assert worst(out, layer.want(x, routing)) < 2 * ROUNDING, rows
