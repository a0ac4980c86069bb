"""Chooses whether a draft's blocks are sharded over the ranks of its target or replicated on each."""

from __future__ import annotations

from runtime.config.device_tuning import DeviceTuning
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.models.config import ModelConfig
from runtime.models.context import ModelContext
from runtime.models.sharing import faster_replicated


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
    return faster_replicated(draft, target.group.size, tuning.nccl_sum_bytes if target.group.fused is None else tuning.sum_bytes)
