"""The sparse MLP of a block: the experts that the router selects for each token, and those that all tokens use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.router import Router
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, Stream

FUSED_TOKENS = 8
"""Maximum tokens for which a stacked shared expert runs with the others: a tile of the kernels for few tokens.

With more tokens it would have several tiles where most experts have one, and the blocks that compute it would finish last.
"""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The dense gated MLP that every token uses in addition to its routed experts; several of them form one wider MLP.

    Attributes:
        gate_up_proj, down_proj: its weights, or this rank's part of them.
        gate: [1, hidden]: the output is multiplied by the sigmoid of this projection. None if it is added as it is.
    """

    gate_up_proj: Linear
    down_proj: Linear
    gate: torch.Tensor | None = None

    @property
    def num_parameters(self) -> int:
        """Entries of its weights."""
        return self.gate_up_proj.num_parameters + self.down_proj.num_parameters


class SparseMlp:
    """An `Mlp` of experts: `sum(weight * expert(x))` over each token's experts, and the shared expert. Owner of its weights.

    Attributes:
        router: chooses the experts.
        experts: the routed experts, perhaps with the shared one as their last, or this rank's part of them.
        shared: the expert of all tokens; None if there is none. Where `router.rule.shared`, its weights are views of the last of
            `experts`, and passes of at most `FUSED_TOKENS` tokens do not use them.
    """

    def __init__(self, router: Router, experts: Experts, ops: BlockOps, shared: SharedExpert | None = None) -> None:
        self.router, self.experts, self.shared = router, experts, shared
        self.kernel_launches = 5 if shared is None else 8
        self._routed = experts.without_last() if router.rule.shared else experts
        self._ops = ops

    @property
    def active_parameters(self) -> int:
        """Number of weights that multiply one token: those of its experts, the shared one and the router."""
        shared = 0 if self.shared is None else self.shared.num_parameters
        return self._routed.active_parameters(self.router.rule.top_k) + shared + self.router.weight.numel()

    def gemms(self, norm: RMSNorm, next_norm: RMSNorm) -> Iterator[Gemm]:
        """The GEMMs of the shared expert; stacked experts have other kernels."""
        if self.shared is not None:
            yield Gemm("gate_up", self.shared.gate_up_proj, norm)
            yield Gemm("linear", self.shared.down_proj, None)

    def forward(self, stream: Stream, norm: RMSNorm, next_norm: RMSNorm | None) -> Stream:
        """`stream + mlp(norm(stream))`, perhaps in the same storage."""
        if self.experts.exchange is not None:
            x = self._ops.norm(stream.h, norm, norm.weight.dtype)
            tokens = self.experts.exchange.gather(x)
            part = self._ops.experts(tokens, self.experts, self._ops.route(tokens, self.router), stream.in_prompt)
            part = self.experts.exchange.scatter_sum(part, len(x))
            total = self.experts.group.all_reduce(part if self.shared is None else part.add_(self._shared(x, self.shared, stream, norm)))
            return Stream(stream.h.add_(total), in_prompt=stream.in_prompt)
        x, routing = self._ops.norm_route(stream, norm, self.router)
        experts, shared = self._parts(len(x))
        beside = None if shared is None else self._shared(x, shared, stream, norm)
        return self._ops.experts_add(x, experts, routing, stream, next_norm, beside)

    def _parts(self, tokens: int) -> tuple[Experts, SharedExpert | None]:
        """The stacked experts of a pass, which ignore ids after their last, and the separate shared expert."""
        if self.router.rule.shared and tokens <= FUSED_TOKENS:
            return self.experts, None
        return self._routed, self.shared

    def warmup_runs(self, norm: RMSNorm, rows: Iterable[int]) -> list[Callable[[], object]]:
        """Runs over this many rows each, for compiling kernels; without the other ranks, which compile in another order."""
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
            inner = inner * torch.sigmoid(x.float() @ shared.gate.float().t()).to(inner.dtype)
        return self._ops.linear(inner, shared.down_proj)
