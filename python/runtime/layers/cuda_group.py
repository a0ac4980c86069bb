"""The ranks of a model on GPUs: NCCL for large arrays, our own kernels for the small arrays of decode steps."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional as F

from runtime.distributed.parallel_group import ALONE, ParallelGroup, Shard, split_ranks
from runtime.distributed.torch_group import LONGEST_PAUSE, TorchGroup, subgroup
from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.graph_timer import median_micros
from runtime.layers.kernels.push_exchange import PushExchange
from runtime.layers.row_norms import RowNorms

log = logging.getLogger(__name__)
T = TypeVar("T")
COLUMNS = 4096
"""Columns of the arrays with which exchanges are timed and checked."""
TIMED_ROWS = (1, 8, 32, 64, 128, 256, 1024, 4096)
CHECKED_ROWS = (1, 3, 128, 1500)
"""Numbers of rows with which exchanges are checked. The last takes several kernels."""
CALLS, REPLAYS = 20, 9
"""Exchanges per timed graph, and its replays."""
TOLERANCE, ROUNDED = 1e-2, 2e-2
"""Largest errors of values that are rounded to 16 bits: of magnitude 1, and of sums of such values over the ranks, per rank."""


class CudaGroup(ParallelGroup):
    """`ParallelGroup` on GPUs, one per rank. Choices at start-up are exchanged through `control`, on the CPU.

    Attributes:
        fused: our own exchange kernels between GPUs of one host; None if they do not work.
        exchange_micros: microseconds of an all-reduce by bytes, as "own / NCCL"; for the log and the server's info.
    """

    def __init__(
        self, control: TorchGroup, device: torch.device, own_kernels: bool, timeout: float, nccl: dist.ProcessGroup | None = None
    ) -> None:
        """All ranks call it together, each with its own `device`, torch's current one.

        Args:
            own_kernels: whether our kernels are used if they work; only for ranks of one host.
            nccl: the process group, if not of all ranks.
        """
        super().__init__(control.rank, control.size)
        self._control, self._device, self._timeout = control, device, timeout
        self._nccl = nccl or dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout))
        dist.all_reduce(torch.zeros(1, device=device), group=self._nccl)  # creates the communicator, which must not happen inside a capture
        self._exchange: PushExchange | None = None  # NCCL is used while it is checked
        if own_kernels:
            self.fused = self._exchange = self._make_fused(device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks by NCCL, in the storage of `x`."""
        dist.all_reduce(x, group=self._nccl)
        return x

    def gather_columns(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """The columns [N, own] of all ranks, concatenated."""
        if self._exchange is not None and self._exchange.gathers_columns(x, columns):
            whole = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
            self._exchange.gather_columns(x, whole)
            return whole
        widths = [shard.stop - shard.start for shard in (Shard(rank, self.size).of(columns) for rank in range(self.size))]
        padded = F.pad(x, (0, widths[0] - x.shape[1])).contiguous()
        parts = torch.empty((self.size, *padded.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts, padded, group=self._nccl)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, concatenated."""
        rows = torch.empty((self.size * len(x), *x.shape[1:]), dtype=x.dtype, device=x.device)
        if self._exchange is not None and self._exchange.moves(rows):
            self._exchange.gather_rows(x.contiguous(), rows)
        else:
            dist.all_gather_into_tensor(rows, x.contiguous(), group=self._nccl)
        return rows

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over all ranks."""
        rows, x = torch.empty((len(x) // self.size, *x.shape[1:]), dtype=x.dtype, device=x.device), x.contiguous()
        if self._exchange is not None and self._exchange.fits(x):
            self._exchange.scatter_sum(x, rows)
        else:
            dist.reduce_scatter_tensor(rows, x, group=self._nccl)
        return rows

    def split(self, parts: int) -> tuple[ParallelGroup, ParallelGroup]:
        """This rank's group of consecutive ranks, and the group of the ranks at its position in all groups."""
        controls = self._control.split(parts)
        groups, places = (self._sub(lists, control) for lists, control in zip(split_ranks(self.size, parts), controls, strict=True))
        return groups, places

    def _sub(self, lists: list[list[int]], control: ParallelGroup) -> ParallelGroup:
        nccl = subgroup(lists, "nccl", self._timeout)
        if not isinstance(control, TorchGroup):
            return ALONE
        return CudaGroup(control, self._device, own_kernels=self.fused is not None, timeout=self._timeout, nccl=nccl)

    def agree(self, value: T) -> T:
        """Rank 0's `value`."""
        return self._control.agree(value)

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank."""
        return self._control.gather(value)

    # ---- our own exchanges: made, checked and timed at start-up

    def _make_fused(self, device: torch.device) -> PushExchange | None:
        others = range(1, self.size)
        reachable = cuda_driver.available() and all(torch.cuda.can_device_access_peer(0, other) for other in others)
        if not all(self.gather(reachable)):
            log.warning("the GPUs cannot read each other's memory: using NCCL all-reduce, which is slower")
            return None
        fused, why = None, ""
        try:
            fused = PushExchange(self, device, torch.cuda.get_device_capability(device)[0] >= 9)
        except RuntimeError as error:
            why = str(error)
        if not all(self.gather(fused is not None)) or fused is None:
            log.warning("custom all-reduce disabled: it does not work here (%s); using NCCL", why or "on another rank")
            return None
        if not all(self.gather(self._is_right(fused, device))):
            log.warning("custom all-reduce disabled: results differ from NCCL")
            return None
        self._time(fused, device)
        fused.wait_at_most(LONGEST_PAUSE)  # processes may be paused; a rank that is gone or hangs is detected by its heartbeats
        return fused

    def _is_right(self, fused: PushExchange, device: torch.device) -> bool:
        """Whether sums, tokens and hashes equal those of NCCL and torch."""

        right = True
        for rows, one_shot_limit in itertools.product(CHECKED_ROWS, fused.shot_limits):
            fused.one_shot_limit = one_shot_limit
            x = torch.randn((rows, COLUMNS), generator=_seeded(device, self.rank), device=device).to(torch.bfloat16)
            h = torch.randn((rows, COLUMNS), generator=_seeded(device, 99), device=device)
            gain = torch.randn(COLUMNS, generator=_seeded(device, 98), device=device).to(torch.bfloat16)
            scaled, squares = torch.empty_like(x), torch.empty((rows, fused.parts(COLUMNS)), device=device)
            expected = h + self.all_reduce(x.float())
            fused.add(x, h, gain, scaled, squares)
            right &= torch.allclose(h, expected, rtol=1e-5, atol=1e-5 if one_shot_limit else ROUNDED * self.size)
            right &= torch.allclose(squares.sum(1), h.square().sum(1), rtol=1e-4)
            right &= torch.allclose(scaled.float(), h * gain.float(), rtol=TOLERANCE, atol=TOLERANCE)
            right &= len(set(self.gather(int(h.view(torch.int32).sum())))) == 1
        for rows in (1, 3, 128):
            gain = torch.randn(3072, generator=_seeded(device, 98), device=device).to(torch.bfloat16)
            qkv = torch.randn((rows, COLUMNS), generator=_seeded(device, self.rank), device=device).to(torch.bfloat16)
            gains = gain[:2048], gain[2048:]
            norms = RowNorms(*gains, 1e-6, (2048 * self.size, 1024 * self.size), self)
            expected = norms(qkv.clone())
            right &= fused.norm_rows(qkv, gains, norms.columns, norms.eps)
            right &= torch.allclose(qkv.float(), expected.float(), rtol=TOLERANCE, atol=TOLERANCE)
            whole, part = torch.empty((self.size * rows, COLUMNS), dtype=qkv.dtype, device=device), torch.empty_like(qkv)
            fused.gather_rows(qkv, whole)
            right &= torch.equal(whole[self.rank * rows :][:rows], qkv)
            fused.scatter_sum(whole, part)
            right &= torch.equal(part, qkv * self.size)
        scores = torch.randn((5, 100), generator=_seeded(device, self.rank), device=device)
        hashed = torch.full((1,), 7, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        tokens = fused.largest(scores, scores.argmax(1), 100 * self.rank, hashed=hashed)
        whole = self.gather_columns(scores, 100 * self.size)
        right &= torch.equal(tokens, whole.argmax(1)) and int(hashed[1]) == 0
        hashed[0].fill_(self.rank)
        fused.largest(scores, scores.argmax(1), 0, hashed=hashed)
        return bool(right) and int(hashed[1]) == 1

    def _time(self, fused: PushExchange, device: torch.device) -> None:
        """Time our kernels and NCCL in graphs. Ours are used up to the largest array for which they are faster on rank 0, or for all arrays
        if that is the largest one.
        """
        limit = one_shot_limit = 0
        for rows in TIMED_ROWS:
            x = torch.zeros((rows, COLUMNS), dtype=torch.bfloat16, device=device)
            h = torch.zeros((rows, COLUMNS), device=device)
            own = list[float]()
            for shot_limit in fused.shot_limits:
                fused.one_shot_limit = shot_limit
                own.append(self._micros(lambda x=x, h=h: fused.add(x, h)))
            nccl = self._micros(lambda x=x, h=h: h.add_(self.all_reduce(x)))
            self.exchange_micros[str(x.nbytes)] = f"{min(own):.1f} / {nccl:.1f}"
            one_shot_limit = x.nbytes if own[0] == min(own) else one_shot_limit
            if min(own) < nccl:
                limit = x.nbytes if rows < TIMED_ROWS[-1] else sys.maxsize
        fused.limit, fused.one_shot_limit = limit, one_shot_limit
        log.info(
            "all-reduce over %d ranks, microseconds by bytes, custom / NCCL: %s; in one shot up to %d bytes",
            *(self.size, self.exchange_micros, one_shot_limit),
        )

    def _micros(self, run: Callable[[], object]) -> float:
        """Rank 0's microseconds of one call in a graph; all ranks replay together."""
        run()
        torch.cuda.synchronize()
        self.gather(None)
        return self.agree(median_micros(run, REPLAYS, CALLS))


def _seeded(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
