"""Mask rows for all positions of the draft window of one request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import MaskRow, only_token

Path = tuple[int, ...]
"""Drafts after the last committed token, in order."""


class WindowMasks:
    """Mask rows after any path of drafts of one request.

    Each path is computed once. Drafts are pushed on forks of the constraint, one per branch.

    Args:
        constraint: the request's, at the last committed token.
        chain: int32 [D, ceil(V / 32)], the output rows; the first requested path of n drafts is written to row n.

    Attributes:
        error: why the grammar cannot be followed after some path; empty without an error.
    """

    def __init__(self, constraint: Constraint, chain: npt.NDArray[np.int32]) -> None:
        self._constraint, self._chain = constraint, list(chain)
        self._at: Path = ()
        self._fork = constraint
        self._known: dict[Path, MaskRow | None] = {}
        self._lengths = set[int]()
        self.error = ""

    def row(self, path: Path) -> MaskRow | None:
        """The mask after `path`; None if every token is allowed or the grammar does not allow `path` itself."""
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
        """Write the mask after `path`, a prefix of a chain, to row `len(path)` of `chain`; return whether any token is forbidden."""
        row, place = self.row(path), self._chain[len(path)]
        if row is None:
            place.fill(-1)
        elif row is not place:
            place[:] = row
        return row is not None

    def substitute_forced(self, path: Path, token: int) -> int:
        """The draft after `path`: the forced token if there is one, else `token`."""
        row = self.row(path)
        forced = None if row is None else only_token(row)
        return token if forced is None else forced

    def _place(self, length: int) -> MaskRow:
        """Memory for the mask row after `length` drafts."""
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
