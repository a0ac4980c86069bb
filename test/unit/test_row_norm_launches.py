"""Norms of whole query and key rows: their cost. Their kernels are compared with their definition in gpu/test_row_norms.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.distributed.parallel_group import ALONE
from runtime.layers.row_norms import RowNorms


@pytest.mark.parametrize(
    ("group", "launches"),
    [(ALONE, 2), (SimpleNamespace(size=2, fused=None), 10), (SimpleNamespace(size=2, fused=object()), 1)],
    ids=["alone", "nccl", "exchange kernel"],
)
def test_launches_count_an_nccl_call_only_where_nccl_sums(group: Any, launches: int) -> None:
    gain = torch.ones(8)
    assert RowNorms(gain, gain, 1e-6, (8 * group.size, 8 * group.size), group).kernel_launches == launches
