"""The kernels of sparse MLPs against their definition: every format, few and many tokens, even and uneven routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu.moe_layers import DEVICE, DTYPE, INTERPRETED, KINDS, Kind, expert_pass, masks, reference, relative, routed, weights
from runtime.config.expert_tuning import H200_EXPERTS, WeightFormat
from runtime.config.kernel_configs import GroupedConfig, StepConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
HIDDEN, INNER, EXPERTS, TOP_K = (256, 128, 6, 2) if INTERPRETED else (512, 384, 40, 4)
ROUNDING = 2e-3 if INTERPRETED else 1e-2
FP8_ROUNDING = 0.2 if INTERPRETED else 7e-2
"""Relative error of e4m3 activations before both GEMMs: at least 4 %. Triton's interpreter rounds e4m3 wrongly below powers of two."""
ROWS = (1, 16) if INTERPRETED else (1, 2, 7, 16, 33, 64)
MANY = (40,) if INTERPRETED else (1, 16, 100, 128, 512)
FEW_CONFIG = StepConfig(32, 64, 2, 2, 3)
MANY_CONFIG = GroupedConfig(16, 64, 64, 4, 3, 2)


def acts() -> dict[str, Any]:
    from runtime.layers.moe.kernels.gated_act import CLAMPED_SWIGLU, GELU_TANH, GatedAct

    return {"silu": GatedAct(), "clamped": GatedAct(CLAMPED_SWIGLU), "gelu": GatedAct(GELU_TANH)}


class Layer:
    """A random sparse layer, and the float32 weights that it represents."""

    def __init__(self, kind: Kind, act: str = "silu", hidden: int = HIDDEN, inner: int = INNER, experts: int = EXPERTS) -> None:
        torch.manual_seed(hidden + inner)
        self.gate_up, self.wide_gate_up = weights(kind, experts, 2 * inner, hidden)
        self.down, self.wide_down = weights(kind, experts, hidden, inner)
        self.act, self.hidden, self.experts = acts()[act], hidden, experts

    def x(self, rows: int) -> torch.Tensor:
        return torch.randn((rows, self.hidden), device=DEVICE).to(DTYPE)

    def want(self, x: torch.Tensor, routing: Any) -> torch.Tensor:
        return reference(x, self.wide_gate_up, self.wide_down, (self.gate_up.bias, self.down.bias), routing, self.act)

    def few(
        self, x: torch.Tensor, routing: Any, configs: tuple[StepConfig, StepConfig], triton: bool = False, **options: Any
    ) -> torch.Tensor:
        from runtime.layers.moe.kernels.few_rows import experts_in_triton
        from runtime.layers.moe.kernels.run_experts import experts_few_rows

        out = torch.full((len(x) + 1, self.hidden), float("nan"), device=DEVICE)
        run = experts_in_triton if triton else experts_few_rows
        run(expert_pass(self, x, routing, out[: len(x)], **options), configs)
        assert out[len(x)].isnan().all(), f"{configs} writes past its rows"
        return out[: len(x)]

    def many(self, x: torch.Tensor, routing: Any, config: GroupedConfig, **options: Any) -> torch.Tensor:
        from runtime.layers.moe.kernels.many_rows import experts_many_rows

        out = torch.full((len(x) + 1, self.hidden), float("nan"), device=DEVICE)
        experts_many_rows(expert_pass(self, x, routing, out[: len(x)], **options), config)
        assert out[len(x)].isnan().all(), f"{config} writes past its rows"
        return out[: len(x)]


def act_of(kind: Kind) -> str:
    return "clamped" if kind.format == "mxfp4" else "gelu" if kind.bias else "silu"


def few_configs(weights: WeightFormat, rows: int) -> list[tuple[StepConfig, StepConfig]]:
    chosen = H200_EXPERTS.few_rows(weights, rows)
    return [(FEW_CONFIG, FEW_CONFIG), *([] if chosen is None or INTERPRETED else [chosen])]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", KINDS)
def test_few_rows_match_the_definition(name: str, rows: int) -> None:
    layer = Layer(KINDS[name], act_of(KINDS[name]))
    for hot in (None, TOP_K + 1):  # most experts have no tokens, or few experts have all tokens
        routing, x = routed(rows, EXPERTS, TOP_K, hot), layer.x(rows)
        want = layer.want(x, routing)
        for configs in few_configs(KINDS[name].format, rows):
            for triton in (False, True):
                assert relative(layer.few(x, routing, configs, triton), want) < ROUNDING, (configs, hot, triton)


@pytest.mark.skipif(INTERPRETED, reason="CUDA C++ needs a GPU")
def test_more_experts_for_a_token_are_left_to_other_kernels() -> None:
    from runtime.layers.moe.kernels.fragment_rows import MOST_TOP_K, supports

    layer = Layer(KINDS["dense"], act_of(KINDS["dense"]), hidden=512, inner=384)
    assert [supports(layer.x(4), layer.gate_up, layer.down, top_k) for top_k in (TOP_K, MOST_TOP_K, MOST_TOP_K + 1)] == [True, True, False]


@pytest.mark.skipif(INTERPRETED, reason="CUDA C++ needs a GPU")
@pytest.mark.parametrize("rows", [4, 65, 256])
@pytest.mark.parametrize("name", KINDS)
def test_units_of_work_take_all_tokens_of_an_expert(name: str, rows: int) -> None:
    from runtime.layers.moe.kernels.fragment_rows import experts_by_fragments, supports

    for hidden, inner in ((512, 384), (KINDS[name].columns(2880), KINDS[name].columns(96))):
        layer = Layer(KINDS[name], act_of(KINDS[name]), hidden=hidden, inner=inner)
        if name == "fp8-half-block":
            assert not supports(layer.x(rows), layer.gate_up, layer.down, TOP_K)
            continue
        for hot in (None, TOP_K + 1):
            routing, x = routed(rows, EXPERTS, TOP_K, hot), layer.x(rows)
            out = torch.full((rows + 1, hidden), float("nan"), device=DEVICE)
            for _ in range(2):
                experts_by_fragments(expert_pass(layer, x, routing, out[:rows]))
                assert relative(out[:rows], layer.want(x, routing)) < ROUNDING, hot
            assert out[rows].isnan().all()


SUM_SHAPES = {
    "dense": ((2048, 768), (2880, 72), (528, 1536)),
    "fp8": ((2048, 768), (2880, 208), (528, 1536)),
    "mxfp4": ((2048, 768), (2880, 288), (96, 2880), (2880, 704), (2880, 320)),
    "int4": ((2048, 768), (3072, 384), (128, 2944)),
}
"""Hidden and inner sizes: whole stages of columns, and rows that end within a stage; one tile per block, and three tiles in two blocks."""


@pytest.mark.skipif(INTERPRETED, reason="CUDA C++ needs a GPU")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("name", ["dense", "dense-bias", "fp8-block", "fp8-row", "mxfp4", "int4", "int4-32"])
def test_sums_over_experts_in_one_kernel_match_the_definition(monkeypatch: pytest.MonkeyPatch, name: str, rows: int) -> None:
    from runtime.layers.moe.kernels import fragment_rows
    from runtime.layers.moe.kernels.down_sums import supports
    from runtime.layers.moe.kernels.fragment_rows import experts_by_fragments

    monkeypatch.setattr(fragment_rows, "sums_are_faster", lambda *_: True)
    for hidden, inner in SUM_SHAPES[KINDS[name].format]:
        layer = Layer(KINDS[name], act_of(KINDS[name]), hidden=hidden, inner=inner)
        assert supports(layer.down, rows, TOP_K) == (name != "int4-32" or rows < 4)  # whose stages have 512 bytes of scales
        if not supports(layer.down, rows, TOP_K):
            continue
        for hot in (None, TOP_K + 1):
            routing, x = routed(rows, EXPERTS, TOP_K, hot), layer.x(rows)
            want = layer.want(x, routing)
            for dtype, pdl in ((DTYPE, False), (torch.float32, False), (torch.float32, True)):
                out = torch.full((rows + 1, hidden), float("nan"), device=DEVICE, dtype=dtype)
                experts_by_fragments(expert_pass(layer, x, routing, out[:rows], pdl=pdl))
                assert relative(out[:rows], want) < ROUNDING, (hidden, inner, hot, dtype, pdl)
                assert out[rows].isnan().all()


def test_columns_are_cut_for_one_wave_of_blocks() -> None:
    from runtime.layers.moe.kernels.down_sums import best_cut

    found = {hidden: best_cut(hidden, 132) for hidden in (528, 2048, 2880, 3072, 4096)}
    assert {hidden: (cut.tiles, cut.blocks) for hidden, cut in found.items()} == {
        528: (1, 1), 2048: (1, 1), 2880: (3, 2), 3072: (3, 2), 4096: (1, 1)
    }  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="only a GPU starts kernels early")
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("name", ["dense", "fp8-block", "mxfp4", "int4"])
def test_sums_over_experts_are_the_same_however_early_they_start(monkeypatch: pytest.MonkeyPatch, name: str, rows: int) -> None:
    from runtime.layers.moe.kernels import fragment_rows
    from runtime.layers.moe.kernels.fragment_rows import experts_by_fragments

    monkeypatch.setattr(fragment_rows, "sums_are_faster", lambda *_: True)
    for hidden, inner in SUM_SHAPES[KINDS[name].format][:2]:
        layer, routing = Layer(KINDS[name], act_of(KINDS[name]), hidden=hidden, inner=inner), routed(rows, EXPERTS, TOP_K)
        inputs = [layer.x(rows) for _ in range(4)]
        late, early = ([torch.full((rows, hidden), float("nan"), device=DEVICE) for _ in inputs] for _ in range(2))
        for pdl, outs in ((False, late), (True, early), (True, early)):
            for x, out in zip(inputs, outs, strict=True):
                experts_by_fragments(expert_pass(layer, x, routing, out, pdl=pdl))
            torch.cuda.synchronize()
            for out, expected in zip(outs, late, strict=True):
                assert torch.equal(out, expected), (hidden, inner, pdl)


@pytest.mark.parametrize("rows", MANY)
@pytest.mark.parametrize("name", KINDS)
def test_many_rows_match_the_definition(name: str, rows: int) -> None:
    layer = Layer(KINDS[name], act_of(KINDS[name]))
    chosen = [] if INTERPRETED else [H200_EXPERTS.many_rows(KINDS[name].format, count) for count in (rows, 8192)]
    for hot in (None, TOP_K + 1):
        routing, x = routed(rows, EXPERTS, TOP_K, hot), layer.x(rows)
        want = layer.want(x, routing)
        for config in (MANY_CONFIG, *chosen):
            assert relative(layer.many(x, routing, config), want) < (FP8_ROUNDING if config.fp8_rows else ROUNDING), (config, hot)


@pytest.mark.skipif(INTERPRETED, reason="only a GPU runs a step of a GEMM while the one before is under way")
@pytest.mark.parametrize("rows", [100, 1000])
@pytest.mark.parametrize("name", KINDS)
def test_long_sums_of_many_rows_are_right_and_the_same_every_time(name: str, rows: int) -> None:
    size = KINDS[name].columns(2880)
    layer = Layer(KINDS[name], act_of(KINDS[name]), hidden=size, inner=size, experts=8)
    routing, x = routed(rows, 8, 4), layer.x(rows)
    config = H200_EXPERTS.many_rows(KINDS[name].format, rows)
    want, out = layer.want(x, routing), layer.many(x, routing, config)
    worst = float((out.double() - want).abs().max() / want.abs().max())
    assert worst < (FP8_ROUNDING if config.fp8_rows else ROUNDING), "a single entry is wrong"
    for _ in range(10):
        assert torch.equal(layer.many(x, routing, config), out)


def test_fp8_rows_match_the_definition() -> None:
    layer, rows = Layer(KINDS["fp8-block"]), 40
    routing, x = routed(rows, EXPERTS, TOP_K), layer.x(rows)
    config = GroupedConfig(16, 64, 128, 4, 3, fp8_rows=True)
    assert relative(layer.many(x, routing, config), layer.want(x, routing)) < FP8_ROUNDING


@pytest.mark.parametrize("hidden", [256, 1040, 2880])
def test_sums_are_added_to_the_stream_and_normed(hidden: int) -> None:
    from runtime.layers.moe.kernels.many_rows import Added, sum_pairs
    from runtime.layers.norm import RMSNorm

    rows, experts, top_k = 5, 8, 2
    routing = routed(rows, experts, top_k, None)
    y, addend = (torch.randn((count, hidden), device=DEVICE).to(DTYPE) for count in (rows * top_k, rows))
    h, norm = torch.randn((rows, hidden), device=DEVICE) * 3, RMSNorm((torch.rand(hidden, device=DEVICE) + 0.5).to(DTYPE), 1e-6)
    for first, held in ((0, experts), (3, 4)):  # all experts, and only those with ids 3 to 6
        own = (routing.ids >= first) & (routing.ids < first + held)
        sums = (y.float().view(rows, top_k, hidden) * own[:, :, None]).sum(1)
        for added in (None, Added(), Added(addend), Added(None, norm), Added(addend, norm)):
            out = torch.full((rows + 1, hidden), float("nan"), device=DEVICE)
            if added is not None:
                out[:rows] = h
            sum_pairs(y, routing, out[:rows], first, held, added=added, pdl=False)
            want = sums if added is None else h + sums + (0 if added.addend is None else addend.float())
            torch.testing.assert_close(out[:rows], want, rtol=1e-5, atol=1e-5)
            assert out[rows].isnan().all(), "writes past its rows"
            if added is not None and added.norm is not None:
                normed = want * torch.rsqrt(want.square().mean(1, keepdim=True) + 1e-6) * norm.weight.float()
                assert added.normed is not None
                torch.testing.assert_close(added.normed.float(), normed, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["dense-bias", "mxfp4", "int4-32"])
def test_shapes_that_no_tile_divides(name: str) -> None:
    layer = Layer(KINDS[name], act_of(KINDS[name]), hidden=288, inner=96, experts=6)
    for rows in (3, 20):
        routing, x = routed(rows, 6, 2), layer.x(rows)
        want = layer.want(x, routing)
        for triton in (False, True):
            assert relative(layer.few(x, routing, (FEW_CONFIG, FEW_CONFIG), triton), want) < ROUNDING, triton
        assert relative(layer.many(x, routing, MANY_CONFIG), want) < ROUNDING


@pytest.mark.parametrize("rows", [3, 9])
@pytest.mark.parametrize("name", ["dense", "fp8-block", "mxfp4", "int4"])
def test_experts_of_other_ranks_are_left_out(name: str, rows: int) -> None:
    from runtime.layers.moe.router import Routing

    layer, first = Layer(KINDS[name]), 3
    ids = torch.rand((rows, EXPERTS + 2 * first), device=DEVICE).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    ids[0] = torch.arange(TOP_K, device=DEVICE) if first >= TOP_K else ids[0]
    routing = Routing(ids, torch.rand((rows, TOP_K), device=DEVICE), masks(ids, EXPERTS + 2 * first))
    x = layer.x(rows)
    want = reference(x, layer.wide_gate_up, layer.wide_down, (layer.gate_up.bias, layer.down.bias), routing, layer.act, first)
    assert relative(layer.few(x, routing, (FEW_CONFIG, FEW_CONFIG), first=first), want) < ROUNDING
    assert relative(layer.many(x, routing, MANY_CONFIG, first=first), want) < ROUNDING
    nothing = Routing(torch.zeros_like(ids), routing.weights, torch.ones_like(routing.masks))
    for out in (layer.few(x, nothing, (FEW_CONFIG, FEW_CONFIG), first=first), layer.many(x, nothing, MANY_CONFIG, first=first)):
        assert (out == 0).all()


@pytest.mark.parametrize("rows", [1, 5] if INTERPRETED else [1, 3, 6, 7, 16, 33, 64])
@pytest.mark.parametrize("name", ["dense", "fp8-block"])
def test_a_shared_expert_is_one_of_each_token(name: str, rows: int) -> None:
    experts = 6 if INTERPRETED else 33
    layer = Layer(KINDS[name], experts=experts)
    routing, x = routed(rows, experts, TOP_K, shared=1), layer.x(rows)
    want = layer.want(x, routing)
    for configs in few_configs(KINDS[name].format, rows):
        for triton in (False, True):
            assert relative(layer.few(x, routing, configs, triton), want) < ROUNDING, (configs, triton)
    assert relative(layer.many(x, routing, MANY_CONFIG), want) < ROUNDING


@pytest.mark.skipif(INTERPRETED, reason="CUDA C++ needs a GPU")
@pytest.mark.parametrize("rows", [1, 2, 4, 6, 8, 9, 16])
@pytest.mark.parametrize("name", ["dense", "fp8-block", "mxfp4", "int4"])
def test_units_of_a_shared_expert_that_come_first_change_no_bit(name: str, rows: int) -> None:
    from runtime.layers.moe.kernels.fragment_rows import experts_by_fragments

    for hidden, inner in ((2048, 1536), (1024, 256)):
        layer = Layer(KINDS[name], act_of(KINDS[name]), experts=17, hidden=hidden, inner=inner)
        inputs = [(layer.x(rows), routed(rows, 17, TOP_K, shared=1)) for _ in range(4)]
        plain, first = ([torch.full((rows, hidden), float("nan"), device=DEVICE) for _ in inputs] for _ in range(2))
        for outs, options in ((plain, {}), (first, {"pdl": True, "shared": True}), (first, {"pdl": True, "shared": True})):
            for (x, routing), out in zip(inputs, outs, strict=True):
                experts_by_fragments(expert_pass(layer, x, routing, out, **options))
            torch.cuda.synchronize()
            for (x, routing), out, expected in zip(inputs, outs, plain, strict=True):
                assert torch.equal(out, expected)
                assert relative(out, layer.want(x, routing)) < ROUNDING


@pytest.mark.parametrize("rows", [1, 5, 8, 9])
@pytest.mark.parametrize("name", ["dense", "dense-bias", "fp8-block", "mxfp4", "int4"])
@pytest.mark.parametrize("config", [FEW_CONFIG, StepConfig(16, 128, 1, 2, 4)], ids=["triton", "fragments"])
def test_few_rows_add_and_prepare_the_deferred_norm(config: StepConfig, name: str, rows: int) -> None:
    from runtime.layers.gemm.deferred_norm import DeferredNorm
    from runtime.layers.moe.kernels.run_experts import experts_few_rows

    layer = Layer(KINDS[name], act_of(KINDS[name]))
    routing, x, h = routed(rows, EXPERTS, TOP_K), layer.x(rows), torch.randn((rows, HIDDEN), device=DEVICE)
    gain = torch.randn(HIDDEN, device=DEVICE).to(DTYPE)
    deferred = DeferredNorm(gain, torch.empty_like(h, dtype=DTYPE), torch.empty((rows, config.parts(HIDDEN)), device=DEVICE))
    want = h + layer.few(x, routing, (config, config), triton=config is FEW_CONFIG)
    experts_few_rows(expert_pass(layer, x, routing, h), (config, config), add=True, deferred=deferred)
    torch.testing.assert_close(h, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(deferred.scaled, (h * gain.float()).to(DTYPE))
    torch.testing.assert_close(deferred.squares.sum(1), h.square().sum(1), rtol=1e-5, atol=0)


RULES = {
    "softmax": (128, ("softmax", True, 1.0, 1, 1), False, False),
    "softmax-raw": (60, ("softmax", False, 1.0, 1, 1), False, False),
    "topk-softmax": (32, ("topk_softmax", False, 1.0, 1, 1), True, False),
    "sigmoid": (64, ("sigmoid", True, 1.8, 1, 1), False, True),
    "grouped": (256, ("sigmoid", True, 2.5, 8, 4), False, True),
    "shared": (64, ("sigmoid", True, 1.8, 1, 1, 1), False, True),
    "shared-raw": (60, ("softmax", False, 1.5, 1, 1, 1), False, False),
    "shared-grouped": (256, ("sigmoid", True, 2.5, 8, 4, 1), False, True),
    "softmax-corrected": (64, ("softmax", True), False, True),
    "softmax-grouped": (160, ("softmax", False, 16.0, 8, 3, 0, 1), False, False),
    "six-groups": (90, ("sigmoid", True, 1.0, 6, 2, 1), False, True),
}


@pytest.mark.parametrize("rows", [1, 5, 70] if INTERPRETED else [1, 5, 16, 64, 65, 1000, 1100])
@pytest.mark.parametrize("name", RULES)
def test_routing_matches_the_definition(name: str, rows: int) -> None:
    from runtime.layers.moe.kernels.route import new_tickets, route
    from runtime.layers.moe.router import Router, RoutingRule

    experts, rule, biased, corrected = RULES[name]
    columns, scoring, tickets = 1040, RoutingRule(8 if experts > 64 else 4, *rule), new_tickets(DEVICE)
    x = torch.randn((rows, columns), device=DEVICE).to(DTYPE)
    weight = (torch.randn((experts, columns), device=DEVICE) * columns**-0.5).to(DTYPE)
    bias = torch.randn(experts, device=DEVICE).to(DTYPE) if biased else None
    correction = torch.rand(experts, device=DEVICE) if corrected else None
    router = Router(weight, scoring, bias, correction)
    found = route(x, router, tickets)
    scores, choice, clear = _scores(x, weight, scoring, bias, correction)
    # The choice is right up to rounding: no omitted expert is clearly better than a chosen one, and the best comes first.
    ids, weights = (tensor[:, : scoring.top_k] for tensor in (found.ids, found.weights))
    taken = choice.gather(1, ids.long())
    kth = choice.sort(dim=1, descending=True).values[:, : scoring.top_k]
    torch.testing.assert_close(taken[clear], kth[clear], rtol=1e-4, atol=1e-5)
    assert clear.float().mean() > 0.98
    want = scores.gather(1, ids.long())
    if scoring.scoring == "topk_softmax":
        want = want.softmax(dim=1)
    elif scoring.renormalize:
        want = want / want.sum(dim=1, keepdim=True)
    torch.testing.assert_close(weights, want * scoring.scaling, rtol=1e-3, atol=1e-5)
    assert found.ids[:, scoring.top_k :].tolist() == [[experts] * scoring.shared] * rows
    assert found.weights[:, scoring.top_k :].tolist() == [[1.0] * scoring.shared] * rows
    assert torch.equal(found.masks, masks(found.ids, experts + scoring.shared))
    assert not tickets.any()
    again = route(x, router, tickets)
    assert torch.equal(again.ids, found.ids)
    assert torch.equal(again.weights, found.weights)


@pytest.mark.parametrize("parts", [1, 64, 128])
@pytest.mark.parametrize("rows", [1, 9, 64, 70])
def test_routing_applies_a_deferred_norm(rows: int, parts: int) -> None:
    from runtime.layers.gemm.deferred_norm import RowScale
    from runtime.layers.moe.kernels.route import new_tickets, route
    from runtime.layers.moe.router import Router, RoutingRule

    experts, columns, rule = 128, 1024, RoutingRule(8, "softmax", True)
    h = torch.randn((rows, columns), device=DEVICE) * 3
    gain = torch.rand(columns, device=DEVICE) + 0.5
    weight = (torch.randn((experts, columns), device=DEVICE) * columns**-0.5).to(DTYPE)
    scaled, squares = (h * gain).to(DTYPE), h.square().view(rows, parts, -1).sum(2)
    normed = torch.full((rows, columns), float("nan"), dtype=DTYPE, device=DEVICE)
    router = Router(weight, rule)
    found = route(scaled, router, new_tickets(DEVICE), norm=RowScale(squares, 1e-6), normed=normed)
    want = scaled.double() * torch.rsqrt(h.double().square().mean(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(normed.double(), want, rtol=1e-2 if DTYPE is torch.bfloat16 else 2e-3, atol=1e-3)
    plain = route(normed, router, new_tickets(DEVICE))
    assert torch.equal(found.ids, plain.ids), "the router reads what the experts read"
    assert torch.equal(found.weights, plain.weights)


def _scores(x, weight, scoring, bias, correction) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, the scores for the choice, and the tokens whose kept groups do not depend on rounding."""
    logits = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()
    scores = {"softmax": lambda: logits.softmax(dim=1), "sigmoid": logits.sigmoid, "topk_softmax": lambda: logits}[scoring.scoring]()
    choice = scores if correction is None else scores + correction
    clear = torch.ones(len(x), dtype=torch.bool, device=x.device)
    if scoring.num_groups > 1:
        grouped = choice.view(len(choice), scoring.num_groups, -1)
        best = grouped.topk(scoring.group_best, dim=2).values.sum(dim=2).sort(dim=1, descending=True)
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best.indices[:, : scoring.top_groups], True)
        choice = grouped.masked_fill(~kept[:, :, None], float("-inf")).view_as(choice)
        last, next_best = best.values[:, scoring.top_groups - 1], best.values[:, scoring.top_groups]
        clear = last - next_best > 1e-4 * last.clamp(max=1.0)
    return scores, choice, clear


def test_equal_logits_go_to_the_smaller_ids() -> None:
    from runtime.layers.moe.kernels.route import new_tickets, route
    from runtime.layers.moe.router import Router, RoutingRule

    x, weight = torch.ones((3, 64), device=DEVICE, dtype=DTYPE), torch.ones((32, 64), device=DEVICE, dtype=DTYPE)
    found = route(x, Router(weight, RoutingRule(4, "softmax", True)), new_tickets(DEVICE))
    assert found.ids.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("rows", [6, 70])
@pytest.mark.parametrize("name", RULES)
def test_tokens_without_finite_scores_have_different_experts(name: str, rows: int) -> None:
    """The kernels of experts support each pair of a token and an expert only once."""
    from runtime.layers.moe import definition
    from runtime.layers.moe.kernels.route import new_tickets, route
    from runtime.layers.moe.router import Router, RoutingRule

    experts, rule, biased, corrected = RULES[name]
    scoring, x = RoutingRule(8 if experts > 64 else 4, *rule), torch.randn((rows, 64), device=DEVICE).to(DTYPE)
    x[1], x[3], x[5] = torch.nan, torch.inf, -torch.inf
    weight = torch.rand((experts, 64), device=DEVICE).to(DTYPE) + 0.5
    bias = torch.randn(experts, device=DEVICE).to(DTYPE) if biased else None
    correction = torch.rand(experts, device=DEVICE) if corrected else None
    router = Router(weight, scoring, bias, correction)
    found, want = route(x, router, new_tickets(DEVICE)), definition.route(x, router)
    assert found.ids[1].tolist() == want.ids[1].tolist() == [*range(scoring.top_k), *[experts] * scoring.shared]
    assert found.ids.min() >= 0
    assert found.ids[:, : scoring.top_k].max() < experts
    assert all(len(set(ids)) == scoring.chosen for ids in found.ids.tolist())
    assert torch.equal(found.masks, masks(found.ids, experts + scoring.shared))
    assert found.weights[1, : scoring.top_k].isnan().all()
    assert found.weights[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("name", KINDS)
def test_tokens_of_nan_leave_the_others_as_they_are(name: str) -> None:
    from runtime.layers.moe.kernels.route import new_tickets, route
    from runtime.layers.moe.router import Router, RoutingRule

    layer = Layer(KINDS[name], act_of(KINDS[name]))
    router, x = torch.randn((EXPERTS, HIDDEN), device=DEVICE).to(DTYPE), layer.x(6)
    x[:4] = torch.nan
    routing = route(x, Router(router, RoutingRule(TOP_K, "softmax", True)), new_tickets(DEVICE))
    want = layer.want(x, routing)[4:]
    few = [layer.few(x, routing, (FEW_CONFIG, FEW_CONFIG), triton) for triton in (False, True)]
    for out in (*few, layer.many(x, routing, MANY_CONFIG)):
        assert out[:4].isnan().all()
        assert relative(out[4:], want) < ROUNDING


@pytest.mark.skipif(INTERPRETED, reason="magnitudes of bfloat16")
@pytest.mark.parametrize("rows", [6, 20])
@pytest.mark.parametrize("name", KINDS)
def test_few_rows_take_tokens_of_any_magnitude(name: str, rows: int) -> None:
    act = act_of(KINDS[name])
    layer, routing = Layer(KINDS[name], act), routed(rows, EXPERTS, TOP_K, TOP_K + 1)
    x = layer.x(rows)
    for row, magnitude in enumerate((3e4, 1e12, 1e-30, 0)):
        x[row] *= magnitude
    x[4, HIDDEN // 2] = torch.nan
    want, out = layer.want(x, routing), layer.few(x, routing, (FEW_CONFIG, FEW_CONFIG))
    good = [row for row in range(rows) if row != 4]
    errors = (out.double() - want).norm(dim=1) - ROUNDING * want.norm(dim=1)
    assert (errors[good] <= 1e-30).all(), errors
    if act != "clamped":  # a clamp replaces NaN by its limit
        assert out[4].isnan().all()


@pytest.mark.skipif(INTERPRETED, reason="CUDA C++ needs a GPU")
@pytest.mark.parametrize("rows", [2, 20])
def test_mxfp4_groups_have_scales_of_any_size(rows: int) -> None:
    from runtime.layers.moe.kernels.fragment_rows import experts_by_fragments

    layer = Layer(KINDS["mxfp4"], "clamped", hidden=288)
    assert layer.gate_up.scale is not None
    steps = torch.randint(-30, 31, layer.gate_up.scale.shape, device=DEVICE)
    steps[:, :, 1] = -120  # nothing remains of such groups
    scale = (layer.gate_up.scale + steps).clamp(1, 128)
    layer.wide_gate_up *= torch.exp2(scale.float() - layer.gate_up.scale).repeat_interleave(32, 2)
    layer.gate_up = replace(layer.gate_up, scale=scale.to(torch.uint8))
    routing, x, out = routed(rows, EXPERTS, TOP_K), layer.x(rows), torch.empty((rows, 288), device=DEVICE)
    experts_by_fragments(expert_pass(layer, x, routing, out))
    assert relative(out, layer.want(x, routing)) < ROUNDING


HOPPER = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
IN_CUDA = pytest.param(True, marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"))
SORTED = [(5, 16, 0, 6), (70, 16, 2, 4), (300, 64, 0, 6), (300, 48, 1, 4)]
MANY_SORTED = [] if INTERPRETED else [(8192, 128, 0, 128), (8192, 192, 40, 30), (2049, 16, 0, 512), (1, 128, 0, 128), (40000, 64, 0, 5)]


@pytest.mark.parametrize("in_cuda", [False, IN_CUDA])
@pytest.mark.parametrize(("tokens", "rows", "first", "own"), SORTED + MANY_SORTED)
def test_pairs_are_sorted_by_expert_in_whole_tiles(tokens: int, rows: int, first: int, own: int, in_cuda: bool) -> None:
    from runtime.layers.moe.kernels.align import align_in_cuda, align_in_triton

    ids = routed(tokens, max(6, first + own), 2).ids
    found, flat = (align_in_cuda if in_cuda else align_in_triton)(ids, first, own, rows), ids.flatten().cpu()
    pairs, experts, in_expert = [], [], []
    for expert in range(first, first + own):
        places = (flat == expert).nonzero().flatten().tolist()
        in_expert += [[tile, len(places) - tile * rows] for tile in range(-(-len(places) // rows))]
        places += [flat.numel()] * (-len(places) % rows)
        pairs += places
        experts += [expert - first] * (len(places) // rows)
    assert found.used.tolist() == [len(experts)]
    assert found.pairs[: len(pairs)].tolist() == pairs
    assert found.experts[: len(experts)].tolist() == experts
    assert found.places[: len(experts)].tolist() == in_expert


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("name", KINDS)
def test_one_graph_serves_every_routing(name: str, rows: int, pdl: bool) -> None:
    from runtime.layers.moe.kernels.route import new_tickets, route
    from runtime.layers.moe.kernels.run_experts import run_experts
    from runtime.layers.moe.router import Router, Routing, RoutingRule

    layer, tickets = Layer(KINDS[name], act_of(KINDS[name])), new_tickets(DEVICE)
    router = Router(torch.randn((EXPERTS, HIDDEN), device=DEVICE).to(DTYPE), RoutingRule(TOP_K, "softmax", True))
    x, out = layer.x(rows), torch.empty((rows, HIDDEN), device=DEVICE)

    def step() -> Routing:
        found = route(x, router, tickets, pdl=pdl)
        run_experts(expert_pass(layer, x, found, out, pdl=pdl), H200_EXPERTS)
        return found

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing = step()
    for spread in (0.0, 1.0, 1.0):  # all tokens equal, then all different
        x.copy_(layer.x(1) + spread * layer.x(rows))
        out.fill_(float("nan"))
        graph.replay()
        first = out.clone()
        assert relative(first, layer.want(x, routing)) < FP8_ROUNDING
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first), "two replays differ"
