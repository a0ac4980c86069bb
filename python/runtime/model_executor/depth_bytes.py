"""Which depth reads the fewest bytes per token of a sparse model: a window of drafts hits more experts than one token does. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LADDER = (0, 1, 3, 5)
"""Depths that the batch size chooses from in a sparse model."""
ACCEPTANCE = (0.70, 0.50, 0.36, 0.26, 0.19)
"""Probability that drafts are accepted up to each position, as EAGLE-3 heads reach it on chat."""
MARGIN = 1.1
"""How much faster than plain decoding a depth must be by bytes: draft passes launch kernels too."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What an iteration reads of the weights.

    Attributes:
        fixed: of the target, without routed experts.
        expert: one expert of every sparse layer together.
        draft: one pass of the draft.
        spread: how independently tokens choose experts, 0 to 1; neighbouring tokens of a text share some.
    """

    fixed: int
    expert: int
    num_experts: int
    top_k: int
    draft: int
    spread: float = 1.0

    def distinct(self, tokens: int) -> float:
        """Expected number of experts that so many tokens hit in one layer."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** (1 + self.spread * (tokens - 1)))

    def total(self, requests: int, depth: int) -> float:
        """Bytes of an iteration."""
        return self.fixed + self.expert * self.distinct(requests * (depth + 1)) + depth * self.draft

    def best(self, requests: int, depths: Iterable[int]) -> int:
        """The depth with the most expected tokens per byte; 0 where none is faster than plain decoding by `MARGIN`."""
        plain = self.total(requests, 0)
        gains = {depth: (1 + sum(ACCEPTANCE[:depth])) * plain / self.total(requests, depth) for depth in depths if depth}
        fastest = max(gains, key=gains.__getitem__, default=0)
        return fastest if fastest and gains[fastest] >= MARGIN else 0


def least_batches(costs: StepBytes, depths: Iterable[int], most: int) -> dict[int, int]:
    """By depth, the smallest batch from which on it or a deeper one is the best, up to `most` requests; `most` + 1 if there is none."""
    depths = sorted(depths)
    best = [costs.best(requests, depths) for requests in range(1, most + 1)]
    return {depth: 1 + max((i + 1 for i, found in enumerate(best) if found < depth), default=0) for depth in depths}
