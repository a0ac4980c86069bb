"""Chooses whether a draft's blocks are sharded over the ranks of its target or replicated on each."""

from __future__ import annotations

from runtime.config.device_tuning import DeviceTuning
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.models.config import ModelConfig
from runtime.models.context import ModelContext

SUMS = 2
"""All-reduces per block: after attention and after the MLP."""


def draft_group(asked: int | None, draft: ModelConfig, target: ModelContext, tuning: DeviceTuning) -> ParallelGroup:
    """The ranks that share the blocks of `draft`. `asked`: the flag; 1 replicates, None decides by size.

    A sharded block reads fewer weights but needs two all-reduces, so small blocks are faster replicated. All ranks make the same choice.
    The LM head is always sharded: its exchange carries one token per row.
    """
    return ALONE if asked == 1 or (asked is None and _faster_replicated(draft, target, tuning)) else target.group


def _faster_replicated(draft: ModelConfig, target: ModelContext, tuning: DeviceTuning) -> bool:
    """Whether a decode pass over a dense block is faster replicated than sharded. Never on a CPU."""
    if target.device.type == "cpu" or draft.moe is not None:
        return False
    columns = 2 * (draft.num_q_heads + draft.num_kv_heads) * draft.head_dim + 3 * draft.intermediate_size
    block_bytes = draft.hidden_size * columns * (2 if draft.quant is None else 1)
    sums = SUMS * (tuning.nccl_sum_bytes if target.group.fused is None else tuning.sum_bytes)
    return block_bytes * (1 - 1 / target.group.size) < sums
