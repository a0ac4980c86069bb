"""NCCL calls in CUDA graphs: their memory, and the check that all ranks captured the same graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.errors import ConfigError
from runtime.layers.linear import Linear
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.graph_runner import GraphRunner
from runtime.models.config import ModelConfig


def nccl_bytes_of_graph(context: WorkerContext, model: ModelConfig, tokens: int) -> int:
    """Device memory of NCCL's calls in a graph of a pass over `tokens`: two all-reduces per layer, unless our own kernel runs them, and two
    exchanges per layer with other attention groups. In activation order ranks also gather the input of two GEMMs per layer,
    which may be too large for our own kernel.
    """
    group = context.attention_group
    x = torch.empty((tokens, model.hidden_size), dtype=context.dtype, device="meta")
    sums = group.size > 1 and (group.fused is None or not group.fused.fits(x))
    gathers = group.size > 1 and model.quant is not None and model.quant.int4 is not None and model.quant.int4.ordered
    return 2 * model.num_layers * (sums + gathers + (context.exchange is not None)) * context.config.device.tuning.nccl_node_bytes


def nccl_bytes_of_logits(context: WorkerContext, head: Linear, tokens: int) -> int:
    """Device memory of NCCL's call in a graph that gathers the logits of `tokens` from all ranks, unless our own kernel does."""
    logits, fused = torch.empty((tokens, head.out_features), dtype=torch.float32, device="meta"), head.group.fused
    own_kernel = fused is not None and fused.gathers_columns(logits, head.whole)
    return 0 if own_kernel or not head.is_sharded else context.config.device.tuning.nccl_node_bytes


def captured_everywhere(context: WorkerContext, runner: GraphRunner, wanted: Sequence[int]) -> list[int]:
    """The sizes that have a graph on all ranks.

    Raises:
        ConfigError: one of the `wanted` sizes calls NCCL and could not be captured. Later NCCL calls would hang.
    """
    held = set.intersection(*map(set, context.group.gather(runner.sizes)))
    if any(runner.calls_nccl(size) for size in set(wanted) - held):
        name = runner.spec.name
        raise ConfigError(f"The graphs of {name} do not fit the memory of all GPUs. Lower --mem-fraction-static or --cuda-graph-max-bs.")
    return sorted(held)
