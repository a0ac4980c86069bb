"""Chooses whether a draft's blocks are sharded over the ranks of its target or replicated on each."""

from __future__ import annotations

from runtime.config.device_tuning import DeviceTuning
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.models.config import ModelConfig
from runtime.models.parts import ModelContext

SUMS = 2
"""All-reduces per block: after attention and after the MLP."""


def draft_group(asked: int | None, draft: ModelConfig, target: ModelContext, tuning: DeviceTuning) -> ParallelGroup:
    """The ranks that share the blocks of `draft`. `asked`: the flag; 1 replicates, None decides by size.

    A sharded block reads fewer weights but needs two all-reduces, so small blocks are faster replicated. All ranks make the same choice.
    The LM head is always sharded: its exchange carries one token per row.
    """
    group = target.group
    if asked is None:
        return ALONE if faster_whole(draft, target, tuning) else group
    return ALONE if asked == 1 else group


def faster_whole(draft: ModelConfig, target: ModelContext, tuning: DeviceTuning) -> bool:
    """Whether a decode pass over a dense block is faster replicated than sharded. Never on a CPU."""
    if target.device.type == "cpu" or draft.moe is not None:
        return False
    sums = SUMS * (tuning.nccl_sum_bytes if target.group.fused is None else tuning.sum_bytes)
    return block_bytes(draft) * (1 - 1 / target.group.size) < sums


def block_bytes(config: ModelConfig) -> int:
    """Approximate bytes of the weights of one dense block."""
    attention = 2 * (config.num_q_heads + config.num_kv_heads) * config.head_dim
    return config.hidden_size * (attention + 3 * config.intermediate_size) * (2 if config.quant is None else 1)
