"""`ParallelGroup` over torch.distributed: gloo between CPUs, and for what the ranks agree on at start-up."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional as F

from runtime.distributed.parallel_group import FusedExchange, Shard
from runtime.distributed.rendezvous import Rendezvous

T = TypeVar("T")
EXCHANGE_SECONDS = 6.0
"""How long a rank waits for the others within a step. They do equal work, so they arrive at almost the same time."""


class TorchGroup:
    """The ranks of one model. Calls within steps wait `EXCHANGE_SECONDS` for the others, calls at start-up `timeout`.

    Attributes:
        exchange_seconds: time spent in exchanges within steps so far, on a CPU.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, size: int, timeout: float) -> None:
        """Join the group and wait for the other ranks."""
        self.rank, self.size = rank, size
        self.exchange_seconds = 0.0
        self.fused: FusedExchange | None = None
        self.exchange_micros: dict[str, str] = {}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", rendezvous.interface)
        dist.init_process_group("gloo", init_method=rendezvous.url, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        self._steps = dist.new_group(backend="gloo", timeout=timedelta(seconds=EXCHANGE_SECONDS))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in float32 and the storage of `x` where it has that type."""
        started = time.perf_counter()
        total = x if x.dtype is torch.float32 else x.float()
        dist.all_reduce(total, group=self._steps)
        self.exchange_seconds += time.perf_counter() - started
        return total.to(x.dtype)

    def gather_columns(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """[N, own] of every rank side by side."""
        started = time.perf_counter()
        widths = [shard.stop - shard.start for shard in (Shard(rank, self.size).of(columns) for rank in range(self.size))]
        padded = F.pad(x, (0, widths[0] - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(parts, padded, group=self._steps)
        self.exchange_seconds += time.perf_counter() - started
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def agree(self, value: T) -> T:
        """Rank 0's `value`."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank."""
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]
