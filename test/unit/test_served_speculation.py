"""Speculative workers under the real scheduler: too little KV, shared prefixes, context ends and aborts, and the plain worker's text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from runtime.managers.io_struct import AbortReq, GenerateReq, TokensOutBatch
from runtime.managers.scheduler import Scheduler
from runtime.sampling_params import SamplingParams
from unit.driver import Driver
from unit.predicting import VOCAB, plain, speculating
from unit.storm import pools
from unit.tiny import tiny_runtime

EOS = (1,)
CONTEXT = 96


def prompts() -> list[list[int]]:
    """Two dozen, many of them with a common beginning; some long enough to meet the context's end."""
    rng = np.random.default_rng(2)
    stem = rng.integers(2, VOCAB, 40).tolist()
    found = []
    for i in range(24):
        tail = rng.integers(2, VOCAB, int(rng.integers(1, 30))).tolist()
        found.append(stem[: int(rng.integers(8, 40))] + tail if i % 2 else tail)
    return [p[: CONTEXT - 4] for p in found]


def serve(
    worker: Any,
    asks: list[GenerateReq],
    aborted: dict[int, str],
    check: Callable[[Scheduler], None] = lambda scheduler: None,
    **settings: Any,
) -> tuple[dict[str, list[int]], Scheduler]:
    """Run `asks`; `aborted[step]` names a request that is aborted before that turn of the loop, `check` is called after every turn."""
    inbox: list[Any] = list(asks)
    texts: dict[str, list[int]] = {a.rid: [] for a in asks}

    def take(message: Any) -> None:
        for out in message.outs if isinstance(message, TokensOutBatch) else []:
            texts[out.rid] += out.token_ids

    config = tiny_runtime(**{"context_length": CONTEXT, "chunked_prefill_size": 24, **settings})
    scheduler = Scheduler(config, worker, EOS, lambda wait: inbox.pop(0) if inbox else None, take)
    for turn in range(5000):
        if turn in aborted:
            inbox.append(AbortReq(rid=aborted[turn]))
        scheduler.step()
        scheduler.ledger.check()
        check(scheduler)
        if scheduler.idle and not inbox:
            return texts, scheduler
    raise AssertionError("the scheduler does not come to rest")


def asked(sampling: SamplingParams, ids: list[list[int]]) -> list[GenerateReq]:
    return [GenerateReq(rid=str(i), input_ids=p, sampling=sampling, seed=i) for i, p in enumerate(ids)]


GREEDY = SamplingParams(temperature=0.0, max_new_tokens=70)
PENALISED = SamplingParams(temperature=0.0, max_new_tokens=40, repetition_penalty=1.2, frequency_penalty=0.3, min_new_tokens=20)
BIASED = SamplingParams(temperature=0.0, max_new_tokens=30, logit_bias={5: 3.0}, presence_penalty=0.4)
WORKERS: list[tuple[str, dict[str, Any]]] = [
    ("EAGLE", {}),
    ("EAGLE", {"topk": 3, "num_draft_tokens": 7}),
    ("EAGLE3", {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}),
    ("STANDALONE", {"num_steps": 2}),
    ("NGRAM", {}),
]


@pytest.mark.parametrize(("algorithm", "spec"), WORKERS)
@pytest.mark.parametrize(("page", "overlap"), [(1, True), (16, False)])
def test_text_is_the_plain_workers_when_kv_is_short_and_prefixes_are_shared(
    tmp_path: Path, algorithm: str, spec: dict[str, Any], page: int, overlap: bool
) -> None:
    ids = prompts()
    sampling = PENALISED if page == 16 else GREEDY
    roomy = {"context_length": CONTEXT, "max_running_requests": 8}
    expected, _ = serve(plain(**roomy), asked(sampling, ids), {}, radix_cache=False)
    tight = {**roomy, "page_size": page, "max_total_tokens": 320}
    worker = speculating(tmp_path, algorithm, "eager", [2, 4, 8], runtime=tight, **spec)
    aborted = {9: "3", 14: "8", 15: "9"}
    got, scheduler = serve(worker, asked(sampling, ids), aborted, page_size=page, overlap=overlap, schedule_conservativeness=0.05)
    for rid, text in got.items():
        if rid in aborted.values():
            assert text == expected[rid][: len(text)]
        else:
            assert text == expected[rid], f"request {rid} of {len(ids[int(rid)])} tokens"
    assert scheduler.state.num_failed_steps_total == 0
    assert scheduler.state.num_retracted_requests_total > 0
    assert scheduler.state.cached_tokens_total > 0
    assert scheduler.state.graph_steps > 0
    assert scheduler.state.spec.verify_steps > 0
    assert scheduler.state.mixed_steps == 0


@pytest.mark.parametrize(("algorithm", "spec"), [(None, {}), WORKERS[0], ("EAGLE3", {"num_steps": 2}), WORKERS[3]])
@pytest.mark.parametrize(("page", "overlap"), [(1, True), (16, False), (16, True)])
def test_text_is_the_plain_workers_when_prompts_and_decoding_share_a_pass(
    tmp_path: Path, algorithm: str | None, spec: dict[str, Any], page: int, overlap: bool
) -> None:
    ids = prompts()
    samplings = [GREEDY, PENALISED, GREEDY, BIASED]
    asks = [structs.replace(a, sampling=samplings[i % 4]) for i, a in enumerate(asked(GREEDY, ids))]
    roomy = {"context_length": CONTEXT, "max_running_requests": 8}
    expected, _ = serve(plain(**roomy), asks, {}, radix_cache=False)
    tight = {**roomy, "page_size": page, "max_total_tokens": 320, "mixed_chunk": True}
    if algorithm is None:
        worker = plain("eager", [2, 4, 8], **tight)
    else:
        worker = speculating(tmp_path, algorithm, "eager", [2, 4, 8], runtime=tight, **spec)
    aborted = {9: "3", 14: "8", 15: "9"}
    got, scheduler = serve(worker, asks, aborted, page_size=page, overlap=overlap, schedule_conservativeness=0.05, chunked_prefill_size=48)
    for rid, text in got.items():
        assert text == (expected[rid][: len(text)] if rid in aborted.values() else expected[rid]), f"request {rid}"
    state = scheduler.state
    assert state.num_failed_steps_total == 0
    assert min(state.num_retracted_requests_total, state.cached_tokens_total, state.graph_steps, state.mixed_steps) > 0
    assert (state.spec.verify_steps > 0) == (algorithm is not None)


@pytest.mark.parametrize(("algorithm", "spec", "page"), [(*worker, page) for worker, page in zip(WORKERS[:4], (1, 16, 16, 1), strict=True)])
def test_kv_of_both_models_is_that_of_a_prefill_behind_prefixes_aborts_and_retractions(
    tmp_path: Path, algorithm: str, spec: dict[str, Any], page: int
) -> None:
    tight = {"context_length": CONTEXT, "max_running_requests": 8, "page_size": page, "max_total_tokens": 320}
    worker = speculating(tmp_path, algorithm, "eager", [2, 4, 8], runtime=tight, **spec)
    twin = Driver(fresh := speculating(tmp_path, algorithm, runtime={"page_size": page}, **spec))
    behind_prefixes: set[str] = set()

    def check(scheduler: Scheduler) -> None:
        for req in scheduler.running[-2:]:
            assert req.holding is not None
            if req.kv_len == 0:
                continue
            known, pages = req.ids[: req.kv_len + 1].tolist(), torch.from_numpy(req.holding.pages.astype(np.int64))
            twin.prefill({1: known}, chunk=req.kv_len)
            its_pages = torch.tensor(twin.pages[1])
            twin.release(1)
            for mine, theirs in zip(pools(worker), pools(fresh), strict=True):
                for a, b in zip((*mine.k, *mine.v), (*theirs.k, *theirs.v), strict=True):
                    a, b = (pool[held].flatten(0, 1)[: req.kv_len] for pool, held in ((a, pages), (b, its_pages)))
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
            if req.cached_tokens:
                behind_prefixes.add(req.rid)

    aborted = {9: "3", 14: "8", 15: "9"}
    asks = asked(GREEDY, prompts())
    _, scheduler = serve(worker, asks, aborted, check, page_size=page, overlap=False, schedule_conservativeness=0.05)
    assert len(behind_prefixes) > 3
    assert scheduler.state.num_retracted_requests_total > 0
