"""`ParallelGroup` over torch.distributed: gloo between CPUs, and for decisions at start-up."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional as F

from runtime.config.node_address import NodeAddress
from runtime.distributed.parallel_group import ALONE, ParallelGroup, Shard, split_ranks
from runtime.distributed.rank_watch import PERIOD
from runtime.distributed.rendezvous import Rendezvous
from runtime.errors import ConfigError

T = TypeVar("T")
EXCHANGE_SECONDS = 6.0
"""How long a rank waits for the others within a step. They do equal work, so they arrive at almost the same time."""
LONGEST_PAUSE = 86400.0
"""Seconds after which an exchange that reads a clock, by gloo or by our kernels, ends."""


class TorchGroup(ParallelGroup):
    """The ranks of one model. Calls within steps wait `EXCHANGE_SECONDS` for the others, calls at start-up `timeout`.

    Attributes:
        exchange_seconds: time spent in exchanges within steps so far, on a CPU.
    """

    def __init__(self, rank: int, size: int, start: dist.ProcessGroup, steps: dist.ProcessGroup) -> None:
        """`start`, `steps`: the process groups for calls at start-up and within steps."""
        super().__init__(rank, size)
        self._start, self._steps = start, steps

    @classmethod
    def join(cls, rendezvous: Rendezvous, rank: int, size: int, timeout: float) -> TorchGroup:
        """Join the group and wait for the other ranks. Raises `ConfigError` if they do not meet."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", rendezvous.interface)
        whole, seconds, url, store = [list(range(size))], timedelta(seconds=timeout), rendezvous.url, None
        if rendezvous.file:
            url, store = None, dist.FileStore(rendezvous.file, size)  # pyright: ignore[reportPrivateImportUsage]
            store.set_timeout(seconds)
        try:
            if rank and not rendezvous.file:
                rendezvous.await_listener(timeout)
                _check_store(rendezvous.node, timeout)
            dist.init_process_group("gloo", url, seconds, size, rank, store)
            return cls(rank, size, subgroup(whole, "gloo", timeout), subgroup(whole, "gloo", LONGEST_PAUSE))
        except (OSError, RuntimeError) as error:  # torch raises several kinds, DistNetworkError among them
            raise ConfigError(
                f"Rank {rank} did not meet the other ranks at {rendezvous.url}: {_reason(error)}. "
                f"All {size} ranks must start within --dist-timeout, {timeout:g} s."
            ) from error

    def split(self, parts: int) -> tuple[ParallelGroup, ParallelGroup]:
        """This rank's group of consecutive ranks, and the group of ranks with its index in each; see `ParallelGroup`."""
        groups, places = (self._sub(lists) for lists in split_ranks(self.size, parts))
        return groups, places

    def _sub(self, lists: list[list[int]]) -> ParallelGroup:
        own, steps = next(ranks for ranks in lists if self.rank in ranks), subgroup(lists, "gloo", LONGEST_PAUSE)
        return TorchGroup(own.index(self.rank), len(own), steps, steps) if len(own) > 1 else ALONE

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in float32, and in the storage of `x` if it has that type and no gaps."""
        total = x.float().contiguous()  # gloo reads a slice as if it had no gaps
        self._await(dist.all_reduce(total, group=self._steps, async_op=True))
        return total.to(x.dtype)

    def gather_columns(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """Concatenate the [N, own] tensors of all ranks along the columns."""
        widths = [shard.stop - shard.start for shard in (Shard(rank, self.size).of(columns) for rank in range(self.size))]
        parts = self.gather_rows(F.pad(x, (0, widths[0] - x.shape[1]))).chunk(self.size)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of every rank, one after another."""
        rows = torch.empty((self.size * len(x), *x.shape[1:]), dtype=x.dtype)
        self._await(dist.all_gather(list(rows.chunk(self.size)), x.contiguous(), group=self._steps, async_op=True))
        return rows

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over all ranks."""
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def _await(self, exchange: dist.Work | None) -> None:
        """Wait for an exchange, in periods, which tolerates a suspended machine.

        Raises:
            RuntimeError: another rank is gone or does not take part.
        """
        assert exchange is not None, "this rank is a member of its own group"
        started = time.perf_counter()
        for _ in range(round(EXCHANGE_SECONDS / PERIOD)):
            with contextlib.suppress(RuntimeError):
                exchange.wait(timedelta(seconds=PERIOD))
            if exchange.is_completed():
                exchange.wait()  # raises the error of one that failed
                self.exchange_seconds += time.perf_counter() - started
                return
        raise RuntimeError(f"another rank did not take part in an exchange for {EXCHANGE_SECONDS:g} s")

    def agree(self, value: T) -> T:
        """Rank 0's `value`."""
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self._start)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank."""
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._start)
        return values  # type: ignore[return-value]


def subgroup(lists: list[list[int]], backend: str, seconds: float) -> dist.ProcessGroup:
    """The group of this rank among `lists`, which contain every rank once; calls time out after `seconds`. All ranks call it together."""
    group, _ = dist.new_subgroups_by_enumeration(lists, timedelta(seconds=seconds), backend=backend)
    assert isinstance(group, dist.ProcessGroup), "every rank is in a list"
    return group


def _check_store(node: NodeAddress, timeout: float) -> None:
    """Check that what listens at `node` is the store of node 0. torch would wait for ever for the first answer of another program.

    Raises:
        OSError: it is not, or does not answer within `timeout` seconds.
    """

    def greet() -> None:
        with contextlib.suppress(RuntimeError):  # the group itself reports these
            seconds = timedelta(seconds=timeout)
            dist.TCPStore(node.host, node.port, timeout=seconds, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]

    thread = threading.Thread(target=greet, name="talon-greet", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise OSError("the program that listens there does not answer as node 0 does")


def _reason(error: OSError | RuntimeError) -> str:
    return str(error).rstrip(".") if isinstance(error, RuntimeError) else (error.strerror or str(error)).lower()
