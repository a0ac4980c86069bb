"""Drafting pauses while many requests decode together and resumes by itself: nothing is lost, and it is seen in the counts alone."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.entrypoints.native.output import meta_info
from runtime.layers.linear import Linear
from runtime.managers.messages import GenerateReq, TextOut
from runtime.managers.observers.metrics import Metrics
from runtime.managers.scheduler import Scheduler
from runtime.managers.telemetry.progress import Progress
from runtime.managers.telemetry.spec_stats import SpecStats
from runtime.model_executor.parity import check_parity, run_scratch
from runtime.sampling_params import SamplingParams
from runtime.speculative import catch_up, dflash_drafter, eagle_worker
from unit.driver import GREEDY, Driver, EveryNth, planned
from unit.predicting import VOCAB, exact_product, model_config, plain, speculating
from unit.storm import SIZES, Storm, draft_state, pools, same_life
from unit.test_eagle_worker import MIXED, SMALL, check_distribution, check_draft_from_scratch, check_first_states, check_logprobs
from unit.test_served_speculation import CONTEXT, asked, prompts, serve

TREE: dict[str, Any] = {"topk": 3, "num_draft_tokens": 7}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("EAGLE", {}),
    "one draft": ("EAGLE", {"num_steps": 1}),
    "tree": ("EAGLE", TREE),
    "bush": ("EAGLE", {"num_steps": 1, "topk": 3, "num_draft_tokens": 4}),
    "eagle3": ("EAGLE3", {"head": {"draft_vocab_size": 40}}),
    "standalone": ("STANDALONE", {}),
    "dflash": ("DFLASH", {}),
    "ngram": ("NGRAM", {}),
}
DRAFTED = [kind for kind in KINDS if kind != "ngram"]
PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + 3 * r).tolist() for r in (1, 2, 3, 5)}
WARM = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=1 << 20)
SAMPLED = (WARM, GREEDY, SamplingParams(temperature=0.7, top_k=8, repetition_penalty=1.2, max_new_tokens=1 << 20))


def pausing(tmp_path: Path, kind: str, above: int, replay: Any = None, sizes: list[int] | None = None, **runtime: Any) -> Any:
    algorithm, spec = KINDS[kind]
    return speculating(tmp_path, algorithm, replay, sizes, runtime=runtime, disable_by_batch_size=above, **spec)


def crossing(driver: Driver, all_of: dict[int, list[int]], few: list[int], tokens: int) -> Iterator[tuple[list[int], Any]]:
    """Alternate steps of all rows and of `few` of them until every row has `tokens` tokens: the rows, and the result."""
    turn = 0
    while any(len(driver.out[row]) < tokens for row in all_of):
        rows = [row for row in (few if turn % 5 in (1, 2) else all_of) if row in driver.kv]
        turn += 1
        yield rows, driver.decode(rows)


# ---- the text


CHANGED = dict(zip(PROMPTS, (GREEDY, MIXED[2], GREEDY, SamplingParams(temperature=0.0, logit_bias={3: 4.0})), strict=True))
"""Greedy, with whatever changes logits."""


@functools.cache
def plain_texts() -> dict[int, list[int]]:
    """What the plain worker answers."""
    return Driver(plain()).generate(PROMPTS, 30, sampling=CHANGED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replay", [None, "eager"])
def test_greedy_text_survives_crossing_the_batch_limit(tmp_path: Path, kind: str, replay: str | None) -> None:
    driver = Driver(pausing(tmp_path, kind, 2, replay, [2, 4] if replay else None, page_size=16))
    driver.prefill(PROMPTS, chunk=5, sampling=CHANGED, room=160)
    kinds = Counter((len(rows) > 2, result.stats.draft_tokens > 0) for rows, result in crossing(driver, PROMPTS, [3, 1], 30))
    assert {row: driver.out[row][:30] for row in PROMPTS} == plain_texts()
    assert kinds[True, False] > 3 < kinds[False, True]
    assert kinds[True, True] == kinds[False, False] == 0


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_compiling_the_kernels_of_catch_up_changes_no_text(tmp_path: Path, kind: str) -> None:
    driver = Driver(pausing(tmp_path, kind, 2, page_size=16))
    runs = driver.worker.parts.drafter.warmup_runs()
    assert len(runs) >= 2
    with torch.inference_mode():
        for run in runs:
            run()
    driver.prefill(PROMPTS, sampling=CHANGED, room=160)
    for _ in crossing(driver, PROMPTS, [3, 1], 30):
        pass
    assert {row: driver.out[row][:30] for row in PROMPTS} == plain_texts()


WORKERS = [("chain", {}), ("tree", {}), ("eagle3", {}), ("standalone", {}), ("ngram", {}), ("chain", {"mixed_chunk": True})]


LONG = SamplingParams(temperature=0.0, max_new_tokens=44)
"""So long that most texts end with the context, at different times: few requests are left at last."""
ROOMY: dict[str, Any] = {"context_length": CONTEXT, "max_running_requests": 8}


@functools.cache
def long_texts() -> dict[str, list[int]]:
    return serve(plain(**ROOMY), asked(LONG, prompts()), {}, radix_cache=False)[0]


@pytest.mark.parametrize(
    ("kind", "runtime", "page", "overlap"), [(*worker, *((1, True), (16, False))[i % 2]) for i, worker in enumerate(WORKERS)]
)
def test_served_text_is_that_of_plain_decoding(tmp_path: Path, kind: str, runtime: dict[str, Any], page: int, overlap: bool) -> None:
    asks, expected = asked(LONG, prompts()), long_texts()
    worker = pausing(tmp_path, kind, 3, "eager", [2, 3, 4, 8], **{**ROOMY, "page_size": page, "max_total_tokens": 320, **runtime})
    aborted = {9: "3", 14: "8", 15: "9"}
    got, scheduler = serve(worker, asks, aborted, page_size=page, overlap=overlap, schedule_conservativeness=0.05, chunked_prefill_size=48)
    for rid, text in got.items():
        assert text == (expected[rid][: len(text)] if rid in aborted.values() else expected[rid]), f"request {rid}"
    state = scheduler.stats
    assert state.num_failed_steps_total == 0
    assert min(state.num_retracted_requests_total, state.cached_tokens_total, state.spec.verify_steps, state.spec_paused_steps_total) > 0
    assert (state.mixed_steps > 0) == bool(runtime)
    assert all(runner.replayed > 0 for runner in worker.runners), "with drafts and without, through every runner"


@pytest.mark.parametrize("kind", KINDS)
def test_padded_and_poisonedbuffers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A life of batches from 1 to 33 of which those above 8 pause, requests cut short mid-step, retracted, resumed, prefixes shared."""
    monkeypatch.setattr(Linear, "__call__", exact_product)

    def life(replay: str | None) -> Storm:
        worker = pausing(tmp_path, kind, 8, replay, SIZES if replay else None, page_size=16)
        return Storm(worker, 11, MIXED, poison=replay is not None).run(7)

    padded = life("eager")
    same_life(life(None), padded)
    decoded = [(len(rows) > 8, set(lens)) for rows, lens in padded.trace if rows]
    assert {n for many, lens in decoded if many for n in lens} == {1}
    if kind != "ngram":  # which finds nothing to look up in texts so short
        assert max(n for many, lens in decoded if not many for n in lens) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_without_speculation(tmp_path: Path, kind: str) -> None:
    check_logprobs(pausing(tmp_path, kind, 2))
    if kind in ("chain", "standalone"):
        check_logprobs(pausing(tmp_path, kind, 2, mixed_chunk=True), beside_prompts=True)


# ---- what drafting resumes with


@pytest.mark.parametrize(
    ("kind", "mixed", "page"),  # drafts without branches with both sizes of pages, trees of one and of several levels with one each
    [
        *((kind, False, (1, 16)[i % 2]) for i, kind in enumerate(DRAFTED)),
        *((kind, True, (16, 1)[i % 2]) for i, kind in enumerate(DRAFTED) if "topk" not in KINDS[kind][1]),
    ],
)
def test_draft_kv_is_complete_after_steps_without_drafts(tmp_path: Path, kind: str, mixed: bool, page: int) -> None:
    algorithm, spec = KINDS[kind]
    worker = pausing(tmp_path, kind, 2, page_size=page, mixed_chunk=mixed)
    driver = Driver(worker)
    driver.prefill({1: PROMPTS[5], 2: PROMPTS[2]}, chunk=5)
    for _ in range(3):
        driver.decode([2, 1])
    driver.prefill({3: PROMPTS[3]}, chunk=4, along=lambda: [1, 2])
    for rows in ([3, 1, 2], [2, 3, 1], [1, 3], [1, 2, 3], [2], [1, 2, 3], [1, 2, 3]):
        driver.decode(rows)
    driver.prefill({5: PROMPTS[5]}, chunk=6, along=lambda: [1, 2, 3])
    check_draft_from_scratch(tmp_path, worker, driver, algorithm, spec, page)


def draft_of(driver: Driver) -> list[torch.Tensor]:
    """All that the draft knows of the requests: its KV, and what it goes on from."""
    state, rows = draft_state(driver.worker), sorted(driver.kv)
    own = [] if state is None else [t[rows] for t in (state.hidden, state.guesses, state.scores, state.probs)]
    slots = [torch.from_numpy(driver.slots(row, driver.kv[row])) for row in rows]
    return own + [t.flatten(0, 1)[at] for at in slots for pool in pools(driver.worker)[1:] for t in (*pool.k, *pool.v)]


@pytest.mark.parametrize(
    ("kind", "sampling", "replay"),
    [
        (kind, sampling, replay)
        for i, kind in enumerate(DRAFTED)
        for sampling, replay in zip((GREEDY, WARM), ((None, "eager"), ("eager", None))[i % 2], strict=True)  # all pairs
    ],
)
def test_following_several_steps_together_gives_the_bits_of_following_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, sampling: SamplingParams, replay: str | None
) -> None:
    """With rows that wait for different numbers of positions, and with full ones."""
    monkeypatch.setattr(Linear, "__call__", exact_product)

    def life(width: int) -> tuple[list[torch.Tensor], list[list[int]], list[int]]:
        for module in (catch_up, eagle_worker, dflash_drafter):
            monkeypatch.setattr(module, "WIDTH", width)
        worker = pausing(tmp_path, kind, 1, replay, [1, 2, 4] if replay else None, page_size=4)
        driver, lags = Driver(worker), []
        driver.prefill({1: PROMPTS[1], 2: PROMPTS[2]}, sampling=sampling, room=120)
        for rows in ([1, 2], [2, 1], [1], [1, 2], [1, 2]):
            driver.decode(rows)
        driver.prefill({3: PROMPTS[3]}, sampling=sampling, room=120)
        for _ in range(10):
            lags.append(driver.decode([3, 1, 2]).stats.unfollowed)
        driver.catch_up()
        return draft_of(driver), [driver.decode([row]).accept_lens.tolist() for row in (1, 2, 3)], lags

    (each, accepted, few), (together, its_accepted, many) = life(1), life(8)
    assert all(torch.equal(a, b) for a, b in zip(each, together, strict=True))
    assert accepted == its_accepted
    assert set(few) == {1}
    assert many == [5, 6, 7, 8, 1, 2, 3, 4, 5, 6]


def test_the_prefix_cache_holds_no_position_that_the_draft_did_not_follow(tmp_path: Path) -> None:
    worker = pausing(tmp_path, "chain", 1, page_size=1, context_length=CONTEXT, max_running_requests=8)
    texts_of = {"0": (PROMPTS[5], 13), "1": (PROMPTS[2], 30)}
    asks = [
        GenerateReq(rid=rid, input_ids=ids, sampling=SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True), seed=1)
        for rid, (ids, n) in texts_of.items()
    ]
    behind = list[int]()

    def watch(scheduler: Scheduler) -> None:
        behind.extend(req.kv_len - req.cacheable_len for req in scheduler.groups.only.running if req.rid == "0")

    texts, scheduler = serve(worker, asks, {}, check=watch, page_size=1)
    text = PROMPTS[5] + texts["0"]
    cached = scheduler.groups.only.kv_pages.cached_len(np.array(text, dtype=np.int32), "")
    assert max(behind) == 8
    assert cached == len(text) - 1 - (behind[-1] % 8 + 1)


@pytest.mark.parametrize("kind", [kind for kind in DRAFTED if kind not in ("standalone", "dflash")])
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_first_guesses_after_steps_without_drafts_equal_a_prefill(tmp_path: Path, kind: str, sampling: SamplingParams) -> None:
    worker, fresh = pausing(tmp_path, kind, 1), speculating(tmp_path, KINDS[kind][0], **KINDS[kind][1])
    driver = Driver(worker)
    driver.prefill(PROMPTS, sampling=sampling)
    for rows in ([1], [2], list(PROMPTS), list(PROMPTS)):
        driver.decode(rows)
    check_first_states(driver, fresh, sampling)


@pytest.mark.parametrize(
    ("kind", "sampling", "steps"),
    [
        (kind, (GREEDY, WARM)[(i + j) % 2], steps)
        for i, kind in enumerate(kind for kind in DRAFTED if kind not in ("standalone", "dflash"))
        for j, steps in enumerate((0, 1, 7, 8, 9))  # all pairs
    ],
)
def test_first_drafts_after_prompts_during_a_pause_wait_until_they_are_needed(
    tmp_path: Path, kind: str, sampling: SamplingParams, steps: int
) -> None:
    """Prompts of one and of several chunks, followed by up to nine steps without drafts."""
    worker, fresh = pausing(tmp_path, kind, 1), speculating(tmp_path, KINDS[kind][0], **KINDS[kind][1])
    driver = Driver(worker)
    driver.prefill({1: PROMPTS[1], 2: PROMPTS[2]}, sampling=sampling)
    driver.decode([1, 2])
    draft = worker.parts.drafter
    computed = [draft.state.guesses[[3, 5]].clone(), draft.state.hidden[[3, 5]].clone()]
    driver.prefill({3: PROMPTS[3], 5: PROMPTS[5]}, chunk=9, sampling=sampling)
    assert torch.equal(draft.state.guesses[[3, 5]], computed[0])
    assert torch.equal(draft.state.hidden[[3, 5]], computed[1])
    for _ in range(steps):
        driver.decode([5, 1, 2, 3])
    check_first_states(driver, fresh, sampling)
    check_draft_from_scratch(tmp_path, worker, driver, KINDS[kind][0], KINDS[kind][1], 1)


def test_first_drafts_after_prompts_between_steps_with_drafts_do_not_wait(tmp_path: Path) -> None:
    driver = Driver(pausing(tmp_path, "chain", 2))
    driver.prefill({1: PROMPTS[1], 2: PROMPTS[2]})
    driver.decode([1, 2])
    driver.prefill({3: PROMPTS[3]})
    assert driver.worker.parts.drafter.state.hidden[3].count_nonzero() > 0


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("replay", [None, "eager"])
def test_a_perfect_draft_is_accepted_right_after_a_pause(tmp_path: Path, steps: int, replay: str | None) -> None:
    sizes = [2, 4] if replay else None
    worker = speculating(tmp_path, "STANDALONE", replay, sizes, num_steps=steps, disable_by_batch_size=2)
    for mine, its in zip(worker.parts.drafter.model.model.layers, worker.parts.target.runner.model.layers, strict=True):
        mine.attention.o_proj.weight.copy_(its.attention.o_proj.weight)
    driver = Driver(worker)
    driver.prefill(PROMPTS, chunk=5, room=160)
    for rows, result in crossing(driver, PROMPTS, [3, 1], 24):
        assert set(result.accept_lens.tolist()) == {1 if len(rows) > 2 else steps + 1}
    assert {row: driver.out[row][:24] for row in PROMPTS} == Driver(plain()).generate(PROMPTS, 24)


@pytest.mark.parametrize("kind", ["chain", "tree", "eagle3"])
def test_acceptance_does_not_depend_on_earlier_pauses(tmp_path: Path, kind: str) -> None:
    """The same texts continued by one window: its drafts depend on the text alone."""
    many = {r: np.random.default_rng(r).integers(0, VOCAB, 6 + r).tolist() for r in range(1, 31)}
    plain_text = Driver(plain()).generate(many, 12)
    driver = Driver(pausing(tmp_path, kind, 29))
    driver.prefill(many)
    for _ in range(9):
        driver.decode(list(many))
    resumed = {row: int(driver.decode([row]).accept_lens[0]) for row in many}
    fresh = Driver(speculating(tmp_path, KINDS[kind][0], **KINDS[kind][1]))
    fresh.prefill({row: ids + plain_text[row][:9] for row, ids in many.items()})
    assert resumed == {row: int(fresh.decode([row]).accept_lens[0]) for row in many}
    assert np.mean(list(resumed.values())) > 1.2


# ---- chance


@pytest.mark.parametrize("kind", ["tree", "bush", "ngram"])
def test_seeded_sampling_survives_paused_drafting(tmp_path: Path, kind: str) -> None:
    samplings = {row: SAMPLED[i % 3] for i, row in enumerate(PROMPTS)}
    expected = Driver(plain()).generate(PROMPTS, 24, sampling=samplings)
    driver = Driver(pausing(tmp_path, kind, 2))
    driver.prefill(PROMPTS, sampling=samplings, room=160)
    assert len({len(rows) for rows, _ in crossing(driver, PROMPTS, [3, 1], 24)}) == 2
    assert {row: driver.out[row][:24] for row in PROMPTS} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_text_repeats_with_equal_pauses(tmp_path: Path, kind: str) -> None:
    samplings = {row: SAMPLED[i % 3] for i, row in enumerate(PROMPTS)}
    worker = pausing(tmp_path, kind, 2)

    def text(few: list[int], seed: int) -> dict[int, list[int]]:
        worker.reset()
        driver = Driver(worker, seed)
        driver.prefill(PROMPTS, sampling=samplings, room=160)
        list(crossing(driver, PROMPTS, few, 20))
        return {row: driver.out[row][:20] for row in PROMPTS}

    assert text([3, 1], 1) == text([3, 1], 2)
    assert text(list(PROMPTS), 3) == Driver(plain()).generate(PROMPTS, 20, sampling=samplings)


@pytest.mark.parametrize("kind", ["chain", "standalone", "eagle3"])
@pytest.mark.parametrize("paused", [0, 1])
def test_sampled_text_has_the_target_distribution_around_pauses(tmp_path: Path, kind: str, paused: int) -> None:
    """Of the second and third token one comes of a paused step, the other of drafts."""
    rows, prompt, small = 200, [3, 5, 3, 5, 3], model_config(vocab_size=SMALL)
    algorithm, spec = KINDS[kind]
    head = {"vocab_size": SMALL} | ({"draft_vocab_size": 7} if kind == "eagle3" else {})
    worker = speculating(
        tmp_path, algorithm, model=small, runtime={"max_running_requests": rows}, sharp=0.6, disable_by_batch_size=100,
        **{**spec, "head": head},
    )  # fmt: skip
    texts: list[list[int]] = []
    for turn in range(3):
        driver = Driver(worker)
        all_rows = list(range(1, rows + 1))
        driver.prefill(dict.fromkeys(all_rows, prompt), sampling={r: _seeded(turn * rows + r) for r in all_rows}, room=30)
        for step in range(2):
            for part in [all_rows] if step == paused else [all_rows[:100], all_rows[100:]]:
                accepted = driver.decode(part).accept_lens
                assert (accepted.max() == 1) == (step == paused)
        texts += [driver.out[row][:3] for row in all_rows]
    check_distribution(texts, prompt, SamplingParams(temperature=0.8))


def _seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed)


# ---- counts, sizes, limits


def test_steps_without_drafts_are_not_counted_as_verification(tmp_path: Path) -> None:
    worker = pausing(tmp_path, "chain", 2, "eager", [1, 2, 4])
    driver = Driver(worker)
    driver.prefill(PROMPTS, room=160)
    list(crossing(driver, PROMPTS, [3, 1], 24))
    drafted = [lens for lens in driver.accepts if len(lens) <= 2]
    counted = worker.parts.monitor.counted()
    assert counted.iterations == sum(len(lens) for lens in drafted)
    assert counted.accepted.sum() == sum(int(lens.sum()) - len(lens) for lens in drafted) > 0
    assert counted.iterations == counted.drafted[0] == counted.reached[0]
    assert all(result.stats.graph and result.stats.padded_size == (4 if len(result.accept_lens) > 2 else 2) for result in driver.results)


@pytest.mark.parametrize(("kind", "mixed"), [("chain", False), ("chain", True), ("ngram", False)])
def test_steps_without_drafts_are_counted_apart(tmp_path: Path, kind: str, mixed: bool) -> None:
    worker = pausing(tmp_path, kind, 2, "eager", [1, 2, 4, 8], context_length=CONTEXT, max_running_requests=8, mixed_chunk=mixed)
    steps, told = Counter[str](), dict[str, Any]()
    add = worker.parts.monitor.add

    def noted(iteration: Any, accept_lens: np.ndarray, *others: Any) -> None:
        add(iteration, accept_lens, *others)
        size = len(accept_lens)
        steps.update({"paused": 1} if size > 2 else {"verified": size, "accepted": int(accept_lens.sum()) - size})

    worker.parts.monitor.add = noted
    endings = [SamplingParams(temperature=0.0, max_new_tokens=4 + 6 * i, ignore_eos=True) for i in range(6)]
    asks = [GenerateReq(rid=str(i), input_ids=prompts()[i], sampling=s, seed=i) for i, s in enumerate(endings)]
    # A step that overlaps the previous one may verify a window of a request that has ended there: the worker counts it, the scheduler not.
    settings: dict[str, Any] = {"chunked_prefill_size": 48, "overlap": False}
    _, scheduler = serve(worker, asks, {}, hear=lambda out: told.update({out.rid: out.progress.spec}), **settings)
    figures = scheduler.stats.figures()
    assert figures["spec_paused_steps_total"] == steps["paused"] > 3
    assert f'talon:spec_paused_steps_total{{model_name="m"}} {steps["paused"]}.0\n' in Metrics("m").render(scheduler.stats)[0].decode()
    assert figures["spec_verify_steps_total"] == steps["verified"] > 3
    assert figures["spec_accepted_tokens_total"] == steps["accepted"]
    assert figures["spec_accept_length"] == 1 + steps["accepted"] / steps["verified"]
    assert figures["graph_steps_total"] == figures["decode_steps"]
    assert sum(spec.verify_steps for spec in told.values() if spec is not None) == steps["verified"]
    if not mixed:  # in whose passes fewer decode
        assert told["0"] is None, "others decoded beside it until its end"


def test_meta_info_covers_verified_windows_only() -> None:
    """And not of the tokens that came without drafts."""
    spec = SpecStats(verify_steps=4, draft_tokens=12, accepted_tokens=6, accepted_by_position=[4, 2, 0])
    answer = meta_info("1", TextOut(rid="1", text="text", token_ids=list(range(40)), progress=Progress(5, 0, 40, spec=spec)))
    told = {name: value for name, value in answer.items() if name.startswith("spec_")}
    assert told == {
        "spec_verify_ct": 4, "spec_accept_length": 2.5, "spec_accept_rate": 0.5, "spec_accept_token_num": 6, "spec_draft_token_num": 12,
        "spec_accepted_by_position": [4, 2, 0], "spec_drafted_by_position": [4, 4, 4],
    }  # fmt: skip


def test_without_speculation_or_a_limit_no_step_is_paused(tmp_path: Path) -> None:
    for worker in (plain(), speculating(tmp_path)):
        asks = asked(SamplingParams(temperature=0.0, max_new_tokens=8), prompts()[:6])
        assert serve(worker, asks, {})[1].stats.spec_paused_steps_total == 0


@pytest.mark.parametrize("kind", ["chain", "standalone", "ngram"])
def test_forced_acceptance_needs_drafts(tmp_path: Path, kind: str) -> None:
    algorithm, spec = KINDS[kind]
    worker = speculating(tmp_path, algorithm, synthetic_accept=(1.0, 1.0, 1.0), disable_by_batch_size=2, **spec)
    driver = Driver(worker)
    driver.prefill(PROMPTS, room=200)
    for rows in ([1, 2], list(PROMPTS), [5]):
        assert set(driver.decode(rows).accept_lens.tolist()) == {1 if len(rows) > 2 else 4}


def test_thresholds_need_drafts(tmp_path: Path) -> None:
    worker = speculating(tmp_path, accept_threshold_single=1e-12, disable_by_batch_size=2)
    driver = Driver(worker)
    driver.prefill(PROMPTS, sampling=SamplingParams(temperature=1.0), room=200)
    for rows in ([1, 2], list(PROMPTS), [5]):
        assert set(driver.decode(rows).accept_lens.tolist()) == {1 if len(rows) > 2 else 4}


@pytest.mark.parametrize(
    ("sizes", "padding", "few", "without"),
    [
        ([1, 2, 4, 8, 16], True, [1, 2, 4], [1, 2, 4, 8, 16]),
        ([1, 2, 3, 4, 5, 6, 7, 8], True, [1, 2, 3, 4], [1, 2, 4, 5, 6, 7, 8]),
        ([1, 2, 8, 16], True, [1, 2, 8], [1, 2, 8, 16]),
        ([1, 2, 8, 16], False, [1, 2], [1, 2, 8, 16]),
        ([1, 2], True, [1, 2], [1, 2]),
        ([16], True, [16], [16]),
    ],
)
def test_graph_sizes_are_split_by_depth(tmp_path: Path, sizes: list[int], padding: bool, few: list[int], without: list[int]) -> None:
    worker = pausing(tmp_path, "chain", 4, "eager", sizes, cuda_graph_padding=padding, max_running_requests=16)
    by_name = {runner.spec.name: runner for runner in worker.runners}
    assert list(by_name) == ["verify", "draft decode", "draft extend", "target decode", "draft extend K=0"]
    for name, runner in by_name.items():
        assert runner.sizes == (without if name in ("target decode", "draft extend K=0") else few), name
    assert by_name["verify"].buffers["logits"].shape[0] == 4 * max(4, *few), "no larger than it is used"
    assert by_name["target decode"].buffers["logits"].shape[0] == 16


@pytest.mark.parametrize("above", [8, 9])
def test_a_limit_above_admission_never_disables_drafting(tmp_path: Path, caplog: pytest.LogCaptureFixture, above: int) -> None:
    with caplog.at_level("INFO"):
        worker = pausing(tmp_path, "chain", above, max_running_requests=8)
    assert "batches are never too large for drafts: at most 8 requests run at once" in caplog.text
    assert worker.parts.depths.limits == {3: 8, 0: 8}


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_up_check_covers_every_depth(tmp_path: Path, kind: str) -> None:
    worker = pausing(tmp_path, kind, 6, "eager", [1, 2, 4, 8])
    before = [runner.replayed for runner in worker.runners]
    check_parity(worker)
    assert all(runner.replayed > count for runner, count in zip(worker.runners, before, strict=True))
    assert [planned(worker.parts.depths, count) > 0 for count in (6, 7)] == [True, False], "it is left as it was"
    counters = run_scratch(worker).counters
    assert counters.iterations == 4 * 11, "of four prompts, a third of the iterations paused"
    few = pausing(tmp_path, kind, 2, "eager", [1, 2, 4, 8])
    assert run_scratch(few).counters.iterations == 2 * 11, "no more prompts than are drafted for at once"


def test_steps_without_drafts_replay_whatever_is_sampled(tmp_path: Path) -> None:
    """The sample after one begins with the draft's eager window over it."""
    worker = pausing(tmp_path, "chain", 2, "eager", [1, 2, 4])
    driver = Driver(worker)
    driver.prefill(PROMPTS, room=160)
    by_name = {runner.spec.name: runner for runner in worker.runners}
    monitor = worker.parts.monitor
    monitor.schedule = EveryNth(512, after=511)
    for _ in range(3):
        assert driver.decode(list(PROMPTS)).stats.graph
    driver.decode([1, 2])
    assert by_name["target decode"].ran_eagerly == 0
    assert by_name["draft extend K=0"].ran_eagerly == 1
    assert monitor.stats().eager_sample.iterations == 2


def test_windows_that_are_only_followed_make_no_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every eighth step without drafts the draft writes its KV; its LM head waits for the next drafts."""
    driver = Driver(pausing(tmp_path, "chain", 2))
    driver.prefill(PROMPTS, room=160)
    model, calls = type(driver.worker.parts.drafter.model), list[str]()
    greedy, forward = model.greedy, model.forward
    monkeypatch.setattr(model, "greedy", lambda self, hidden: calls.append("head") or greedy(self, hidden))
    monkeypatch.setattr(model, "forward", lambda self, *args: calls.append("pass") or forward(self, *args))
    for _ in range(25):
        driver.decode(list(PROMPTS))
    assert calls == ["pass"] * 3
    calls.clear()
    driver.decode([1, 2])
    assert calls[:2] == ["pass", "head"]


def test_depth_is_chosen_per_step_with_overlap(tmp_path: Path) -> None:
    """With a step in flight, who decodes next is decided by who is there, so that pausing and resuming need nothing that is on the way."""
    worker = pausing(tmp_path, "chain", 2, context_length=CONTEXT, max_running_requests=8)
    seen: list[tuple[int, int]] = []
    worker.parts.monitor.add = lambda iteration, lens, stats, pairs: seen.append((len(lens), stats.draft_tokens))
    endings = [SamplingParams(temperature=0.0, max_new_tokens=6 + 9 * i, ignore_eos=True) for i in range(5)]
    asks = [GenerateReq(rid=str(i), input_ids=prompts()[i], sampling=s, seed=i) for i, s in enumerate(endings)]

    def flying(scheduler: Scheduler) -> None:
        assert scheduler.steps_in_flight <= 1

    serve(worker, asks, {}, check=flying, overlap=True)
    assert {drafts for size, drafts in seen if size > 2} == {0}
    assert {drafts for size, drafts in seen if size <= 2} == {3}
