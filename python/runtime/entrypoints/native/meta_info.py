"""`meta_info` of one output, in SGLang's names: the same from /generate and from the offline engine."""

from __future__ import annotations

from typing import Any

from runtime.managers.generation import GenerationUpdate
from runtime.managers.telemetry.spec_stats import SpecStats


def meta_info(rid: str, last: GenerationUpdate) -> dict[str, Any]:
    """Counts, finish reason and speculation after update `last` of generation `rid`. Callers add log-probabilities and latencies."""
    progress = last.progress
    return {
        "id": rid,
        "finish_reason": finish_form(last),
        "prompt_tokens": progress.prompt_tokens,
        "completion_tokens": progress.completion_tokens,
        "cached_tokens": progress.cached_tokens,
        "queue_time": progress.queue_seconds,
        **progress.decode.shares(),
        **(spec_form(progress.spec) if progress.spec is not None and progress.spec.verify_steps else {}),
    }


def finish_form(update: GenerationUpdate) -> dict[str, Any] | None:
    """The finish reason: its type, and what matched, how long, or why."""
    finish = update.finish
    if finish is None:
        return None
    if finish.reason == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.reason == "length":
        return {"type": "length", "length": update.progress.completion_tokens}
    return {"type": "abort", "message": finish.message or "aborted"}


def spec_form(spec: SpecStats) -> dict[str, Any]:
    """The acceptance of the verify steps so far, and that of each draft position."""
    return {
        "spec_verify_ct": spec.verify_steps,
        "spec_accept_length": spec.accept_length,
        "spec_accept_rate": spec.accept_rate,
        "spec_accept_token_num": spec.accepted_tokens,
        "spec_draft_token_num": spec.draft_tokens,
        "spec_accepted_by_position": spec.accepted_by_position,
    }
