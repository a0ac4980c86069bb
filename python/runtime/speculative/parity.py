"""Graphs against eager at start: prompts run both ways over rows that nobody has yet, and the acceptance of each position compared."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from runtime.batch import Int32, RowInit, ScheduleBatch
from runtime.errors import ConfigError
from runtime.model_executor.graph_runner import GraphRunner, RunMode
from runtime.sampling_params import SamplingParams
from runtime.speculative.acceptance import AcceptanceCounters, not_compared, side_by_side
from runtime.speculative.eagle_worker import EagleWorker
from runtime.speculative.ngram_worker import NgramWorker

log = logging.getLogger(__name__)
PROMPTS, PROMPT_LEN, ITERATIONS = 4, 16, 16
PAUSED_EVERY = 3
"""Where the server may do without drafts, one iteration in so many does."""
PERIOD = 5
"""The prompts repeat themselves at this distance, so that prompt lookup has something to find."""
GREEDY = SamplingParams(temperature=0.0)

SpeculativeWorker = EagleWorker | NgramWorker


@contextmanager
def eagerly(runners: Sequence[GraphRunner], mode: RunMode = RunMode.EAGER_PADDED) -> Iterator[None]:
    """Within, `runners` run eagerly.

    EAGER_PADDED reads the same inputs as a graph: GEMMs have the same shapes, hence the same kernels and bits, and only the
    replay differs. EAGER runs without padding and shows its effect too, where shapes do not change the rounding of a GEMM.
    """
    for runner in runners:
        runner.mode = mode
    try:
        yield
    finally:
        for runner in runners:
            runner.mode = RunMode.REPLAY


@dataclass(frozen=True)
class Outcome:
    """What a run came to: acceptance, and each request's tokens."""

    counters: AcceptanceCounters
    tokens: list[list[int]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and self.counters == other.counters and self.tokens == other.tokens

    __hash__ = None  # type: ignore[assignment]


def check_parity(worker: SpeculativeWorker) -> None:
    """Compare graphs with eager over scratch rows, log the table, and leave the worker as it was.

    Raises:
        ConfigError: they differ; it names the runner whose graph is at fault.
    """
    if not any(runner.sizes for runner in worker.all_runners):
        log.info("acceptance parity: nothing is captured, so there is nothing to compare")
        return
    with eagerly(worker.all_runners):
        eager = run_scratch(worker)
    graphs = run_scratch(worker)
    log.info("acceptance of %d prompts, eager and through graphs:\n%s", PROMPTS, side_by_side(eager.counters, graphs.counters))
    if unreached := not_compared(eager.counters):
        log.warning("acceptance parity: %s; python -m runtime.check_acceptance compares with prompts of your own", unreached)
    if graphs == eager:
        return
    raise ConfigError(
        f"graphs of {_culprit(worker, eager)} do not compute what the same passes compute eagerly (see the table in the log); "
        "start with --disable-cuda-graph, or turn one runner's graphs off"
    )


def _culprit(worker: SpeculativeWorker, eager: Outcome) -> str:
    """The runners whose graphs differ from eager when they alone replay."""
    guilty = []
    for runner in worker.all_runners:
        with eagerly([other for other in worker.all_runners if other is not runner]):
            if run_scratch(worker) != eager:
                guilty.append(runner.spec.name)
    return " and ".join(guilty) or "several runners together"


def run_scratch(worker: SpeculativeWorker) -> Outcome:
    """A short greedy run of fixed prompts over the first rows and pages; nothing of it is left."""
    limits = worker.limits
    pause = worker.verifier.pause
    count = min(PROMPTS, limits.max_running_requests, PROMPTS if pause is None else pause.above)
    room = PROMPT_LEN + ITERATIONS * limits.max_accept_len + 2 * limits.tokens_per_step
    pages = -(-room // limits.page_size)
    count = min(count, limits.max_total_tokens // limits.page_size // pages)
    if count == 0 or PROMPT_LEN + ITERATIONS * limits.max_accept_len > limits.max_context_len:
        raise ConfigError("--speculative-check-parity needs room for one short request; raise --max-total-tokens or --context-length")
    worker.reset()
    try:
        tokens = [result.tolist() for result in _iterate(worker, count, pages)]
        return Outcome(worker.verifier.counted(), tokens)
    finally:
        worker.verifier.pause = pause
        worker.reset()


def _iterate(worker: SpeculativeWorker, count: int, pages: int) -> list[np.ndarray]:
    limits, pause = worker.limits, worker.verifier.pause
    rows, kv = np.arange(1, count + 1, dtype=np.int32), np.full(count, PROMPT_LEN, dtype=np.int32)
    out = [worker.submit(_prompt(row, pages, limits.vocab_size)).wait().token_ids.tolist() for row in rows.tolist()]
    for step in range(1, ITERATIONS + 1):
        batch = ScheduleBatch(step, rows, kv.copy(), np.full(count, -1, dtype=np.int32))
        if pause is not None:
            worker.verifier.pause = replace(pause, above=0 if step % PAUSED_EVERY == 0 else count)
        result = worker.submit(batch).wait()
        kv += result.accept_lens
        for text, part in zip(out, np.split(result.token_ids, result.accept_lens.cumsum()[:-1]), strict=True):
            text.extend(part.tolist())
    return [np.array(text, dtype=np.int32) for text in out]


def _prompt(row: int, pages: int, vocab_size: int) -> ScheduleBatch:
    """The prompt of a row, which has so many pages of its own. It runs alone, and so through a graph where short prompts have them."""

    def ints(*values: int) -> Int32:
        return np.array(values, dtype=np.int32)

    ids = ints(*((7 * row + i % PERIOD * 11 + 3) % vocab_size for i in range(PROMPT_LEN)))
    return ScheduleBatch(
        step=0,
        rows=ints(row),
        len_bounds=ints(0),
        top_logprobs=ints(-1),
        new_rows=[RowInit(row, PROMPT_LEN, GREEDY, 0, ints(), ids)],
        page_rows=ints(row).repeat(pages),
        page_cols=ints(*range(pages)),
        page_ids=ints(*range((row - 1) * pages + 1, row * pages + 1)),
        prefix_lens=ints(0),
        extend_lens=ints(PROMPT_LEN),
        token_ids=ids,
        next_tokens=ints(-1),
    )
