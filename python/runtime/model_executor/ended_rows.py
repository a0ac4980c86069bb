"""Requests whose end was read after their next step was launched: what that step commits says nothing. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.batch import BatchResult, Int32, RowInit


class EndedRows:
    """Owner of the rows whose requests ended, by an end-of-text or stop token, in the step that was read last.

    At most one step is in flight when a step is read, so the rows of earlier ends are free, or prefill other requests.
    """

    def __init__(self) -> None:
        self._end_ids: dict[int, frozenset[int]] = {}
        self._all_end_ids = set[int]()
        self._ended: list[int] = []

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Set the tokens that end the requests of newly assigned rows."""
        for init in new_rows:
            self._end_ids[init.row] = ids = frozenset(init.eos_ids.tolist())
            self._all_end_ids |= ids

    def read(self, rows: Int32, result: BatchResult) -> npt.NDArray[np.bool_]:
        """bool [B]: the requests that had not ended before this step. Called once per step, in order.

        Args:
            rows: int32 [B].
            result: of the step.
        """
        alive = ~np.isin(rows, self._ended) if self._ended else np.ones(len(rows), dtype=np.bool_)
        tokens, stop, self._ended = result.token_ids.tolist(), 0, []
        if self._all_end_ids.isdisjoint(tokens):
            return alive
        for row, count in zip(rows.tolist(), result.accept_lens.tolist(), strict=True):
            start, stop = stop, stop + count
            if not self._end_ids.get(row, frozenset()).isdisjoint(tokens[start:stop]):
                self._ended.append(row)
        return alive
