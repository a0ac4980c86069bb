"""The sparse MLP of a block: routed experts, and a shared expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear
from runtime.layers.moe.definition import row_products, sigmoid
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.router import Router
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, Stream

FUSED_TOKENS = 8
"""Maximum tokens for which a stacked shared expert runs with the others: one tile of the kernels for few tokens.
With more tokens it would have several tiles while most experts have one, and its blocks would finish last.
"""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The dense gated MLP that every token uses in addition to its routed experts; several shared experts form one wider MLP.

    Attributes:
        gate_up_proj, down_proj: its weights, or this rank's shard of them.
        gate: [1, hidden]: the output is multiplied by the sigmoid of this projection; None for no gate.
    """

    gate_up_proj: Linear
    down_proj: Linear
    gate: torch.Tensor | None = None

    @property
    def num_parameters(self) -> int:
        """Number of its weights."""
        return self.gate_up_proj.num_parameters + self.down_proj.num_parameters


class SparseMlp:
    """An `Mlp` of experts: `sum(weight * expert(x))` over each token's experts, and the shared expert. Owner of its weights.

    Attributes:
        router: chooses the experts.
        experts: the routed experts, possibly followed by the shared one, or this rank's shard of them.
        shared: the shared expert, or None. With `router.rule.shared`, its weights are views of the last of `experts`, and passes of at most
            `FUSED_TOKENS` tokens run that one instead.
    """

    def __init__(self, router: Router, experts: Experts, ops: BlockOps, shared: SharedExpert | None = None) -> None:
        self.router, self.experts, self.shared = router, experts, shared
        self.kernel_launches = 7 if shared is None else 10
        self._routed = experts.without_last() if router.rule.shared else experts
        self._ops = ops

    @property
    def active_parameters(self) -> int:
        """Number of weights used for each token: its experts, the shared expert and the router."""
        shared = 0 if self.shared is None else self.shared.num_parameters
        return self._routed.active_parameters(self.router.rule.top_k) + shared + self.router.weight.numel()

    @property
    def shares(self) -> set[float]:
        """The fractions of tokens that choose an expert, on average: with and without a stacked shared expert."""
        return {self.router.rule.chosen / experts.total for experts in (self.experts, self._routed)}

    def gemms(self, norm: RMSNorm, next_norm: RMSNorm) -> Iterator[Gemm]:
        """The GEMMs of the shared expert; stacked experts have separate kernels."""
        if self.shared is not None:
            yield Gemm("gate_up", self.shared.gate_up_proj, norm)
            yield Gemm("linear", self.shared.down_proj, None)

    def forward(self, stream: Stream, norm: RMSNorm, next_norm: RMSNorm | None) -> Stream:
        """`stream + mlp(norm(stream))`, possibly in the same storage."""
        if self.experts.exchange is not None:
            x = self._ops.norm(stream.h, norm, norm.weight.dtype)
            tokens = self.experts.exchange.gather(x)
            part = self._ops.experts(tokens, self.experts, self._ops.route(tokens, self.router), stream.in_prompt)
            shared = None if self.shared is None else self._shared(x, self.shared, stream, norm)
            if self.experts.group.size == 1:
                if shared is not None:
                    stream.h.add_(shared)
                return self._ops.add_scattered(part, self.experts.exchange, stream, next_norm)
            part = self.experts.exchange.scatter_sum(part, len(x))
            total = self.experts.group.all_reduce(part if shared is None else part.add_(shared))
            return Stream(stream.h.add_(total), in_prompt=stream.in_prompt)
        x, routing = self._ops.norm_route(stream, norm, self.router)
        experts, shared = self._parts(len(x))
        addend = None if shared is None else self._shared(x, shared, stream, norm)
        return self._ops.experts_add(x, experts, routing, stream, next_norm, addend)

    def _parts(self, tokens: int) -> tuple[Experts, SharedExpert | None]:
        """The stacked experts for a pass, which ignore larger ids, and the shared expert if it runs separately."""
        if self.router.rule.shared and tokens <= FUSED_TOKENS:
            return self.experts, None
        return self._routed, self.shared

    def warmup_runs(self, norm: RMSNorm, rows: Iterable[int]) -> list[Callable[[], object]]:
        """Runs over these numbers of rows that compile kernels, without all-reduces, because other ranks compile in another order."""
        groups = 1 if self.experts.exchange is None else self.experts.exchange.group.size
        counts = sorted({count * factor for count in rows for factor in (1, groups)})
        return [partial(self._warm_up, norm, count) for count in counts]

    def _warm_up(self, norm: RMSNorm, rows: int) -> None:
        h = torch.zeros((rows, self.experts.size[0]), device=norm.weight.device)
        scaled = DeferredNorm(norm.weight, h.to(norm.weight.dtype), torch.ones((rows, 1), device=h.device))
        for stream in (Stream(h, norm, scaled), Stream(h)):
            x, routing = self._ops.norm_route(stream, norm, self.router)
        experts, shared = self._parts(rows)
        if experts.group.size > 1 or experts.exchange is not None:
            self._ops.experts(x, experts, routing)
            return
        for next_norm in (norm, None):
            self._ops.experts_add(x, experts, routing, Stream(h), next_norm, None if shared is None else torch.zeros_like(x))

    def _shared(self, x: torch.Tensor, shared: SharedExpert, stream: Stream, norm: RMSNorm) -> torch.Tensor:
        inner = self._ops.norm_gate_up(stream, norm, shared.gate_up_proj, self.experts.activation)
        if shared.gate is not None:
            inner = inner * sigmoid(row_products(x, shared.gate)).to(inner.dtype)
        return self._ops.linear(shared.down_proj.own_columns(inner), shared.down_proj, stream.in_prompt)
