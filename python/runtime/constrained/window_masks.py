"""Mask rows for all positions of the draft window of one request."""

from __future__ import annotations

import numpy as np

from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import MaskRow, allows, only_token

Path = tuple[int, ...]
"""Drafts after the last committed token, in order."""


class WindowMasks:
    """Mask rows behind any path of drafts of one request, whose constraint stands at the last committed token.

    Every path is computed once. Drafts are looked at on forks, of which there is one per branch.

    Attributes:
        error: why the grammar cannot be followed behind some path; empty where all is well.
    """

    def __init__(self, constraint: Constraint, words: int) -> None:
        self._constraint, self._words = constraint, words
        self._at: Path = ()
        self._fork = constraint
        self._known: dict[Path, MaskRow | None] = {}
        self.error = ""

    def row(self, path: Path) -> MaskRow | None:
        """What may follow `path`; None where everything may, also because the path itself is not allowed."""
        if path not in self._known:
            self._known[path] = self._compute(path)
        return self._known[path]

    def guided(self, path: Path, token: int) -> int:
        """The draft after `path`: `token`, or the one token that may stand there."""
        row = self.row(path)
        forced = None if row is None else only_token(row)
        return token if forced is None else forced

    def _compute(self, path: Path) -> MaskRow | None:
        if path:
            before = self.row(path[:-1])
            if before is not None and not allows(before, path[-1]):
                return None
        constraint = self._move(path)
        if not constraint.restricts:
            return None
        row = np.empty(self._words, dtype=np.int32)
        constraint.fill(row)
        self.error = self.error or constraint.error
        return row

    def _move(self, path: Path) -> Constraint:
        """The constraint at the end of `path`."""
        if not path:
            return self._constraint
        if self._fork is self._constraint or path[: len(self._at)] != self._at:
            self._fork, self._at = self._constraint.fork(), ()
        for token in path[len(self._at) :]:
            self._fork.push(token)
        self._at = path
        return self._fork
