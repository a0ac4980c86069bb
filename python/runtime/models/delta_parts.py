"""Makes linear attention layers from a checkpoint's tensors."""

from __future__ import annotations

from functools import partial

import torch

from runtime.distributed.parallel_group import Shard
from runtime.layers.delta.heads import DeltaHeads
from runtime.layers.delta_attention import DeltaAttention
from runtime.layers.linear import Partition
from runtime.layers.norm import RMSNorm
from runtime.layers.quantization.scheme import WeightSlot
from runtime.models.config import DeltaConfig
from runtime.models.parts import ModelParts
from runtime.models.sharing import check_delta_heads


def delta_attention(parts: ModelParts, prefix: str, layer_id: int) -> DeltaAttention:
    """The linear attention of tensors `prefix`*, under the names of Qwen 3.5. Its heads are sharded.

    Raises:
        ConfigError: the heads cannot be sharded over the group's ranks.
    """
    c, weights, delta = parts.config, parts.weights, parts.config.delta
    assert delta is not None, "a model with linear attention"
    check_delta_heads(delta, c.architecture, parts.context.group.size)
    key, value, head = head_shards(parts, delta)
    keys, values, hidden = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim, c.hidden_size
    counts = {"q": keys, "k": keys, "v": values}
    qkv = weights.linear(
        {prefix + name: count for name, count in counts.items()}, hidden, False, Partition.COLUMN, (key, key, value),
        stored=prefix + "in_proj_qkv",
    )  # fmt: skip
    z = weights.linear({prefix + "in_proj_z": values}, hidden, False, Partition.COLUMN, (value,))
    rows = {prefix + "in_proj_b": delta.num_value_heads, prefix + "in_proj_a": delta.num_value_heads}
    gates = weights.linear(rows, hidden, False, Partition.COLUMN, (head, head))
    o = weights.linear({prefix + "out_proj": hidden}, values, False, Partition.ROW, [value])
    norm = RMSNorm(weights.tensor(prefix + "norm.weight", (delta.value_dim,)), c.rms_eps)
    heads = _heads(parts, prefix, delta)
    return DeltaAttention(sum(delta.layers[:layer_id]), heads, (qkv, z, gates), norm, o, parts.context.ops)


def head_shards(parts: ModelParts, delta: DeltaConfig) -> tuple[Shard, Shard, Shard]:
    """This rank's rows of the keys, of the values, and of what has one row per value head."""
    group, per_key = parts.context.group, delta.num_value_heads // delta.num_key_heads
    key, value, head = (Shard(group.rank, group.size, unit) for unit in (delta.key_dim, per_key * delta.value_dim, per_key))
    return key, value, head


def _heads(parts: ModelParts, prefix: str, delta: DeltaConfig) -> DeltaHeads:
    weights, (key, value, head) = parts.weights, head_shards(parts, delta)
    own = head.of(delta.num_value_heads)
    heads, ranks = own.stop - own.start, parts.context.group.size
    decay_log, decay_bias = (weights.tensor(prefix + name, (delta.num_value_heads,), torch.float32, own) for name in ("A_log", "dt_bias"))
    keys, values = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
    parts_of = [(key.of(keys), 0), (key.of(keys), keys), (value.of(values), 2 * keys)]
    conv = torch.empty(
        (sum(rows.stop - rows.start for rows, _ in parts_of), delta.conv_width), dtype=parts.context.dtype, device=parts.context.device
    )
    weights.hold([conv])
    start = 0
    for rows, first in parts_of:
        target = conv[start : start + rows.stop - rows.start]
        index = (slice(first + rows.start, first + rows.stop), slice(None), slice(None))
        put = partial(_put_squeezed, target)
        weights.add(prefix + "conv1d.weight", WeightSlot((2 * keys + values, 1, delta.conv_width), index, put))
        start += len(target)
    return DeltaHeads(delta.num_key_heads // ranks, heads, delta.key_dim, delta.value_dim, conv, decay_log, decay_bias)


def _put_squeezed(target: torch.Tensor, weight: torch.Tensor) -> None:
    target.copy_(weight[:, 0])
