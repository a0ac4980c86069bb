"""An MLP with a dense and a sparse part: each reads the stream through its own norm, and both outputs are normed and added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from runtime.layers.gemm.gemm import Gemm
from runtime.layers.mlp import GatedMlp
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, Stream
from runtime.layers.sparse_mlp import SparseMlp


@dataclass(frozen=True, slots=True)
class DenseSparseMlp:
    """`dense_out(dense(x)) + sparse_out(experts(sparse_in(h)))`, as in Gemma 4.

    Attributes:
        dense_out, sparse_in, sparse_out: norms after the dense MLP, before the experts and after them.
        router_norm: the norm of the router's input, which is also multiplied by hidden ** -0.5.
        expert_scale: [E]: factors of the routing weights.
        kernel_launches: approximate number per eager pass.
    """

    dense: GatedMlp
    sparse: SparseMlp
    dense_out: RMSNorm
    sparse_in: RMSNorm
    sparse_out: RMSNorm
    router_norm: RMSNorm
    expert_scale: torch.Tensor
    ops: BlockOps
    kernel_launches: int = 16

    @property
    def active_parameters(self) -> int:
        """Number of weights used for each token."""
        return self.dense.active_parameters + self.sparse.active_parameters

    def gemms(self, norm: RMSNorm | None, next_norm: RMSNorm | None) -> Iterator[Gemm]:
        """The GEMMs of the dense MLP; the experts have separate kernels."""
        yield from self.dense.gemms(norm, next_norm)

    def output(self, stream: Stream, norm: RMSNorm) -> torch.Tensor:
        """The sum of both parts, [T, hidden] in the model's dtype; `norm` is the norm before the dense MLP."""
        ops, h, dtype, experts = self.ops, stream.h, norm.weight.dtype, self.sparse.experts
        dense = ops.norm(self.dense.output(stream, norm).float(), self.dense_out, dtype)
        routing = ops.route(ops.norm(h, self.router_norm, dtype) * h.shape[1] ** -0.5, self.sparse.router)
        routing = replace(routing, weights=routing.weights * self.expert_scale[routing.ids].float())
        found = ops.experts(ops.norm(h, self.sparse_in, dtype), experts, routing, stream.in_prompt)
        return dense + ops.norm(experts.group.all_reduce(found).float(), self.sparse_out, dtype)
