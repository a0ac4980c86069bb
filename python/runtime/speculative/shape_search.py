"""Finds the shape of the drafts with the most tokens per second, from measured times and acceptance. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from runtime.config.speculative_tuning import BatchDepth

CLOSE = 0.01
"""Depths this close to the best count as equal: measured times are no more accurate, and fewer depths need fewer graphs."""
TREE_GAIN = 1.03
"""How much faster than the best chain a tree must be: the depth of a chain adapts to the text while serving."""

Rates = Mapping[int, Mapping[int, float]]
"""Tokens per second of chains, by number of requests and depth."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A draft shape.

    Attributes:
        shape: steps, top-k and draft tokens.
        depths: the depth by number of requests.
        rates: tokens per second by number of requests.
    """

    shape: tuple[int, int, int]
    depths: dict[int, int]
    rates: dict[int, float]

    @property
    def table(self) -> tuple[BatchDepth, ...]:
        """The batch sizes at which the depth changes; the first line starts at one request."""
        lines: list[BatchDepth] = []
        for requests, depth in sorted(self.depths.items()):
            if not lines or lines[-1].depth != depth:
                lines.append(BatchDepth(requests if lines else 1, depth))
        return tuple(lines)

    def score(self, requests: Iterable[int]) -> float:
        """The geometric mean of its tokens per second at these numbers of requests."""
        return geometric_mean(self.rates[count] for count in requests)


def chain_plan(rates: Rates) -> Plan:
    """The chain with a depth for each batch size within `CLOSE` of the best one, and with as few different depths as possible."""
    wanted, open_rows = set[int](), dict(rates)
    while open_rows:
        close = {count: {d for d, rate in row.items() if rate >= (1 - CLOSE) * max(row.values())} for count, row in open_rows.items()}
        most = max(set().union(*close.values()), key=lambda depth: (sum(depth in found for found in close.values()), -depth))
        wanted.add(most)
        open_rows = {count: row for count, row in open_rows.items() if most not in close[count]}
    depths, current = dict[int, int](), -1
    for count, row in sorted(rates.items()):
        best = max(wanted & row.keys(), key=row.__getitem__)
        current = current if row.get(current, 0.0) >= (1 - CLOSE) * row[best] else best
        depths[count] = current
    steps = max(1, *depths.values())
    return Plan((steps, 1, steps + 1), depths, {count: rates[count][depth] for count, depth in depths.items()})


def tree_plan(shape: tuple[int, int, int], tree: Mapping[int, float], rates: Rates) -> Plan:
    """A tree up to the largest batch size at which it is not slower than plain decoding; no drafts above. `tree`: its tokens per second."""
    depths, found, drafting = dict[int, int](), dict[int, float](), True
    for count in sorted(rates):
        drafting = drafting and tree.get(count, 0.0) >= rates[count][0]
        depths[count] = shape[0] if drafting else 0
        found[count] = tree[count] if drafting else rates[count][0]
    return Plan(shape, depths, found)


def best_plan(chain: Plan, trees: Sequence[Plan], requests: Sequence[int]) -> Plan:
    """The plan with the most tokens per second on average over batches of `requests`; a tree only if it is clearly faster."""
    best = max(trees, key=lambda plan: plan.score(requests), default=chain)
    return best if best.score(requests) >= TREE_GAIN * chain.score(requests) else chain
