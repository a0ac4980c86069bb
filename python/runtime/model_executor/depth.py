"""Draft depth K: the table of captured depths, and the choice of a batch's depth."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.batch import BatchResult, Flags, Int32, RowInit, ScheduleBatch, no_ints
from runtime.errors import InvalidField
from runtime.model_executor.copied_text import MAX_PROMPT, CopiedText
from runtime.model_executor.depth_controller import DecodeRows, DepthChooser, Windows
from runtime.model_executor.ended_rows import EndedRows
from runtime.model_executor.row_acceptance import RowAcceptance
from runtime.model_executor.window_widths import assign_widths
from runtime.sampling_params import MAX_DRAFT_STEPS

log = logging.getLogger(__name__)
USUAL_STEPS, FEW = 3, 3
"""The depth that, like depth 0, has graphs for all batch sizes. If there are at most `FEW` depths, all of them do."""
MAX_BATCH = {5: 64, 7: 32}
"""The largest batch for deep windows: with more requests they are slower than shallow ones at any acceptance."""
ROUND = {1 << shift for shift in range(16)} | {3 << shift for shift in range(4, 14)}
"""Common batch sizes: other depths have graphs for these, so they run without padding."""
THIN = 2.0
"""The largest factor between neighbouring graph sizes of other depths."""
LARGE = 64
"""For larger batches depth 1 is often the best, so it has graphs for all sizes above this one."""
SHARED_GAIN = 0.5
"""The time that attending once to a shared prefix saves, as a fraction of the time of reading the keys that need not be read again: these
lie in L2, and more kernels run."""


@dataclass(frozen=True, slots=True)
class DepthBatches:
    """Batch sizes of the iterations at one depth.

    Attributes:
        running: the largest size without padding.
        padded: the largest size with padding.
        captured: sizes that have graphs.
        tuned: sizes for which kernels are autotuned.
    """

    running: int
    padded: int
    captured: list[int]
    tuned: list[int]

    @classmethod
    def of(cls, running: int, captured: list[int]) -> DepthBatches:
        """Batches of at most `running` requests, with graphs for the `captured` sizes."""
        return cls(running, max([running, *captured]), captured, captured or [1, running])


def split_batch_sizes(
    num_steps: int, max_batch_with_drafts: int | None, running: int, sizes: Sequence[int], padding: bool
) -> dict[int, DepthBatches]:
    """The depth table of a fixed depth: K = `num_steps`, and K = 0 for batches of more than `max_batch_with_drafts` requests and for those
    of which no request wants drafts.

    Args:
        running: maximum number of requests that decode together.
        sizes: batch sizes of graphs.
        padding: whether smaller batches are padded to them.
    """
    if num_steps == 0:
        return {0: DepthBatches.of(running, list(sizes))}
    if max_batch_with_drafts is not None and max_batch_with_drafts >= running:
        log.info("batches are never too large for drafts: at most %d requests run at once", running)
    most = min(running, max_batch_with_drafts or running)
    with_drafts = captured_up_to(most, sizes, padding)
    return {num_steps: DepthBatches.of(most, with_drafts), 0: DepthBatches.of(running, thinned(sizes, most))}


def split_by_depth(
    depths: Sequence[int], max_batch_with_drafts: int | None, running: int, sizes: Sequence[int], padding: bool
) -> dict[int, DepthBatches]:
    """The depth table for a controller, deepest first. Arguments as for `split_batch_sizes`."""
    table = dict[int, DepthBatches]()
    for depth in sorted(depths, reverse=True):
        most = min(running, MAX_BATCH.get(depth, running), max_batch_with_drafts or running) if depth else running
        own = captured_up_to(most, sizes, padding)
        if depth not in (0, USUAL_STEPS) and len(depths) > FEW:
            own = thinned(own, LARGE if depth == 1 else None)
        table[depth] = DepthBatches.of(most, own)
    return table


def captured_up_to(most: int, sizes: Sequence[int], padding: bool) -> list[int]:
    """The graph sizes for batches of up to `most` requests, with padding including the next size above `most`."""
    fitting = [size for size in sorted(sizes) if size <= most]
    larger = [size for size in sorted(sizes) if size > most]
    return fitting if not padding or most in fitting else fitting + larger[:1]


def thinned(sizes: Sequence[int], up_to: int | None = None) -> list[int]:
    """The sizes in `ROUND`, all above `up_to`, the largest, and others if a gap would exceed `THIN`."""
    ordered, kept = sorted(sizes), list[int]()
    for size, following in zip(ordered, [*ordered[1:], 0], strict=False):
        if not kept or (up_to is not None and size > up_to) or not following or size in ROUND or following > THIN * kept[-1]:
            kept.append(size)
    return kept


def depths_to_drop(graph_bytes: Mapping[int, int], max_bytes: int) -> list[int]:
    """Depths to drop so that the remaining graphs take at most `max_bytes`: the deepest first, but never 0 or `USUAL_STEPS`.

    Args:
        graph_bytes: bytes of the graphs by depth.
    """
    dropped: list[int] = []
    for depth in sorted(set(graph_bytes) - {0, USUAL_STEPS}, reverse=True):
        if sum(size for other, size in graph_bytes.items() if other not in dropped) > max_bytes:
            dropped.append(depth)
    return dropped


class VerifySizes(Protocol):
    """The verifier's batch sizes.

    Attributes:
        ragged_depth: the depth at which windows may differ in width.
    """

    ragged_depth: int

    def padded_size(self, depth: int, live: int) -> int:
        """The padded size at which an iteration of `live` requests runs."""
        ...

    def has_graph(self, depth: int, size: int) -> bool:
        """Whether iterations of `size` requests replay a graph."""
        ...

    def ragged_passes(self, live: int) -> list[tuple[int, int]]:
        """Requests and tokens, padding included, of the passes over windows of different widths, fewest tokens first."""
        ...

    def shared_size(self, depth: int, live: int, shared_tokens: int) -> int:
        """The padded size at which `live` requests attend once to their common prefix of `shared_tokens`; 0 if they do not."""
        ...


class DepthControl:
    """Chooses the depth of each iteration: by the batch size alone, or with a controller.

    Attributes:
        limits: by depth, the largest batch that it serves.
        controller: None if the batch size decides.
        rows: acceptance by request row, for the controller.
        copied: by attention group, which requests copy their prompt, for the controller.
        ended: by attention group, the requests that had already ended when a step was read.
    """

    def __init__(self, limits: Mapping[int, int], rows: int, sizes: VerifySizes, groups: int = 1, max_prompt: int = MAX_PROMPT) -> None:
        """
        Args:
            rows: number of request rows of each attention group.
            sizes: batch sizes by depth.
            groups: number of attention groups.
            max_prompt: the longest prompt, in tokens.
        """
        self.limits, self._sizes = dict(limits), sizes
        self.controller: DepthChooser | None = None
        self.rows = RowAcceptance(rows)
        self.copied = [CopiedText(rows, max_prompt) for _ in range(groups)]
        self.ended = [EndedRows() for _ in range(groups)]
        self._forced: int | None = None
        self._fixed: int | None = None
        self._turn: int | None = None
        self._latest = self.deepest  # the depth of the latest iteration
        self._capped = False
        # By row, one group after another.
        self._per_group = rows
        self._caps = np.full(rows * groups, MAX_DRAFT_STEPS, dtype=np.int32)
        self._greedy = np.zeros(rows * groups, dtype=np.bool_)
        self._ends = np.zeros(rows * groups, dtype=np.int64)  # maximum length of each request

    @property
    def deepest(self) -> int:
        """K at full depth."""
        return max(self.limits)

    def choose(self, batch: ScheduleBatch) -> None:
        """Set the depth of a step, 0 without decode rows, and what depends on it. Called once per step, in order."""
        for group, section in enumerate(batch.parts):
            self._admit(section.new_rows, group, batch.step)
        if self.controller is not None:
            for section, text in zip(batch.parts, self.copied, strict=False):
                section.copied = text.copied(section.decode_rows)
        if live := batch.max_decodes:  # all groups run passes of the size of the largest group
            self._choose_depth(batch, live)
            self._latest = batch.depth
        batch.defers_first_drafts = self._latest == 0

    def _choose_depth(self, batch: ScheduleBatch, live: int) -> None:
        """Set the depth, and the widths of the windows if they differ."""
        if self._forced is not None:
            batch.depth = self._forced
            return
        serving = [depth for depth, most in self.limits.items() if live <= most]
        if self._turn is not None:
            self._turn += 1
            turns = serving if len(serving) > 2 else [max(serving), *serving]
            batch.depth = turns[self._turn % len(turns)]
        elif self.controller is not None and self._fixed is None:
            batch.depth, batch.widths = self._best(self.controller, batch, serving, live)
            return
        else:
            batch.depth = self._deepest_wanted(batch, serving)
        if self._capped and batch.depth == self._sizes.ragged_depth and not batch.num_prompts and not batch.sections:
            batch.widths = self._by_caps(batch)

    def _deepest_wanted(self, batch: ScheduleBatch, serving: Sequence[int]) -> int:
        """The smallest depth that gives each request as many drafts as its limit allows, or else the deepest; at most the fixed depth."""
        serving = [depth for depth in serving if self._fixed is None or depth <= self._fixed] or [min(serving)]
        if len(serving) == 1:
            return serving[0]
        max_wanted = int(self._caps[np.concatenate(self._decode_rows(batch))].max())
        return min((depth for depth in serving if depth >= max_wanted), default=max(serving))

    def _best(self, controller: DepthChooser, batch: ScheduleBatch, serving: Sequence[int], live: int) -> tuple[int, Int32]:
        """The depth that the controller chooses, and the widths of the windows if they differ."""
        rows = np.concatenate(self._decode_rows(batch))
        caps = self._caps[rows]
        max_wanted = int(caps.max())
        serving = [depth for depth in serving if depth <= max_wanted] or [min(serving)]
        if len(serving) == 1:
            return serving[0], no_ints()
        kv_lens = np.concatenate([section.decode_len_bounds for section in batch.parts])
        kv_tokens = batch.sections[0].pad_kv if batch.sections else int(kv_lens.sum())
        left = np.maximum(self._ends[rows] - kv_lens, 1)
        shared = self._shared_sizes(serving, live, batch.shared_tokens)
        spared = dict.fromkeys(shared, int(SHARED_GAIN * batch.shared_tokens * (live - 1)))
        copied = np.concatenate([section.copied for section in batch.parts])
        decodes = DecodeRows(caps, self._greedy[rows], kv_tokens, rows, left, spared, copied)
        depth, passes = self._sizes.ragged_depth, list[tuple[int, int]]()
        if depth in serving and not batch.num_prompts and not batch.sections:
            passes = [(size, tokens) for size, tokens in self._ragged_passes(live) if size < tokens and not tokens % size]
        chosen = controller.choose(decodes, self._padded(serving, live) | shared, passes, depth)
        return chosen.depth, no_ints() if chosen.widths is None else chosen.widths

    def _by_caps(self, batch: ScheduleBatch) -> Int32:
        """Widths by the draft limits of the requests, if a pass over such windows has fewer tokens than one over full windows."""
        depth, live = batch.depth, batch.num_decodes
        caps = self._caps[batch.rows]
        if caps.min(initial=depth) >= depth:
            return no_ints()
        drafts = int(np.minimum(caps, depth).sum())
        full = self._sizes.padded_size(depth, live) * (depth + 1)
        for size, tokens in self._sizes.ragged_passes(live):
            if size + drafts <= tokens < full:
                return assign_widths((np.arange(depth) < caps[:, None]).astype(np.float32), size, tokens)
        return no_ints()

    def tracks(self, live: int) -> bool:
        """Whether the controller measures the acceptance of each of `live` requests, because their windows may differ in width."""
        return bool(self._ragged_passes(live))

    def _ragged_passes(self, live: int) -> list[tuple[int, int]]:
        """`VerifySizes.ragged_passes`; [] for one request."""
        return [] if live < 2 else self._sizes.ragged_passes(live)

    def _padded(self, depths: Sequence[int], live: int) -> dict[int, int]:
        """The padded size by depth; if some depths have a graph of that size, only those depths."""
        padded = {depth: self._sizes.padded_size(depth, live) for depth in depths}
        return {depth: size for depth, size in padded.items() if self._sizes.has_graph(depth, size)} or padded

    def _shared_sizes(self, depths: Sequence[int], live: int, shared_tokens: int) -> dict[int, int]:
        """`VerifySizes.shared_size` of the depths that attend once to the common prefix."""
        return {depth: size for depth in depths if shared_tokens and (size := self._sizes.shared_size(depth, live, shared_tokens))}

    def _decode_rows(self, batch: ScheduleBatch) -> list[Int32]:
        """The decode rows of each attention group, numbered through all groups."""
        return [section.decode_rows + group * self._per_group for group, section in enumerate(batch.parts)]

    def read(self, batch: ScheduleBatch, result: BatchResult, group: int = 0) -> Flags:
        """Note the tokens that a step of one attention group emitted. Called once per step, in order.

        Returns:
            bool [B], the requests that had not ended before this step.
        """
        if self.controller is not None:
            self.copied[group].read(batch.rows, batch.step, result.accept_lens, result.token_ids)
        return self.ended[group].read(batch.rows, result)

    def observer_of_groups(self, batch: ScheduleBatch) -> Callable[[Sequence[BatchResult]], None]:
        """A function that passes on the acceptance of the other attention groups, from their results of the step just planned, to the
        controller.
        """
        controller, sections = self.controller, batch.sections[1:]
        limits = [(self._caps[rows], self._greedy[rows]) for rows in self._decode_rows(batch)[1:]] if controller else []

        def observe(results: Sequence[BatchResult]) -> None:
            for group, result in enumerate(results, 1):
                section = sections[group - 1]
                alive = self.read(section, result, group)[section.num_prompts :]
                if controller is not None and section.depth and alive.any():
                    lens, (caps, greedy) = result.accept_lens[section.num_prompts :][alive], limits[group - 1]
                    controller.observe_windows(Windows(section.depth, lens, caps[alive], greedy[alive], copied=section.copied[alive]))

        return observe

    def _admit(self, new_rows: Sequence[RowInit], group: int, step: int) -> None:
        if not new_rows:
            return
        self.ended[group].admit(new_rows)
        for init in new_rows:
            row = init.row + group * self._per_group
            self._caps[row], self._greedy[row] = init.sampling.draft_limit, init.sampling.greedy
            self._ends[row] = init.prompt_len + init.sampling.max_new_tokens
            if not group:
                self.rows.admit(row, step)
            if self.controller is not None:
                self.copied[group].admit(init.row, step, init.tokens, init.prompt_len)
        self._capped = bool(self._caps.min() < self.deepest)

    def fix(self, depth: int) -> None:
        """Run at `depth` from now on, or at a smaller one if the batch is large or its requests have lower limits; -1 undoes this.

        Raises:
            RequestError: the table has no such depth.
        """
        if depth >= 0 and depth not in self.limits:
            depths = ", ".join(map(str, sorted(self.limits)))
            raise InvalidField("speculative_num_steps", depth, f"auto, or one of {depths}")
        self._fixed = depth if depth >= 0 else None

    @contextmanager
    def forced(self, depth: int | None) -> Iterator[None]:
        """Within the `with` block, every iteration runs at `depth`, which must be in the table. For checks; None has no effect."""
        assert depth is None or depth in self.limits, f"depth {depth} is not in the table"
        self._forced = depth
        try:
            yield
        finally:
            self._forced, self._latest = None, self.deepest

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within the `with` block, iterations cycle through all depths available for their batch size. For checks.

        Of two depths the deeper one has two turns: only the drafts of the second one are made from what draft-extend computed.
        """
        self._turn = -1
        try:
            yield
        finally:
            self._turn, self._latest = None, self.deepest
