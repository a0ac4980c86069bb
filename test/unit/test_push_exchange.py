"""The exchange kernels between GPUs, as far as the host decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.layers.kernels.push_exchange import PushExchange


def test_tokens_are_exchanged_where_nccl_adds_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = list[int]()
    monkeypatch.setattr(PushExchange, "_kernel", lambda *_: lambda blocks, *_: launches.append(blocks))
    exchange: Any = object.__new__(PushExchange)  # __init__ needs GPUs
    exchange._ranks = exchange._state = torch.zeros(2, dtype=torch.int32)
    exchange._pdl, exchange.limit = True, 0
    exchange.largest(torch.zeros(200, 8), torch.zeros(200, dtype=torch.int64), 0)
    assert launches == [2]
