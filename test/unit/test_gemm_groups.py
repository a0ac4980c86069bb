"""Which GEMMs of a model are autotuned."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from int4_weights import random_int4
from runtime.config.device_tuning import H200
from runtime.layers.gemm.autotune import candidates, group_gemms
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear
from runtime.layers.quantization.int4 import Int4
from runtime.layers.quantization.scheme import Storage


def test_gemms_that_only_cublas_supports_are_not_autotuned() -> None:
    """A rank of eight holds 264 columns of Gemma 4's 2112, which are no multiple of 16."""
    gemms = [Gemm("linear", Linear.dense(torch.empty(64, columns, dtype=torch.bfloat16)), None) for columns in (264, 272)]
    assert [group.linears[0].in_features for group in group_gemms(gemms, (1, 128))] == [272, 272]


def test_int4_weights_are_timed_with_kernels_that_take_them() -> None:
    weight, scale, _ = random_int4(64, 256, 32, "cpu")
    groups = group_gemms([Gemm("linear", Linear(Storage(weight, scale), scheme=Int4()), None)], (1, 128, 192, 2048))
    assert [group.rows for group in groups] == [1, 128]
    for group in groups:  # only Triton's run on a device that is no Hopper GPU
        assert candidates(group, 132, H200) == (None, *H200.int4_configs(group.rows))
