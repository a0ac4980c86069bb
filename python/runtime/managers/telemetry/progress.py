"""How far one request is: the counts that every reply about it carries."""

from __future__ import annotations

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
        detokenize_seconds: time that the detokenizer worked for it; 0 unless that is measured.
        spec: speculation; None before the first verify step.
        decode: decode steps.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    spec: SpecStats | None = None
    decode: DecodeStats = msgspec.field(default_factory=DecodeStats)
    prefill_seconds: float = 0.0
    detokenize_seconds: float = 0.0
