"""Makes the sparse MLPs that a model's config describes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from runtime.layers.activation import Activation
from runtime.layers.linear import Linear, Partition
from runtime.layers.moe.definition import WORD
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.router import KEPT_ROWS, Router, RoutingRule
from runtime.layers.sparse_mlp import SharedExpert, SparseMlp
from runtime.models.config import MoeConfig
from runtime.models.expert_weights import ExpertNames, ExpertPlacement, stacked_weights
from runtime.models.packed_layer import Packable
from runtime.models.weights import WeightTable

SHARED_PARTS = ("gate_proj", "up_proj", "down_proj")
"""Projections of a shared expert, as all families name them."""


@dataclass(frozen=True, slots=True)
class SparseNames:
    """How a family names the tensors of a sparse MLP.

    Attributes:
        experts: the routed experts, with their whole prefix.
        router: the router's linear layer, without `.weight`.
        correction_bias: the router's correction bias, if it has one.
        correction_rows: 1 if the checkpoint holds that bias as one row [1, E] instead of [E]; else 0.
        shared: prefix of the shared expert's `gate_proj`, `up_proj` and `down_proj`.
        shared_gate: the layer whose sigmoid scales the shared expert, without `.weight`; None if there is none.
    """

    experts: ExpertNames
    router: str
    correction_bias: str = ""
    correction_rows: int = 0
    shared: str = ""
    shared_gate: str | None = None

    @classmethod
    def usual(cls, prefix: str, shared: str = "shared_experts.", shared_gate: str | None = None) -> SparseNames:
        """The names of Qwen and DeepSeek: everything starts with `prefix`, and the correction bias is the router's."""
        return cls(
            experts=ExpertNames(prefix + "experts."),
            router=prefix + "gate",
            correction_bias=prefix + "gate.e_score_correction_bias",
            shared=prefix + shared,
            shared_gate=None if shared_gate is None else prefix + shared_gate,
        )


@dataclass(frozen=True, slots=True)
class SparseParts:
    """Makes the parts of a model's sparse MLPs."""

    weights: WeightTable
    hidden: int
    moe: MoeConfig

    def mlp(self, names: SparseNames, activation: Activation = Activation.SILU) -> SparseMlp:
        """The sparse MLP of these tensors."""
        fused = self.fuses(names)
        router, experts = self.router(names, fused), self.experts(names, activation, fused)
        shared = self.last_of(experts) if fused else self.shared(names) if self.moe.shared_intermediate_size else None
        return SparseMlp(router, experts, self.weights.context.ops, shared)

    def last_of(self, experts: Experts) -> SharedExpert:
        """The shared expert that is the last of a stack."""
        group, inner, scheme = self.weights.group, self.moe.shared_intermediate_size, experts.scheme
        gate_up = Linear(experts.gate_up.at(-1), None, scheme, Partition.COLUMN, group, 2 * inner)
        return SharedExpert(gate_up, Linear(experts.down.at(-1), None, scheme, Partition.ROW, group))

    def fuses(self, names: SparseNames) -> bool:
        """Whether the shared expert can be stacked: it has the routed experts' shape and scheme, and each rank holds a part of every
        expert.
        """
        m, context, scheme_of = self.moe, self.weights.context, self.weights.scheme_of
        if not context.fuse_shared or context.ep_size > 1 or context.exchange is not None:
            return False
        if m.shared_intermediate_size != m.intermediate_size or m.bias or names.shared_gate is not None:
            return False
        routed = scheme_of([f"{names.experts.prefix}0.{names.experts.gate}"])
        return all(scheme_of([names.shared + part]) is routed for part in SHARED_PARTS)

    def router(self, names: SparseNames, fused: bool) -> Router:
        """The router, whole on every rank."""
        m, tensor = self.moe, self.weights.tensor
        rule = RoutingRule(m.top_k, m.scoring, m.renormalize, m.scaling, m.num_groups, m.top_groups, int(fused), m.group_best)
        weight = tensor(names.router + ".weight", (m.num_experts, self.hidden))
        self.weights.may_be_packed(names.router, Packable((m.num_experts, self.hidden), weight.copy_))  # as in some files of AutoAWQ
        bias = tensor(names.router + ".bias", (m.num_experts,)) if m.bias else None
        shape = (1,) * names.correction_rows + (m.num_experts,)
        correction = tensor(names.correction_bias, shape, torch.float32).view(-1) if m.correction else None
        kept = torch.zeros((KEPT_ROWS, -(-(m.num_experts + fused) // WORD)), dtype=torch.int32, device=weight.device)
        return Router(weight, rule, bias, correction, kept)

    def experts(self, names: SparseNames, activation: Activation, fused: bool) -> Experts:
        """This rank's part of the routed experts, followed by the shared one if it is fused."""
        m, context, exchange = self.moe, self.weights.context, self.weights.context.exchange
        rank, ranks = context.group.rank, context.group.size
        if exchange is not None:
            rank, ranks = exchange.group.rank * ranks + rank, exchange.group.size * ranks
        placement = ExpertPlacement.of(m.num_experts, rank, ranks, context.ep_size)
        shared = names.shared if fused else None
        stacked = stacked_weights(self.weights, names.experts, placement, self.hidden, m.intermediate_size, m.bias, shared)
        return replace(stacked, activation=activation, exchange=exchange, shared=fused)

    def shared(self, names: SparseNames) -> SharedExpert:
        """The shared expert, through which all tokens run, sharded like a dense MLP."""
        *gate_up_parts, down_part = SHARED_PARTS
        rows = {names.shared + part: self.moe.shared_intermediate_size for part in gate_up_parts}
        gate_up = self.weights.linear(rows, self.hidden, partition=Partition.COLUMN)
        whole = self.moe.shared_intermediate_size
        down = self.weights.linear({names.shared + down_part: self.hidden}, whole, partition=Partition.ROW)
        gate = None if names.shared_gate is None else self.weights.tensor(names.shared_gate + ".weight", (1, self.hidden))
        return SharedExpert(gate_up, down, gate)
