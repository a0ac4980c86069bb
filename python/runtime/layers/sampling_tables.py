"""Sampling state by request row, and the interface of the operations that read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
"""Columns of `SamplingTables.floats`."""
ROWS_AT_ONCE = 64
"""Maximum rows of logits that are processed at a time, to limit memory.
Sorting 64 rows of 128,256 entries takes 0.3 GiB; sorting a full verify window would take 10. All operations with several numbers per
vocabulary entry process this many rows at a time, so the largest batch needs no more memory.
"""


class SamplingOps(Protocol):
    """Sampling operations that are slow over a large vocabulary. A row's result depends only on that row."""

    def filter(self, probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
        """Like `filter_probs`; rows without a filter keep their bits. May reuse the storage of `probs`."""
        ...

    def draw(self, probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Like `draw`."""
        ...

    def uniforms(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """Like `uniforms`, bit for bit."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Sampling parameters and state by request row; R rows, V vocabulary.

    Attributes:
        ops: the implementation of filters, draws and random numbers.
        floats: float32 [R, 6]: temperature (0: greedy), top_p, min_p, presence, frequency, repetition penalty.
        top_k: int32 [R].
        seeds: int64 [R].
        min_positions: int64 [R]. Tokens at positions before this one may not be in `eos_ids`.
        eos_ids: int64 [R, E], -1 where unused.
        bias_ids, bias_values: int64, float32 [R, 1024]; unused entries are id 0, value 0.
        output_counts: int16 [R, V]. Output tokens so far; kept for penalised rows only.
        in_prompt: bool [R, V].
    """

    ops: SamplingOps
    floats: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor
    min_positions: torch.Tensor
    eos_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    output_counts: torch.Tensor
    in_prompt: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """The sampling stages that a batch needs, known on the host. Indices are positions in the batch.

    Attributes:
        all_greedy, any_greedy: whether all, or any, requests have temperature 0.
        filtered: whether any request has top_k, top_p or min_p.
        penalised, biased, min_length: requests with penalties, a logit bias, a minimum output length.
        constrained: requests whose grammar restricts the next token.
    """

    all_greedy: bool
    any_greedy: bool
    filtered: bool
    penalised: list[int] = field(default_factory=list)
    biased: list[int] = field(default_factory=list)
    min_length: list[int] = field(default_factory=list)
    constrained: list[int] = field(default_factory=list)

    @classmethod
    def every(cls, count: int) -> SamplingNeeds:
        """All stages for each of `count` requests, except grammars, which need a mask."""
        requests = list(range(count))
        return cls(all_greedy=False, any_greedy=True, filtered=True, penalised=requests, biased=requests, min_length=requests)

    @property
    def adjusts(self) -> bool:
        """Whether a logits processor changes logits."""
        return bool(self.penalised or self.biased or self.min_length or self.constrained)

    def part(self, start: int, stop: int) -> SamplingNeeds:
        """The needs of requests `start` to `stop`."""
        stages = (self.penalised, self.biased, self.min_length, self.constrained)
        lists = ([i - start for i in which if start <= i < stop] for which in stages)
        return SamplingNeeds(self.all_greedy, self.any_greedy, self.filtered, *lists)
