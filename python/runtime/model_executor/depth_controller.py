"""Chooses the depth of each iteration that maximises accepted tokens per second. On the host; no torch.

The expected tokens of an iteration at each depth come from exponential averages of acceptance by position, its expected time from
`IterationCost`. `choose` runs on the thread that submits steps and `observe` on the thread that reads results; each writes only its own
fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.batch import Flags, Int32, no_flags, no_ints
from runtime.model_executor.acceptance_averages import CLASSES, COPIED, GREEDY, ClassAverages, class_numbers, expected_tokens, reach
from runtime.model_executor.depth_option import HYSTERESIS, Option, best_option
from runtime.model_executor.depth_probes import DepthProbes
from runtime.model_executor.end_spread import EndSpread
from runtime.model_executor.iteration_cost import CLEARLY_SHORT, IterationCost
from runtime.model_executor.row_acceptance import RowAcceptance
from runtime.model_executor.window_widths import assign_widths
from runtime.worker_info import DepthClass, DepthInfo

Floats = npt.NDArray[np.float64]
KEEP_FOR, STEADY = 4, 32
"""A choice that did not change for `STEADY` iterations is reused for `KEEP_FOR` iterations of one batch size, to save host time."""
SAME_TEXT = 1 / 8
"""It is not reused if the number of requests that copy their prompt changed by more than this fraction of the batch."""
RAGGED_GAIN = 0.01
"""Ragged windows are used if this fraction more tokens per second is expected from them, and kept while any more is."""
RAGGED_EVERY = 8
"""Iterations between two checks of ragged windows while they are not in use and all requests have the same draft limit."""


@dataclass(slots=True)
class DecodeRows:
    """The requests of an iteration, as known before it is submitted.

    Attributes:
        caps: int [n], the draft limit of each request.
        greedy: bool [n], which requests are greedy.
        kv_tokens: upper bound of the sum of their KV lengths.
        rows: int32 [n], their request rows; read if windows may differ in width.
        left: int [n], the maximum number of tokens that each may still generate; empty if not known.
        spared: by depth, how much context costs less than its `kv_tokens`, in tokens, because the requests share a prefix.
        copied: bool [n], which requests currently copy their prompt; empty if none does.
    """

    caps: npt.NDArray[np.integer]
    greedy: Flags
    kv_tokens: int
    rows: Int32 = field(default_factory=no_ints)
    left: npt.NDArray[np.integer] = field(default_factory=no_ints)
    spared: Mapping[int, int] = field(default_factory=dict[int, int])
    copied: Flags = field(default_factory=no_flags)

    def context(self, depth: int) -> int:
        """The tokens of context that an iteration at `depth` is charged for."""
        return self.kv_tokens - self.spared.get(depth, 0)


@dataclass(slots=True)
class Windows:
    """Verified windows.

    Attributes:
        depth: K.
        accept_lens: int [n].
        caps, greedy, copied: as in `DecodeRows` when the depth was chosen.
    """

    depth: int
    accept_lens: npt.NDArray[np.integer]
    caps: npt.NDArray[np.integer]
    greedy: Flags
    copied: Flags = field(default_factory=no_flags, kw_only=True)

    @property
    def drafted(self) -> npt.NDArray[np.integer]:
        """int [n], drafts of each window."""
        return np.minimum(self.caps, self.depth)


@dataclass(slots=True)
class Observed(Windows):
    """An iteration whose results were read, and its windows.

    Attributes:
        size: requests, padding included.
        kv_tokens: as in `DecodeRows`.
        seconds: time since the results of the previous iteration; None if it is unknown or not comparable with others. Draft extend runs
            after the results are read, so this is the iteration's own time only if the previous one had the same depth. After depth 0 it
            includes the catch-up window.
        width: mean tokens of its windows if they differ, else 0.
        rows: int32 [n], request rows if windows may differ in width; else empty.
        step: the number of its step.
        shared: whether it attended once to a shared prefix, so that it took less time than its context says.
    """

    size: int
    kv_tokens: int
    seconds: float | None
    width: int = 0
    rows: Int32 = field(default_factory=no_ints)
    step: int = 0
    shared: bool = False


class DepthChooser(Protocol):
    """Chooses the depth of each iteration and observes its result. Methods that a chooser does not need do nothing."""

    def choose(self, rows: DecodeRows, sizes: Mapping[int, int], passes: Sequence[tuple[int, int]] = (), ragged_depth: int = 0) -> Option:
        """The option at which the next iteration runs.

        Args:
            sizes: the padded number of requests at each available depth.
            passes: requests and tokens of the available ragged passes, at `ragged_depth`.
        """
        ...

    def observe(self, read: Observed) -> None:
        """Learn from an iteration whose results were read."""
        ...

    def observe_windows(self, windows: Windows) -> None:
        """Learn from windows of another attention group, at least one and of at least one draft; `observe` gets the iteration's time."""
        ...

    def observe_guesses(self, greedy: Flags, hits: Flags, copied: Flags) -> None:
        """Learn which first drafts would have been accepted in an iteration without drafts.

        Args:
            greedy, copied: as in `Windows`.
            hits: bool [n], whether the guess equals the committed token.
        """

    def correct(self, independence: float) -> None:
        """Update the cost model by the measured `DistinctExperts.independence` of a sparse model."""

    def info(self) -> DepthInfo | None:
        """The values behind the choice, for reports."""
        return None


class DepthController(DepthChooser):
    """Owner of the averages, the cost model and the current depth.

    Attributes:
        cost: predicts the time of an iteration.
        chosen: number of iterations by depth.
        ragged: number of iterations with windows of different widths.
        rows: acceptance by request row.
    """

    def __init__(
        self, depths: Sequence[int], cost: IterationCost, acceptance: Sequence[float] = (), rows: RowAcceptance | None = None
    ) -> None:
        """
        Args:
            acceptance: acceptance of the first positions, if it was measured before.
            rows: acceptance by request row, if windows may differ in width.
        """
        self.cost, self.rows = cost, rows or RowAcceptance(0)
        self._ragged = False
        self.chosen, self.ragged = dict.fromkeys(sorted(depths), 0), 0
        self._max_depth = max(depths)
        self._averages = ClassAverages(self._max_depth, acceptance)
        self._current: int | None = None
        self._probes = DepthProbes(depths)
        self._steps = self._changed_at = 0
        self._kept: Option | None = None  # the choice that is reused for `_kept_for`, requests and sizes
        self._kept_for: tuple[int, Mapping[int, int]] = (0, {})
        self._kept_copied = 0  # requests that copied their prompt then
        self._observed = -1  # depth of the previous iteration that was read
        self._windows = 0  # windows whose acceptance is known; `observe` writes it
        self._spreads_ends = False  # whether drafts make requests finish at different times

    def choose(self, rows: DecodeRows, sizes: Mapping[int, int], passes: Sequence[tuple[int, int]] = (), ragged_depth: int = 0) -> Option:
        """The option that is expected to commit the most tokens per second, or a probe of another depth."""
        n = len(rows.caps)
        mixed = passes and (self._ragged or rows.caps.min() < ragged_depth or self._steps % RAGGED_EVERY == 0)
        copied, kept = int(np.count_nonzero(rows.copied)), None if mixed or self._steps % KEEP_FOR == 0 else self._kept
        if kept is not None and self._kept_for == (n, sizes) and abs(copied - self._kept_copied) <= SAME_TEXT * n:
            self._probes.accrue(kept, n)
            return self._chose(kept)
        options = self._options(rows, sizes)
        best = best_option(options, self._current)
        if best.depth != self._current:
            self._current, self._changed_at = best.depth, self._steps
        if mixed:
            best, options = self._narrowed(best, options, rows, passes, ragged_depth)
        depth = self._probes.next(options, best, n, self._spreads_ends, self._windows)
        steady = not mixed and depth == best.depth and self._steps - self._changed_at >= STEADY
        self._kept, self._kept_for, self._kept_copied = best if steady else None, (n, sizes), copied
        return self._chose(best if depth == best.depth else next(option for option in options if option.depth == depth))

    def _chose(self, option: Option) -> Option:
        self._steps += 1
        self.chosen[option.depth] += 1
        self.ragged += option.widths is not None
        return option

    def _options(self, rows: DecodeRows, sizes: Mapping[int, int]) -> list[Option]:
        """Every depth with full windows. Errors of measured times are shared by all depths with drafts, so the smallest one counts for
        all.
        """
        accepted = self._accepted(rows)
        tokens = list(accumulate(accepted, initial=float(len(rows.caps))))
        seconds = {depth: self.cost.seconds(size, depth, rows.context(depth)) for depth, size in sizes.items()}
        lost = self._lost_at_ends(rows, seconds, tokens, accepted)
        self._spreads_ends = lost[min(filter(None, sizes), default=0)] > HYSTERESIS  # at depth 0, only the shallowest is probed
        error = min((self.cost.error(size, depth) for depth, size in sizes.items() if depth), default=0.0)
        return [Option(depth, tokens[depth], took, None, lost[depth], error if depth else 0.0) for depth, took in seconds.items()]

    def _lost_at_ends(
        self, rows: DecodeRows, seconds: Mapping[int, float], tokens: Sequence[float], accepted: Sequence[float]
    ) -> dict[int, float]:
        """The fraction of time that each depth loses because drafts make requests finish at different times; 0 at depth 0.

        The last request is assumed to run alone. Windows of requests of different kinds count as draws from one distribution.

        Args:
            seconds: of an iteration, by depth.
            tokens: expected from all requests, by depth 0..K.
            accepted: as returned by `_accepted`.
        """
        n = len(rows.left)
        if n < 2:
            return dict.fromkeys(seconds, 0.0)
        ends, lost = EndSpread.of(rows.left), dict[int, float]()
        # The mean square of a window's tokens is the sum of (2 k + 1) P(at least k accepted) over k = 0..K.
        squares = list(accumulate(((2 * k + 1) * requests for k, requests in enumerate(accepted, 1)), initial=float(n)))
        for depth, took in seconds.items():
            mean = tokens[depth] / n
            alone = min(self.cost.seconds(1, depth) / took, 1.0) if depth else 0.0
            lost[depth] = ends.share_lost(mean, max(squares[depth] / n - mean * mean, 0.0)) * alone
        return lost

    def _narrowed(
        self, best: Option, full: list[Option], rows: DecodeRows, passes: Sequence[tuple[int, int]], depth: int
    ) -> tuple[Option, list[Option]]:
        """The best ragged pass and the options with full windows, both rated by the acceptance of each request, if the ragged pass is
        clearly better; else `best` and `full`.
        """
        n, gains = len(rows.caps), self._gains(rows)
        by_depth = [0.0, *gains.sum(0).cumsum().tolist()]
        by_request = [option._replace(tokens=n + by_depth[option.depth]) for option in full]
        gains = gains[:, :depth]
        promised = np.sort(gains, axis=None)[::-1].cumsum()
        options = list[Option]()
        for size, tokens in passes:
            drafts = min(tokens - size, gains.size)
            seconds = self.cost.seconds(size, depth, rows.kv_tokens, tokens // size)
            options.append(Option(depth, n + (float(promised[drafts - 1]) if drafts else 0.0), seconds))
        ragged = max(options, key=lambda option: option.rate)
        self._ragged = ragged.rate > max(option.rate for option in by_request) * (1 if self._ragged else 1 + RAGGED_GAIN)
        if not self._ragged:
            return best, full
        return ragged._replace(widths=assign_widths(gains, *passes[options.index(ragged)])), by_request

    def _gains(self, rows: DecodeRows) -> Floats:
        """Expected accepted tokens of each draft of each request, [n, most steps]; 0 beyond its limit."""
        usual = np.array([self._averages.rates(number)[0] for number in range(CLASSES)])[class_numbers(rows.greedy, rows.copied)]
        gains = self.rows.gains(rows.rows, usual, self._max_depth, rows.copied)
        return gains if rows.caps.min() >= self._max_depth else np.where(np.arange(self._max_depth) < rows.caps[:, None], gains, 0.0)

    def observe(self, read: Observed) -> None:
        """Learn from an iteration."""
        before, self._observed = self._observed, read.depth
        if read.seconds is not None and not read.shared and before in (read.depth, 0):
            # A longer time after depth 0 may include the catch-up window, so it says nothing about the depth.
            expected = self.cost.seconds(read.size, read.depth, read.kv_tokens, read.width)
            if self._current == before == 0 < read.depth and read.seconds * CLEARLY_SHORT < expected:
                self._probes.overcharged(expected - read.seconds)
            if before == read.depth or read.seconds < expected:
                self.cost.observe(read.size, read.depth, read.kv_tokens, read.seconds, read.width)
        if read.depth == 0 or not len(read.accept_lens):
            return
        if len(read.rows):
            self.rows.add(read.rows, read.step, read.accept_lens, read.drafted, read.copied)
        self.observe_windows(read)
        if self._current == 0 and not read.width and not self._spreads_ends:  # a probe that accepted drafts saved time
            self._probes.refund((float(read.accept_lens.mean()) - 1.0) * self.cost.seconds(read.size, 0, read.kv_tokens))

    def observe_guesses(self, greedy: Flags, hits: Flags, copied: Flags) -> None:
        """Learn from the guesses for greedy requests that were compared with the tokens of an iteration at depth 0.

        Sampled requests do not count: a draft is accepted with probability min(1, p / q), more often than it equals an independent draw.
        """
        counts = np.bincount(class_numbers(greedy, copied) * 2 + hits, minlength=2 * CLASSES).tolist()
        for number in (GREEDY, GREEDY + COPIED):
            wrong, right = counts[2 * number : 2 * number + 2]
            self._windows += wrong + right
            self._averages.add(number, [0, wrong, right], 1)

    def observe_windows(self, windows: Windows) -> None:
        """Add the windows to the averages of their class, shallow ones first."""
        depth, width, drafted = windows.depth, windows.depth + 2, windows.drafted
        self._windows += len(windows.accept_lens)
        kinds = (class_numbers(windows.greedy, windows.copied) * width + drafted) * width + windows.accept_lens
        counts, size = np.bincount(kinds, minlength=CLASSES * width * width).tolist(), width * width
        shallowest = max(int(drafted.min()), 1)
        for number in range(CLASSES):
            if any(own := counts[number * size : (number + 1) * size]):
                for drafts in range(shallowest, depth + 1):
                    self._averages.add(number, own[drafts * width : (drafts + 1) * width], drafts)

    def correct(self, independence: float) -> None:
        """Update the cost model by the measured `DistinctExperts.independence`."""
        self.cost.correct(independence)

    def info(self) -> DepthInfo:
        """Counts, averages and expected times, for reports."""
        sizes = sorted({point.size for point in self.cost.points})
        return DepthInfo(
            chosen={str(depth): count for depth, count in self.chosen.items()},
            ragged=self.ragged,
            greedy=self._class(GREEDY),
            sampled=self._class(0),
            greedy_copied=self._class(GREEDY + COPIED),
            sampled_copied=self._class(COPIED),
            milliseconds={
                str(size): {str(depth): round(1e3 * self.cost.seconds(size, depth), 3) for depth in self.chosen} for size in sizes
            },
        )

    def _class(self, number: int) -> DepthClass:
        rates = self._averages.rates(number)
        tokens = [round(each, 3) for each in expected_tokens(rates)]
        return DepthClass([round(rate, 4) for rate in rates], tokens, self._averages.windows(number))

    def _accepted(self, rows: DecodeRows) -> list[float]:
        """The expected number of requests that accept at least k drafts, for k = 1..K."""
        most = self._max_depth
        total, width = [0.0] * most, most + 1
        kinds = class_numbers(rows.greedy, rows.copied) * width + np.minimum(rows.caps, most)
        caps = np.bincount(kinds, minlength=CLASSES * width).tolist()
        for number in range(CLASSES):
            by_cap = caps[number * width : (number + 1) * width]
            drafted = list(accumulate(by_cap[:0:-1]))[::-1]  # requests with at least k drafts
            if any(drafted):
                shares = reach(self._averages.rates(number))
                total = [requests + n * share for requests, n, share in zip(total, drafted, shares, strict=True)]
        return total
