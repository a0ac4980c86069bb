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
from runtime.models.parts import ModelParts
from runtime.models.sharing import check_delta_heads
from runtime.models.weights import LayerRows


class DeltaParts:
    """Makes the linear attention of one layer, whose heads are sharded: each rank has whole key heads with their value heads."""

    def __init__(self, parts: ModelParts, prefix: str, fused: bool = False) -> None:
        """Find this rank's heads.

        Args:
            prefix: of the layer's tensors.
            fused: whether the checkpoint holds `in_proj_qkvz` and `in_proj_ba`, which have all rows of a key head and its value heads
                side by side, instead of `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`.

        Raises:
            ConfigError: the heads cannot be sharded over the group's ranks.
        """
        delta, group = parts.config.delta, parts.context.group
        assert delta is not None, "a model with linear attention"
        check_delta_heads(delta, parts.config.architecture, group.size)
        self._parts, self._prefix, self._fused, self._delta = parts, prefix, fused, delta
        self._key_heads = Shard(group.rank, group.size).of(delta.num_key_heads)

    def attention(self, layer: int) -> DeltaAttention:
        """The linear attention of layer `layer`."""
        c, weights, prefix, delta = self._parts.config, self._parts.weights, self._prefix, self._delta
        qkvz = weights.rows_of(self._qkvz_rows(), c.hidden_size)
        # Few rows, whose rounding every later token would feel through the decays.
        gates = weights.rows_of(self._gate_rows(), c.hidden_size, keep=True)
        values = delta.num_value_heads * delta.value_dim
        group, unit = self._parts.context.group, self._per_key * delta.value_dim
        o = weights.linear({prefix + "out_proj": c.hidden_size}, values, False, Partition.ROW, [Shard(group.rank, group.size, unit)])
        norm = RMSNorm(weights.tensor(prefix + "norm.weight", (delta.value_dim,)), c.rms_eps)
        return DeltaAttention(sum(delta.layers[:layer]), self._heads(), qkvz, gates, norm, o, self._parts.context.ops)

    @property
    def _per_key(self) -> int:
        """Value heads of a key head."""
        return self._delta.num_value_heads // self._delta.num_key_heads

    def _of_heads(self, rows: int) -> slice:
        """This rank's rows, of `rows` for each key head."""
        return slice(self._key_heads.start * rows, self._key_heads.stop * rows)

    def _qkvz_rows(self) -> list[LayerRows]:
        """This rank's rows of queries, keys, values and output gates."""
        key, value, heads = self._delta.key_dim, self._per_key * self._delta.value_dim, self._delta.num_key_heads
        if self._fused:
            return self._side_by_side("in_proj_qkvz", key, key, value, value)
        total, own = self._part_by_part(key, key, value)
        qkv = [LayerRows(self._prefix + "in_proj_qkv", total, rows) for rows in own]
        return [*qkv, LayerRows(self._prefix + "in_proj_z", value * heads, self._of_heads(value))]

    def _gate_rows(self) -> list[LayerRows]:
        """This rank's rows of the inputs of the rates, then of the decays."""
        if self._fused:
            return self._side_by_side("in_proj_ba", self._per_key, self._per_key)
        own = self._of_heads(self._per_key)
        return [LayerRows(f"{self._prefix}in_proj_{part}", self._delta.num_value_heads, own) for part in "ba"]

    def _part_by_part(self, *counts: int) -> tuple[int, list[slice]]:
        """All rows, and this rank's rows of each part, of a tensor with the rows of all key heads for one part after another: `counts` for
        each key head.
        """
        heads, before = self._delta.num_key_heads, (sum(counts[:i]) for i in range(len(counts)))
        own = ((first * heads, self._of_heads(count)) for first, count in zip(before, counts, strict=True))
        return sum(counts) * heads, [slice(first + rows.start, first + rows.stop) for first, rows in own]

    def _side_by_side(self, name: str, *counts: int) -> list[LayerRows]:
        """This rank's rows of layer `name`, which has `counts` rows of each part for each key head: part after part."""
        each, pieces = sum(counts), list[LayerRows]()
        for i, count in enumerate(counts):
            starts = (head * each + sum(counts[:i]) for head in range(self._key_heads.start, self._key_heads.stop))
            total = each * self._delta.num_key_heads
            pieces += [LayerRows(self._prefix + name, total, slice(start, start + count)) for start in starts]
        return pieces

    def _heads(self) -> DeltaHeads:
        parts, delta = self._parts, self._delta
        own, key_heads = self._of_heads(self._per_key), self._key_heads.stop - self._key_heads.start
        decay_log, decay_bias = (
            parts.weights.tensor(self._prefix + name, (delta.num_value_heads,), torch.float32, own) for name in ("A_log", "dt_bias")
        )
        heads = own.stop - own.start
        return DeltaHeads(key_heads, heads, delta.key_dim, delta.value_dim, self._convolution(), decay_log, decay_bias)

    def _convolution(self) -> torch.Tensor:
        """This rank's channels of the convolution, [C, conv_width]."""
        parts, key, value, width = self._parts, self._delta.key_dim, self._per_key * self._delta.value_dim, self._delta.conv_width
        total, own = self._part_by_part(key, key, value)
        channels = sum(rows.stop - rows.start for rows in own)
        weight, start = torch.empty((channels, width), dtype=parts.context.dtype, device=parts.context.device), 0
        parts.weights.hold([weight])
        for rows in own:
            target = weight[start : start + rows.stop - rows.start]
            slot = WeightSlot((total, 1, width), (rows, slice(None), slice(None)), partial(_put_channels, target))
            parts.weights.add(self._prefix + "conv1d.weight", slot)
            start += len(target)
        return weight


def _put_channels(target: torch.Tensor, weight: torch.Tensor) -> None:
    """Store channels [n, 1, conv_width] of a convolution over single channels."""
    target.copy_(weight[:, 0])
