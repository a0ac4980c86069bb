"""The log line of a choice that ended (--log-requests)."""

from __future__ import annotations

import logging

from runtime.managers.generation import Generation, GenerationUpdate

log = logging.getLogger(__name__)


def log_request(generation: Generation, index: int, update: GenerationUpdate | None, seconds: float) -> None:
    """Log the end of one choice; `update` is its last one."""
    name = generation.rid.encode("unicode_escape").decode()  # a line feed must not forge a line of the log
    if update is None or update.finish is None:
        log.info("%s[%d]: ended early after %.2f s", name, index, seconds)
        return
    progress = update.progress
    log.info(
        "%s[%d]: %d prompt tokens (%d cached), %d new, %s, %.2f s, queued %.2f s",
        name,
        index,
        progress.prompt_tokens,
        progress.cached_tokens,
        progress.completion_tokens,
        update.finish.reason,
        seconds,
        progress.queue_seconds,
    )
