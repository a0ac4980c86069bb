"""Attention groups that share the experts of a model serve the text of one group, idle groups included."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark.shapes import tiny_model
from msgspec import structs

from runtime.batch import BatchResult, Logprobs, StepStats
from runtime.config.flag_parser import parse
from runtime.constrained.grammar import GrammarFailure
from runtime.distributed.step_messages import GroupResult, RankCodec
from runtime.entrypoints.prepare import prepare
from runtime.errors import ConfigError
from runtime.managers.messages import GenerateReq
from runtime.managers.schedule_policy import best_group
from runtime.managers.scheduler import Scheduler
from runtime.models.config import ModelConfig
from runtime.models.sharing import check_heads
from runtime.sampling_params import SamplingParams
from unit import grammars, test_mtp
from unit.latent import latent_model
from unit.predicting import VOCAB, plain
from unit.ranks import ranks
from unit.test_served_speculation import BIASED, PENALISED, asked, prompts, serve
from unit.test_sparse_workers import FAMILIES, family
from unit.test_tensor_parallel import CHAIN, builder
from unit.tiny import tiny_runtime

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=24)
ROOMY: dict[str, Any] = {"context_length": 128, "max_running_requests": 8}


def latent(**changes: Any) -> ModelConfig:
    """A DeepSeek-V3 with experts and a layer for multi-token prediction."""
    return latent_model(moe=test_mtp.MOE, **changes)


@pytest.mark.parametrize(
    ("name", "size", "groups", "ep_size"), [*((name, 2, 2, 2) for name in FAMILIES), ("qwen2-moe", 4, 2, 1), ("qwen3-moe", 4, 4, 4)]
)
def test_groups_generate_the_text_of_one(tmp_path: Path, name: str, size: int, groups: int, ep_size: int) -> None:
    model, ids = family(name), prompts()[:12]
    expected, _ = serve(builder(tmp_path, None, model, **ROOMY)(), asked(GREEDY, ids), {}, radix_cache=False)
    placed = set[int]()
    with ranks(size, builder(tmp_path, None, model, **ROOMY, dp_size=groups, ep_size=ep_size), groups=groups) as worker:
        assert worker.parts.target.runner.model.sparse_mlps[0].experts.count == 8 // ep_size
        found, scheduler = serve(
            worker,
            asked(GREEDY, ids),
            {},
            lambda scheduler: placed.update(req.group for group in scheduler.groups for req in group.running),
        )
    assert found == expected
    assert placed == set(range(groups))
    assert len(scheduler.stats.groups) == groups


DEPTHS = (3, 2, 1, 0)


@pytest.mark.parametrize(("chosen", "size", "groups"), [(True, 2, 2), (False, 2, 2), (False, 4, 4), (True, 4, 2)])
def test_groups_share_a_depth_that_changes_and_keep_the_text(chosen: bool, size: int, groups: int) -> None:
    """Chosen by a controller, or by the batch size of the largest group."""
    spec: dict[str, Any] = {"depths": DEPTHS} if chosen else {"disable_by_batch_size": 4 // groups}
    ids, model, greedy = prompts()[: 6 if chosen else 10], latent(), structs.replace(GREEDY, max_new_tokens=18)
    expected, _ = serve(test_mtp.plain(model, **ROOMY), asked(greedy, ids), {}, radix_cache=False)

    def build(**group: Any) -> Any:
        options = {**ROOMY, "tp_size": size, "dp_size": groups, "ep_size": size}
        return test_mtp.drafting(model, options, group=group, num_steps=3, **spec)

    with ranks(size, build, groups=groups) as worker:
        control = worker.parts.depths
        assert (control.controller is not None) is chosen
        with control.in_turn() if chosen else nullcontext():
            found, scheduler = serve(worker, asked(greedy, ids), {})
        assert found == expected
        assert len([n for n in scheduler.stats.spec_depth_steps_total.values() if n]) > 1
        if control.controller is not None:
            before = control.controller.info().greedy.rates
            worker.reset()
            assert serve(worker, asked(greedy, ids), {})[0] == expected, "the controller chooses"
            assert control.controller.info().greedy.rates != before, "and learns"


@pytest.mark.parametrize(("spec", "size"), [("one", 2), ("chain", 2), ("tree", 2), ("chain", 4)])
def test_latent_attention_with_mtp_drafts_runs_in_groups(spec: str, size: int) -> None:
    ids, model = prompts()[:6], latent()
    expected, _ = serve(test_mtp.plain(model, **ROOMY), asked(GREEDY, ids), {}, radix_cache=False)

    def build(**group: Any) -> Any:
        options = {**ROOMY, "tp_size": size, "dp_size": 2, "ep_size": size}
        return test_mtp.drafting(model, options, group=group, **test_mtp.SPECS[spec])

    with ranks(size, build, groups=2) as worker:
        found, scheduler = serve(worker, asked(GREEDY, ids), {})
    assert found == expected
    assert (scheduler.stats.spec.accept_length or 0.0) > 1.2


@pytest.mark.parametrize(("size", "groups"), [(2, 1), (4, 2)])
def test_a_draft_that_each_rank_holds_whole_runs_beside_placed_experts(size: int, groups: int) -> None:
    ids, model = prompts()[:6], latent()
    expected, _ = serve(test_mtp.plain(model, **ROOMY), asked(GREEDY, ids), {}, radix_cache=False)

    def build(**group: Any) -> Any:
        options = {**ROOMY, "tp_size": size, "dp_size": groups, "ep_size": size}
        return test_mtp.drafting(model, options, group=group, num_steps=3, draft_tp_size=1)

    with ranks(size, build, groups=groups) as worker:
        found, scheduler = serve(worker, asked(GREEDY, ids), {})
    assert found == expected
    assert (scheduler.stats.spec.accept_length or 0.0) > 1.2


@pytest.mark.parametrize(("draft", "page"), [(None, 1), (None, 16), (("EAGLE3", CHAIN), 1), (("NGRAM", CHAIN), 16)])
def test_groups_keep_the_text_when_kv_is_short_and_requests_are_aborted(tmp_path: Path, draft: Any, page: int) -> None:
    model, ids = family("qwen3-moe"), prompts()
    sampling = [GREEDY, PENALISED, BIASED, SAMPLED] if draft is None else [GREEDY, PENALISED]
    asks = [GenerateReq(rid=str(i), input_ids=p, sampling=sampling[i % len(sampling)], seed=i) for i, p in enumerate(ids)]
    expected, _ = serve(builder(tmp_path, None, model, **ROOMY)(), asks, {}, radix_cache=False)
    tight = {**ROOMY, "page_size": page, "max_total_tokens": 208, "max_running_requests": 16}
    aborted = {9: "3", 14: "8", 15: "9"}
    with ranks(2, builder(tmp_path, draft, model, **tight, dp_size=2, ep_size=2), groups=2) as worker:
        found, scheduler = serve(worker, asks, aborted, page_size=page, schedule_conservativeness=0.05)
    for rid, text in found.items():
        assert text == (expected[rid][: len(text)] if rid in aborted.values() else expected[rid]), f"request {rid}"
    assert scheduler.stats.num_retracted_requests_total > 0
    assert scheduler.stats.cached_tokens_total > 0
    assert scheduler.stats.num_failed_steps_total == 0


def test_one_long_prompt_runs_while_other_groups_are_idle(tmp_path: Path) -> None:
    model, long = family("qwen3-moe"), np.random.default_rng(5).integers(2, VOCAB, 100).tolist()
    expected, _ = serve(builder(tmp_path, None, model, **ROOMY)(), asked(GREEDY, [long]), {})
    with ranks(4, builder(tmp_path, None, model, **ROOMY, dp_size=4, ep_size=4), groups=4) as worker:
        found, scheduler = serve(worker, asked(GREEDY, [long]), {})
        assert found == expected
        assert scheduler.stats.extend_steps > 1
        beside, _ = serve(worker, asked(GREEDY, [long, [5, 6, 7], [*long[:90], 3]]), {})
    assert beside["0"] == expected["0"]


def test_a_request_goes_where_its_prefix_is_unless_that_group_is_busy(tmp_path: Path) -> None:
    stem, places = np.random.default_rng(6).integers(2, VOCAB, 60).tolist(), dict[str, int]()
    inbox, config = list[GenerateReq](), tiny_runtime(context_length=128)
    with ranks(2, builder(tmp_path, None, family("qwen3-moe"), **ROOMY, dp_size=2, ep_size=2), groups=2) as worker:
        receive = lambda wait: inbox.pop(0) if inbox else None  # noqa: E731
        scheduler = Scheduler(config.scheduler, config.cache, worker, (0,), receive, lambda message: None)
        for asks in ([[*stem, 8]], [[*stem, 9], [8, 9]], [[*stem, 9, 4], [*stem, 8, 4]]):
            inbox += [GenerateReq(rid=str(len(places) + i), input_ids=ids, sampling=GREEDY, seed=1) for i, ids in enumerate(asks)]
            while inbox or not scheduler.idle:
                scheduler.step()
                places.update({req.rid: req.group for group in scheduler.groups for req in group.running})
    assert places == {"0": 0, "1": 0, "2": 1, "3": 0, "4": 1}, "two requests do not share a group for 60 cached tokens"


def test_the_best_group_has_the_prefix_or_less_to_do() -> None:
    assert best_group([(0, 0), (0, 0)]) == 0
    assert best_group([(0, 2), (0, 1), (0, 1)]) == 1
    assert best_group([(0, 0), (100, 0)]) == 1
    assert best_group([(0, 0), (100, 1)]) == 0
    assert best_group([(0, 0), (1000, 3)]) == 1


def test_log_probabilities_are_those_of_one_group(tmp_path: Path) -> None:
    model, ids = family("qwen3-moe"), prompts()[:5]
    asks = [GenerateReq(rid=str(i), input_ids=p, sampling=GREEDY, seed=i, top_logprobs=3, prompt_logprobs=True) for i, p in enumerate(ids)]

    def run(worker: Any) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}

        def hear(out: Any) -> None:
            for part in (out.logprobs, out.prompt_logprobs):
                found.setdefault(out.rid, []).extend(p for p in (part.chosen if part else []) if p is not None)

        serve(worker, asks, {}, hear=hear)
        return found

    expected = run(builder(tmp_path, None, model, **ROOMY)())
    with ranks(2, builder(tmp_path, None, model, **ROOMY, dp_size=2), groups=2) as worker:
        found = run(worker)
    assert found.keys() == expected.keys()
    for rid, values in found.items():
        np.testing.assert_allclose(values, expected[rid], atol=1e-4)


def test_grammars_hold_in_every_group() -> None:
    compiler, schema = grammars.make_compiler(), grammars.schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    sampling = SamplingParams(temperature=0.0, max_new_tokens=40, json_schema=schema)
    asks = [GenerateReq(rid=str(i), input_ids=[50 + i, 60], sampling=sampling, seed=i) for i in range(3)]
    model = family("qwen3-moe", vocab_size=grammars.VOCAB, max_context_len=grammars.CONTEXT, eos_ids=(0, 1))
    options = {"context_length": grammars.CONTEXT, "max_running_requests": 8}
    expected, _ = grammars.serve(plain(model=model, **options), asks, compiler)

    def follow(rank: int, worker: Any) -> None:
        worker.parts.grammars.compile = lambda spec: compiler.compile(spec).future.result()

    def build(**group: Any) -> Any:
        return plain(model=model, tp_size=2, dp_size=2, ep_size=2, **options, **group)

    with ranks(2, build, follow, groups=2) as worker:
        found, scheduler = grammars.serve(worker, asks, compiler)
    assert found.tokens == expected.tokens
    assert {end.reason for end in found.ends.values()} <= {"stop", "length"}
    assert scheduler.stats.num_failed_steps_total == 0


def test_results_of_groups_arrive_as_they_were_sent() -> None:
    floats = np.arange(6, dtype=np.float32)
    logprobs = Logprobs(floats[:3], np.arange(6, dtype=np.int32).reshape(3, 2), floats.reshape(3, 2))
    tokens, lens = np.array([4, 5], dtype=np.int32), np.array([1, 1], dtype=np.int32)
    failures = {0: GrammarFailure(1, "why")}
    result = BatchResult(tokens, lens, logprobs, {1: logprobs}, StepStats(True, 4, 3, 3), failures, {1: floats})
    codec = RankCodec()
    found = codec.decode_result(codec.encode(GroupResult(7, 2, result)))
    assert (found.step, found.group, found.result.stats, found.result.grammar_failures) == (7, 2, result.stats, failures)
    assert found.result.logprobs is not None
    np.testing.assert_array_equal(found.result.token_ids, tokens)
    np.testing.assert_array_equal(found.result.logprobs.top_ids, logprobs.top_ids)
    np.testing.assert_array_equal(found.result.prompt_logprobs[1].top, logprobs.top)
    np.testing.assert_array_equal(found.result.pooled[1], floats)
    no_tops = replace(result, logprobs=Logprobs(floats[:3], logprobs.top_ids[:, :0], logprobs.top[:, :0]))
    found = codec.decode_result(codec.encode(GroupResult(7, 2, no_tops)))
    assert found.result.logprobs is not None
    assert found.result.logprobs.top.shape == (3, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp-size", "3"], "--tp-size 3 cannot share the 4 query and 2 KV heads of LlamaForCausalLM"),
        (["--tp-size", "2", "--ep-size", "2"], "--ep-size 2: LlamaForCausalLM has no experts"),
    ],
)
def test_ranks_that_cannot_share_the_model_are_refused_before_loading(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(parse([*tiny_model().target_flags, "--device", "cpu", *flags]).args)


def test_the_check_before_loading_refuses_what_the_layers_refuse() -> None:
    latent = latent_model()
    check_heads(latent, 2)
    with pytest.raises(ConfigError, match=f"--tp-size 3 cannot share the {latent.num_q_heads} heads"):
        check_heads(latent, 3)


def test_models_without_experts_to_share_are_refused() -> None:
    flags = [*tiny_model().target_flags, "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]
    with pytest.raises(ConfigError, match="--enable-dp-attention: LlamaForCausalLM has no experts"):
        prepare(parse(flags).args)
