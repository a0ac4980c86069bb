"""The experts' CUDA C++ kernels for few tokens, emulated on the CPU, against their definition."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from emulated import COMPILER, emulated, guarded
from gpu import moe_layers
from gpu.moe_layers import KINDS, expert_pass, reference, relative, routed, weights
from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.moe.definition import route
from runtime.layers.moe.kernels import down_sums, fragment_rows, pair_sums, route_few, widened_rows
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.gated_act import CLAMPED_SWIGLU, GELU_TANH, SILU, GatedAct
from runtime.layers.moe.router import Router, Routing, RoutingRule

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
BF16 = torch.bfloat16
EXPERTS, TOP_K, HIDDEN, INNER, INT4_INNER = 6, 2, 128, 160, 384
SMS = 8
ROUNDING = 1e-2


@pytest.fixture(scope="module", autouse=True)
def on_cpu(programs: Path) -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as patch,
        emulated(programs, [down_sums, fragment_rows, pair_sums, route_few, widened_rows], SMS),
    ):
        patch.setattr(moe_layers, "DEVICE", torch.device("cpu"))
        patch.setattr(moe_layers, "DTYPE", BF16)
        yield


def copied(own: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(None if part is None else guarded(part) for part in (own.weight, own.scale, own.bias)))


class Layer:
    def __init__(self, name: str, hidden: int = HIDDEN) -> None:
        torch.manual_seed(len(name))
        kind = KINDS[name]
        inner = INT4_INNER if kind.format == "int4" else INNER
        self.act = GatedAct(CLAMPED_SWIGLU if kind.format == "mxfp4" else GELU_TANH if kind.bias else SILU)
        (gate_up, self.wide_gate_up), (down, self.wide_down) = (
            weights(kind, EXPERTS, 2 * inner, hidden),
            weights(kind, EXPERTS, hidden, inner),
        )
        self.gate_up, self.down = copied(gate_up), copied(down)

    def want(self, x: torch.Tensor, routing: Any, first: int = 0) -> torch.Tensor:
        return reference(x, self.wide_gate_up, self.wide_down, (self.gate_up.bias, self.down.bias), routing, self.act, first)


@pytest.mark.parametrize(
    ("name", "rows", "sums"),  # all pairs; `sums`: in the second GEMM
    [
        (name, rows, (i + j) % 2 == 1)
        for i, name in enumerate(("dense-bias", "fp8-row", "mxfp4", "int4-32", "int4"))
        for j, rows in enumerate((1, 8))
    ],
)
def test_experts_follow_their_definition(monkeypatch: pytest.MonkeyPatch, name: str, rows: int, sums: bool) -> None:
    monkeypatch.setattr(fragment_rows, "sums_are_faster", lambda *_: sums)
    layer, x = Layer(name), guarded(torch.randn((rows, HIDDEN)).to(BF16))
    for hot in (None, TOP_K + 1):  # most experts have no tokens, or few experts have all tokens
        routing = routed(rows, EXPERTS, TOP_K, hot)
        want, out = layer.want(x, routing), torch.full((rows + 1, HIDDEN), float("nan"))
        fragment_rows.experts_by_fragments(expert_pass(layer, x, routing, out[:rows], pdl=True))
        assert relative(out[:rows], want) < ROUNDING, hot
        assert out[rows].isnan().all()
        deferred = DeferredNorm(torch.rand(HIDDEN).to(BF16), torch.empty((rows, HIDDEN), dtype=BF16), torch.empty((rows, HIDDEN // 16)))
        h = torch.randn((rows, HIDDEN))
        before = h.clone()
        fragment_rows.experts_by_fragments(expert_pass(layer, x, routing, h), add=True, deferred=deferred)
        assert relative(h - before, want) < ROUNDING, hot
        assert torch.equal(deferred.scaled, (h * deferred.gain.float()).to(BF16))
        torch.testing.assert_close(deferred.squares, h.square().view(rows, -1, 16).sum(2), rtol=1e-5, atol=0)


UNITS = {"many units": 1, "one or two units": SMS, "one unit or none": 23}
"""The number of multiprocessors for which a block takes so many units of the shared expert."""


@pytest.mark.parametrize(
    ("name", "rows", "hidden", "units"),
    [
        (name, *size, list(UNITS)[(i + j) % 3])
        for i, name in enumerate(("dense", "fp8-row", "mxfp4", "int4"))
        for j, size in enumerate(((1, HIDDEN), (4, 9 * HIDDEN), (8, HIDDEN)))  # all pairs
    ],
)
def test_units_of_a_shared_expert_come_first(monkeypatch: pytest.MonkeyPatch, name: str, rows: int, hidden: int, units: str) -> None:
    """Blocks copy their units of the shared expert before they know the routing."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=UNITS[units]))
    layer, x = Layer(name, hidden), guarded(torch.randn((rows, hidden)).to(BF16))
    for hot in (None, TOP_K):
        routing = routed(rows, EXPERTS, TOP_K, hot, shared=1)
        out, plain = torch.full((rows + 1, hidden), float("nan")), torch.empty((rows, hidden))
        fragment_rows.experts_by_fragments(expert_pass(layer, x, routing, out[:rows], pdl=True, shared=True))
        assert relative(out[:rows], layer.want(x, routing)) < ROUNDING, hot
        assert out[rows].isnan().all()
        fragment_rows.experts_by_fragments(expert_pass(layer, x, routing, plain))
        assert torch.equal(out[:rows], plain), "the order of units changes no sum of a unit"


def test_units_of_several_tiles_take_all_tokens_of_an_expert() -> None:
    for name in ("dense", "mxfp4", "int4"):
        layer, x = Layer(name), guarded(torch.randn((40, HIDDEN)).to(BF16))
        routing, out = routed(40, EXPERTS, TOP_K), torch.full((40, HIDDEN), float("nan"))
        fragment_rows.experts_by_fragments(expert_pass(layer, x, routing, out))
        assert relative(out, layer.want(x, routing)) < ROUNDING, name


def test_int4_weights_whose_groups_lanes_cannot_copy_are_left_to_triton() -> None:
    for columns, taken in ((96, False), (128, True), (160, False), (384, True)):
        own = copied(weights(KINDS["int4-32"], 2, 32, columns)[0])
        assert fragment_rows._readable(own, 1) is taken, columns
        assert own.scale is not None
        shifted = torch.empty(own.scale.numel() + 2, dtype=torch.float16)[2:].view(own.scale.shape)
        assert not fragment_rows._readable(replace(own, scale=shifted), 1), "scales in the middle of 16 bytes"
    wide = torch.zeros((2, 32, 1, 2), dtype=torch.float16)  # groups of 256 columns
    assert not fragment_rows._readable(ExpertWeights(torch.zeros((2, 32, 128), dtype=torch.uint8), wide), 1)


def test_experts_of_other_ranks_are_left_out() -> None:
    layer, x, routing = Layer("fp8-row"), guarded(torch.randn((4, HIDDEN)).to(BF16)), routed(4, EXPERTS + 4, TOP_K)
    out = torch.full((4, HIDDEN), float("nan"))
    fragment_rows.experts_by_fragments(expert_pass(layer, x, routing, out, first=4))
    want = layer.want(x, routing, 4)
    assert float((out.double() - want).norm() / want.norm()) < ROUNDING


def test_two_blocks_share_three_tiles_of_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragment_rows, "sums_are_faster", lambda *_: True)
    hidden = 48 * SMS // 2
    assert down_sums.best_cut(hidden, SMS).blocks == 2
    layer, x, routing = Layer("fp8-row", hidden), guarded(torch.randn((2, hidden)).to(BF16)), routed(2, EXPERTS, TOP_K)
    out = torch.full((2, hidden), float("nan"))
    fragment_rows.experts_by_fragments(expert_pass(layer, x, routing, out))
    assert relative(out, layer.want(x, routing)) < ROUNDING


@pytest.mark.parametrize(
    ("experts", "hidden", "rule"),
    [
        (8, 512, RoutingRule(2, "topk_softmax", False)),
        (40, 272, RoutingRule(4, "softmax", True)),
        (64, 256, RoutingRule(4, "sigmoid", True, 1.8, shared=1)),
    ],
    ids=["columns shared by blocks", "columns in part", "a block for each 16 experts"],
)
@pytest.mark.parametrize("rows", [1, 9])
def test_routing_follows_its_definition(experts: int, hidden: int, rule: RoutingRule, rows: int) -> None:
    torch.manual_seed(experts)
    x, weight = guarded(torch.randn((rows, hidden)).to(BF16)), guarded(torch.randn((experts, hidden)).to(BF16))
    bias = torch.randn(experts).to(BF16) if rule.scoring == "topk_softmax" else None
    correction = torch.rand(experts) if rule.scoring == "sigmoid" else None
    router, shape = Router(weight, rule, bias, correction), (rows, rule.chosen)
    words = -(-(experts + rule.shared) // 32)
    ids, masks = torch.full(shape, -1, dtype=torch.int32), torch.zeros((rows, words), dtype=torch.int32)
    found, want = route_few.route_few(x, router, Routing(ids, torch.empty(shape), masks)), route(x, router)
    assert torch.equal(found.ids, want.ids)
    assert torch.equal(found.masks, want.masks)
    torch.testing.assert_close(found.weights, want.weights, rtol=1e-4, atol=1e-6)


class Tiles(ctypes.Structure):
    """`Tiles` in `grouped_parts.cu`."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("pairs", "experts", "places", "used"))


@pytest.mark.parametrize("width", [64, 2880, 3136])  # some lanes without columns; a part of the last round; more than a warp holds
def test_rows_of_sorted_pairs_are_those_of_their_tokens_in_float16(width: int) -> None:
    tile_rows, used, top_k = 16, 3, 2
    counts, undefined = [16, 1, 5], 1 << 30
    x = torch.randn((11, width)).to(BF16) * torch.logspace(-30, 30, 11).to(BF16)[:, None]
    pairs = torch.full((used + 2, tile_rows), undefined, dtype=torch.int32)
    mixed = torch.randperm(len(x) * top_k).to(torch.int32).split(counts)
    for tile, own in enumerate(mixed):
        pairs[tile, : len(own)] = own
    places = torch.full((used + 2, 2), undefined, dtype=torch.int32)
    places[:used, 1] = torch.tensor(counts)
    own = [guarded(part) for part in (pairs, places, torch.tensor([used], dtype=torch.int32))]
    argument = Tiles(own[0].data_ptr(), 0, own[1].data_ptr(), own[2].data_ptr())
    aligned: Any = SimpleNamespace(tiles=used + 2, rows=tile_rows, argument=argument)
    rows, factors = widened_rows.prepare_rows(guarded(x), aligned, top_k, pdl=True)
    order = torch.arange(width).view(-1, 8, 2).transpose(1, 2).flatten()  # even columns of each 16, then odd ones
    for tile, sorted_pairs in enumerate(mixed):
        at = tile * tile_rows + torch.arange(len(sorted_pairs))
        want = x[sorted_pairs.long() // top_k][:, order].double()
        assert torch.equal(rows[at].double() * factors[at, None].double(), want)
    # The same for rows that are sorted already: those between the GEMMs.
    between = torch.randn((used * tile_rows, width)).to(BF16)
    rows, factors = widened_rows.prepare_rows(guarded(between), aligned, 0, pdl=True)
    for tile, count in enumerate(counts):
        at = slice(tile * tile_rows, tile * tile_rows + count)
        assert torch.equal(rows[at].double() * factors[at, None].double(), between[at].double())
