"""Mask rows for all positions of the draft window of one request."""

from __future__ import annotations

import numpy as np

from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import MaskRow, allows, only_token

Path = tuple[int, ...]
"""Drafts after the last committed token, in order."""


class WindowMasks:
    """Mask rows behind any path of drafts of one request; every path is computed once.

    The constraint stands at the last committed token before and after each call of `close`.
    """

    def __init__(self, constraint: Constraint, words: int) -> None:
        self._constraint, self._words = constraint, words
        self._at: Path = ()
        self._known: dict[Path, MaskRow | None] = {}

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

    def close(self) -> None:
        """Take all drafts back."""
        self._go(())

    def _compute(self, path: Path) -> MaskRow | None:
        if path:
            before = self.row(path[:-1])
            if before is not None and not allows(before, path[-1]):
                return None
        self._go(path)
        if not self._constraint.restricts:
            return None
        row = np.empty(self._words, dtype=np.int32)
        self._constraint.fill(row)
        return row

    def _go(self, path: Path) -> None:
        """Move the constraint to the end of `path`."""
        common = 0
        for here, there in zip(self._at, path, strict=False):
            if here != there:
                break
            common += 1
        if common < len(self._at):
            self._constraint.pop(len(self._at) - common)
        for token in path[common:]:
            self._constraint.push(token)
        self._at = path
