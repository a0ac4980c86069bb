"""Linear attention's operations between its GEMMs on a CUDA GPU."""

from __future__ import annotations

import torch

from runtime.layers.delta.heads import DeltaHeads
from runtime.layers.delta.kernels.begin import begin
from runtime.layers.delta.kernels.chunks import apply_chunks
from runtime.layers.delta.kernels.convolution import convolve
from runtime.layers.delta.kernels.gated_norm import gated_norm
from runtime.layers.delta.kernels.recurrence import advance
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.norm import RMSNorm
from runtime.mem_cache.state_pool import StatePass, StatePool


class CudaDeltaOps:
    """The part of `CudaOps` for linear attention. `pdl`: as there."""

    pdl: bool

    def begin_states(self, states: StatePool, batch: ForwardBatch) -> StatePass:
        """Begin a pass over recurrent states."""
        return begin(states, batch.req_pool_indices, batch.seq_lens, batch.qo_indptr, self.pdl)

    def delta_rule(
        self, rows: torch.Tensor, gates: torch.Tensor, heads: DeltaHeads, layer: int, states: StatePass, batch: ForwardBatch
    ) -> torch.Tensor:
        """The outputs of linear attention, [T, H * value_dim]: windows token by token, longer prompt chunks 64 tokens at a time."""
        own, indptr = states.layers[layer], batch.qo_indptr
        longest = batch.max_queries or (batch.tokens_per_req if batch.extend_lens is None else int(batch.extend_lens.max()))
        tokens = convolve(rows, gates, heads, own, states, indptr, longest, self.pdl)
        out = torch.empty((len(rows), heads.num_value_heads * heads.value_dim), dtype=rows.dtype, device=rows.device)
        if batch.max_queries or batch.extend_lens is None or batch.extend_lens.min() <= own.window_width:
            advance(tokens, heads, own, states, indptr, out, self.pdl)
        if longest > own.window_width:
            apply_chunks(tokens, heads, own, states, indptr, out, longest, self.pdl)
        return out

    def gated_norm(self, x: torch.Tensor, gate: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """The norm of each head times SiLU of its gate, [T, H * dim]."""
        return gated_norm(x, gate, norm, self.pdl)
