"""Multi-head latent attention: one low-rank row is stored per token; all heads' keys and values are computed from it.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1. Passes over cached rows use the absorbed form: queries are multiplied by
the key half of `kv_b_proj`, so that all heads attend over the latent rows themselves, and the value half is applied to the
result. Prompts without a cached prefix use the plain form, with keys and values per head, which needs fewer operations. Quantised
weights on a CPU always use the absorbed form, because the bits of a prompt must not depend on how it is split into passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from runtime.batch import ForwardMode
from runtime.layers.absorption import TOKEN_TILES
from runtime.layers.attention.base import AttentionSpec
from runtime.layers.attention_layer import AttentionLayer
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.latent_heads import LatentHeads, NewRows
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, LatentRows, Stream
from runtime.layers.pass_context import PassContext


class LatentAttention(AttentionLayer[LatentRows]):
    """`AttentionLayer`: latent attention of one layer, or this rank's heads over rows replicated on every rank. Owner of its weights.

    Attributes:
        spec: its description for the attention backend; its KV is of kind "mla".
        heads: widths, norms and rotary table.
        down_proj: the first projection: hidden -> the queries' latent (or all query heads), the latent and the shared key.
        q_proj: the queries' latent -> all query heads; None if `down_proj` computes them.
        kv_b_proj: the latent -> unrotated keys and values of all heads.
        o_proj: all heads' values -> hidden.
        kernel_launches: approximate number per eager pass: norm, projections, norms and KV write, absorption, attention, output.
    """

    kernel_launches = 10

    def __init__(
        self,
        spec: AttentionSpec,
        heads: LatentHeads,
        down_proj: Linear,
        q_proj: Linear | None,
        kv_b_proj: Linear,
        o_proj: Linear,
        ops: BlockOps,
    ) -> None:
        self.spec, self.heads, self.ops = spec, heads, ops
        self.down_proj, self.q_proj, self.kv_b_proj, self.o_proj = down_proj, q_proj, kv_b_proj, o_proj
        self._kv_b = kv_b_proj.weight
        self._always_absorbed = not kv_b_proj.is_dense and self._kv_b.device.type == "cpu"

    def weights_filled(self) -> None:
        """Dequantise `kv_b_proj`: the absorbed form multiplies by both halves of it, one of them transposed."""
        linear = self.kv_b_proj
        if not linear.is_dense:
            self._kv_b = linear.scheme.dequantize(linear.storage, self.heads.kv_norm.weight.dtype)

    def attention_spec(self) -> AttentionSpec:
        """Its description for the attention backend."""
        return self.spec

    @property
    def active_parameters(self) -> int:
        """Number of weights used for each token."""
        linears = (self.down_proj, self.q_proj, self.kv_b_proj, self.o_proj)
        return sum(linear.num_parameters for linear in linears if linear is not None)

    def gemms(self, norm: RMSNorm, next_norm: RMSNorm) -> Iterator[Gemm]:
        """The GEMMs of decode passes, in order."""
        q_norm = self.heads.q_norm
        yield Gemm("linear", self.down_proj, norm, q_norm=q_norm)
        if self.q_proj is not None:
            yield Gemm("linear", self.q_proj, None, q_norm=q_norm)
        yield Gemm("linear_add", self.o_proj, next_norm, after_attention=True)

    def warmup_runs(self) -> list[Callable[[], object]]:
        """Runs of absorption by each kernel: for each token tile, and for more tokens, as in chunks after a cached prefix."""
        return [partial(self._warm_up, tokens) for tokens in (*TOKEN_TILES, TOKEN_TILES[-1] + 1)]

    def _warm_up(self, tokens: int) -> None:
        """Run absorption with inputs laid out as in `attend`, because kernels are compiled for an alignment."""
        heads, key, value = self.heads, *self._kv_weights()
        positions = torch.zeros(tokens, dtype=torch.int64, device=key.device)  # created before `rows`, because kernels may read it early
        rows = torch.zeros((tokens, (self.q_proj or self.down_proj).out_features), dtype=key.dtype, device=key.device)
        q = rows[:, : heads.num_heads * heads.query_dim].view(tokens, heads.num_heads, -1)
        query = self.ops.absorb(q, heads, key, positions)
        rows = torch.zeros((tokens, self.down_proj.out_features), dtype=key.dtype, device=key.device)
        cache = torch.zeros((1, 1, heads.row_dim), dtype=key.dtype, device=key.device)
        self.ops.absorb_and_write(q, heads, key, positions, NewRows(rows, positions, cache))
        self.ops.project_values(query[..., : heads.kv_rank].contiguous(), value)

    def project(self, stream: Stream, norm: RMSNorm) -> LatentRows:
        """The first projection of the normed stream."""
        return self.ops.project_latent(stream, norm, self.down_proj, self.heads.q_norm)

    def project_rows(self, x: torch.Tensor, in_prompt: bool = False) -> LatentRows:
        """The first projection of rows [T, in] in the model's dtype. `in_prompt`: as in `Stream`."""
        return LatentRows(self.ops.linear(x, self.down_proj, in_prompt))

    def write_kv(self, qkv: LatentRows, context: PassContext) -> None:
        """Write the latent rows to the pool."""
        self.ops.write_latent(qkv.rows, self.heads, self.spec.layer_id, context)

    def attend(self, qkv: LatentRows, context: PassContext) -> torch.Tensor:
        """Write the latent rows to the pool and attend: [T, H * value_dim], the dtype of the rows."""
        attend = self._plain if not self._always_absorbed and is_whole_prompt(context.batch) else self._absorbed
        return attend(qkv, context).flatten(1)

    def _absorbed(self, qkv: LatentRows, context: PassContext) -> torch.Tensor:
        """The absorbed form, over the latent rows in the pool: [T, H, value_dim]."""
        heads, key, value = self.heads, *self._kv_weights()
        in_prompt = context.batch.mode is ForwardMode.EXTEND
        query = self._written_together(qkv, key, context)
        if query is None:
            q, _ = self._written(qkv, context)
            query = self.ops.absorb(q, heads, key, context.batch.positions, in_prompt)
        attended = context.backend.forward(query, self.spec, context.batch).view(-1, heads.num_heads, heads.kv_rank)
        return self.ops.project_values(attended, value, in_prompt)

    def _written_together(self, qkv: LatentRows, key: torch.Tensor, context: PassContext) -> torch.Tensor | None:
        """Queries over latent rows, which the kernel that computes them also writes to the pool; None if no kernel does."""
        heads, batch, rows = self.heads, context.batch, qkv.rows
        q = rows[:, : heads.q_columns]
        if self.q_proj is not None:
            assert heads.q_norm is not None, "the queries' latent has a norm"
            q = self.ops.project_queries(qkv, self.q_proj, heads.q_norm)
        if q is None:
            return None
        cache, _ = context.kv_pool.flat(self.spec.layer_id)
        q = q.view(-1, heads.num_heads, heads.query_dim)
        return self.ops.absorb_and_write(q, heads, key, batch.positions, NewRows(rows, batch.out_cache_loc, cache))

    def _written(self, qkv: LatentRows, context: PassContext) -> tuple[torch.Tensor, torch.Tensor]:
        """All heads' queries [T, H, query_dim], and the KV rows [T, row_dim], which are also written to the pool."""
        heads = self.heads
        q, latent = self.ops.write_latent(qkv.rows, heads, self.spec.layer_id, context)
        if self.q_proj is not None:
            q = self.ops.linear(q, self.q_proj, context.batch.mode is ForwardMode.EXTEND)
        return q.view(-1, heads.num_heads, heads.query_dim), latent

    def _plain(self, qkv: LatentRows, context: PassContext) -> torch.Tensor:
        """The plain form, over keys and values of the pass itself: [T, H, value_dim]."""
        heads, batch, (q, latent) = self.heads, context.batch, self._written(qkv, context)
        self.ops.rotate(q[..., heads.nope_dim :], heads.rope, batch.positions, q[..., heads.nope_dim :])
        made = self.ops.linear(latent[:, : heads.kv_rank].contiguous(), self.kv_b_proj).view(len(q), heads.num_heads, -1)
        shared = latent[:, None, heads.kv_rank :].expand(-1, heads.num_heads, -1)
        keys = torch.cat((made[..., : heads.nope_dim], shared), dim=2)
        return self.ops.prompt_attention(q, keys, made[..., heads.nope_dim :], self.spec, batch)

    def _kv_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of `kv_b_proj` by head: keys [H, nope_dim, kv_rank] and values [H, value_dim, kv_rank]."""
        weight = self._kv_b.view(self.heads.num_heads, -1, self.heads.kv_rank)
        return weight[:, : self.heads.nope_dim], weight[:, self.heads.nope_dim :]


def is_whole_prompt(batch: ForwardBatch) -> bool:
    """Whether every request of a pass is a prompt without a cached prefix; known on the host."""
    return batch.extend_lens is not None and bool((batch.extend_lens == batch.seq_len_bounds).all())
