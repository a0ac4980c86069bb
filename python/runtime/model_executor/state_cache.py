"""How many recurrent states of cached prefixes there is memory for, and where prompts can leave them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from runtime.config.device_tuning import CPU
from runtime.config.host_memory import MIB, host_memory
from runtime.layers.delta.definition import CHUNK
from runtime.mem_cache.state_pool import StateSpec
from runtime.model_executor.context import WorkerContext

log = logging.getLogger(__name__)

SHARE = 0.2
"""Fraction of the free memory for states of cached prefixes; keys and values get most of the rest."""


def cached_states(context: WorkerContext, specs: Sequence[StateSpec]) -> int:
    """The number of states of cached prefixes, before the states of running requests and the KV cache take memory.

    Args:
        specs: of each linear-attention layer; empty for a model without recurrent states.
    """
    cache, size = context.config.cache, sum(spec.cached_bytes for spec in specs)
    if not size or not cache.radix_cache:
        return 0
    count = cache.max_mamba_cache_size
    if count is None:
        free = torch.cuda.mem_get_info()[0] if context.device.type == "cuda" else min(host_memory().available, CPU.kv_bytes)
        count = min(context.group.gather(int(free * SHARE) // size))
    log.info("recurrent states of cached prefixes: %d, %.0f MiB", count, count * size / MIB)
    return count


def state_unit(page_size: int, window: int) -> int:
    """The tokens between two positions at which prompts can leave their states, see `WorkerLimits.state_unit`.

    A chunk of this length is longer than a `window`, so it is applied to the state at once.
    """
    unit = math.lcm(CHUNK, page_size)
    return unit * (1 + window // unit)
