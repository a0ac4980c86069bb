"""Random requests through random workers of which some steps fail: texts are the plain worker's, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from runtime.batch import Pending, ScheduleBatch
from runtime.constrained.compiler import GrammarCompiler
from runtime.managers.messages import AbortReq, GenerateReq, Sample, StopReq
from runtime.managers.scheduler import Scheduler
from runtime.models.config import ModelConfig
from runtime.sampling_params import SamplingParams
from unit.grammars import VOCAB, Served, make_compiler, serve
from unit.latent import latent_model
from unit.predicting import model_config, plain, speculating
from unit.test_gpt_oss import gpt_oss
from unit.test_sparse_workers import sparse_config

CONTEXT = 96
CASES = 7
FAMILIES: list[Callable[..., ModelConfig]] = [model_config, gpt_oss, sparse_config, latent_model]
DRAFTS: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    ("EAGLE", {}),
    ("EAGLE", {"topk": 3, "num_draft_tokens": 7}),
    ("EAGLE3", {"num_steps": 2, "disable_by_batch_size": 2}),
    ("STANDALONE", {"num_steps": 2}),
    ("DFLASH", {"num_steps": 5}),
    ("NGRAM", {}),
]
KEEP_SEEDS = (None, "DFLASH", "NGRAM")
"""Drafters with which sampled text is the plain worker's too."""
PLACES = ("submit", "wait", "verify", "accept", "follow", "follow_prompt")
CHANGES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -0.5, "repetition_penalty": 1.2},
    {"min_new_tokens": 4, "stop_token_ids": tuple(range(60, 160))},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"presence_penalty": -1.0, "logit_bias": {5: 3.0, 97: -100.0}},
    {"speculative_num_steps": 0},
    {"speculative_num_steps": 1},
    {"json_schema": json.dumps({"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 9})},
    {"regex": "(yes|no){20,40}", "min_new_tokens": 2},
]


class Injected(RuntimeError):
    """A failure that the test makes."""


class Failing:
    """A worker of which the steps in `plan` fail: when they are submitted, on their way, or when they are read."""

    def __init__(self, worker: Any, plan: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._worker, self._plan = worker, plan
        self.limits, self.info, self.steps, self.failed = worker.limits, worker.info, 0, 0
        self._armed = ""
        parts = worker.parts
        for place, owner, name in (
            ("verify", parts.verifier, "run"),
            ("accept", parts.accepter, "accept"),
            ("follow", parts.drafter, "follow"),
            ("follow_prompt", parts.drafter, "follow_prompt"),
        ):
            monkeypatch.setattr(owner, name, self._failing(place, getattr(owner, name)))

    def _failing(self, place: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._fail(place)
            return real(*args)

        return call

    def _fail(self, place: str) -> None:
        if self._armed == place:
            self._armed = ""
            self.failed += 1
            raise Injected(place)

    def submit(self, batch: ScheduleBatch) -> Pending:
        self.steps += 1
        place = self._plan.get(self.steps, "")
        self._worker.run_between_steps(lambda: setattr(self, "_armed", place))
        self._fail("submit")
        pending = self._worker.submit(batch)
        return pending if place != "wait" else Unreadable(self, pending)

    def fail_reading(self) -> None:
        self.failed += 1
        raise Injected("wait")


@dataclass
class Unreadable:
    """A step that fails when it is read."""

    owner: Failing
    pending: Pending

    def wait(self) -> Any:
        self.pending.wait()
        self.owner.fail_reading()


@dataclass
class Case:
    """What the seed decides."""

    seed: int
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.family = self.seed % len(FAMILIES)
        self.algorithm, self.spec = DRAFTS[self.seed % len(DRAFTS)]
        tree = "topk" in self.spec
        self.runtime = dict(
            context_length=CONTEXT, max_running_requests=self.pick(3, 6), page_size=self.pick(1, 16), max_total_tokens=self.pick(144, 176),
            chunked_prefill_size=self.pick(7, 24, 48), iteration_graph=bool(self.pick(0, 1)),
            mixed_chunk=bool(self.pick(0, 1)) and not tree and self.algorithm != "NGRAM",
        )  # fmt: skip
        self.settings = self.runtime | dict(
            radix_cache=bool(self.pick(0, 1, 1)), overlap=bool(self.pick(0, 1)), schedule_conservativeness=self.pick(0.01, 0.05),
            schedule_policy=self.pick("fcfs", "lpm"), stream_interval=self.pick(1, 3),
        )  # fmt: skip
        self.asks = [self.ask(i) for i in range(10)]
        self.plan = {int(self.rng.integers(20, 60)): self.pick(*PLACES)}

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def ask(self, index: int) -> GenerateReq:
        stem = np.random.default_rng(self.seed).integers(2, VOCAB, CONTEXT)
        ids = np.concatenate([stem[: self.pick(0, 17, 40)], self.rng.integers(2, VOCAB, self.pick(1, 5, 33))])
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self.pick(1, 20, 60, 200))
        change = {"ignore_eos": True} | self.pick(*CHANGES)
        change |= {"min_new_tokens": min(change.get("min_new_tokens", 0), sampling.max_new_tokens)}
        if self.algorithm in KEEP_SEEDS and self.pick(0, 0, 1):
            change |= {"temperature": 0.9, "top_p": 0.8, "top_k": 50}
        return GenerateReq(
            rid=str(index), input_ids=ids.tolist(), sampling=structs.replace(sampling, **change), seed=index, stream=bool(self.pick(0, 1)),
            top_logprobs=self.pick(-1, 0, 2), prompt_logprobs=self.pick(0, 0, 1) == 1, client=self.pick("", "", "b"),
            more=(Sample(f"{index}.1", 99),) if index == 3 else (),
        )  # fmt: skip

    @property
    def model(self) -> ModelConfig:
        return FAMILIES[self.family](vocab_size=VOCAB, max_context_len=CONTEXT, eos_ids=(0, 1))

    def worker(self, folder: Path) -> Any:
        sizes = [2, 4]
        if self.algorithm is None:
            return plain("eager", sizes, model=self.model, **self.runtime)
        head = {"vocab_size": VOCAB, **({"draft_vocab_size": VOCAB} if self.algorithm == "EAGLE3" else {})}
        return speculating(folder, self.algorithm, "eager", sizes, runtime=self.runtime, model=self.model, head=head, **self.spec)


@lru_cache
def compiler() -> GrammarCompiler:
    return make_compiler()


def left_over(scheduler: Scheduler) -> tuple[int, ...]:
    """Requests, pages, locks and rows that are still in use."""
    group, stats = scheduler.groups.only, scheduler.current_stats()
    pages, rows = group.kv_pages, scheduler.limits.max_running_requests - group.free_rows
    return pages.own_pages, pages.used, rows, len(group.queue), stats.num_running_reqs, stats.num_queue_reqs


def logprobs(served: Served, rid: str) -> torch.Tensor:
    """All that were told of the prompt and of the output, however they were cut into messages."""
    outs = [out for out in served.outs if out.rid == rid]
    parts = [part for out in outs for part in (out.prompt_logprobs, out.logprobs) if part is not None]
    chosen = [value for part in parts for value in part.chosen if value is not None]
    return torch.tensor([*chosen, *(value for part in parts for row in part.top for _, value in row)])


@pytest.mark.parametrize("seed", range(CASES))
def test_texts_are_the_plain_workers_whatever_happens_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    case = Case(seed)
    reference = plain(model=case.model, context_length=CONTEXT, max_running_requests=8)
    expected, _ = serve(reference, case.asks, compiler(), context_length=CONTEXT, radix_cache=False)
    worker = Failing(case.worker(tmp_path), case.plan, monkeypatch)
    ended = {9: AbortReq(rid="2"), 14: StopReq(rid="5"), 20: AbortReq(rid="3.1")}
    got, scheduler = serve(
        worker, case.asks, compiler(), lambda turn, inbox: inbox.extend([ended[turn]] if turn in ended else []), **case.settings
    )
    assert left_over(scheduler) == (0,) * 6
    assert scheduler.stats.num_failed_steps_total == worker.failed
    for rid, tokens in expected.tokens.items():
        end, found = got.ends.get(rid), got.tokens.get(rid, [])
        cut = end is None or end.reason == "abort"
        assert found == (tokens[: len(found)] if cut else tokens), f"request {rid}"
        assert cut or end == expected.ends[rid]
        assert not cut or rid in ("2", "5", "3.1") or (end is not None and end.status == 500 and worker.failed)
        if not cut:
            torch.testing.assert_close(logprobs(got, rid), logprobs(expected, rid), rtol=1e-4, atol=1e-3)
