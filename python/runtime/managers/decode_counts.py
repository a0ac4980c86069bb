"""The counts of a step's decode rows, in their requests and in the server's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from runtime.batch import StepStats
from runtime.managers.req import Phase
from runtime.managers.step_plan import StepPlan
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.telemetry.spec_stats import SpecStats, context_class


def count_decodes(plan: StepPlan, ran: StepStats, accept_lens: Sequence[int], max_accept_len: int, stats: SchedulerStats) -> None:
    """Account for what the decode rows of a step committed. This runs for each request and step, so it makes few calls.

    Args:
        ran: how they ran.
        accept_lens: tokens that each committed.
    """
    live, pure = len(plan.decodes), not plan.chunks
    graph, deepest, unfollowed, padded = ran.graph, ran.depth, ran.unfollowed, max(0, ran.padded_size - live)
    if pure:
        stats.decode.add(graph, live, padded)
    if max_accept_len > 1:
        stats.count_depth(deepest)
    windows: dict[tuple[int, int, int, int], int] = {}  # requests by accept length, drafts, depth and context
    for req, accept_len, most in zip(plan.decodes, accept_lens, ran.drafts or repeat(deepest, live), strict=True):
        if req.phase is Phase.ENDED:
            continue
        req.decode_collected(accept_len, max_accept_len, unfollowed)
        progress = req.progress
        if pure:
            progress.decode.add(graph, live, padded)
        if depth := most if most <= req.most_drafts else req.most_drafts:
            drafts = ran.draft_tokens if depth == deepest else depth
            if progress.spec is None:
                progress.spec = SpecStats()
            progress.spec.add(accept_len, drafts, max_accept_len, depth)
            window = (accept_len, drafts, depth, context_class(req.kv_len))
            windows[window] = windows.get(window, 0) + 1
    for (accept_len, drafts, depth, context), times in windows.items():
        stats.spec.add(accept_len, drafts, max_accept_len, depth, times)
        stats.spec_by_context.add(accept_len, context, times)
