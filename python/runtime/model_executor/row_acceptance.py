"""Acceptance per request row, in addition to the averages of all requests. No torch.

`admit` and `gains` run on the thread that submits steps, `add` on the one that reads them; each writes only its own fields.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.batch import Int32

KEEP = 1 - 1 / 64
"""Decay of a row's counts per iteration, with or without drafts, so that a row without drafts is tried again."""
PRIOR = 6.0
"""The average of all requests counts as this many drafts."""
MOST = 0.98
"""The highest rate expected of any draft."""

Floats = npt.NDArray[np.float64]


class RowAcceptance:
    """Owner of tested and accepted drafts by request row."""

    def __init__(self, rows: int) -> None:
        self._tested, self._accepted = np.zeros(rows), np.zeros(rows)
        self._since = np.zeros(rows, dtype=np.int64)  # the step in which the present request took the row
        self._admitted, self._seen = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)

    def admit(self, row: int, step: int) -> None:
        """A new request takes the row in `step`."""
        self._since[row] = step
        self._admitted[row] += 1

    def add(self, rows: Int32, step: int, accept_lens: npt.NDArray[np.integer], drafts: npt.NDArray[np.integer]) -> None:
        """Count the iteration of `step`: int [n] each, `drafts` those that were verified."""
        admitted, own = self._admitted[rows], self._since[rows] <= step  # another request may have the row by now
        rows, admitted, accept_lens, drafts = rows[own], admitted[own], accept_lens[own], drafts[own]
        keep = np.where(self._seen[rows] == admitted, KEEP, 0.0)
        self._seen[rows] = admitted
        self._tested[rows] = keep * self._tested[rows] + np.minimum(accept_lens, drafts)
        self._accepted[rows] = keep * self._accepted[rows] + (accept_lens - 1)

    def gains(self, rows: Int32, usual: Floats, K: int) -> Floats:
        """The expected gain of each draft of each request, [n, K], decreasing in each row.

        All drafts of a request have the same conditional rate: differences by position in averages over many requests mostly reflect
        which requests get that far.

        Args:
            rows: int32 [n].
            usual: [n], rates of requests of this kind.
        """
        known = self._seen[rows] == self._admitted[rows]
        rate = (known * self._accepted[rows] + PRIOR * usual) / (known * self._tested[rows] + PRIOR)
        return np.minimum(rate, MOST)[:, None] ** np.arange(1, K + 1)
