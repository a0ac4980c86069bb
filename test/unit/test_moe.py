"""Routing and experts follow their definitions, and stacked weights are filled from every layout and shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.distributed.parallel_group import ALONE, Shard
from runtime.errors import ConfigError
from runtime.layers.activation import Activation, gated
from runtime.layers.moe.definition import masks_of, route, run_experts, sigmoid
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.router import Router, Routing, RoutingRule
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.scheme import Storage
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.weight_loader import safetensors_weights
from runtime.models import checkpoint_parts
from runtime.models.context import ModelContext
from runtime.models.expert_weights import ExpertNames, ExpertPlacement, stacked_weights
from runtime.models.file_tensor import FileTensor
from runtime.models.weights import WeightTable

E, HIDDEN, INNER = 8, 16, 24
CPU = torch.device("cpu")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_router(scoring: Any, correction: bool = False, bias: bool = False, **rule: Any) -> Router:
    defaults: dict[str, Any] = {"top_k": 3, "scoring": scoring, "renormalize": True}
    return Router(
        rand(E, HIDDEN, seed=1),
        RoutingRule(**{**defaults, **rule}),
        rand(E, seed=2) if bias else None,
        rand(E, seed=3) if correction else None,
    )


def slow_route(x: torch.Tensor, router: Router) -> tuple[list[int], list[float]]:
    """One token, by Python's sums and sorts."""
    rule = router.rule
    logits = [float(x @ row) + (0.0 if router.bias is None else float(router.bias[e])) for e, row in enumerate(router.weight)]
    exps = [torch.tensor(v).exp().item() for v in logits]
    scores = {"softmax": [v / sum(exps) for v in exps], "sigmoid": [v / (1 + v) for v in exps], "topk_softmax": logits}[rule.scoring]
    choice = [s + (0.0 if router.correction_bias is None else float(router.correction_bias[e])) for e, s in enumerate(scores)]
    width = E // rule.num_groups
    groups = [sorted(choice[g * width : (g + 1) * width], reverse=True) for g in range(rule.num_groups)]
    best = sorted(range(rule.num_groups), key=lambda g: -sum(groups[g][: rule.group_best]))[: rule.top_groups]
    allowed = [e for e in range(E) if rule.num_groups == 1 or e // width in best]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: rule.top_k]
    weights = [exps[e] if rule.scoring == "topk_softmax" else scores[e] for e in ids]
    total = sum(weights) if rule.renormalize or rule.scoring == "topk_softmax" else 1.0
    return ids + [E] * rule.shared, [w / total * rule.scaling for w in weights] + [1.0] * rule.shared


@pytest.mark.parametrize(
    "router",
    [
        make_router("softmax"),
        make_router("softmax", renormalize=False),
        make_router("sigmoid", correction=True, scaling=2.5),
        make_router("sigmoid", correction=True, num_groups=4, top_groups=2, renormalize=False),
        make_router("softmax", num_groups=4, top_groups=2, group_best=1, renormalize=False, scaling=16.0),
        make_router("softmax", correction=True),
        make_router("topk_softmax", bias=True, top_k=4),
        make_router("softmax", top_k=1),
        make_router("sigmoid", correction=True, scaling=2.5, shared=1),
        make_router("softmax", top_k=E),
    ],
)
def test_routing_follows_its_definition(router: Router) -> None:
    x = rand(20, HIDDEN, seed=4)
    routing = route(x, router)
    assert (routing.ids.dtype, routing.weights.dtype) == (torch.int32, torch.float32)
    for token, ids, weights, mask in zip(x, routing.ids.tolist(), routing.weights, routing.masks.tolist(), strict=True):
        want_ids, want_weights = slow_route(token, router)
        assert ids == want_ids
        assert mask == [sum(1 << e for e in ids)]
        torch.testing.assert_close(weights, torch.tensor(want_weights), rtol=1e-5, atol=1e-6)


def test_a_sigmoid_does_not_depend_on_its_place() -> None:
    x = torch.randn(640, generator=torch.Generator().manual_seed(0)) * 4
    alone = torch.cat([sigmoid(one) for one in x.split(1)])
    for count in (2, 31, 33, 640):
        assert torch.equal(sigmoid(x[:count]), alone[:count]), count
    torch.testing.assert_close(alone, x.sigmoid())


def test_of_equal_experts_the_smaller_id_is_chosen() -> None:
    router = Router(torch.zeros(E, HIDDEN), RoutingRule(3, "softmax", True))
    assert route(rand(2, HIDDEN), router).ids.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_shared_expert_follows_the_chosen_ones() -> None:
    kept = torch.zeros((2, 3), dtype=torch.int32)
    routing = route(rand(2, HIDDEN), Router(torch.zeros(64, HIDDEN), RoutingRule(3, "softmax", True, 1.5, shared=1), kept=kept))
    assert routing.ids.tolist() == [[0, 1, 2, 64]] * 2
    torch.testing.assert_close(routing.weights, torch.tensor([[0.5, 0.5, 0.5, 1.0]] * 2))
    assert routing.masks.tolist() == kept.tolist() == [[7, 0, 1]] * 2


def test_masks_use_all_32_bits_of_a_word() -> None:
    ids = torch.tensor([[0, 31, 32], [63, 64, 5]], dtype=torch.int32)
    masks = masks_of(ids, 70)
    assert masks.dtype == torch.int32
    assert (masks.to(torch.int64) & 0xFFFFFFFF).tolist() == [[1 + (1 << 31), 1, 0], [1 << 5, 1 << 31, 1]]


def test_a_correction_bias_changes_the_choice_and_not_the_weights() -> None:
    router = make_router("sigmoid", renormalize=False)
    wanted = dataclasses.replace(router, correction_bias=torch.tensor([9.0, 8.0, 7.0, *[0.0] * (E - 3)]))
    x = rand(1, HIDDEN, seed=5)
    routing = route(x, wanted)
    assert routing.ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(routing.weights, torch.sigmoid(x @ router.weight[:3].T))


def make_experts(bias: bool = False, activation: Activation = Activation.SILU, dtype: torch.dtype = torch.float32) -> Experts:
    return Experts(
        gate_up=Storage(rand(E, 2 * INNER, HIDDEN, seed=6).to(dtype)),
        down=Storage(rand(E, HIDDEN, INNER, seed=7).to(dtype)),
        gate_up_bias=rand(E, 2 * INNER, seed=8).to(dtype) if bias else None,
        down_bias=rand(E, HIDDEN, seed=9).to(dtype) if bias else None,
        count=E,
        total=E,
        size=(HIDDEN, INNER),
        activation=activation,
    )


def slow_experts(x: torch.Tensor, experts: Experts, routing: Routing) -> torch.Tensor:
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for t, (ids, weights) in enumerate(zip(routing.ids.tolist(), routing.weights.double(), strict=True)):
        for e, weight in zip(ids, weights, strict=True):
            inner = experts.gate_up.weight[e].double() @ x[t].double()
            inner = inner if experts.gate_up_bias is None else inner + experts.gate_up_bias[e].double()
            result = experts.down.weight[e].double() @ gated(experts.activation, inner[None])[0]
            out[t] += weight * (result if experts.down_bias is None else result + experts.down_bias[e].double())
    return out.float()


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_follow_their_definition(tokens: int, bias: bool) -> None:
    x, experts = rand(tokens, HIDDEN, seed=10), make_experts(bias)
    routing = route(x, make_router("softmax"))
    torch.testing.assert_close(run_experts(x, experts, routing), slow_experts(x, experts, routing), rtol=1e-4, atol=1e-3)


def part_of(experts: Experts, held: range) -> Experts:
    own = slice(held.start, held.stop)
    biases = {"gate_up_bias": experts.gate_up_bias, "down_bias": experts.down_bias}
    return dataclasses.replace(
        experts,
        gate_up=Storage(experts.gate_up.weight[own]),
        down=Storage(experts.down.weight[own]),
        **{name: None if bias is None else bias[own] for name, bias in biases.items()},
        count=len(held),
        first=held.start,
    )


def test_parts_of_the_experts_add_up_to_the_whole() -> None:
    x, whole = rand(12, HIDDEN, seed=12), make_experts(bias=True)
    routing = route(x, make_router("softmax"))
    parts = sum(run_experts(x, part_of(whole, held), routing) for held in (range(3), range(3, 4), range(4, E)))
    torch.testing.assert_close(parts, run_experts(x, whole, routing), rtol=1e-4, atol=1e-4)


# ---- stacked weights

Tensors = dict[str, torch.Tensor]


def one_by_one(bias: bool) -> Tensors:
    tensors = Tensors()
    for e in range(E):
        for i, (name, rows, columns) in enumerate((("gate_proj", INNER, HIDDEN), ("up_proj", INNER, HIDDEN), ("down_proj", HIDDEN, INNER))):
            tensors[f"m.{e}.{name}.weight"] = rand(rows, columns, seed=100 + 10 * e + i)
            if bias:
                tensors[f"m.{e}.{name}.bias"] = rand(rows, seed=500 + 10 * e + i)
    return tensors


def fused(tensors: Tensors, interleaved: bool, transposed: bool) -> Tensors:
    """The same weights as fused checkpoints hold them."""

    def stack(name: str, kind: str) -> torch.Tensor:
        return torch.stack([tensors[f"m.{e}.{name}.{kind}"] for e in range(E)])

    def join(kind: str) -> torch.Tensor:
        gate, up = stack("gate_proj", kind), stack("up_proj", kind)
        return torch.stack((gate, up), dim=2).flatten(1, 2) if interleaved else torch.cat((gate, up), dim=1)

    turned = (lambda t: t.transpose(1, 2).contiguous()) if transposed else (lambda t: t)
    out = {"m.gate_up_proj": turned(join("weight")), "m.down_proj": turned(stack("down_proj", "weight"))}
    if "m.0.up_proj.bias" in tensors:
        out |= {"m.gate_up_proj_bias": join("bias"), "m.down_proj_bias": stack("down_proj", "bias")}
    return out


def filled(tensors: Tensors, names: ExpertNames, placement: ExpertPlacement, bias: bool, shared: str | None = None) -> Experts:
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, DENSE, ALONE))
    stacked = stacked_weights(table, names, placement, HIDDEN, INNER, bias, shared)
    table.load(tensors.items())
    return stacked


PLACEMENTS = {
    "whole": ExpertPlacement.of(E, 0, 1),
    "second half of each": ExpertPlacement.of(E, 1, 2),
    "last quarter of the experts": ExpertPlacement.of(E, 3, 4, ep_size=4),
    "second half of the first experts": ExpertPlacement.of(E, 1, 4, ep_size=2),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", ["one by one", "fused", "interleaved", "interleaved and transposed"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=list(PLACEMENTS))
def test_stacks_are_filled_from_every_layout_and_by_slice(placement: ExpertPlacement, layout: str, bias: bool) -> None:
    tensors = one_by_one(bias)
    flags = {"interleaved": "interleaved" in layout, "transposed": "transposed" in layout}
    checkpoint = tensors if layout == "one by one" else fused(tensors, **flags)
    stacked = filled(checkpoint, ExpertNames("m.", **flags), placement, bias)
    cut = placement.shard.of(INNER)
    for own, e in enumerate(placement.held):
        gate, up, down = (tensors[f"m.{e}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(stacked.gate_up.weight[own], torch.cat((gate[cut], up[cut])))
        assert torch.equal(stacked.down.weight[own], down[:, cut])
        if bias:
            assert stacked.gate_up_bias is not None
            assert torch.equal(stacked.gate_up_bias[own], torch.cat([tensors[f"m.{e}.{name}_proj.bias"][cut] for name in ("gate", "up")]))
    if bias:
        assert (stacked.down_bias is None) == (placement.shard.index > 0), "the ranks that share an expert add its bias once"
        if stacked.down_bias is not None:
            assert torch.equal(stacked.down_bias, torch.stack([tensors[f"m.{e}.down_proj.bias"] for e in placement.held]))


@pytest.mark.parametrize("layout", ["one by one", "fused"])
@pytest.mark.parametrize("name", ["whole", "second half of each"])
def test_a_shared_expert_is_the_last_of_the_stack(name: str, layout: str) -> None:
    tensors, placement = one_by_one(False), PLACEMENTS[name]
    gate, up, down = rand(INNER, HIDDEN, seed=300), rand(INNER, HIDDEN, seed=301), rand(HIDDEN, INNER, seed=302)
    own = {"s.gate_proj.weight": gate, "s.up_proj.weight": up, "s.down_proj.weight": down}
    checkpoint = tensors if layout == "one by one" else fused(tensors, False, False)
    stacked = filled(checkpoint | own, ExpertNames("m."), placement, False, "s.")
    routed, cut = filled(tensors, ExpertNames("m."), placement, False), placement.shard.of(INNER)
    assert torch.equal(stacked.gate_up.weight, torch.cat((routed.gate_up.weight, torch.cat((gate[cut], up[cut]))[None])))
    assert torch.equal(stacked.down.weight, torch.cat((routed.down.weight, down[None, :, cut])))


@pytest.mark.parametrize("layout", ["one by one", "fused", "interleaved", "interleaved and transposed"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=list(PLACEMENTS))
def test_a_rank_reads_its_own_part_only(placement: ExpertPlacement, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into, read = checkpoint_parts._read, list[int]()

    def recorded(tensors: Sequence[FileTensor], starts: Sequence[int], buffers: checkpoint_parts.Buffers) -> None:
        read.extend(tensor.nbytes for tensor in tensors)
        read_into(tensors, starts, buffers)

    monkeypatch.setattr(checkpoint_parts, "_read", recorded)
    flags = {"interleaved": "interleaved" in layout, "transposed": "transposed" in layout}
    tensors = one_by_one(False) if layout == "one by one" else fused(one_by_one(False), **flags)
    save_file(tensors, tmp_path / "model.safetensors")
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, DENSE, ALONE))
    stacked = stacked_weights(table, ExpertNames("m.", **flags), placement, HIDDEN, INNER)
    table.load(safetensors_weights(tmp_path, progress=False))
    expected = filled(one_by_one(False), ExpertNames("m."), placement, False)
    assert torch.equal(stacked.gate_up.weight, expected.gate_up.weight)
    assert torch.equal(stacked.down.weight, expected.down.weight)
    cut = placement.shard.of(INNER)
    assert sum(read) == 4 * 3 * HIDDEN * (cut.stop - cut.start) * len(placement.held)


def test_a_fused_tensor_of_another_shape_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"tensor m.gate_up_proj has shape \[8, 3, 16\]; config.json asks for \[8, 48, 16\]"):
        filled({"m.gate_up_proj": rand(E, 3, HIDDEN)}, ExpertNames("m."), PLACEMENTS["whole"], False)


def test_a_missing_expert_is_named() -> None:
    tensors = one_by_one(False)
    del tensors["m.5.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"it lacks m.5.up_proj.weight"):
        filled(tensors, ExpertNames("m."), PLACEMENTS["whole"], False)


@pytest.mark.parametrize(("ranks", "ep_size"), [(1, 1), (2, 1), (2, 2), (4, 2), (8, 4)])
def test_every_part_of_every_expert_lies_on_one_rank(ranks: int, ep_size: int) -> None:
    held = [ExpertPlacement.of(E, rank, ranks, ep_size) for rank in range(ranks)]
    pieces = [(expert, p.shard.index, p.shard.count) for p in held for expert in p.held]
    assert sorted(pieces) == [(e, i, ranks // ep_size) for e in range(E) for i in range(ranks // ep_size)]
    assert all(p.shard == Shard(rank % (ranks // ep_size), ranks // ep_size) for rank, p in enumerate(held))
