"""Sparse layers of public models with random weights, for timing kernels: several of each, so that no weight stays in L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from runtime.config.expert_tuning import WeightFormat

if TYPE_CHECKING:  # requires Triton, which is installed with a GPU only
    from runtime.layers.moe.kernels.expert_weights import ExpertWeights
    from runtime.layers.moe.kernels.gated_act import GatedAct
    from runtime.layers.moe.router import Routing

BF16 = torch.bfloat16
ENOUGH_BYTES = 3 << 30
"""Bytes of weights that one timing reads, many times the size of L2."""
REPLAYS = 5
FEW_CALLS, MANY_CALLS = 16, 4
"""Calls in one graph, for at most 256 tokens and for more."""
INT4_GROUP = 128
"""Columns that share a scale and a zero point, as in most files of AWQ and GPTQ."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The sparse layer of a model."""

    name: str
    format: WeightFormat
    experts: int
    top_k: int
    hidden: int
    inner: int
    scoring: Literal["softmax", "sigmoid", "topk_softmax"] = "softmax"
    bias: bool = False

    @property
    def expert_weights(self) -> int:
        """Entries of one expert."""
        return 3 * self.hidden * self.inner

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert, with scales and biases."""
        each = {"dense": 2.0, "fp8": 1 + 4 / 128**2, "mxfp4": 0.5 + 1 / 32, "int4": 0.5 + 4 / INT4_GROUP}[self.format]
        return self.expert_weights * each + (2 * (self.hidden + 2 * self.inner) if self.bias else 0)


SHAPES = (
    ExpertShape("qwen3-30b-a3b", "dense", 128, 8, 2048, 768),
    ExpertShape("qwen3-30b-a3b-fp8", "fp8", 128, 8, 2048, 768),
    ExpertShape("gpt-oss-20b", "mxfp4", 32, 4, 2880, 2880, "topk_softmax", bias=True),
    ExpertShape("glm-4.7-flash", "dense", 64, 4, 2048, 1536, "sigmoid"),
    ExpertShape("qwen3-30b-a3b-int4", "int4", 128, 8, 2048, 768),
)


class ExpertLayers:
    """Layers of one shape with random weights and routers. Owns the weights."""

    def __init__(self, shape: ExpertShape) -> None:
        from runtime.layers.moe.kernels.gated_act import CLAMPED_SWIGLU, SILU, GatedAct
        from runtime.layers.moe.kernels.route import new_tickets
        from runtime.layers.moe.router import Router, RoutingRule

        self.shape = shape
        device = torch.device("cuda")
        count = max(2, -(-ENOUGH_BYTES // int(shape.experts * shape.expert_bytes)))
        self.layers = [(self._weights(2 * shape.inner, shape.hidden), self._weights(shape.hidden, shape.inner)) for _ in range(count)]
        weights = [torch.randn((shape.experts, shape.hidden), device=device).to(BF16) for _ in range(count)]
        bias = torch.randn(shape.experts, device=device).to(BF16) if shape.bias else None
        correction = torch.rand(shape.experts, device=device) if shape.scoring == "sigmoid" else None
        rule = RoutingRule(shape.top_k, shape.scoring, True)
        self.routers = [Router(weight, rule, bias, correction) for weight in weights]
        self.act: GatedAct = GatedAct(CLAMPED_SWIGLU if shape.bias else SILU)
        self._tickets = new_tickets(device)

    def _weights(self, rows: int, columns: int) -> ExpertWeights:
        from runtime.layers.moe.kernels.expert_weights import ExpertWeights

        E, device = self.shape.experts, "cuda"
        bias = torch.randn((E, rows), device=device).to(BF16) if self.shape.bias else None
        if self.shape.format == "dense":
            return ExpertWeights(torch.empty((E, rows, columns), dtype=BF16, device=device).normal_(std=columns**-0.5), None, bias)
        if self.shape.format == "fp8":
            weight = torch.empty((E, rows, columns), dtype=torch.float8_e4m3fn, device=device)
            for expert in weight:
                expert.copy_(torch.randn((rows, columns), device=device) * 50)
            scale = torch.rand((E, -(-rows // 128), -(-columns // 128)), device=device) * (columns**-0.5 / 50)
            return ExpertWeights(weight, scale, bias)
        if self.shape.format == "int4":
            codes = torch.randint(256, (E, rows, columns // 2), dtype=torch.uint8, device=device)
            scale = torch.rand((E, rows, columns // INT4_GROUP), device=device) * (columns**-0.5 / 4)
            return ExpertWeights(codes, torch.stack((scale, torch.full_like(scale, 8)), dim=3).half(), bias)
        packed = torch.randint(256, (E, rows // 8, columns // 32, 8, 16), dtype=torch.uint8, device=device)
        return ExpertWeights(packed, torch.randint(116, 124, (E, rows, columns // 32), dtype=torch.uint8, device=device), bias)

    def inputs(self, rows: int) -> list[torch.Tensor]:
        """One input for each call of a graph."""
        return [torch.randn((rows, self.shape.hidden), device="cuda").to(BF16) for _ in range(FEW_CALLS if rows <= 256 else MANY_CALLS)]

    def route(self, x: torch.Tensor, call: int, *, pdl: bool = True) -> Routing:
        """The routing of the layer of a call."""
        from runtime.layers.moe.kernels.route import route

        return route(x, self.routers[call % len(self.routers)], self._tickets, pdl=pdl)

    def distinct(self, routings: Sequence[Routing]) -> float:
        """Mean number of distinct experts."""
        return statistics.mean(len(routing.ids.unique()) for routing in routings)


def microseconds(call: Callable[[int], object], calls: int) -> float:
    """Median time of a call in a captured graph of `calls` calls; `call` gets the number of the call."""
    from runtime.layers.kernels.graph_timer import replay_times

    def run() -> None:
        for i in range(calls):
            call(i)

    return statistics.median(replay_times(run, REPLAYS)) / calls
