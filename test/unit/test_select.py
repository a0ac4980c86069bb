"""Which form of the block operations a machine runs."""

from __future__ import annotations

import sys

import pytest
import torch

from runtime.layers.select import select_ops
from runtime.layers.torch_ops import TorchOps


def test_a_gpu_without_the_fused_kernels_runs_plain_torch_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    monkeypatch.delitem(sys.modules, "runtime.layers.cuda_ops", raising=False)
    ops, why = select_ops(torch.device("cuda"), torch.bfloat16)
    assert isinstance(ops, TorchOps)
    assert "sgl_kernel" in why
    assert "'cuda' extra" in why
