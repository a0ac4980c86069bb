"""The grouped WGMMA GEMMs compared with the definition: every config, any counts of pairs, experts with all, some or no tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from gpu.moe_layers import KINDS, expert_pass, masks, reference, relative, routed, weights
from runtime.config.kernel_configs import WgmmaExpertsConfig
from runtime.layers.gemm.quantized_rows import quantize_rows
from runtime.layers.moe.kernels.align import align
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.gated_act import CLAMPED_SWIGLU, GELU_TANH, SILU, GatedAct
from runtime.layers.moe.kernels.grouped_gemm import SCALE_BLOCK, _grouped, _kernel, _Variant, experts_by_wgmma, supports
from runtime.layers.moe.kernels.widened_experts import supports as takes_widened
from runtime.layers.moe.kernels.widened_experts import widened_experts
from runtime.layers.moe.router import Routing

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("grouped_gemm"), pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
BF16 = torch.bfloat16
WIDE = WgmmaExpertsConfig()
CUTS = (
    WIDE,
    replace(WIDE, cluster=1),
    WgmmaExpertsConfig(128, 192, 256, 2),
    WgmmaExpertsConfig(192, 192, 192, 2),
    WgmmaExpertsConfig(192, 128, 192, 1),
)
FP8_CUTS = CUTS[:2]
SIZES = ((512, 384), (1032, 200), (136, 72))
"""Hidden and inner sizes: multiples of tiles; not multiples of tiles or stages; less than a tile, with few stages."""
EXPERTS, TOP_K = 12, 4
ROUNDING, FP8_ROUNDING = 1e-2, 7e-2


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the kernels of most tests in parallel."""
    keys = []
    for config, fp8 in (*((config, False) for config in CUTS), *((config, True) for config in FP8_CUTS)):
        for gated, tile in ((True, config.gate_up_tile), (False, config.down_tile)):
            keys += [_Variant(config.rows, tile, config.cluster, BF16, fp8, gated, 0, False, early) for early in (False, True)]

    def one(variant: _Variant) -> None:
        torch.cuda.synchronize()  # gives the thread torch's context
        _kernel(variant)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, keys))


class Layer:
    """A random sparse layer, and the float32 weights that it represents."""

    def __init__(self, name: str, hidden: int, inner: int, experts: int = EXPERTS, act: int = SILU) -> None:
        torch.manual_seed(hidden + inner)
        self.gate_up, self.wide_gate_up = weights(KINDS[name], experts, 2 * inner, hidden)
        self.down, self.wide_down = weights(KINDS[name], experts, hidden, inner)
        self.act, self.hidden = GatedAct(act), hidden

    def x(self, rows: int) -> torch.Tensor:
        """Rows of a tensor whose next rows are NaN."""
        around = torch.full((rows + 4, self.hidden), float("nan"), device="cuda", dtype=BF16)
        return around[:rows].copy_(torch.randn((rows, self.hidden), device="cuda"))

    def want(self, x: torch.Tensor, routing: Routing, first: int = 0) -> torch.Tensor:
        return reference(x, self.wide_gate_up, self.wide_down, (self.gate_up.bias, self.down.bias), routing, self.act, first)

    def run(self, x: torch.Tensor, routing: Routing, config: WgmmaExpertsConfig, **options: object) -> torch.Tensor:
        assert supports(x, self.gate_up, self.down, config)
        out = torch.full((len(x) + 1, self.hidden), float("nan"), device="cuda")
        experts_by_wgmma(expert_pass(self, x, routing, out[: len(x)], **options), config)
        assert out[len(x)].isnan().all(), f"{config} writes past its rows"
        return out[: len(x)]

    def run_widened(self, x: torch.Tensor, routing: Routing, pairs: int, **options: object) -> torch.Tensor:
        """By the GEMMs that convert weights in registers, in tiles of `pairs`."""
        assert takes_widened(x, self.gate_up, self.down, self.act, pairs)
        out = torch.full((len(x) + 1, self.hidden), float("nan"), device="cuda")
        widened_experts(expert_pass(self, x, routing, out[: len(x)], **options), pairs)
        assert out[len(x)].isnan().all(), f"tiles of {pairs} pairs write past their rows"
        return out[: len(x)]


def worst(out: torch.Tensor, want: torch.Tensor) -> float:
    """The largest relative error of a row that is not zero; NaN fails any comparison."""
    norm = want.norm(dim=1)
    assert (out[norm == 0] == 0).all()
    return float(((out.double() - want).norm(dim=1) / norm)[norm > 0].max())


def with_counts(counts: list[int], tokens: int) -> Routing:
    """Routing with one expert per token and `counts` tokens per expert; the experts of further tokens are on another rank."""
    ids = torch.full((tokens, 1), len(counts), dtype=torch.int32)
    ids[: sum(counts), 0] = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)], dtype=torch.int32)
    ids = ids[torch.randperm(tokens)].cuda()
    return Routing(ids, torch.rand((tokens, 1), device="cuda"), masks(ids, len(counts) + 1))


@pytest.mark.parametrize("rows", [1, 63, 300, 1100])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_cut_matches_the_definition(size: tuple[int, int], rows: int) -> None:
    layer = Layer("dense", *size)
    for hot in (None, TOP_K, TOP_K + 1):  # all experts have some tokens; few experts have all or most tokens
        routing, x = routed(rows, EXPERTS, TOP_K, hot), layer.x(rows)
        want = layer.want(x, routing)
        for config in CUTS:
            assert worst(layer.run(x, routing, config), want) < ROUNDING, (config, hot)
            assert worst(layer.run(x, routing, config, pdl=True), want) < ROUNDING, (config, hot)


COUNTS = (
    [128] * 6,
    [0, 1, 0, 64, 65, 0],
    [127, 129, 191, 192, 193, 0],
    [255, 256, 257, 383, 384, 385],
    [0, 0, 0, 1500, 0, 0],
    [900, 3, 0, 0, 0, 640],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 1],
)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_any_counts_of_pairs_match_the_definition(counts: list[int]) -> None:
    layer, tokens = Layer("dense", 512, 384, experts=len(counts)), sum(counts) + 5
    routing, x = with_counts(counts, tokens), layer.x(tokens)
    want = layer.want(x, routing)
    for config in CUTS:
        out = layer.run(x, routing, config)
        assert (out[routing.ids[:, 0] == len(counts)] == 0).all(), config
        if sum(counts):
            assert worst(out, want) < ROUNDING, config


@pytest.mark.parametrize("name", ["dense", "fp8-block"])
def test_experts_of_other_ranks_are_left_out(name: str) -> None:
    layer, rows, first = Layer(name, 512, 384), 700, 5
    ids = torch.rand((rows, EXPERTS + 2 * first), device="cuda").argsort(dim=1)[:, :TOP_K].to(torch.int32)
    routing = Routing(ids, torch.rand((rows, TOP_K), device="cuda"), masks(ids, EXPERTS + 2 * first))
    x = layer.x(rows)
    want = layer.want(x, routing, first)
    for config in CUTS if name == "dense" else FP8_CUTS:
        assert worst(layer.run(x, routing, config, first=first), want) < (ROUNDING if name == "dense" else 2 * FP8_ROUNDING), config


@pytest.mark.parametrize("act", [SILU, CLAMPED_SWIGLU, GELU_TANH])
def test_biases_and_activations_match_the_definition(act: int) -> None:
    for hidden, inner in SIZES:
        layer = Layer("dense-bias", hidden, inner, act=act)
        routing, x = routed(500, EXPERTS, TOP_K), layer.x(500)
        want = layer.want(x, routing)
        for config in (CUTS[0], CUTS[3]):
            assert worst(layer.run(x, routing, config), want) < ROUNDING, (config, hidden)


@pytest.mark.parametrize("rows", [1, 300, 1100])
@pytest.mark.parametrize("size", [(512, 384), (640, 256), (1024, 128), (2048, 768)], ids=str)
def test_e4m3_rows_match_the_definition(size: tuple[int, int], rows: int) -> None:
    layer = Layer("fp8-block", *size)
    for hot in (None, TOP_K + 1):
        routing, x = routed(rows, EXPERTS, TOP_K, hot), layer.x(rows)
        want = layer.want(x, routing)
        for config in FP8_CUTS:
            out = layer.run(x, routing, config, pdl=True)
            assert relative(out, want) < FP8_ROUNDING, (config, hot)
            assert worst(out, want) < 2 * FP8_ROUNDING, (config, hot)


@pytest.mark.parametrize("rows", [1, 300])
def test_rows_between_the_gemms_have_a_scale_for_128_columns(rows: int) -> None:
    inner, layer = 384, Layer("fp8-block", 512, 384)
    routing = routed(rows, EXPERTS, TOP_K)
    x = layer.x(rows)
    experts = expert_pass(layer, x, routing, torch.empty_like(x))
    values, scales = quantize_rows(x)
    wide = values.double() * scales.double()
    for config in FP8_CUTS:
        aligned = align(routing.ids, 0, EXPERTS, config.rows)
        places = aligned.tiles * config.rows
        h = torch.empty((places, inner), dtype=torch.float8_e4m3fn, device="cuda")
        h_scale = torch.full((inner // SCALE_BLOCK, places), float("nan"), device="cuda")
        _grouped(experts, config, aligned, values, scales, h, h_scale, gated=True)
        place = (aligned.pairs[: int(aligned.used) * config.rows] < rows * TOP_K).nonzero().flatten()
        pair = aligned.pairs[place].long()
        expert, sums = routing.ids.flatten()[pair], torch.empty((len(pair), 2 * inner), dtype=torch.float64, device="cuda")
        for e in range(EXPERTS):
            sums[expert == e] = wide[pair[expert == e] // TOP_K] @ layer.wide_gate_up[e].double().T
        gate, up = sums.chunk(2, dim=1)
        want = (torch.nn.functional.silu(gate) * up).view(len(pair), -1, SCALE_BLOCK)
        scale = h_scale.t()[place].double()[:, :, None]
        largest = want.abs().amax(2, keepdim=True)
        assert ((scale * 448 - largest).abs() <= 0.01 * largest).all(), config
        off = (h[place].double().view_as(want) * scale - want).abs()  # half a step of e4m3 is at most 1/16 of a value
        assert (off <= want.abs() / 15 + largest / 200).all(), config


def test_a_layer_of_half_precision_matches_the_definition() -> None:
    layer = Layer("dense", 512, 384)
    halves = [ExpertWeights(w.weight.to(torch.float16)) for w in (layer.gate_up, layer.down)]
    layer.gate_up, layer.down = halves
    layer.wide_gate_up, layer.wide_down = (w.weight.float() for w in halves)
    routing, x = routed(500, EXPERTS, TOP_K), layer.x(500).to(torch.float16)
    assert worst(layer.run(x, routing, WIDE), layer.want(x, routing)) < ROUNDING


def test_weights_without_a_kernel_are_refused() -> None:
    fp8, rows, packed = Layer("fp8-block", 512, 384), Layer("fp8-row", 512, 384), Layer("mxfp4", 512, 384)
    x = fp8.x(8)
    assert not supports(x, fp8.gate_up, fp8.down, CUTS[3]), "192 pairs leave no registers for sums of a block of scales"
    assert not supports(x, rows.gate_up, rows.down, WIDE)
    assert not supports(x, packed.gate_up, packed.down, WIDE)
    assert not supports(x.to(torch.float16), Layer("dense", 512, 384).gate_up, Layer("dense", 512, 384).down, WIDE)


@pytest.mark.parametrize("name", ["dense", "fp8-block"])
def test_one_graph_serves_every_routing(name: str) -> None:
    layer, rows, config = Layer(name, 1024, 384), 900, WIDE
    x, out = layer.x(rows), torch.empty((rows, 1024), device="cuda")
    routing = routed(rows, EXPERTS, TOP_K)
    experts_by_wgmma(expert_pass(layer, x, routing, out, pdl=True), config)  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            experts_by_wgmma(expert_pass(layer, x, routing, out, pdl=True), config)
    for hot in (None, TOP_K, TOP_K + 2, None):
        other = routed(rows, EXPERTS, TOP_K, hot)
        for to, source in zip((routing.ids, routing.weights, routing.masks), (other.ids, other.weights, other.masks), strict=True):
            to.copy_(source)
        want = layer.run(x, routing, config)
        assert relative(want, layer.want(x, routing)) < (ROUNDING if name == "dense" else FP8_ROUNDING)
        for _ in range(5):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want), hot


def test_a_token_depends_on_no_other() -> None:
    layer, rows = Layer("dense", 1024, 384), 700
    routing, x = routed(rows, EXPERTS, TOP_K), layer.x(rows)
    for config in CUTS:
        first = layer.run(x, routing, config)[123].clone()
        others = torch.full_like(x, float("nan"))
        others[123] = x[123]
        assert torch.equal(layer.run(others, routing, config)[123], first), config
