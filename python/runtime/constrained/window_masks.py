"""Mask rows for all positions of the draft window of one request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import MaskRow, only_token

Path = tuple[int, ...]
"""Drafts after the last committed token, in order."""


class WindowMasks:
    """Mask rows behind any path of drafts of one request, whose constraint stands at the last committed token.

    Every path is computed once. Drafts are looked at on forks, of which there is one per branch.

    Args:
        constraint: of the request.
        chain: int32 [D, ceil(V / 32)], where the rows of a chain go: the first path of n drafts that is asked for has row n.

    Attributes:
        error: why the grammar cannot be followed behind some path; empty where all is well.
    """

    def __init__(self, constraint: Constraint, chain: npt.NDArray[np.int32]) -> None:
        self._constraint, self._chain = constraint, list(chain)
        self._at: Path = ()
        self._fork = constraint
        self._known: dict[Path, MaskRow | None] = {}
        self._lengths = set[int]()
        self.error = ""

    def row(self, path: Path) -> MaskRow | None:
        """What may follow `path`; None where everything may, also because the path itself is not allowed."""
        known = self._known
        if path in known:
            return known[path]
        constraint, row = self._move(path), None
        if constraint.restricts:
            row = self._place(len(path))
            constraint.fill(row)
            self.error = self.error or constraint.error
        known[path] = row
        return row

    def write(self, path: Path) -> bool:
        """Put what may follow `path`, drafts of a chain, into the chain's row of that length; returns whether anything is forbidden."""
        row, place = self.row(path), self._chain[len(path)]
        if row is None:
            place.fill(-1)
        elif row is not place:
            place[:] = row
        return row is not None

    def substitute_forced(self, path: Path, token: int) -> int:
        """The draft after `path`: `token`, or the one token that may stand there."""
        row = self.row(path)
        forced = None if row is None else only_token(row)
        return token if forced is None else forced

    def _place(self, length: int) -> MaskRow:
        """Memory for the row behind `length` drafts."""
        if length < len(self._chain) and length not in self._lengths:
            self._lengths.add(length)
            return self._chain[length]
        return np.empty_like(self._chain[0])

    def _move(self, path: Path) -> Constraint:
        """The constraint at the end of `path`."""
        if not path:
            return self._constraint
        done = len(self._at)
        if not done or path[:done] != self._at:
            self._fork, done = self._constraint.fork(), 0
        for token in path[done:]:
            self._fork.push(token)
        self._at = path
        return self._fork
