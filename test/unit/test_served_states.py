"""A scheduler and a worker of a model with linear attention: texts behind cached states are those of whole prompts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from runtime.managers import kept_states
from runtime.managers.messages import GenerateReq
from runtime.model_executor.state_cache import state_unit
from runtime.sampling_params import SamplingParams
from unit import test_mtp
from unit.ranks import ranks
from unit.test_linear_attention_models import sparse_model
from unit.test_served_speculation import serve
from unit.test_tensor_parallel import builder

LEAST, CONTEXT = 64, 400
RUNTIME: dict[str, Any] = {"context_length": CONTEXT, "max_running_requests": 6}
VOCAB = 97


@pytest.fixture(autouse=True)
def short_prompts_leave_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_states, "LEAST_TOKENS", LEAST)


def asks() -> list[GenerateReq]:
    """Fourteen prompts of 3 to 330 tokens; most begin as others do, some to their end."""
    rng = np.random.default_rng(5)
    stem, found = rng.integers(2, VOCAB, 300).tolist(), list[list[int]]()
    for i in range(14):
        tail = rng.integers(2, VOCAB, int(rng.integers(3, 30))).tolist()
        found.append(stem[: (0, 70, 131, 300, 192)[i % 5]] + tail)
    found[8] = found[3]
    sampling = [SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True), SamplingParams(temperature=0.7, max_new_tokens=24)]
    return [GenerateReq(rid=str(i), input_ids=p, sampling=sampling[i % 4 == 3], seed=i) for i, p in enumerate(found)]


def make_worker(speculative: bool, **options: Any) -> Any:
    """A worker with or without drafts by the model's own layer; its iterations are graphs that run eagerly."""
    model = test_mtp.qwen_model(max_context_len=CONTEXT)
    return test_mtp.drafting(model, options, "eager", [2, 4, 8]) if speculative else test_mtp.plain(model, **options)


@functools.cache
def whole_prompts(speculative: bool) -> dict[str, list[int]]:
    """The texts without a prefix cache; sampled ones depend on whether drafts are proposed."""
    worker = make_worker(speculative, **RUNTIME, radix_cache=False)
    assert worker.limits.cached_states == 0
    return serve(worker, asks(), {}, **RUNTIME, radix_cache=False, chunked_prefill_size=128)[0]


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "mtp"])
@pytest.mark.parametrize(
    ("page_size", "states", "chunk", "tokens", "mixed"),
    [
        (1, 40, 128, 4096, False),
        (16, 40, 200, 4096, True),
        (16, 2, 64, 1200, False),
        (64, None, 512, 1280, False),
        (16, 0, 128, 4096, False),
    ],
)
def test_texts_behind_cached_states_are_those_of_whole_prompts(
    speculative: bool, page_size: int, states: int | None, chunk: int, tokens: int, mixed: bool
) -> None:
    """Also with few states, which are dropped for others, and with few pages, so that prefixes are evicted and requests are retracted."""
    options = {**RUNTIME, "page_size": page_size, "max_total_tokens": tokens, "mixed_chunk": mixed, "chunked_prefill_size": chunk}
    worker = make_worker(speculative, **options, max_mamba_cache_size=states)
    assert worker.limits.state_unit == 64
    assert worker.limits.cached_states > 100 if states is None else worker.limits.cached_states == states
    expected = whole_prompts(speculative)
    then = [GenerateReq(rid=f"again {i}", input_ids=a.input_ids, sampling=a.sampling, seed=a.seed) for i, a in enumerate(asks())]
    few = {"schedule_conservativeness": 0.05} if tokens < 4096 else {}
    got, scheduler = serve(worker, asks(), {5: "4"}, then=then, **options, **few)
    for i in range(14):
        assert got[str(i)] == expected[str(i)][: len(got["4"]) if i == 4 else None], i
        assert got[f"again {i}"] == expected[str(i)], f"again {i}"
    cached = scheduler.stats.cached_tokens_total
    assert cached == 0 if states == 0 else cached > 900
    assert scheduler.stats.num_failed_steps_total == 0
    if speculative:
        assert scheduler.stats.spec.verify_steps > 0


def test_what_a_free_row_holds_does_not_matter() -> None:
    worker = make_worker(True, **RUNTIME, max_mamba_cache_size=8)
    states = worker.parts.target.runner.states
    for layer in states.layers:
        for tensor in (layer.matrices, layer.tail, layer.window, layer.gates):
            tensor.fill_(torch.nan)
    got, scheduler = serve(worker, asks(), {}, **RUNTIME, chunked_prefill_size=128)
    assert got == whole_prompts(True)
    assert scheduler.stats.cached_tokens_total > 500


def test_ranks_cache_the_same_states(tmp_path: Any) -> None:
    model = sparse_model("Qwen3NextForCausalLM", max_context_len=CONTEXT)
    options = {"context_length": CONTEXT, "max_running_requests": 6}
    alone, _ = serve(builder(tmp_path, None, model, **options)(), asks(), {}, **options, chunked_prefill_size=128)
    with ranks(2, builder(tmp_path, None, model, **options)) as worker:
        assert worker.limits.cached_states > 0
        got, scheduler = serve(worker, asks(), {}, **options, chunked_prefill_size=128)
    assert got == alone
    assert scheduler.stats.cached_tokens_total > 500


@pytest.mark.parametrize(
    ("page_size", "window", "unit"), [(1, 4, 64), (16, 4, 64), (128, 4, 128), (16, 64, 128), (16, 63, 64), (1, 200, 256)]
)
def test_chunks_of_a_unit_are_longer_than_a_window(page_size: int, window: int, unit: int) -> None:
    assert state_unit(page_size, window) == unit
