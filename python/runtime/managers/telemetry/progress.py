"""The progress of one request: the counts in every reply about it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from runtime.managers.telemetry.decode_stats import DecodeStats
from runtime.managers.telemetry.spec_stats import SpecStats


class Progress(msgspec.Struct, array_like=True):
    """Counts of one request so far. The scheduler updates one instance in place; messages encode its current values.

    Attributes:
        prompt_tokens, cached_tokens: prompt length, and the part of it found in the prefix cache.
        completion_tokens: tokens generated.
        queue_seconds: time from the arrival at the scheduler to the first step; 0 before it.
        prefill_seconds: time from there to the first token; 0 before it.
        detokenize_seconds: time that the detokenizer spent on it; 0 unless traces need it.
        spec: verify steps and drafts; None before the first verify step.
        decode: decode steps.

    `spec` and `decode` are up to date in the last reply; with `running_counts` in every reply.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    spec: SpecStats | None = None
    decode: DecodeStats = msgspec.field(default_factory=DecodeStats)
    prefill_seconds: float = 0.0
    detokenize_seconds: float = 0.0


DecodeStep = tuple[bool, int, int]
"""Arguments of `DecodeStats.add`: one decode step."""
VerifyStep = tuple[int, int, int, int, str]
"""Arguments of `SpecStats.add`, and a `context_class`: one verify step of a request."""


@dataclass(slots=True)
class UnsentCounts:
    """Steps of one request that its `Progress` does not include yet. Counting equal steps together is faster than one by one."""

    decode_steps: dict[DecodeStep, int] = field(default_factory=lambda: defaultdict(int))
    verify_steps: dict[VerifyStep, int] = field(default_factory=lambda: defaultdict(int))

    def move_to(self, progress: Progress) -> None:
        """Add the steps to `progress` and forget them."""
        for step, times in self.decode_steps.items():
            progress.decode.add(*step, times)
        for (accept_len, drafts, max_accept_len, depth, _), times in self.verify_steps.items():
            progress.spec = progress.spec or SpecStats()
            progress.spec.add(accept_len, drafts, max_accept_len, depth, times)
        self.decode_steps.clear()
        self.verify_steps.clear()
