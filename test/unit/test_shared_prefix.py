"""Passes over a prefix that all requests share: which pages they share, when a pass makes use of it, and the text, which stays the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from runtime.layers.attention.torch_native import TorchNativeAttention
from runtime.managers.common_pages import CommonPages
from runtime.managers.messages import GenerateReq
from runtime.mem_cache.kv_page_manager import KVPageManager, RequestPages
from runtime.model_executor import verification
from runtime.model_executor.depth_trial import DepthTrial
from runtime.sampling_params import SamplingParams
from unit.predicting import VOCAB, plain, speculating
from unit.test_served_speculation import CONTEXT, GREEDY, PENALISED, serve

PAGE = 4


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Requests and shared keys of each pass over a shared prefix, in any layer, after it was checked that they are shared."""
    found = list[tuple[int, int]]()
    forward = TorchNativeAttention.forward

    def checked(self: TorchNativeAttention, q: torch.Tensor, layer: Any, batch: Any) -> torch.Tensor:
        if batch.shared_lens is not None and layer.layer_id == 0:
            keys = set(batch.shared_lens.tolist())
            live = batch.req_pool_indices > 0
            (count,), pages, size = keys, self._table.pages[batch.req_pool_indices[live]], self._table.page_size
            assert count % size == 0
            assert (pages[:, : count // size] == pages[0, : count // size]).all()
            assert (batch.seq_lens[live] - batch.tokens_per_req >= count).all()
            found.append((int(live.sum()), count))
        return forward(self, q, layer, batch)

    monkeypatch.setattr(TorchNativeAttention, "forward", checked)
    monkeypatch.setattr(TorchNativeAttention, "caps", replace(TorchNativeAttention.caps, shared_prefix=True))
    monkeypatch.setattr(verification, "SHARED_FROM", 2)
    monkeypatch.setattr(verification, "SHARED_SAVES", 1)
    monkeypatch.setattr(verification, "SHARED_PADDING", 2)
    return found


def asks(sampling: SamplingParams = GREEDY, requests: int = 6, stem: int = 30) -> list[GenerateReq]:
    """Prompts with a common beginning of `stem` tokens; the first is its only one for a while, so that the others find it cached."""
    rng = np.random.default_rng(3)
    begin = rng.integers(2, VOCAB, stem).tolist()
    tails = [rng.integers(2, VOCAB, 1 + 2 * i).tolist() for i in range(requests)]
    return [GenerateReq(rid=str(i), input_ids=[*begin, *tail], sampling=sampling, seed=i) for i, tail in enumerate(tails)]


def pages_of(*requests: tuple[list[int], int]) -> list[RequestPages]:
    """Requests with these pages, of which so many belong to the cache."""
    found = []
    for ids, shared in requests:
        pages = RequestPages("")
        pages.extend(np.array(ids, dtype=np.int32))
        pages.shared = shared
        found.append(pages)
    return found


@pytest.mark.parametrize(
    ("requests", "count"),
    [
        ([], 0),
        ([([1, 2, 3], 3)], 0),
        ([([1, 2, 3], 3), ([1, 2, 4, 5], 2)], 2),
        ([([1, 2, 3], 3), ([1, 2, 3, 5], 4)], 3),
        ([([1, 2, 3], 3), ([1, 2, 3, 5], 0)], 0),
        ([([1, 2, 3], 3), ([4, 2, 3], 3)], 0),
        ([([1, 2, 3, 7], 4), ([1, 2, 3, 8], 4), ([1, 9, 3, 7], 4)], 1),
    ],
)
def test_common_pages_are_the_leading_ones_that_all_have_in_the_cache(requests: list[tuple[list[int], int]], count: int) -> None:
    common = CommonPages()
    assert common.count(pages_of(*requests)) == count
    assert common.count(pages_of(([1, 2], 2), ([1, 3], 2))) == 1, "other requests are counted anew"


def test_pages_are_counted_once_for_the_same_requests() -> None:
    manager, common = KVPageManager(64, PAGE, 0, True), CommonPages()
    ids = np.arange(20, dtype=np.int32)
    first = manager.open(ids, "")
    manager.grow([first], [5])
    manager.publish(first, ids, 20)
    second = manager.open(ids, "")
    assert common.count([first, second]) == 4, "the last token is computed again"
    second.shared = 0  # not looked at again
    assert common.count([first, second]) == 4
    assert common.count([first]) == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("replay", [None, "eager"])
@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_served_text_is_the_same_over_a_shared_prefix(
    tmp_path: Path, passes: list[tuple[int, int]], sampling: SamplingParams, replay: Any, overlap: bool
) -> None:
    roomy = {"context_length": CONTEXT, "max_running_requests": 8, "page_size": PAGE}
    (first, *others) = asks(sampling)
    expected, _ = serve(plain(**roomy), [first, *others], {}, radix_cache=False)
    assert not passes
    worker: Any = speculating(tmp_path, "EAGLE", replay, [2, 4, 8] if replay else None, runtime=roomy)
    got, scheduler = serve(worker, [first], {}, then=others, overlap=overlap)
    assert got == expected
    assert scheduler.stats.num_failed_steps_total == 0
    most = 28  # of the common beginning, whole pages
    assert {count for _, count in passes} == ({most} if replay else set()), "passes without graphs attend as usual"
    assert bool(sum(runner.replayed for runner in worker.parts.verifier.shared.values())) == (replay is not None)


def test_requests_without_a_common_beginning_run_as_usual(tmp_path: Path, passes: list[tuple[int, int]]) -> None:
    roomy = {"context_length": CONTEXT, "max_running_requests": 8, "page_size": PAGE}
    worker: Any = speculating(tmp_path, "EAGLE", "eager", [2, 4, 8], runtime=roomy)
    (first, *others) = asks()
    others[2] = GenerateReq(rid=others[2].rid, input_ids=others[2].input_ids[1:], sampling=GREEDY, seed=2)
    serve(worker, [first], {}, then=others)
    assert {live for live, _ in passes} <= {2, 3, 4}, "only after the one that differs has ended"


@pytest.mark.parametrize(("page", "tokens", "chunk", "overlap"), [(1, 320, 16, True), (16, 448, 64, False), (64, 448, 24, True)])
def test_text_is_the_same_while_requests_are_retracted_and_aborted(
    tmp_path: Path, passes: list[tuple[int, int]], page: int, tokens: int, chunk: int, overlap: bool
) -> None:
    roomy = {"context_length": 192, "max_running_requests": 8, "page_size": page}
    (first, *others) = asks(requests=14, stem=90)
    others[11] = structs.replace(others[11], cache_salt="other")
    others[6] = structs.replace(others[6], input_ids=[*first.input_ids[:70], *others[6].input_ids[90:]])
    expected, _ = serve(plain(**roomy), [first, *others], {}, radix_cache=False, context_length=192)
    worker: Any = speculating(tmp_path, "EAGLE", "eager", [2, 4, 8], runtime={**roomy, "max_total_tokens": tokens})
    tight = {"context_length": 192, "chunked_prefill_size": chunk, "schedule_conservativeness": 0.05, "page_size": page}
    aborted = {"2": 30, "5": 40, "9": 50}
    steps = {step: rid for rid, step in aborted.items()}
    got, scheduler = serve(worker, [first], steps, then=others, overlap=overlap, **tight)
    assert {rid: text for rid, text in got.items() if rid not in aborted} == {rid: expected[rid] for rid in got if rid not in aborted}
    assert all(got[rid] == expected[rid][: len(got[rid])] for rid in aborted)
    assert scheduler.stats.num_retracted_requests_total
    assert scheduler.stats.num_aborted_requests_total
    # The last common token is cached together with the token after it.
    assert {count for _, count in passes} == {69 // page * page, 89 // page * page}


def test_depth_trials_time_passes_over_a_shared_prefix(tmp_path: Path, passes: list[tuple[int, int]]) -> None:
    roomy = {"context_length": CONTEXT, "max_running_requests": 8, "page_size": PAGE}
    worker: Any = speculating(tmp_path, "EAGLE", "eager", [2, 4, 8], runtime=roomy, num_steps=3, depths=(3, 0))
    trial = worker.parts.depths.controller = DepthTrial((0, 3))
    trial.begin(5)
    (first, *others) = asks()
    serve(worker, [first], {}, then=others)
    assert any(live == 5 for live, _ in passes)
    assert {depth for requests, depth in trial.cells if requests == 5} == {0, 3}


@pytest.mark.parametrize(
    ("live", "tokens", "size"),
    [(15, 1 << 20, 0), (16, 2560, 0), (16, 2688, 16), (17, 1 << 20, 0), (25, 1 << 20, 0), (26, 1 << 20, 32), (32, 1280, 0), (32, 1344, 32)],
)
def test_a_pass_makes_use_of_a_prefix_that_saves_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: int, tokens: int, size: int
) -> None:
    monkeypatch.setattr(TorchNativeAttention, "caps", replace(TorchNativeAttention.caps, shared_prefix=True))
    worker: Any = speculating(tmp_path, "EAGLE", "eager", [16, 32], runtime={"max_running_requests": 32})
    deepest, runner = max(worker.parts.verifier.shared), worker.parts.target.runner
    monkeypatch.setattr(verification, "SHARED_SAVES", 40_000 * runner.bytes_per_slot / runner.config.num_layers)
    assert [worker.parts.verifier.shared_size(depth, live, tokens) for depth in (0, deepest)] == [size, size]
    assert worker.parts.verifier.shared_size(deepest + 1, live, tokens) == 0, "no graph"
