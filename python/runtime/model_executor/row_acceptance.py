"""Acceptance per request row, in addition to the averages of all requests. No torch.

`admit` and `gains` run on the thread that submits steps, `add` on the one that reads them; each writes only its own fields.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.batch import Int32

KEEP = 1 - 1 / 64
"""Decay of a row's counts per iteration, with or without drafts, so that a row without drafts is eventually drafted for again."""
PRIOR = 6.0
"""Weight, in drafts, of the average of all requests."""
MOST = 0.98
"""Maximum expected acceptance of a draft."""

Floats = npt.NDArray[np.float64]


class RowAcceptance:
    """Owner of the counts of verified and accepted drafts by request row."""

    def __init__(self, rows: int) -> None:
        self._tested, self._accepted = np.zeros(rows), np.zeros(rows)
        self._since = np.zeros(rows, dtype=np.int64)  # the step in which the current request got the row
        self._admitted, self._seen = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)

    def admit(self, row: int, step: int) -> None:
        """Reset a row that a new request gets in `step`."""
        self._since[row] = step
        self._admitted[row] += 1

    def add(self, rows: Int32, step: int, accept_lens: npt.NDArray[np.integer], drafts: npt.NDArray[np.integer]) -> None:
        """Count the iteration of `step`: int [n] each; `drafts` is the number of verified drafts."""
        admitted, own = self._admitted[rows], self._since[rows] <= step  # the row may belong to another request by now
        rows, admitted, accept_lens, drafts = rows[own], admitted[own], accept_lens[own], drafts[own]
        keep = np.where(self._seen[rows] == admitted, KEEP, 0.0)
        self._seen[rows] = admitted
        self._tested[rows] = keep * self._tested[rows] + np.minimum(accept_lens, drafts)
        self._accepted[rows] = keep * self._accepted[rows] + (accept_lens - 1)

    def gains(self, rows: Int32, usual: Floats, K: int) -> Floats:
        """The expected gain of each draft of each request, [n, K], decreasing in each row.

        All drafts of a request are assumed to have the same conditional rate: in averages over many requests, differences by position
        mostly reflect which requests reach that position.

        Args:
            rows: int32 [n].
            usual: [n], average rates of requests of the same kind.
        """
        known = self._seen[rows] == self._admitted[rows]
        rate = (known * self._accepted[rows] + PRIOR * usual) / (known * self._tested[rows] + PRIOR)
        return np.minimum(rate, MOST)[:, None] ** np.arange(1, K + 1)
