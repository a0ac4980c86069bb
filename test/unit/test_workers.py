"""The plain worker: prompts in any pieces, shared prefixes, steps in flight, log-probabilities, and what a failed step leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.batch import ScheduleBatch
from runtime.errors import ConfigError
from runtime.model_executor.build import build_worker
from runtime.model_executor.context import BuildOptions, make_context
from runtime.pooling import Pooling
from runtime.sampling_params import SamplingParams
from runtime.worker_info import RunnerRuns
from unit.driver import Driver
from unit.latent import latent_model
from unit.predicting import VOCAB, model_config, plain, speculating
from unit.storm import runners
from unit.tiny import tiny_runtime

PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 5 + 6 * r).tolist() for r in (1, 2, 3)}
SEEDED = SamplingParams(temperature=0.9, top_p=0.95)


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SEEDED])
def test_pieces_of_a_prompt_and_pages_do_not_matter(page: int, sampling: SamplingParams) -> None:
    expected = Driver(plain()).generate(PROMPTS, 20, sampling=sampling)
    for chunk in (1, 5, 16):
        assert Driver(plain(page_size=page), seed=chunk).generate(PROMPTS, 20, sampling=sampling, chunk=chunk) == expected


def test_the_text_is_that_of_one_long_prompt_read_token_by_token() -> None:
    """Each output token is the likeliest one after a prefill of all text before it."""
    out = Driver(plain()).generate({1: PROMPTS[2]}, 10)[1]
    for length in range(10):
        driver = Driver(plain())
        driver.prefill({3: PROMPTS[2] + out[:length]})
        assert driver.out[3] == [out[length]]


@pytest.mark.parametrize(("page", "shared"), [(1, 32), (16, 32), (16, 31), (16, 17), (16, 9), (64, 32), (64, 1)])
def test_a_shared_prefix_gives_the_text_of_an_own_one(page: int, shared: int) -> None:
    long = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    expected = Driver(plain()).generate({2: [*long[:32], 5, 6]}, 12)[2]
    driver = Driver(plain(page_size=page))
    driver.prefill({1: long})
    driver.prefill({2: [*long[:32], 5, 6]}, shared={2: (1, shared)})
    while len(driver.out[2]) < 12:
        driver.decode([2, 1])
    assert driver.out[2][:12] == expected


@pytest.mark.parametrize(
    "sampling", [SEEDED, SamplingParams(temperature=0.0, frequency_penalty=0.7, repetition_penalty=1.3, min_new_tokens=9)]
)
def test_a_request_that_lost_its_row_goes_on_as_if_it_had_not(sampling: SamplingParams) -> None:
    expected = Driver(plain()).generate({1: PROMPTS[1]}, 16, sampling=sampling)[1]
    driver = Driver(plain())
    driver.prefill({1: PROMPTS[1], 2: PROMPTS[2]}, sampling=sampling)
    for _ in range(6):
        driver.decode([2, 1])
    so_far = driver.out[1]
    driver.release(1)
    driver.prefill({3: PROMPTS[3]})
    driver.prefill({1: PROMPTS[1] + so_far}, sampling=sampling, resumed={1: len(PROMPTS[1])}, chunk=4)
    while len(driver.out[1]) < 16:
        driver.decode([3, 1])
    assert driver.out[1][:16] == expected


@pytest.mark.parametrize("kind", ["plain", "fp8 cache", "latent", "EAGLE", "EAGLE tree"])
def test_a_text_of_nan_leaves_nothing_in_its_pages(tmp_path: Path, kind: str) -> None:
    """Pages are read whole, and 0 x NaN is NaN: what one text stored may not reach the next one that has the page."""

    def worker() -> Any:
        if kind.startswith("EAGLE"):
            tree = {"topk": 3, "num_draft_tokens": 7} if "tree" in kind else {}
            return speculating(tmp_path, "EAGLE", runtime={"page_size": 16}, **tree)
        model = latent_model(vocab_size=VOCAB) if kind == "latent" else model_config()
        return plain(page_size=16, model=model, **({"kv_cache_dtype": "fp8_e4m3"} if "fp8" in kind else {}))

    expected = Driver(worker()).generate({1: PROMPTS[2]}, 12)[1]
    driver, bad = Driver(worker()), next(t for t in range(2, VOCAB) if t not in (*PROMPTS[2], *expected))
    driver.worker.parts.target.runner.model.embed[bad] = torch.nan
    driver.generate({2: [5, bad, *range(2, 40)]}, 4)
    pages = driver.held[2]
    driver.release(2)
    driver.free_pages = driver.free_pages[len(pages) :] + pages[::-1]  # the next ones to be taken
    assert driver.generate({1: PROMPTS[2]}, 12)[1] == expected


def test_steps_may_be_submitted_before_the_last_one_is_read() -> None:
    expected = Driver(plain()).generate(PROMPTS, 11)
    driver = Driver(plain())
    driver.prefill(PROMPTS)
    rows = list(PROMPTS)
    pending = [driver.launch(rows, slack=i) for i in range(10)]
    for p in pending:
        driver.collect(p, rows)
    assert driver.out == expected


@pytest.mark.parametrize("k", [0, 4])
def test_prompt_log_probabilities_are_those_of_the_following_tokens(k: int) -> None:
    whole = _all_logprobs(PROMPTS[3])
    for chunk in (1 << 30, 7):
        driver = Driver(plain())
        results = driver.prefill({2: PROMPTS[3]}, logprobs=k, prompt_logprobs=True, chunk=chunk)
        chosen = np.concatenate([r.prompt_logprobs[0].chosen for r in results])
        top = np.concatenate([r.prompt_logprobs[0].top for r in results])
        assert len(chosen) == len(PROMPTS[3])
        for i, token in enumerate(PROMPTS[3][1:]):
            assert chosen[i] == pytest.approx(whole[i][token], abs=1e-4)
            np.testing.assert_allclose(top[i], np.sort(whole[i])[::-1][:k], atol=1e-4)


@pytest.mark.parametrize("chunk", [1 << 30, 7])
def test_pooled_prompts_are_the_states_and_log_probabilities_of_their_tokens(chunk: int) -> None:
    prompt, labels, worker = PROMPTS[3], (3, 9, 3), plain()
    kinds = {1: Pooling(kind="mean"), 2: Pooling(kind="last"), 3: Pooling(kind="labels", label_ids=labels)}
    results = Driver(worker).prefill(dict.fromkeys(kinds, prompt), chunk=chunk, pooling=kinds)
    mean, last, scores = (np.sum([r.pooled[i] for r in results if i in r.pooled], axis=0) for i in range(3))
    states = np.stack([_last_state(worker, prompt[:length]) for length in range(1, len(prompt) + 1)])
    np.testing.assert_allclose(mean, states.sum(0), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(last, states[-1], rtol=1e-3, atol=1e-4)
    whole = _all_logprobs(prompt)[-1]
    np.testing.assert_allclose(scores, whole[list(labels)], atol=1e-4)
    logits = worker.parts.target.runner.model.logits(torch.from_numpy(last)[None])  # the state that predicts the next token
    np.testing.assert_allclose(torch.log_softmax(logits, -1)[0].numpy(), whole, atol=1e-4)


def _last_state(worker: Any, prompt: list[int]) -> np.ndarray:
    """float32 [hidden]: the state after a prompt that runs alone."""
    worker.reset()
    (result,) = Driver(worker).prefill({1: prompt}, pooling={1: Pooling(kind="last")})
    return result.pooled[0]


def _all_logprobs(prompt: list[int]) -> np.ndarray:
    """float64 [T, V]: after each prefix of the prompt."""
    rows = []
    for length in range(1, len(prompt) + 1):
        driver = Driver(plain())
        (result,) = driver.prefill({1: prompt[:length]}, logprobs=VOCAB)
        assert result.logprobs is not None
        row = np.zeros(VOCAB)
        row[result.logprobs.top_ids[0]] = result.logprobs.top[0]
        rows.append(row)
    return np.stack(rows)


def test_a_failed_step_raises_when_read_and_the_next_one_runs() -> None:
    driver = Driver(plain())
    driver.prefill(PROMPTS)
    bad = np.array([99], dtype=np.int32)  # a row that does not exist
    broken = ScheduleBatch(50, bad, bad, np.array([-1], dtype=np.int32))
    pending = driver.worker.submit(broken)
    with pytest.raises(IndexError):
        pending.wait()
    expected = Driver(plain()).generate(PROMPTS, 5)
    while len(driver.out[1]) < 5:
        driver.decode(list(PROMPTS))
    assert driver.out == expected


def test_runs_are_counted_by_kind() -> None:
    worker = plain("eager", [2])
    driver = Driver(worker)
    driver.prefill(PROMPTS)
    results = [driver.decode(rows) for rows in ([1], [2, 3], [1, 2, 3])]
    assert [(r.stats.graph, r.stats.padded_size) for r in results] == [(True, 2), (True, 2), (False, 3)]
    assert worker.info().graph_runs == [RunnerRuns("target decode", replayed=2, eager=1)]


def test_a_reset_worker_has_nobody_left_and_answers_as_at_first() -> None:
    worker: Any = plain()
    first = Driver(worker).generate(PROMPTS, 5)
    assert worker.parts.target.rows.kv_lens.any()
    assert worker.parts.target.page_table.pages.any()
    worker.reset()
    assert not worker.parts.target.rows.kv_lens.any()
    assert not worker.parts.target.page_table.pages.any()
    assert Driver(worker, seed=1).generate(PROMPTS, 5) == first


def test_limits_are_what_was_asked_and_lengths_what_they_allow() -> None:
    worker = build_worker(tiny_runtime(max_running_requests=3, max_total_tokens=1000, page_size=16), model_config())
    assert (worker.limits.max_running_requests, worker.limits.max_total_tokens, worker.limits.page_size) == (3, 992, 16)
    assert (worker.limits.tokens_per_step, worker.limits.max_accept_len, worker.limits.prefix_lookahead) == (1, 1, 0)
    worker.close()


def test_kv_that_cannot_hold_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="one request needs"):
        build_worker(tiny_runtime(max_total_tokens=32), model_config())


def test_sizes_of_a_configuration_can_be_overridden() -> None:
    assert make_context(tiny_runtime(), BuildOptions("eager", [3, 5])).requests == 8
    assert make_context(tiny_runtime(max_running_requests=2), BuildOptions("eager", [3, 5])).requests == 5


@pytest.mark.parametrize("vocab", [2, 31, 97, 257])
def test_any_size_of_vocabulary_works(vocab: int) -> None:
    """None is a multiple of a tile."""
    worker: Any = plain("eager", [4], model=model_config(vocab_size=vocab))
    prompts = {r: np.random.default_rng(r).integers(0, vocab, 4 + r).tolist() for r in (1, 2, 3)}
    mixed = {1: SamplingParams(temperature=0.0), 2: SamplingParams(top_k=3, top_p=0.8), 3: SamplingParams(logit_bias={vocab - 1: 3.0})}
    out = Driver(worker).generate(prompts, 10, sampling=mixed)
    assert all(0 <= t < vocab for text in out.values() for t in text)
    assert torch.isfinite(runners(worker)["target_decode"].buffers["logits"]).all()
