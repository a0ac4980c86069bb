"""What `meta_info` tells of one output so far, the same from /generate and from the offline engine, in SGLang's names."""

from __future__ import annotations

from typing import Any

from runtime.managers.telemetry.spec_stats import SpecStats
from runtime.managers.tokenizer_manager import GenerationUpdate


def meta_info(rid: str, last: GenerationUpdate) -> dict[str, Any]:
    """Counts, finish reason and speculation after update `last` of generation `rid`; log-probabilities and latencies are the caller's."""
    return {
        "id": rid,
        "finish_reason": finish_form(last),
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.completion_tokens,
        "cached_tokens": last.cached_tokens,
        "queue_time": last.queue_seconds,
        **last.steps.shares(),
        **(spec_form(last.spec) if last.spec is not None and last.spec.verify_steps else {}),
    }


def finish_form(update: GenerationUpdate) -> dict[str, Any] | None:
    """The finish reason: its type, and what matched, how long, or why."""
    finish = update.finish
    if finish is None:
        return None
    if finish.reason == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.reason == "length":
        return {"type": "length", "length": update.completion_tokens}
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
