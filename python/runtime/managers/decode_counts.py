"""The counts of a step's decode rows, in their requests and in the server's statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import repeat

from runtime.batch import StepStats
from runtime.managers.req import Phase
from runtime.managers.step_plan import StepPlan
from runtime.managers.telemetry.progress import VerifyStep
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.telemetry.spec_stats import context_class


def count_decodes(plan: StepPlan, ran: StepStats, accept_lens: Sequence[int], max_accept_len: int, stats: SchedulerStats) -> None:
    """Count the tokens that the decode rows of a step committed. This runs for each request and step, so it makes few calls.

    Args:
        ran: how the step ran: graph, padding, depth.
        accept_lens: tokens that each row committed.
    """
    live, pure = len(plan.decodes), not plan.chunks
    deepest, unfollowed, ended = ran.depth, ran.unfollowed, Phase.ENDED
    step = (ran.graph, live, max(0, ran.padded_size - live))
    if pure:
        stats.decode.add(*step)
    if max_accept_len > 1:
        stats.count_depth(deepest)
    verified: list[VerifyStep] = []
    for req, accept_len, most in zip(plan.decodes, accept_lens, ran.drafts or repeat(deepest, live), strict=True):
        if req.phase is ended:
            continue
        req.decode_collected(accept_len, max_accept_len, unfollowed)
        if pure:
            req.counts.decode_steps[step] += 1
        if depth := most if most <= req.draft_limit else req.draft_limit:
            drafts = ran.draft_tokens if depth == deepest else depth
            verify_step = (accept_len, drafts, max_accept_len, depth, context_class(req.kv_len))
            req.counts.verify_steps[verify_step] += 1
            verified.append(verify_step)
    for (accept_len, drafts, _, depth, context), times in Counter(verified).items():
        stats.spec_by_context[context].add(accept_len, drafts, max_accept_len, depth, times)
