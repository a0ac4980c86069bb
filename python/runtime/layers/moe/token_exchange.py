"""The exchange of tokens between attention groups that share the experts."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from runtime.distributed.parallel_group import ParallelGroup


class TokenExchange:
    """Gathers the tokens of all attention groups for the experts, and returns each group's sums. Both methods can be captured.

    Attributes:
        group: the ranks with this rank's position in all attention groups.
        rows: number of tokens to which each group is padded in this pass; 0 if all groups have equally many.
    """

    def __init__(self, group: ParallelGroup) -> None:
        self.group, self.rows = group, 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """This group's tokens [T, hidden] -> those of all groups, [groups * rows, hidden]; padding is zero."""
        return self.group.gather_rows(F.pad(x, (0, 0, 0, self.rows - len(x))) if self.rows > len(x) else x)

    def scatter_sum(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """[groups * rows, hidden] of every rank -> their sum for this group's `count` tokens, [T, hidden]."""
        return self.group.scatter_sum(x)[:count]
