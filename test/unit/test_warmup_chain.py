"""The GEMMs that run before others are timed: every kind of a model's layers, whether norms precede them or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.layers.linear import Linear
from runtime.layers.ops import Stream
from runtime.layers.torch_ops import TorchOps
from runtime.layers.warmup_chain import run_chain
from unit.test_models import Checkpoint, loaded

ROWS = 3


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "model"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2", "olmo2", "exaone4", "deepseek-v2-lite"])
def test_every_kind_of_gemm_runs(family: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpoint(family, tmp_path)
    model, ops, ran = loaded(tmp_path), TorchOps(), set[tuple[int, int]]()
    gemms = [*model.gemms()] if whole else [gemm for layer in model.layers for gemm in layer.gemms()]
    multiply = Linear.__call__

    def recorded(linear: Linear, x: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
        assert x.shape == (ROWS, linear.in_features)
        ran.add((linear.out_features, linear.in_features))
        return multiply(linear, x, in_prompt)

    monkeypatch.setattr(Linear, "__call__", recorded)
    run_chain(ops, gemms, ROWS, Stream, ops.linear_add)
    assert ran == {(gemm.linear.out_features, gemm.linear.in_features) for gemm in gemms if gemm.op != "logits"}
