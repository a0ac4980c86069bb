"""Which ranks share a draft's blocks: those of its target, or none, so that each rank replicates them."""

from __future__ import annotations

from runtime.config.device_tuning import DeviceTuning
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.models.config import ModelConfig
from runtime.models.parts import ModelContext

SUMS = 2
"""All-reduces of a block: after attention and after the MLP."""


def draft_group(asked: int | None, draft: ModelConfig, target: ModelContext, tuning: DeviceTuning) -> ParallelGroup:
    """The ranks that share the blocks of `draft`: with `asked` 1 each rank alone.

    A sharded block reads fewer weights but needs two all-reduces, so small blocks are faster replicated. All ranks decide alike. The LM
    head is always sharded: its exchange carries one token per row.
    """
    group = target.group
    if asked is None:
        return ALONE if faster_whole(draft, target, tuning) else group
    return ALONE if asked == 1 else group


def faster_whole(draft: ModelConfig, target: ModelContext, tuning: DeviceTuning) -> bool:
    """Whether a decode pass over a dense block takes less time where each rank reads all of it. On a CPU it never does."""
    if target.device.type == "cpu" or draft.moe is not None:
        return False
    sums = SUMS * (tuning.nccl_sum_bytes if target.group.fused is None else tuning.sum_bytes)
    return block_bytes(draft) * (1 - 1 / target.group.size) < sums


def block_bytes(config: ModelConfig) -> int:
    """Bytes of the weights of one dense block, about."""
    attention = 2 * (config.num_q_heads + config.num_kv_heads) * config.head_dim
    return config.hidden_size * (attention + 3 * config.intermediate_size) * (2 if config.quant is None else 1)
