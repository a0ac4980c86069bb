"""Makes latent attention layers from a checkpoint's tensors."""

from __future__ import annotations

from runtime.distributed.parallel_group import WHOLE, Shard
from runtime.layers.attention.base import AttentionSpec
from runtime.layers.latent_attention import LatentAttention
from runtime.layers.latent_heads import LatentHeads
from runtime.layers.linear import Partition
from runtime.layers.norm import RMSNorm
from runtime.mem_cache.kv_spec import KVSpec
from runtime.models.parts import ModelParts
from runtime.models.sharing import check_layer_heads

LATENT_EPS = 1e-6
"""Epsilon of the norms over latents, whatever config.json says."""


def latent_attention(parts: ModelParts, prefix: str, layer_id: int) -> LatentAttention:
    """The latent attention of tensors `prefix`*, under DeepSeek's names. Its heads are sharded; each rank holds all KV rows.

    Raises:
        ConfigError: the heads cannot be sharded over the group's ranks.
    """
    c, weights, heads = parts.config, parts.weights, _heads(parts, prefix)
    hidden, query_rows, value_columns = c.hidden_size, c.num_q_heads * heads.query_dim, c.num_q_heads * heads.value_dim
    query, key_value, value = (
        Shard(parts.context.group.rank, parts.context.group.size, unit)
        for unit in (heads.query_dim, heads.nope_dim + heads.value_dim, heads.value_dim)
    )
    shared = {prefix + "kv_a_proj_with_mqa": heads.row_dim}
    if heads.q_norm is None:
        down = weights.linear({prefix + "q_proj": query_rows} | shared, hidden, c.qkv_bias, Partition.COLUMN, [query, WHOLE])
        q_proj = None
    else:
        down = weights.linear({prefix + "q_a_proj": heads.q_columns} | shared, hidden, c.qkv_bias)
        q_proj = weights.linear({prefix + "q_b_proj": query_rows}, heads.q_columns, False, Partition.COLUMN, [query])
    kv_rows = {prefix + "kv_b_proj": c.num_q_heads * key_value.unit}
    kv_b = weights.linear(kv_rows, heads.kv_rank, False, Partition.COLUMN, [key_value])
    o = weights.linear({prefix + "o_proj": hidden}, value_columns, c.o_bias, Partition.ROW, [value])
    assert c.latent is not None, "a model with latent attention"
    kv = KVSpec("mla", 1, heads.row_dim, heads.kv_rank, parts.context.dtype)
    spec = AttentionSpec(layer_id, heads.num_heads, kv, c.latent.scale, c.window[layer_id])
    return LatentAttention(spec, heads, down, q_proj, kv_b, o, parts.context.ops)


def _heads(parts: ModelParts, prefix: str) -> LatentHeads:
    c, latent, group = parts.config, parts.config.latent, parts.context.group
    assert latent is not None, "a model with latent attention"
    check_layer_heads(c, group.size)

    def norm(name: str, width: int) -> RMSNorm:
        return RMSNorm(parts.weights.tensor(f"{prefix}{name}_layernorm.weight", (width,)), LATENT_EPS)

    return LatentHeads(
        num_heads=c.num_q_heads // group.size,
        nope_dim=latent.nope_dim,
        value_dim=latent.value_dim,
        kv_norm=norm("kv_a", latent.kv_rank),
        rope=parts.rope,
        q_norm=None if latent.q_rank is None else norm("q_a", latent.q_rank),
    )
