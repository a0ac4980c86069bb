"""`meta_info` of one output of /generate or of the offline engine, with SGLang's names."""

from __future__ import annotations

from typing import Any

from runtime.managers.messages import TextOut
from runtime.managers.telemetry.spec_stats import SpecStats


def meta_info(rid: str, last: TextOut) -> dict[str, Any]:
    """Counts, finish reason and acceptance of generation `rid` after its update `last`."""
    progress = last.progress
    return {
        "id": rid,
        "finish_reason": _finish_reason(last),
        "prompt_tokens": progress.prompt_tokens,
        "completion_tokens": progress.completion_tokens,
        "cached_tokens": progress.cached_tokens,
        "queue_time": progress.queue_seconds,
        **progress.decode.shares(),
        **(_acceptance(progress.spec) if progress.spec is not None and progress.spec.verify_steps else {}),
    }


def _finish_reason(update: TextOut) -> dict[str, Any] | None:
    finish = update.finish
    if finish is None:
        return None
    if finish.reason == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.reason == "length":
        return {"type": "length", "length": update.progress.completion_tokens}
    return {"type": "abort", "message": finish.message or "aborted"}


def _acceptance(spec: SpecStats) -> dict[str, Any]:
    return {
        "spec_verify_ct": spec.verify_steps,
        "spec_accept_length": spec.accept_length,
        "spec_accept_rate": spec.accept_rate,
        "spec_accept_token_num": spec.accepted_tokens,
        "spec_draft_token_num": spec.draft_tokens,
        "spec_accepted_by_position": spec.accepted_by_position,
        "spec_drafted_by_position": spec.drafted_by_position,
    }
