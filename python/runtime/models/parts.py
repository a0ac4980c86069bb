"""Makes the parts of a model: norms, attention layers, MLPs and whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from runtime.distributed.parallel_group import Shard
from runtime.layers.activation import Activation
from runtime.layers.attention.base import AttentionSpec
from runtime.layers.attention_layer import Attention, AttentionLayer
from runtime.layers.dense_sparse_mlp import DenseSparseMlp
from runtime.layers.gated_attention import GatedAttention
from runtime.layers.linear import Partition
from runtime.layers.mlp import GatedMlp, Mlp, SquaredReluMlp
from runtime.layers.norm import RMSNorm
from runtime.layers.quantization.scheme import WeightSlot
from runtime.layers.rope import Rope, RotaryHeads
from runtime.layers.row_norms import RowNorms
from runtime.layers.sparse_mlp import SparseMlp
from runtime.mem_cache.kv_spec import KVSpec
from runtime.models.block import Block, SandwichBlock
from runtime.models.config import UNROTATED, ModelConfig
from runtime.models.context import ModelContext
from runtime.models.rotary import build_rope
from runtime.models.sharing import check_layer_heads
from runtime.models.sparse import SparseNames, SparseParts
from runtime.models.weights import LayerRows, WeightTable


class ModelParts:
    """Makes the parts of one model. Their weights are filled through `weights`.

    Attributes:
        config: the architecture.
        context: operations, dtype, device, scheme and group.
        weights: the table of all parameters so far.
        sparse_mlps: the sparse MLPs made so far.
        rope: the rotary table that the attention layers share.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, weights: WeightTable | None = None) -> None:
        """`weights`: a table to add to; a new one by default."""
        self.config, self.context = config, context
        self.sparse_mlps = list[SparseMlp]()
        self.weights = weights or WeightTable(context)
        self.rope = build_rope(config, context.device)
        self._others = dict[ModelConfig, ModelParts]()

    @cached_property
    def _no_rope(self) -> Rope:
        """A rotary table that rotates nothing, for heads that are rotated before their norms."""
        return build_rope(replace(self.config, rope_scaling=UNROTATED), self.context.device)

    @property
    def rope_bytes(self) -> int:
        """Bytes of all rotary tables."""
        scales = self.rope.query_scales
        own = self.rope.cos_sin.nbytes + (0 if scales is None else scales.nbytes)
        own += self._no_rope.cos_sin.nbytes if self.config.norm_after_rope else 0
        return own + sum(parts.rope_bytes for parts in self._others.values())

    def of_layer(self, layer: int) -> ModelParts:
        """The parts for the attention of layer `layer`, whose heads may differ from the model's; shares the table of parameters."""
        config = self.config.of_layer(layer)
        if config is self.config:
            return self
        if config not in self._others:
            self._others[config] = ModelParts(config, self.context, self.weights)
        return self._others[config]

    def norm(self, name: str, width: int | None = None) -> RMSNorm:
        """The norm whose weight is tensor `name`: of the residual stream, or over `width` columns."""
        c = self.config
        eps = c.rms_eps if width is not None else c.rms_eps / c.residual_scale**2
        return RMSNorm(self.weights.tensor(name, (width or c.hidden_size,), offset=c.norm_offset), eps)

    def attention(self, prefix: str, layer_id: int, in_features: int | None = None, causal: bool = True, fused: bool = False) -> Attention:
        """The attention layer of tensors `prefix`*, whose qkv projection reads rows of the hidden size or of `in_features`.

        `fused`: the checkpoint holds that projection as one layer, `qkv_proj`.
        """
        c = self.config
        q_rows, kv_rows = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        query, key = self.head_shards()
        rows = {prefix + "q_proj": q_rows, prefix + "k_proj": kv_rows} | ({} if c.shared_kv else {prefix + "v_proj": kv_rows})
        if c.output_gate:
            kv = [LayerRows(prefix + name, kv_rows, key.of(kv_rows)) for name in ("k_proj", "v_proj")]
            qkv = self.weights.rows_of([*self._gated_rows(prefix, query, 0), *kv], c.hidden_size, c.qkv_bias)
        else:
            qkv = self.weights.linear(
                rows, in_features or c.hidden_size, c.qkv_bias, Partition.COLUMN, (query, key, key)[: len(rows)],
                stored=prefix + "qkv_proj" if fused else None,
            )  # fmt: skip
        q_norm, k_norm = (self.norm(f"{prefix}{name}_norm.weight", c.head_dim) if c.qk_norm else None for name in "qk")
        o = self.weights.linear({prefix + "o_proj": c.hidden_size}, q_rows, c.o_bias, Partition.ROW, [query])
        heads, kv_heads = _length(query.of(q_rows)) // c.head_dim, _length(key.of(kv_rows)) // c.head_dim
        kv_dtype = self.context.kv_dtype
        kv = KVSpec("gqa", kv_heads, c.head_dim, c.head_dim, kv_dtype or self.context.dtype, scaled=kv_dtype is not None)
        kv_scales = None if kv_dtype is None else self.kv_scales(prefix)
        own = slice(query.of(q_rows).start // c.head_dim, query.of(q_rows).stop // c.head_dim)
        sinks = self.weights.tensor(prefix + "sinks", (c.num_q_heads,), rows=own) if c.sinks else None
        scale = c.attn_scale or c.head_dim**-0.5
        v_norm = RMSNorm(torch.ones(c.head_dim, dtype=self.context.dtype, device=self.context.device), c.rms_eps) if c.v_norm else None
        rope = self._no_rope if c.norm_after_rope else self.rope
        split = RotaryHeads(heads, kv_heads, c.head_dim, rope, q_norm, k_norm, v_norm, c.shared_kv, kv_scales)
        spec = AttentionSpec(layer_id, heads, kv, scale, c.window[layer_id], sinks, causal, kv_scales, split, c.attn_softcap)
        row_norms = self.row_norms(prefix, query, key) if c.qk_row_norm else None
        return Attention(spec, qkv, o, self.context.ops, row_norms, self.rope if c.norm_after_rope else None)

    def gated_attention(self, prefix: str, layer_id: int) -> GatedAttention:
        """The attention layer of tensors `prefix`*, whose query projection has the rows of a gate behind those of each head."""
        gate = self.weights.rows_of(self._gated_rows(prefix, self.head_shards()[0], 1), self.config.hidden_size, self.config.qkv_bias)
        return GatedAttention(self.attention(prefix, layer_id), gate)

    def _gated_rows(self, prefix: str, query: Shard, part: int) -> list[LayerRows]:
        """This rank's rows of a query projection with a gate: of its queries if `part` is 0, of its gate if 1."""
        dim, rows = self.config.head_dim, self.config.num_q_heads * self.config.head_dim
        own = query.of(rows)
        starts = (2 * first + part * dim for first in range(own.start, own.stop, dim))
        return [LayerRows(prefix + "q_proj", 2 * rows, slice(start, start + dim)) for start in starts]

    def row_norms(self, prefix: str, query: Shard, key: Shard) -> RowNorms:
        """The norms of q and k over all heads; this rank computes the shards `query` and `key`."""
        c, group = self.config, self.context.group
        q_width, k_width = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        q_weight = self.weights.tensor(prefix + "q_norm.weight", (q_width,))[query.of(q_width)]
        k_weight = self.weights.tensor(prefix + "k_norm.weight", (k_width,))[key.of(k_width)]
        key_copies = max(group.size // c.num_kv_heads, 1)
        return RowNorms(q_weight, k_weight, c.rms_eps, (q_width, k_width * key_copies), group)

    def kv_scales(self, prefix: str) -> torch.Tensor:
        """Scales of an attention layer's keys and values, float32 [2]: 1 unless the checkpoint gives them."""
        scales = torch.ones(2, dtype=torch.float32, device=self.context.device)
        targets = {prefix + "kv_scale": scales}  # older files have one scale for both
        for part, scale in zip("kv", scales, strict=True):
            names = (f"{part}_scale", f"{part}_proj.{part}_scale", f"qkv_proj.{part}_scale")
            targets |= dict.fromkeys((prefix + name for name in names), scale)
        for name, target in targets.items():
            slot = WeightSlot((1,), (slice(None),), lambda value, to=target: to.copy_(value.reshape(())), broadcast=True, optional=True)
            self.weights.add(name, slot)
        return scales

    def head_shards(self) -> tuple[Shard, Shard]:
        """The query heads and the KV heads that this rank computes, as rows of their projections.

        Each KV head is on the ranks of its query heads. With more KV heads than ranks, some ranks may hold one more than
        others; with fewer, several ranks hold each KV head and share its query heads.

        Raises:
            ConfigError: the heads cannot be sharded over this many ranks.
        """
        c, group = self.config, self.context.group
        check_layer_heads(c, group.size)
        per_kv, copies = c.num_q_heads // c.num_kv_heads, group.size // c.num_kv_heads
        if c.num_kv_heads >= group.size:
            return Shard(group.rank, group.size, per_kv * c.head_dim), Shard(group.rank, group.size, c.head_dim)
        return Shard(group.rank, group.size, c.head_dim), Shard(group.rank // copies, c.num_kv_heads, c.head_dim)

    def gated_mlp(self, prefix: str, activation: Activation = Activation.SILU, fused: bool = False) -> GatedMlp:
        """The dense MLP of tensors `prefix`*. `fused`: the checkpoint holds its first projections as one layer, `gate_up_proj`."""
        c = self.config
        inner = {prefix + "gate_proj": c.intermediate_size, prefix + "up_proj": c.intermediate_size}
        stored = prefix + "gate_up_proj" if fused else None
        gate_up = self.weights.linear(inner, c.hidden_size, c.mlp_bias, Partition.COLUMN, stored=stored)
        down = self.weights.linear({prefix + "down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias, Partition.ROW)
        return GatedMlp(gate_up, down, self.context.ops, activation)

    def squared_relu_mlp(self, prefix: str) -> SquaredReluMlp:
        """The dense MLP without a gate of tensors `prefix`*."""
        c = self.config
        up = self.weights.linear({prefix + "up_proj": c.intermediate_size}, c.hidden_size, c.mlp_bias, Partition.COLUMN)
        down = self.weights.linear({prefix + "down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias, Partition.ROW)
        return SquaredReluMlp(up, down, self.context.ops)

    def sparse_mlp(self, names: SparseNames, activation: Activation = Activation.SILU) -> SparseMlp:
        """The sparse MLP of these tensors."""
        assert self.config.moe is not None, "the model is dense"
        mlp = SparseParts(self.weights, self.config.hidden_size, self.config.moe).mlp(names, activation)
        self.sparse_mlps.append(mlp)
        return mlp

    def mlp(self, prefix: str, layer_id: int, names: SparseNames | None = None) -> GatedMlp | SparseMlp:
        """The dense MLP of tensors `prefix`*, or the sparse MLP of `names` (by default Qwen's) if the layer is sparse."""
        if self.config.moe is None or not self.config.moe.layers[layer_id]:
            return self.gated_mlp(prefix)
        return self.sparse_mlp(names or SparseNames.usual(prefix))

    def usual_block(
        self, prefix: str, layer_id: int, names: SparseNames | None = None, in_features: int | None = None, input_norm: bool = True
    ) -> Block:
        """The block of tensors `prefix`*, under Llama's names except in a sparse MLP.

        Args:
            names, in_features: as for `mlp` and `attention`.
            input_norm: as for `block`.
        """
        attention = self.of_layer(layer_id).attention(prefix + "self_attn.", layer_id, in_features)
        return self.block(prefix, attention, self.mlp(prefix + "mlp.", layer_id, names), input_norm)

    def block(self, prefix: str, attention: AttentionLayer[Any], mlp: Mlp, input_norm: bool = True) -> Block:
        """The block of this attention and MLP, whose norms have Llama's names. `input_norm`: whether the block has the first one."""
        attn_norm = self.norm(prefix + "input_layernorm.weight") if input_norm else None
        return Block(attention, mlp, attn_norm, self.norm(prefix + "post_attention_layernorm.weight"))

    def sandwich_block(
        self,
        prefix: str,
        attention: Attention,
        mlp: GatedMlp | DenseSparseMlp,
        norms: Sequence[str | None],
        factor: torch.Tensor | None = None,
    ) -> SandwichBlock:
        """The block of this attention and MLP, whose norms before and after attention, then before and after the MLP, are named
        `prefix` + `norms` + "_layernorm"; None where there is no norm. `factor`: as for `SandwichBlock`.
        """
        before, behind, mlp_before, mlp_behind = (self.norm(f"{prefix}{name}_layernorm.weight") if name else None for name in norms)
        assert behind is not None, "attention has a norm behind it"
        assert mlp_behind is not None, "the MLP has a norm behind it"
        return SandwichBlock(attention, mlp, before, behind, mlp_before, mlp_behind, factor, self.context.ops)


def _length(part: slice) -> int:
    return part.stop - part.start
