"""Draft depth K: the table of captured depths, and which of them a batch runs at."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DepthBatches:
    """Batch sizes of the iterations at one depth.

    Attributes:
        running: the largest, without padding.
        padded: the largest, with padding.
        captured: sizes that have graphs.
        tuned: sizes that kernels are chosen for.
    """

    running: int
    padded: int
    captured: list[int]
    tuned: list[int]


def choose_depth(batch_size: int, limits: Mapping[int, int]) -> int:
    """The depth of an iteration: the largest K that serves so many requests.

    Args:
        batch_size: requests that decode.
        limits: by depth, the largest batch that it serves.
    """
    return max(depth for depth, most in limits.items() if batch_size <= most)


def split_batch_sizes(
    num_steps: int, most_with_drafts: int | None, running: int, sizes: Sequence[int], padding: bool
) -> dict[int, DepthBatches]:
    """The table of depths: K = `num_steps`, and K = 0 for batches of more than `most_with_drafts` requests if there are
    such.

    Args:
        running: requests that decode together at most.
        sizes: batch sizes of graphs.
        padding: whether smaller batches are padded to them.
    """
    largest = max(running, max(sizes, default=1))
    if num_steps == 0 or most_with_drafts is None or most_with_drafts >= running:
        if most_with_drafts is not None:
            log.info("drafting is never disabled: no more than %d requests run at once", running)
        return {num_steps: DepthBatches(running, largest, list(sizes), list(sizes) or [1, running])}
    few = [size for size in sorted(sizes) if size <= most_with_drafts]
    many = [size for size in sorted(sizes) if size > most_with_drafts]
    if padding and most_with_drafts not in few:
        few = few + many[:1]  # a batch of `most_with_drafts` requests is padded to it
    return {
        num_steps: DepthBatches(most_with_drafts, max([most_with_drafts, *few]), few, few or [1, most_with_drafts]),
        0: DepthBatches(running, largest, many, many or [most_with_drafts + 1, running]),
    }


class DepthControl:
    """Chooses the depth of each iteration.

    Attributes:
        limits: by depth, the largest batch that it serves.
    """

    def __init__(self, limits: Mapping[int, int]) -> None:
        self.limits = dict(limits)
        self._forced: int | None = None

    @property
    def forced_depth(self) -> int | None:
        """The depth that every iteration runs at; None where the batch size decides."""
        return self._forced

    @property
    def deepest(self) -> int:
        """K at full depth."""
        return max(self.limits)

    def choose(self, batch_size: int) -> int:
        """The depth of an iteration of `batch_size` requests."""
        return choose_depth(batch_size, self.limits) if self._forced is None else self._forced

    @contextmanager
    def forced(self, depth: int | None) -> Iterator[None]:
        """Within, every iteration runs at `depth`, which must be in the table. For checks; None forces nothing."""
        self.force(depth)
        try:
            yield
        finally:
            self._forced = None

    def force(self, depth: int | None) -> None:
        """Run every iteration at `depth` from now on, which must be in the table; None forces nothing."""
        assert depth is None or depth in self.limits, f"depth {depth} was not built"
        self._forced = depth
