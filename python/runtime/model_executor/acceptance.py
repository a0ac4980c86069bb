"""Counts acceptance of drafts by position. On the host; no torch.

Rates are conditional: the fraction of drafts accepted among those with all predecessors accepted. They are
independent between positions, so one bad position shows as one bad number.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from runtime.worker_info import AcceptanceCounts

Int64 = npt.NDArray[np.int64]


class AcceptanceCounters:
    """Totals over iterations of one or more requests.

    Attributes:
        num_steps: K, the maximum number of drafts on a path.
        iterations: verified windows.
        draft_tokens: drafts verified in them; a tree has more drafts than positions.
        counts: int64 [3, K], whose rows are `drafted`, `reached` and `accepted`.
        drafted: int64 [K]. Windows that had a draft at the position.
        reached: int64 [K]. Windows in which all drafts before it were accepted as well.
        accepted: int64 [K]. Windows in which it was accepted, too.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.iterations = self.draft_tokens = 0
        self.counts: Int64 = np.zeros((3, num_steps), dtype=np.int64)
        self.drafted, self.reached, self.accepted = self.counts

    def add(self, accept_lens: npt.ArrayLike, num_steps: int | None = None, draft_tokens: int | None = None) -> None:
        """Count one batch.

        Args:
            accept_lens: int [B], each in 1..num_steps + 1, the bonus token included.
            num_steps: depth of this batch, 0 included; None for K.
            draft_tokens: number of drafts in each window; None for a chain, which has one at each depth.
        """
        depth = self.num_steps if num_steps is None else num_steps
        lens = np.asarray(accept_lens, dtype=np.int64)
        at_least = np.bincount(lens, minlength=depth + 2)[::-1].cumsum()[::-1]
        self.count(len(lens), depth if draft_tokens is None else draft_tokens, at_least[1 : depth + 1], at_least[2 : depth + 2])

    def count(self, windows: int, draft_tokens: int, reached: Int64, accepted: Int64) -> None:
        """Count windows of `draft_tokens` drafts each; `reached` and `accepted` have an entry for each of their positions."""
        depth = len(reached)
        self.iterations += windows
        self.draft_tokens += windows * draft_tokens
        self.drafted[:depth] += windows
        self.reached[:depth] += reached
        self.accepted[:depth] += accepted

    def merge(self, other: AcceptanceCounters) -> None:
        """Add another's totals, of the same K."""
        self.iterations += other.iterations
        self.draft_tokens += other.draft_tokens
        self.counts += other.counts

    @property
    def mean_accept_len(self) -> float:
        """Tokens per iteration, including the bonus token; 1 before the first iteration."""
        return 1.0 + float(self.accepted.sum()) / self.iterations if self.iterations else 1.0

    def rates(self) -> list[float]:
        """The fraction accepted of those reached, by position; 0 if none was reached."""
        return (self.accepted / np.maximum(self.reached, 1)).tolist()

    def stats(self) -> AcceptanceCounts:
        """The counts in the form of reports."""
        return AcceptanceCounts(
            iterations=self.iterations,
            accept_length=self.mean_accept_len,
            drafted_tokens=self.draft_tokens,
            accepted_tokens=int(self.accepted.sum()),
            drafted=self.drafted.tolist(),
            reached=self.reached.tolist(),
            accepted=self.accepted.tolist(),
            rates=self.rates(),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AcceptanceCounters) and self.stats() == other.stats()


def total(num_steps: int, counters: Iterable[AcceptanceCounters]) -> AcceptanceCounters:
    """The sum of counters that all have K = `num_steps`."""
    found = AcceptanceCounters(num_steps)
    for each in counters:
        found.merge(each)
    return found


def side_by_side(first: AcceptanceCounters, second: AcceptanceCounters) -> str:
    """A table that compares an eager run with one through graphs: accepted / reached and the rate by position, and a mark where they
    differ.
    """
    lines = [f"{'position':>9}  {'eager':>22}  {'graphs':>22}"]
    for i in range(max(first.num_steps, second.num_steps)):
        same = _cell(first, i) == _cell(second, i)
        lines.append(f"{i + 1:>9}  {_cell(first, i):>22}  {_cell(second, i):>22}{'' if same else '  <- differs'}")
    lines.append(f"{'length':>9}  {first.mean_accept_len:>22.4f}  {second.mean_accept_len:>22.4f}")
    lines.append(f"{'windows':>9}  {first.iterations:>22}  {second.iterations:>22}")
    return "\n".join(lines)


def not_compared(counters: AcceptanceCounters) -> str:
    """A sentence that names the draft positions that no window reached; empty if all were reached."""
    unreached = [str(i + 1) for i, count in enumerate(counters.reached) if not count]
    return f"not compared: draft positions {', '.join(unreached)}, which no window reached" if unreached else ""


def _cell(counters: AcceptanceCounters, position: int) -> str:
    if position >= counters.num_steps:
        return "-"
    return f"{counters.accepted[position]}/{counters.reached[position]} {counters.rates()[position]:.4f}"
