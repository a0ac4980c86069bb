"""The processes that share one model, passed to everything that is sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class FusedExchange(Protocol):
    """Exchanges of small arrays in one kernel each, fused with the adjacent operations. Every method may be captured."""

    def fits(self, x: torch.Tensor) -> bool:
        """Whether `add` takes this array; the same on every rank."""
        ...

    def gathers_columns(self, x: torch.Tensor, columns: int) -> bool:
        """Whether it gathers this rank's columns, x [N, own], of [N, `columns`]; the same on every rank."""
        ...

    def parts(self, columns: int) -> int:
        """Sums of squares per row that `add` stores."""
        ...

    def add(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        gain: torch.Tensor | None = None,
        scaled: torch.Tensor | None = None,
        squares: torch.Tensor | None = None,
        *,
        scattered: bool = False,
    ) -> None:
        """`h += sum of x over the ranks`, or of this rank's part of x if `scattered`; with `gain` also `scaled = h * gain` and `squares`,
        sums of h * h.
        """
        ...

    def norm_rows(self, rows: torch.Tensor, gains: tuple[torch.Tensor, torch.Tensor], columns: tuple[int, int], eps: float) -> bool:
        """RMS norms of two parts of each row over the ranks, in place; False, and nothing is done, if it does not take these rows."""
        ...

    def largest(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        first: int,
        tokens: torch.Tensor | None = None,
        hashed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The most likely token over all ranks, int64 [N]; `hashed`: a hash, and the flag that is set if ranks differ in it."""
        ...

    def commit(self, hashed: torch.Tensor, tokens: torch.Tensor, lens: torch.Tensor) -> None:
        """Add the first `lens` tokens of each row to the hash."""
        ...


class ParallelGroup:
    """`size` processes that each hold a shard of a model. All of them make the same calls in the same order.

    This class is the group of one process, in which nothing is sharded; its subclasses are groups of several.

    Attributes:
        rank: rank of this process, 0..size - 1.
        size: 1 if the model is not sharded.
        exchange_seconds: time spent in exchanges within steps so far, if the host waits for them.
        fused: exchanges by one kernel each; None if there are none.
        exchange_micros: measured microseconds of an all-reduce by bytes; empty if not measured.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.exchange_seconds = 0.0
        self.fused: FusedExchange | None = None
        self.exchange_micros: dict[str, str] = {}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over all ranks, the same bits on every rank; may reuse the storage of `x`."""
        return x

    def gather_columns(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """[N, own] of every rank concatenated: [N, `columns`], of which rank r has `Shard(r, size).of(columns)`."""
        return x

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[N, columns] of every rank one after another, [size * N, columns]; N is the same on all ranks."""
        return x

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """[size * N, columns] of every rank -> [N, columns], the sum over all ranks of this rank's rows; may reuse the storage."""
        return x

    def split(self, parts: int) -> tuple[ParallelGroup, ParallelGroup]:
        """This rank's group of `parts` equal groups of consecutive ranks, and the group of ranks at its index in each. Start-up only."""
        return self, self

    def agree(self, value: T) -> T:
        """Rank 0's `value`: every measured choice that ranks must share goes through here. At start-up only."""
        return value

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank, in the order of ranks. At start-up only."""
        return [value]


ALONE = ParallelGroup()
"""The group of an unsharded model; it has no state."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of a dimension that is cut into units of `unit`, the first parts larger if it does not
    divide evenly.
    """

    index: int = 0
    count: int = 1
    unit: int = 1

    def of(self, size: int) -> slice:
        """This part's range of a dimension of `size`, a multiple of `unit`."""
        assert size % self.unit == 0, f"{size} is not a multiple of {self.unit}"
        each, more = divmod(size // self.unit, self.count)
        start = self.index * each + min(self.index, more)
        return slice(start * self.unit, (start + each + (self.index < more)) * self.unit)


def split_ranks(size: int, parts: int) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of `parts` equal groups of consecutive ranks, and of the groups of ranks with the same index in each."""
    each = size // parts
    return [list(range(i * each, (i + 1) * each)) for i in range(parts)], [list(range(i, size, each)) for i in range(each)]


WHOLE = Shard()
"""The whole dimension."""
