"""Mask rows for all positions of the draft window of one request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import GrammarFailure, MaskRow, only_token

TOO_SLOW = "It takes too long to tell which tokens may come next. Make it simpler."
Path = tuple[int, ...]
"""Drafts after the last committed token, in order."""


class WindowMasks:
    """Mask rows after any path of drafts of one request.

    Each path is computed once. Drafts are pushed on forks of the constraint, one per branch.

    Args:
        constraint: the request's, at the last committed token.
        chain: int32 [D, ceil(V / 32)], the output rows; the first requested path of n drafts is written to row n.
    """

    def __init__(self, constraint: Constraint, chain: npt.NDArray[np.int32]) -> None:
        self._constraint, self._chain = constraint, list(chain)
        self._at: Path = ()
        self._fork = constraint
        self._known: dict[Path, MaskRow | None] = {}
        self._lengths = set[int]()
        self._errors: dict[Path, str] = {}
        self._costs: list[float] = []  # of the masks, in seconds of the meter

    def row(self, path: Path) -> MaskRow | None:
        """The mask after `path`; None if every token is allowed or the grammar does not allow `path` itself."""
        if path not in self._known:
            try:
                self._known[path] = self._mask(path)
            except Exception as error:  # a library's fault is the grammar's
                self._known[path], self._at = None, ()
                self._errors[path] = f"The grammar library failed: {type(error).__name__}."
        return self._known[path]

    def _mask(self, path: Path) -> MaskRow | None:
        constraint = self._move(path)
        if not constraint.restricts:
            return None
        row, meter = self._place(len(path)), self._constraint.meter
        began = meter.start()
        reason = constraint.fill(row)
        self._costs.append(meter.stop(began))
        if reason:
            self._errors[path] = reason
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

    @property
    def clean(self) -> bool:
        """Whether no mask failed or costs anything, so that no committed tokens end the request."""
        return not (self._errors or self._constraint.error or any(self._costs))

    def failure(self, tokens: Path) -> GrammarFailure | None:
        """Why the request ends with these committed tokens; None if it goes on. Call it once.

        Only masks of committed tokens count, as without drafts: errors after rejected drafts do not end the request, and the meter is
        charged with the average mask of the window for each token.
        """
        constraint, paths = self._constraint, [tokens[:n] for n in range(len(tokens))]
        if self._costs:
            masks = sum(self._known.get(path) is not None for path in paths)
            constraint.meter.charge(masks * sum(self._costs) / len(self._costs))
        for valid, path in enumerate(paths):
            if path in self._errors:
                return GrammarFailure(valid, self._errors[path])
        if constraint.error:
            return GrammarFailure(0, constraint.error)
        return GrammarFailure(len(tokens), TOO_SLOW) if constraint.meter.exceeded else None

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
