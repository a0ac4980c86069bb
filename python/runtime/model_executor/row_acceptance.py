"""Acceptance per request row, in addition to the averages of all requests, apart for new text and text copied from the prompt. No torch.

`admit` and `gains` run on the thread that submits steps, `add` on the one that reads them; each writes only its own fields.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.batch import Flags, Int32, no_flags

KEEP = 1 - 1 / 64
"""Decay of a row's counts per iteration, with or without drafts, so that a row without drafts is eventually drafted for again."""
PRIOR = 6.0
"""Weight, in drafts, of the average of all requests."""
MOST = 0.98
"""Maximum expected acceptance of a draft."""
ALL_NEW = no_flags()
"""No request copies its prompt."""

Floats = npt.NDArray[np.float64]


class RowAcceptance:
    """Owner of the counts of verified and accepted drafts by request row and text."""

    def __init__(self, rows: int) -> None:
        # Two of each row: of its new text, and of its copied text.
        self._tested, self._accepted = np.zeros(2 * rows), np.zeros(2 * rows)
        self._since = np.zeros(rows, dtype=np.int64)  # the step in which the current request got the row
        self._admitted, self._seen = np.zeros(rows, dtype=np.int64), np.zeros(2 * rows, dtype=np.int64)

    def admit(self, row: int, step: int) -> None:
        """Reset a row that a new request gets in `step`."""
        self._since[row] = step
        self._admitted[row] += 1

    def add(
        self, rows: Int32, step: int, accept_lens: npt.NDArray[np.integer], drafts: npt.NDArray[np.integer], copied: Flags = ALL_NEW
    ) -> None:
        """Count the iteration of `step`.

        Args:
            rows, accept_lens: int [n].
            drafts: int [n], the number of verified drafts.
            copied: as in `Windows`.
        """
        admitted, own, entries = self._admitted[rows], self._since[rows] <= step, _entries(rows, copied)
        entries, admitted, accept_lens, drafts = entries[own], admitted[own], accept_lens[own], drafts[own]  # others have new requests
        keep = np.where(self._seen[entries] == admitted, KEEP, 0.0)
        self._seen[entries] = admitted
        self._tested[entries] = keep * self._tested[entries] + np.minimum(accept_lens, drafts)
        self._accepted[entries] = keep * self._accepted[entries] + (accept_lens - 1)

    def gains(self, rows: Int32, usual: Floats, K: int, copied: Flags = ALL_NEW) -> Floats:
        """The expected gain of each draft of each request, [n, K], decreasing in each row.

        All drafts of a request are assumed to have the same conditional rate: in averages over many requests, differences by position
        mostly reflect which requests reach that position.

        Args:
            rows: int32 [n].
            usual: [n], average rates of requests of the same class.
            copied: as in `DecodeRows`.
        """
        entries = _entries(rows, copied)
        known = self._seen[entries] == self._admitted[rows]
        rate = (known * self._accepted[entries] + PRIOR * usual) / (known * self._tested[entries] + PRIOR)
        return np.minimum(rate, MOST)[:, None] ** np.arange(1, K + 1)


def _entries(rows: Int32, copied: Flags) -> Int32:
    """Where the counts of these rows are."""
    return 2 * rows + copied if len(copied) else 2 * rows
