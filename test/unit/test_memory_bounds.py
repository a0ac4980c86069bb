"""Choosing tokens a few rows at a time changes nothing, and dry runs for the memory plan leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from runtime.errors import ConfigError
from runtime.layers import sampler
from runtime.model_executor import accepter, build
from runtime.model_executor.build import plan_kv
from runtime.model_executor.context import make_context
from runtime.model_executor.dry_run import FILTERED, accept_padding, padding_prompt, sample_padding
from runtime.model_executor.graph_capture import CallPool, GraphKey, Replay
from runtime.sampling_params import SamplingParams
from unit.driver import GREEDY, Driver
from unit.predicting import VOCAB, plain, speculating
from unit.storm import pools
from unit.tiny import tiny_runtime

MIXED = {
    1: GREEDY,
    2: FILTERED,
    3: SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.3),
    5: SamplingParams(temperature=1.0, logit_bias={3: 4.0}, min_new_tokens=9),
    7: SamplingParams(temperature=1.2, min_p=0.05),
}
PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + r).tolist() for r in MIXED}
TREE: dict[str, Any] = {"topk": 3, "num_draft_tokens": 7}


def answers(worker: Any) -> tuple[dict[int, list[int]], list[Any]]:
    driver = Driver(worker)
    out = driver.generate(PROMPTS, 20, sampling=MIXED, logprobs=3)
    return out, [(r.logprobs.chosen, r.logprobs.top_ids, r.logprobs.top) for r in driver.results if r.logprobs is not None]


@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
def test_sampling_in_chunks_equals_sampling_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    spec: dict[str, Any] = TREE if kind == "tree" else {}

    def worker() -> Any:
        return plain(None) if kind == "plain" else speculating(tmp_path, "EAGLE", None, **spec)

    together, logprobs = answers(worker())
    monkeypatch.setattr(sampler, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(accepter, "ROWS_ACCEPTED_TOGETHER", 9)
    apart, apart_logprobs = answers(worker())
    assert together == apart
    assert len(logprobs) == len(apart_logprobs) > 5
    assert all(np.array_equal(a, b) for one, two in zip(logprobs, apart_logprobs, strict=True) for a, b in zip(one, two, strict=True))


def test_draws_of_many_rows_are_those_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    probs, numbers = torch.rand((9, 50), generator=g).softmax(-1), torch.rand(9, generator=g)
    together = sampler.draw(probs, numbers)
    monkeypatch.setattr(sampler, "ROWS_AT_ONCE", 4)
    assert torch.equal(sampler.draw(probs, numbers), together)


@pytest.mark.parametrize("spec", [{}, TREE, {"num_steps": 1, "num_draft_tokens": 2}])
def test_a_dry_run_of_the_largest_window_changes_no_answer(tmp_path: Path, spec: dict[str, Any]) -> None:
    worker = speculating(tmp_path, "EAGLE", None, **spec)
    prompts = {r: PROMPTS[r] for r in (1, 2)}
    expected = Driver(worker).generate(prompts, 12)
    worker.reset()
    with torch.inference_mode():
        accept_padding(worker.parts, worker.parts.depths.deepest, worker.limits.max_running_requests)
    assert worker.parts.monitor.counted().iterations == 0
    assert Driver(worker).generate(prompts, 12) == expected


def test_a_pass_holds_the_longest_prompt_where_none_is_cut() -> None:
    assert make_context(tiny_runtime(chunked_prefill_size=-1, context_length=128, max_prefill_tokens=32)).extend_tokens == 128


def test_a_pass_holds_the_largest_chunk() -> None:
    assert make_context(tiny_runtime(chunked_prefill_size=40, largest_chunk_size=96)).extend_tokens == 96
    assert make_context(tiny_runtime(chunked_prefill_size=40)).extend_tokens == 40


def test_dry_runs_leave_the_rows_as_they_were() -> None:
    worker = plain(None)
    target = worker.parts.target
    context = make_context(tiny_runtime(chunked_prefill_size=40, context_length=32, max_running_requests=8))
    batch = padding_prompt(context)
    assert batch.extend_lens.tolist() == [31, 3, 1, 1, 1, 1, 1, 1]
    assert batch.rows.max() == 0
    before = [t.clone() for t in (target.rows.kv_lens, target.rows.tables.output_counts)]
    with torch.inference_mode():
        result = target.extend(batch)[1].wait()
        assert result.logprobs is not None
        assert result.logprobs.top.shape == (8, 20)
        assert result.prompt_logprobs[0].chosen.shape == (31,)
        sample_padding(target, torch.zeros((8, VOCAB)))
    target.reset()
    assert all(torch.equal(a, b) for a, b in zip(before, (target.rows.kv_lens, target.rows.tables.output_counts), strict=True))


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
def test_a_slot_costs_what_target_and_draft_keep_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    divide, costs = build.plan_kv, list[int]()
    monkeypatch.setattr(build, "plan_kv", lambda *args: costs.append(args[3]) or divide(*args))
    worker = speculating(tmp_path, algorithm)
    assert costs == [sum(t[0, 0].nbytes for pool in pools(worker) for t in (*pool.k, *pool.v))]


def test_kv_on_a_cpu_takes_the_given_or_a_bounded_share(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=16 << 30, available=12 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def tokens(share: float | None) -> int:
        return plan_kv(make_context(tiny_runtime(max_total_tokens=None, mem_fraction_static=share)), 0, {}, 1 << 20, 1, experts=0).num_pages

    assert tokens(0.5) == 4 * 1024 - 1, "half of it less what is in use, and the padding slot"
    assert tokens(0.875) == 10 * 1024 - 1, "more than is taken unasked"
    assert tokens(None) == 8 * 256
    with pytest.raises(ConfigError, match=r"KV cache is .* MiB short .* Raise --mem-fraction-static"):
        tokens(0.25)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("context", [96, 256])
def test_kv_on_a_cpu_always_holds_one_request(context: int, page: int) -> None:
    alone = {"max_running_requests": 1, "context_length": context, "page_size": page, "max_total_tokens": None}
    plan = plan_kv(make_context(tiny_runtime(**alone)), 0, {}, 1 << 10, 12, experts=0)
    assert plan.num_pages * page >= context + 2 * 12 + page


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_sizes_without_a_graph_give_the_same_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[RuntimeError]
) -> None:
    expected = answers(plain("eager", [1, 2, 4, 8]))[0]
    capture = CallPool.capture

    def starved(self: CallPool, key: GraphKey, function: Replay) -> Replay:
        if key[0] > 2:
            raise error("no memory is left")
        return capture(self, key, function)

    monkeypatch.setattr(CallPool, "capture", starved)
    with caplog.at_level("WARNING"):
        worker = plain("eager", [1, 2, 4, 8])
    assert worker.runners[0].sizes == [1, 2]
    assert "no graph for batch sizes [4, 8]; they run eagerly and slower" in caplog.text
    assert "--cuda-graph-max-bs to 2" in caplog.text
    if error is RuntimeError:
        assert "graph capture failed at size 4 (no memory is left)" in caplog.text
    assert answers(worker)[0] == expected
    assert worker.info().graph_runs[0].eager > 0, "five requests run without a graph"
