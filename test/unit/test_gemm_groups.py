"""Which GEMMs of a model are autotuned."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from runtime.layers.gemm.autotune import group_gemms
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear


def test_gemms_that_only_cublas_supports_are_not_autotuned() -> None:
    """A rank of eight holds 264 columns of Gemma 4's 2112, which are no multiple of 16."""
    gemms = [Gemm("linear", Linear.dense(torch.empty(64, columns, dtype=torch.bfloat16)), None) for columns in (264, 272)]
    assert [group.linears[0].in_features for group in group_gemms(gemms, (1, 128))] == [272, 272]
