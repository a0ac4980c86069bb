"""Workers under the real scheduler: too little KV, shared prefixes, context ends and aborts; the plain worker's text, what is told."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from runtime.batch import BatchResult, Pending, ScheduleBatch
from runtime.managers import scheduler as scheduler_module
from runtime.managers.messages import AbortReq, GenerateReq, TokensOut, TokensOutBatch
from runtime.managers.scheduler import Scheduler
from runtime.managers.telemetry.decode_stats import DecodeStats
from runtime.sampling_params import SamplingParams
from unit.driver import Driver
from unit.predicting import VOCAB, plain, speculating
from unit.storm import pools, runners
from unit.tiny import tiny_runtime
from unit.wire import as_sent

EOS = (1,)
CONTEXT = 96


def prompts() -> list[list[int]]:
    """Sixteen, many of them with a common beginning; some long enough to meet the context's end."""
    rng = np.random.default_rng(2)
    stem = rng.integers(2, VOCAB, 40).tolist()
    found = []
    for i in range(16):
        tail = rng.integers(2, VOCAB, int(rng.integers(1, 30))).tolist()
        found.append(stem[: int(rng.integers(8, 40))] + tail if i % 2 else tail)
    return [p[: CONTEXT - 4] for p in found]


def serve(
    worker: Any,
    asks: list[GenerateReq],
    aborted: dict[int, str],
    check: Callable[[Scheduler], None] = lambda scheduler: None,
    hear: Callable[[TokensOut], None] = lambda out: None,
    then: Sequence[GenerateReq] = (),
    **settings: Any,
) -> tuple[dict[str, list[int]], Scheduler]:
    """Run `asks`; `aborted[step]` names a request that is aborted before that turn of the loop, `check` is called after every turn,
    `hear` with all that is told; `then` is asked when all others have ended."""
    inbox: list[Any] = list(asks)
    texts: dict[str, list[int]] = {a.rid: [] for a in (*asks, *then)}

    def take(message: Any) -> None:
        message = as_sent(message)
        for out in message.outs if isinstance(message, TokensOutBatch) else []:
            texts[out.rid] += out.token_ids
            hear(out)

    config = tiny_runtime(**{"context_length": CONTEXT, "chunked_prefill_size": 24, **settings})
    scheduler = Scheduler(config.scheduler, config.cache, worker, EOS, lambda wait: inbox.pop(0) if inbox else None, take)
    for turn in range(5000):
        if turn in aborted:
            inbox.append(AbortReq(rid=aborted[turn]))
        scheduler.step()
        scheduler.groups.check()
        check(scheduler)
        if scheduler.idle and not inbox:
            if not then:
                return texts, scheduler
            inbox, then = list(then), ()
    raise AssertionError("the scheduler does not come to rest")


def asked(sampling: SamplingParams, ids: list[list[int]]) -> list[GenerateReq]:
    return [GenerateReq(rid=str(i), input_ids=p, sampling=sampling, seed=i) for i, p in enumerate(ids)]


GREEDY = SamplingParams(temperature=0.0, max_new_tokens=32)
PENALISED = SamplingParams(temperature=0.0, max_new_tokens=32, repetition_penalty=1.2, frequency_penalty=0.3, min_new_tokens=20)
BIASED = SamplingParams(temperature=0.0, max_new_tokens=30, logit_bias={5: 3.0}, presence_penalty=0.4)
SAMPLINGS = {"greedy": GREEDY, "penalised": PENALISED, "biased": BIASED}


def asks_of(*kinds: str) -> list[GenerateReq]:
    """All prompts; the samplings take turns."""
    return [GenerateReq(rid=str(i), input_ids=p, sampling=SAMPLINGS[kinds[i % len(kinds)]], seed=i) for i, p in enumerate(prompts())]


@functools.cache
def plain_texts(*kinds: str) -> dict[str, list[int]]:
    """What the plain worker with all the KV it wants answers to `asks_of(*kinds)`; several tests compare with it."""
    return serve(plain(context_length=CONTEXT, max_running_requests=8), asks_of(*kinds), {}, radix_cache=False)[0]


WORKERS: list[tuple[str, dict[str, Any]]] = [
    ("EAGLE", {}),
    ("EAGLE", {"topk": 3, "num_draft_tokens": 7}),
    ("EAGLE3", {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}),
    ("STANDALONE", {"num_steps": 2}),
    ("DFLASH", {"num_steps": 4}),
    ("NGRAM", {}),
]


@pytest.mark.parametrize(("algorithm", "spec"), WORKERS)
@pytest.mark.parametrize(("page", "overlap"), [(1, True), (16, False)])
def test_text_is_the_plain_workers_when_kv_is_short_and_prefixes_are_shared(
    tmp_path: Path, algorithm: str, spec: dict[str, Any], page: int, overlap: bool
) -> None:
    kind, ids = "penalised" if page == 16 else "greedy", prompts()
    expected = plain_texts(kind)
    tight = {"context_length": CONTEXT, "max_running_requests": 8, "page_size": page, "max_total_tokens": 272}
    worker = speculating(tmp_path, algorithm, "eager", [2, 4, 8], runtime=tight, **spec)
    aborted = {9: "3", 14: "8", 15: "9"}
    got, scheduler = serve(worker, asks_of(kind), aborted, page_size=page, overlap=overlap, schedule_conservativeness=0.05)
    for rid, text in got.items():
        if rid in aborted.values():
            assert text == expected[rid][: len(text)]
        else:
            assert text == expected[rid], f"request {rid} of {len(ids[int(rid)])} tokens"
    assert scheduler.stats.num_failed_steps_total == 0
    assert scheduler.stats.num_retracted_requests_total > 0
    assert scheduler.stats.cached_tokens_total > 0
    assert scheduler.stats.decode.graph_steps > 0
    assert scheduler.stats.spec.verify_steps > 0
    assert scheduler.stats.mixed_steps == 0


@pytest.mark.parametrize(
    ("algorithm", "spec", "page", "overlap"),
    [
        (*worker, *way)
        for i, worker in enumerate([(None, {}), WORKERS[0], ("EAGLE3", {"num_steps": 2}), WORKERS[3]])
        for j, way in enumerate([(1, True), (16, False), (16, True)])
        if i % 3 != j
    ],
)
def test_text_is_the_plain_workers_when_prompts_and_decoding_share_a_pass(
    tmp_path: Path, algorithm: str | None, spec: dict[str, Any], page: int, overlap: bool
) -> None:
    kinds = ("greedy", "penalised", "greedy", "biased")
    asks, expected = asks_of(*kinds), plain_texts(*kinds)
    tight = {"context_length": CONTEXT, "max_running_requests": 8, "page_size": page, "max_total_tokens": 272, "mixed_chunk": True}
    if algorithm is None:
        worker = plain("eager", [2, 4, 8], **tight)
    else:
        worker = speculating(tmp_path, algorithm, "eager", [2, 4, 8], runtime=tight, **spec)
    aborted = {9: "3", 14: "8", 15: "9"}
    got, scheduler = serve(worker, asks, aborted, page_size=page, overlap=overlap, schedule_conservativeness=0.05, chunked_prefill_size=48)
    for rid, text in got.items():
        assert text == (expected[rid][: len(text)] if rid in aborted.values() else expected[rid]), f"request {rid}"
    state = scheduler.stats
    assert state.num_failed_steps_total == 0
    assert min(state.num_retracted_requests_total, state.cached_tokens_total, state.decode.graph_steps, state.mixed_steps) > 0
    assert (state.spec.verify_steps > 0) == (algorithm is not None)


@pytest.mark.parametrize(("algorithm", "spec", "page"), [(*worker, page) for worker, page in zip(WORKERS[:4], (1, 16, 16, 1), strict=True)])
def test_kv_of_both_models_is_that_of_a_prefill_behind_prefixes_aborts_and_retractions(
    tmp_path: Path, algorithm: str, spec: dict[str, Any], page: int
) -> None:
    tight = {"context_length": CONTEXT, "max_running_requests": 8, "page_size": page, "max_total_tokens": 272}
    worker = speculating(tmp_path, algorithm, "eager", [2, 4, 8], runtime=tight, **spec)
    reference = Driver(fresh := speculating(tmp_path, algorithm, runtime={"page_size": page}, **spec))
    behind_prefixes: set[str] = set()

    turns = itertools.count()

    def check(scheduler: Scheduler) -> None:
        """In every third turn: what is wrong once stays wrong until the request ends."""
        for req in scheduler.groups.only.running[-2:] if next(turns) % 3 == 0 else []:
            if req.kv_len == 0:
                continue
            known, pages = req.ids[: req.kv_len + 1].tolist(), torch.from_numpy(req.pages.ids.astype(np.int64))
            reference.prefill({1: known}, chunk=req.kv_len)
            its_pages = torch.tensor(reference.pages[1])
            reference.release(1)
            for mine, theirs in zip(pools(worker), pools(fresh), strict=True):
                for a, b in zip((*mine.k, *mine.v), (*theirs.k, *theirs.v), strict=True):
                    a, b = (pool[held].flatten(0, 1)[: req.kv_len] for pool, held in ((a, pages), (b, its_pages)))
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
            if req.progress.cached_tokens:
                behind_prefixes.add(req.rid)

    aborted = {9: "3", 14: "8", 15: "9"}
    asks = asked(GREEDY, prompts())
    _, scheduler = serve(worker, asks, aborted, check, page_size=page, overlap=False, schedule_conservativeness=0.05)
    assert len(behind_prefixes) > 3
    assert scheduler.stats.num_retracted_requests_total > 0


@pytest.mark.parametrize("stage", ["stage_rows", "run"])
@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
def test_prompts_whose_step_failed_write_over_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str | None, stage: str
) -> None:
    """The step after it was submitted before that is known, and decodes them: in rows that others had, perhaps without pages."""
    expected, failing, ended = plain_texts("greedy"), itertools.cycle([False, False, False, True]), dict[str, str]()
    few = {"context_length": CONTEXT, "max_running_requests": 3, "max_total_tokens": 272}
    worker = plain(**few) if algorithm is None else speculating(tmp_path, algorithm, runtime=few)
    target, failures = worker.parts.target, list[int]()
    original = getattr(target, stage)

    def fail_sometimes(work: Any, *args: Any) -> Any:
        prompts = work.num_prompts if isinstance(work, ScheduleBatch) else work.batch.batch_size
        if prompts and next(failing):
            failures.append(prompts)
            raise ValueError("no memory")
        return original(work, *args)

    def hear(out: TokensOut) -> None:
        if out.finish is not None:
            ended[out.rid] = out.finish.reason

    monkeypatch.setattr(target, stage, fail_sometimes)
    monkeypatch.setattr(scheduler_module, "FAILURES_ALLOWED", 100)
    got, scheduler = serve(worker, asked(GREEDY, prompts() * 3), {}, hear=hear)
    assert scheduler.stats.num_failed_steps_total == len(failures) > 1
    for rid, text in got.items():
        want = expected[str(int(rid) % 16)]
        assert text == (want if ended[rid] != "abort" else want[: len(text)]), f"request {rid}"


class Witness:
    """A worker, and by request the decode steps read of it: how many, how many replayed a graph, their live rows and their padding.

    A request is known by its seed, which its row is told.
    """

    def __init__(self, worker: Any) -> None:
        self._worker, self.limits, self.info = worker, worker.limits, worker.info
        self._owners: dict[int, str] = {}
        self.seen: dict[str, Counter[str]] = {}
        self.total = Counter[str]()

    def submit(self, batch: ScheduleBatch) -> Pending:
        self._owners |= {init.row: str(init.seed) for init in batch.new_rows}
        decoding = [self._owners[row] for row in batch.rows.tolist()] if not batch.num_prompts else []
        return Watched(self, decoding, self._worker.submit(batch))

    def count(self, decoding: list[str], result: BatchResult) -> None:
        live, stats = len(decoding), result.stats
        step = {"steps": 1, "graphs": int(stats.graph), "live": live, "padding": stats.padded_size - live}
        for counts in (self.total, *(self.seen.setdefault(rid, Counter()) for rid in decoding)):
            counts.update(step)


class Watched:
    """A step that is counted when it is read."""

    def __init__(self, witness: Witness, decoding: list[str], pending: Pending) -> None:
        self._witness, self._decoding, self._pending = witness, decoding, pending

    def wait(self) -> BatchResult:
        result = self._pending.wait()
        if self._decoding:
            self._witness.count(self._decoding, result)
        return result


def shares(counts: Counter[str]) -> tuple[float, float]:
    """By the definition: steps with a graph among steps, padding among rows computed."""
    return counts["graphs"] / counts["steps"], counts["padding"] / (counts["live"] + counts["padding"])


MIXING: list[tuple[str | None, dict[str, Any]]] = [(None, {}), WORKERS[0], WORKERS[3]]
SERVED = [(*worker, False, bool(i % 2)) for i, worker in enumerate([(None, {}), *WORKERS])] + [
    (*worker, True, overlap) for worker, overlap in zip(MIXING, (True, False, True), strict=True)
]
"""Each with steps that overlap or not; plain decoding, EAGLE and STANDALONE with both."""


@pytest.mark.parametrize(("algorithm", "spec", "mixed", "overlap"), SERVED)
def test_each_request_is_told_how_its_own_steps_ran_and_the_server_how_all_did(
    tmp_path: Path, algorithm: str | None, spec: dict[str, Any], overlap: bool, mixed: bool
) -> None:
    few = {"context_length": CONTEXT, "max_running_requests": 6, "max_total_tokens": 176, "mixed_chunk": mixed}
    if algorithm is None:
        worker = plain("eager", [1, 4], **few)
    else:
        worker = speculating(tmp_path, algorithm, "eager", [1, 4], runtime=few, **spec)
    decoder = runners(worker)["target_decode" if algorithm is None else "verify"]
    witness, told = Witness(worker), dict[str, tuple[float | None, float | None]]()
    said: list[tuple[TokensOut, DecodeStats]] = []
    replayed = decoder.replayed

    def hear(out: TokensOut) -> None:
        figures = out.progress.decode.graph_hit_rate, out.progress.decode.padding_waste
        assert figures == (shares(witness.seen[out.rid]) if out.rid in witness.seen else (None, None)), "so far"
        said.append((out, copy(out.progress.decode)))
        if out.finish is not None:
            told[out.rid] = figures

    endings = [structs.replace(GREEDY, max_new_tokens=1 + 3 * i, ignore_eos=True) for i in range(16)]
    asks = [
        structs.replace(a, sampling=s, stream=True, running_counts=True) for a, s in zip(asked(GREEDY, prompts()), endings, strict=True)
    ]
    _, scheduler = serve(witness, asks, {}, hear=hear, overlap=overlap, schedule_conservativeness=0.05, chunked_prefill_size=48)
    state = scheduler.stats
    assert state.num_retracted_requests_total > 0
    assert (state.mixed_steps > 0) == mixed
    assert all(out.progress.decode == then for out, then in said), "what was said does not change"
    assert told["0"] == (None, None), "its prompt's pass made its only token"
    assert len(told) == 16
    assert len({rate for rate, _ in told.values()}) > 3
    assert len({waste for _, waste in told.values()}) > 3
    assert (state.decode.graph_hit_rate, state.decode.padding_waste) == shares(witness.total)
    assert state.decode.graph_steps == decoder.replayed - replayed > 0
    assert sum(counts["steps"] for counts in witness.seen.values()) == state.decode.live_rows
    asks = [structs.replace(asks[5], rid="alone", seed=99)]
    witness.seen.clear()
    witness.total.clear()
    alone = serve(witness, asks, {}, hear=lambda out: said.append((out, out.progress.decode)))[1].stats.decode
    last = said[-1][0].progress.decode
    assert (last.graph_hit_rate, last.padding_waste) == (alone.graph_hit_rate, alone.padding_waste) == (1.0, 0.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("algorithm", "spec"), WORKERS)
def test_acceptance_is_that_of_steps_before_the_end_of_the_text(
    tmp_path: Path, algorithm: str, spec: dict[str, Any], overlap: bool
) -> None:
    few = {"context_length": CONTEXT, "max_running_requests": 6}
    worker = speculating(tmp_path, algorithm, runtime=few, **spec)
    ends = SamplingParams(temperature=1.0, max_new_tokens=64, logit_bias={1: 4.0}, stop_token_ids=(5,))
    reasons = Counter[str]()

    def hear(out: TokensOut) -> None:
        if out.finish is not None:
            reasons[out.finish.reason] += 1

    _, scheduler = serve(worker, asked(ends, [prompt[:20] for prompt in prompts()]), {}, hear=hear, overlap=overlap)
    stats, counted = scheduler.stats.spec, worker.parts.monitor.counted()
    worker.close()
    assert reasons == {"stop": 16}
    assert (counted.iterations, counted.draft_tokens) == (stats.verify_steps, stats.draft_tokens)
    assert counted.accepted.sum() == stats.accepted_tokens
