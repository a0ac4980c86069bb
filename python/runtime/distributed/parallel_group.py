"""The processes that share one model, handed to everything that is sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class ParallelGroup(Protocol):
    """`size` processes that each hold a shard of a model.

    Attributes:
        rank: of this process, 0..size - 1.
        size: 1 where the model is not sharded.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102

    @property
    def size(self) -> int: ...  # noqa: D102

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over all ranks, the same bits on every rank; may reuse the storage of `x`."""
        ...

    def agree(self, value: T) -> T:
        """Rank 0's `value`: every measured choice that ranks must share goes through here."""
        ...


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """The `ParallelGroup` of one process: nothing is sharded."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def agree(self, value: T) -> T:
        """`value` itself."""
        return value


ALONE = SingleProcess()
"""The group of an unsharded model; it has no state."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal parts of a dimension."""

    index: int = 0
    count: int = 1

    def of(self, size: int) -> slice:
        """This part's range of a dimension of `size`, a multiple of `count`."""
        assert size % self.count == 0, f"{size} is not a multiple of {self.count}"
        part = size // self.count
        return slice(self.index * part, (self.index + 1) * part)


WHOLE = Shard()
"""The whole dimension."""
