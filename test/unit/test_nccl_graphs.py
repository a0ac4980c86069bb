"""Calls of NCCL in CUDA graphs: their memory is planned, and a failed capture of them ends the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.config.device_tuning import H200
from runtime.config.quant_config import Int4Format, QuantConfig
from runtime.errors import ConfigError
from runtime.model_executor.nccl_graphs import captured_everywhere, nccl_bytes_of_graph, nccl_bytes_of_logits

MODEL: Any = SimpleNamespace(num_layers=3, hidden_size=64, quant=None)


def context(size: int = 1, fused: int | None = None, exchange: bool = False, sizes: list[list[int]] | None = None) -> Any:
    """Of ranks whose own kernels sum arrays of up to `fused` bytes, and that hold graphs of these `sizes`."""
    own = None if fused is None else SimpleNamespace(fits=lambda x: x.nbytes <= fused)
    return SimpleNamespace(
        attention_group=SimpleNamespace(size=size, fused=own),
        group=SimpleNamespace(gather=lambda mine: sizes),
        exchange=object() if exchange else None,
        dtype=torch.bfloat16,
        config=SimpleNamespace(device=SimpleNamespace(tuning=H200)),
    )


@pytest.mark.parametrize(
    ("ranks", "tokens", "calls"),
    [
        (context(), 8, 0),
        (context(size=2), 8, 6),
        (context(size=2, fused=8 * 64 * 2), 8, 0),
        (context(size=2, fused=8 * 64 * 2), 9, 6),
        (context(exchange=True), 8, 6),
        (context(size=2, exchange=True), 8, 12),
    ],
)
def test_two_sums_and_two_exchanges_per_layer_take_memory(ranks: Any, tokens: int, calls: int) -> None:
    assert nccl_bytes_of_graph(ranks, MODEL, tokens) == calls * H200.nccl_node_bytes


@pytest.mark.parametrize(("size", "ordered", "calls"), [(1, True, 0), (2, False, 6), (2, True, 12)])
def test_gathering_inputs_in_activation_order_takes_memory(size: int, ordered: bool, calls: int) -> None:
    quant = QuantConfig("int4", int4=Int4Format("gptq", 32, ordered=ordered))
    model: Any = SimpleNamespace(num_layers=3, hidden_size=64, quant=quant)
    assert nccl_bytes_of_graph(context(size=size), model, 8) == calls * H200.nccl_node_bytes


@pytest.mark.parametrize(
    ("ranks", "most", "tokens", "calls"),
    [(1, None, 4, 0), (2, None, 4, 1), (2, 4, 4, 0), (2, 4, 5, 1)],
    ids=["alone", "NCCL", "own", "large"],
)
def test_gathering_logits_takes_memory_unless_our_kernel_does_it(ranks: int, most: int | None, tokens: int, calls: int) -> None:
    own = None if most is None else SimpleNamespace(gathers_columns=lambda x, columns: columns == 96 and len(x) <= most)
    head: Any = SimpleNamespace(out_features=96 // ranks, whole=96, is_sharded=ranks > 1, group=SimpleNamespace(fused=own))
    assert nccl_bytes_of_logits(context(), head, tokens) == calls * H200.nccl_node_bytes


def test_a_failed_capture_with_nccl_ends_the_start() -> None:
    runner: Any = SimpleNamespace(sizes=[2, 4], spec=SimpleNamespace(name="target decode"), calls_nccl=lambda size: size > 1)
    assert captured_everywhere(context(sizes=[[2, 4], [2, 4]]), runner, [2, 4]) == [2, 4]
    assert captured_everywhere(context(sizes=[[2, 4], [1, 2, 4]]), runner, [1, 2, 4]) == [2, 4], "size 1 calls no NCCL"
    with pytest.raises(ConfigError, match="target decode do not fit the memory of all GPUs"):
        captured_everywhere(context(sizes=[[2, 4], [4]]), runner, [2, 4])
