"""The start-up check that graphs give the same acceptance by position and the same text as eager passes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from runtime.batch import ScheduleBatch
from runtime.errors import ConfigError
from runtime.model_executor.acceptance import AcceptanceCounters, not_compared, side_by_side
from runtime.model_executor.graph_runner import eagerly
from runtime.model_executor.scratch_prompts import scratch_prompts
from runtime.model_executor.worker import Worker

log = logging.getLogger(__name__)
PROMPTS, PROMPT_LEN, ITERATIONS = 4, 16, 16
OTHER_DEPTH_EVERY = 3
"""One in this many iterations runs below full depth, if the worker has other depths."""
PERIOD = 5
"""Prompts repeat after this many tokens, so that prompt lookup finds drafts."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run: acceptance, and the tokens of each request."""

    counters: AcceptanceCounters
    tokens: list[list[int]]


def check_parity(worker: Worker) -> None:
    """Compare graphs with eager passes over unused rows and log the table; the worker's state is reset afterwards.

    Raises:
        ConfigError: they differ; the message names the runner whose graph is at fault.
    """
    if not any(runner.sizes for runner in worker.all_runners):
        log.info("acceptance parity: nothing is captured, so there is nothing to compare")
        return
    with eagerly(worker.all_runners):
        eager = run_scratch(worker)
    with eagerly(worker.iteration_runners):
        graphs = run_scratch(worker)
        culprit = "" if graphs == eager else _culprit(worker, eager)
    if worker.iteration_runners and not culprit:
        graphs = run_scratch(worker)
        culprit = "" if graphs == eager else "whole iterations"
    log.info("acceptance of %d prompts, eager and with graphs:\n%s", PROMPTS, side_by_side(eager.counters, graphs.counters))
    if unreached := not_compared(eager.counters):
        log.warning("acceptance parity: %s; python -m runtime.check_acceptance compares with your own prompts", unreached)
    if culprit:
        raise ConfigError(
            f"Graphs of {culprit} and the same passes run eagerly differ (see the table in the log). "
            "Start with --disable-cuda-graph, without --enable-iteration-graph, or disable the graphs of one runner."
        )


def _culprit(worker: Worker, eager: Outcome) -> str:
    """The runners that differ from eager runs when only they replay graphs."""
    guilty = []
    for runner in worker.all_runners:
        with eagerly([other for other in worker.all_runners if other is not runner]):
            if run_scratch(worker) != eager:
                guilty.append(runner.spec.name)
    return " and ".join(guilty) or "several runners together"


def run_scratch(worker: Worker) -> Outcome:
    """A short greedy run of fixed prompts over the first rows and pages, which are freed afterwards."""
    limits, depths = worker.limits, worker.parts.depths.limits
    count = min(PROMPTS, limits.max_running_requests, *depths.values())
    room = PROMPT_LEN + ITERATIONS * limits.max_accept_len + 2 * limits.tokens_per_step
    pages = -(-room // limits.page_size)
    count = min(count, limits.max_total_tokens // limits.page_size // pages)
    if count == 0 or PROMPT_LEN + ITERATIONS * limits.max_accept_len > limits.max_context_len:
        raise ConfigError("--speculative-check-parity needs KV slots for one short request. Raise --max-total-tokens or --context-length.")
    worker.reset()
    try:
        with worker.parts.monitor.without_sample():
            tokens = _iterate(worker, count, pages)
        return Outcome(worker.parts.monitor.counted(), tokens)
    finally:
        worker.reset()


def _iterate(worker: Worker, count: int, pages: int) -> list[list[int]]:
    """The tokens of `count` prompts after iterations at all depths of the worker, mostly the deepest."""
    limits, control = worker.limits, worker.parts.depths
    rows, kv = np.arange(1, count + 1, dtype=np.int32), np.full(count, PROMPT_LEN, dtype=np.int32)
    ids = (7 * rows[:, None] + np.arange(PROMPT_LEN, dtype=np.int32) % PERIOD * 11 + 3) % limits.vocab_size
    # Each prompt runs alone, so that a graph for short prompts is replayed.
    prompts = [scratch_prompts(rows[i : i + 1], ids[i : i + 1], pages) for i in range(count)]
    out = [worker.submit(prompt).wait().token_ids.tolist() for prompt in prompts]
    others = [depth for depth in control.limits if depth != control.deepest]
    for step in range(1, ITERATIONS + 1):
        # Without log-probabilities, passes of few rows may skip the logits.
        batch = ScheduleBatch(step, rows, kv.copy(), np.full(count, step % 2 - 1, dtype=np.int32))
        depth = others[step % len(others)] if others and step % OTHER_DEPTH_EVERY == 0 else control.deepest
        with control.forced(depth):
            result = worker.submit(batch).wait()
        kv += result.accept_lens
        for text, part in zip(out, np.split(result.token_ids, result.accept_lens.cumsum()[:-1]), strict=True):
            text.extend(part.tolist())
    return out
