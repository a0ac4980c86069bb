"""The log lines of a choice that ended (--log-requests, --log-slow-requests)."""

from __future__ import annotations

import logging

from runtime.managers.observers.request_end import RequestEnd

log = logging.getLogger(__name__)


def log_request(end: RequestEnd) -> None:
    """Log the lengths and times of one choice, never its text."""
    progress = end.progress
    counts = f"{progress.prompt_tokens} prompt tokens ({progress.cached_tokens} cached), {progress.completion_tokens} new"
    outcome = end.finish.reason if end.finish is not None else "ended early"
    log.info("%s: %s, %s, %.2f s (%s)", _name(end), counts, outcome, end.seconds, _phases(end), extra=_fields(end))


def log_slow_request(min_seconds: float, end: RequestEnd) -> None:
    """Log a choice that took at least `min_seconds`, with the phase that took longest."""
    if end.seconds < min_seconds:
        return
    counts = f"{end.progress.prompt_tokens} prompt tokens, {end.progress.completion_tokens} new"
    times = f"{end.seconds:.2f} s, most of it {end.slowest_phase()} ({_phases(end)})"
    log.warning("slow request %s: %s; %s", _name(end), times, counts, extra=_fields(end))


def _phases(end: RequestEnd) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in end.phases().items())


def _name(end: RequestEnd) -> str:
    """Its id and choice, without line feeds, which could forge a log line."""
    return f"{end.generation.rid.encode('unicode_escape').decode()}[{end.index}]"


def _fields(end: RequestEnd) -> dict[str, dict[str, object]]:
    """The fields that the JSON format shows in addition to the message."""
    context, finish = end.generation.context, end.finish
    return {
        "fields": {
            **({"request_id": context.request_id} if context is not None else {}),
            "rid": end.generation.rid,
            "choice": end.index,
            "prompt_tokens": end.progress.prompt_tokens,
            "cached_tokens": end.progress.cached_tokens,
            "completion_tokens": end.progress.completion_tokens,
            "finish_reason": finish.reason if finish is not None else "failed",
            "seconds": round(end.seconds, 4),
            "phase_seconds": {name: round(seconds, 4) for name, seconds in end.phases().items()},
            "slowest_phase": end.slowest_phase(),
        }
    }
