"""Speculative workers against their slow twins: the same target without drafts, the same passes without padding, the draft from scratch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.batch import ScheduleBatch
from runtime.layers.attention.base import plan_pass
from runtime.layers.linear import Linear
from runtime.layers.random_streams import RandomStream, uniforms
from runtime.layers.sampler import draw
from runtime.model_executor.build import build_worker
from runtime.model_executor.draft_window import DraftWindow
from runtime.models.config import DeltaConfig, FullAttention, QueryScaling
from runtime.sampling_params import SamplingParams
from runtime.speculative.draft_tree import top_log_probs
from runtime.speculative.ngram import NgramHistory
from runtime.speculative.registry import make_drafter
from unit.driver import GREEDY, Driver
from unit.predicting import VOCAB, exact_product, model_config, plain, speculating
from unit.storm import BATCHES, SIZES, Poison, Storm, pools, same_life
from unit.tiny import tiny_model, tiny_runtime, tiny_speculative

PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 3 + 5 * r).tolist() for r in (1, 2, 3, 5)}
ECHO = {1: [5, 6, 7, 8, 9] * 4, 2: [1, 2, 3, 4] * 4, 3: list(range(20))}
CHAIN: dict[str, Any] = {}
TREE = {"topk": 3, "num_draft_tokens": 7}


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "__call__", exact_product)


def life(
    tmp_path: Path,
    algorithm: str | None,
    replay: str | None,
    seed: int,
    turns: int,
    page: int = 1,
    mixed: bool = False,
    mixing: bool = False,
    **spec: Any,
) -> Storm:
    sizes = SIZES if replay else None
    samplings, model = spec.pop("samplings", (GREEDY,)), spec.pop("model", None)
    if algorithm is None:
        worker = plain(replay, sizes, model=model, page_size=page, mixed_chunk=mixed)
    else:
        worker = speculating(tmp_path, algorithm, replay, sizes, runtime={"page_size": page, "mixed_chunk": mixed}, model=model, **spec)
    # the reference is left alone; what runs on padded buffers is poisoned
    return Storm(worker, seed, samplings, poison=replay is not None, mixing=mixing).run(turns)


MIXED = (
    GREEDY,
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(temperature=0.7, top_k=8, logit_bias={3: 4.0, 5: -100.0}, min_new_tokens=5),
)


@pytest.mark.parametrize(
    ("algorithm", "page", "spec"),
    [
        (None, 16, {}),
        (None, 1, {"samplings": MIXED}),
        ("EAGLE", 1, CHAIN),
        ("EAGLE", 16, {**CHAIN, "samplings": MIXED}),
        ("EAGLE", 16, {**TREE, "samplings": MIXED}),
        ("EAGLE", 1, {"num_steps": 5, "topk": 4, "num_draft_tokens": 8}),
        ("EAGLE", 1, {"num_steps": 1, "topk": 3, "num_draft_tokens": 4}),
        ("EAGLE3", 16, {**CHAIN, "samplings": MIXED}),
        ("EAGLE3", 1, TREE),
        ("STANDALONE", 16, {**CHAIN, "samplings": MIXED}),
        ("DFLASH", 16, {**CHAIN, "samplings": MIXED}),
        ("NGRAM", 16, {**CHAIN, "samplings": MIXED}),
    ],
)
def test_padded_and_poisoned_buffers_change_nothing(
    tmp_path: Path, exact_products: None, algorithm: str | None, page: int, spec: dict[str, Any]
) -> None:
    """Batches of 1 to 33 in any order, rows reused, requests cut short mid-step, retracted and resumed, prefixes shared, odd chunks."""
    padded = life(tmp_path, algorithm, "eager", 7, 7, page, **spec)
    same_life(life(tmp_path, algorithm, None, 7, 7, page, **spec), padded)
    expected = {*(f"batch of {n}" for n in BATCHES), "finished", "retracted", "resumed", "prefix hit", "chunk tail"}
    if algorithm != "NGRAM":  # whose steps are read before the next one
        expected.add("aborted in flight")
    assert expected <= set(padded.reached), "a storm that does not reach what it is for shows nothing"
    if algorithm in ("EAGLE", "EAGLE3", "STANDALONE"):
        decoded = [n for rows, lens in padded.trace if rows for n in lens]
        assert np.mean(decoded) > 1.3, "drafts that are never right would hide what is wrong with them"


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("algorithm", "page"), [(None, 16), ("EAGLE", 1), ("EAGLE3", 16), ("STANDALONE", 16), ("DFLASH", 1), ("NGRAM", 1)])
def test_recurrent_states_follow_their_requests(
    tmp_path: Path, exact_products: None, algorithm: str | None, page: int, mixed: bool
) -> None:
    """The same as above with linear attention, which shares no prefixes; rows without a request hold NaN."""
    mixed = mixed and algorithm != "NGRAM"
    options: dict[str, Any] = {"model": model_config(**FAMILIES["qwen3.5"]), "samplings": MIXED, "mixed": mixed, "mixing": mixed}
    padded = life(tmp_path, algorithm, "eager", 7, 7, page, **options)
    same_life(life(tmp_path, algorithm, None, 7, 7, page, **options), padded)
    expected = {*(f"batch of {n}" for n in BATCHES), "finished", "retracted", "resumed", "chunk tail"}
    assert expected <= set(padded.reached), "a storm that does not reach what it is for shows nothing"
    assert padded.reached["prefix hit"] == 0


def without_padding(tmp_path: Path, padding: int, **options: Any) -> Any:
    """A worker whose draft is the target itself but for the last `padding` ids."""
    worker = speculating(tmp_path, "STANDALONE", head={"vocab_size": VOCAB - padding}, **options)
    draft, target = worker.parts.drafter.model.model, worker.parts.target.runner.model
    draft.embed.copy_(target.embed[:-padding])
    draft.lm_head.weight.copy_(target.lm_head.weight[:-padding])
    for mine, its in zip(draft.layers, target.layers, strict=True):
        for part, layer in (("attention", "qkv_proj"), ("attention", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj")):
            getattr(getattr(mine, part), layer).weight.copy_(getattr(getattr(its, part), layer).weight)
    return worker


def test_a_draft_without_the_last_ids_leaves_the_text_as_it_is(tmp_path: Path) -> None:
    prompts = {**PROMPTS, 6: [VOCAB - 1] * 4, 7: [3, VOCAB - 2, 5]}  # with ids that the draft lacks
    text = Driver(plain()).generate(prompts, 24)
    driver = Driver(without_padding(tmp_path, 9))
    assert driver.generate(prompts, 24) == text
    assert driver.mean_accept_len() > 2.5
    assert any(token >= VOCAB - 9 for tokens in text.values() for token in tokens), "some of the text should be what the draft lacks"


def test_sampled_drafts_without_the_last_ids_match_their_twins_on_padded_buffers(tmp_path: Path, exact_products: None) -> None:
    def storm(replay: str | None) -> Storm:
        worker = without_padding(tmp_path, 9, replay=replay, sizes=SIZES if replay else None, runtime={"page_size": 16})
        return Storm(worker, 7, MIXED, poison=replay is not None).run(4)

    same_life(storm(None), storm("eager"))


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "page", "spec"),
    [
        (None, 1, {}),
        (None, 16, {"samplings": MIXED}),
        ("EAGLE", 1, {"num_steps": 5}),
        ("EAGLE", 16, {"samplings": MIXED}),
        ("EAGLE", 1, {"num_steps": 1, "samplings": MIXED}),
        ("EAGLE3", 16, {"samplings": MIXED}),
        ("STANDALONE", 1, {"samplings": MIXED}),
        ("DFLASH", 16, {"samplings": MIXED}),
    ],
)
def test_piggybacked_decoding_equals_separate_decoding(
    tmp_path: Path, exact_products: None, algorithm: str | None, page: int, spec: dict[str, Any]
) -> None:
    """The same storm by a worker that mixes, over padded and poisoned buffers and without, and by one that does not."""

    def storm(mixed: bool, replay: str | None) -> Storm:
        return life(tmp_path, algorithm, replay, 5, 4, page, mixed=mixed, mixing=True, **spec)

    together, padded, apart = storm(True, None), storm(True, "eager"), storm(False, None)
    same_life(together, padded)
    same_life(together, apart, near)
    assert padded.reached["decoded beside prompts"] > 8
    assert {"finished", "retracted", "resumed", "prefix hit", "chunk tail", "aborted in flight"} <= set(padded.reached)


SHAPES: list[dict[str, Any]] = [
    *({"num_steps": k} for k in (1, 2, 3, 5)),
    {"num_steps": 1, "topk": 2, "num_draft_tokens": 3},
    {"num_steps": 2, "topk": 2, "num_draft_tokens": 4},
    {"num_steps": 3, "topk": 4, "num_draft_tokens": 16},
    {"num_steps": 5, "topk": 2, "num_draft_tokens": 4},
]


@pytest.mark.parametrize(
    ("algorithm", "spec", "page"),
    [(name, spec, (1, 16)[(i + j) % 2]) for i, name in enumerate(("EAGLE", "EAGLE3")) for j, spec in enumerate(SHAPES)],  # all pairs
)
def test_greedy_text_is_the_same_with_speculation(tmp_path: Path, algorithm: str, spec: dict[str, Any], page: int) -> None:
    driver = Driver(speculating(tmp_path, algorithm, runtime={"page_size": page}, **spec))
    assert driver.generate(PROMPTS, 24, chunk=1 << 30 if page == 1 else 4) == greedy_text()
    assert driver.mean_accept_len() > 1.2


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True},
    "mistral": {"architecture": "MistralForCausalLM", "window": (11, 1)},
    "ministral3": {"architecture": "Ministral3ForCausalLM", "query_scaling": QueryScaling(0.5, 8)},
    "olmo3": {"architecture": "Olmo3ForCausalLM", "window": (11, -1), "qk_row_norm": True},
    "granite": {"architecture": "GraniteForCausalLM", "embed_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.5},
    "hunyuan": {"architecture": "HunYuanDenseV1ForCausalLM", "qk_norm": True, "norm_after_rope": True},
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "window": (11, -1),
        "qk_norm": True,
        "norm_offset": 1.0,
        "embed_scale": 8.0,
        "full_attention": FullAttention(num_kv_heads=2, head_dim=16, rope_theta=1e6, rope_scaling=None, shared_kv=False),
    },
    "qwen3.5": {
        "architecture": "Qwen3_5ForCausalLM",
        "qk_norm": True,
        "output_gate": True,
        "delta": DeltaConfig((True, False), num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, conv_width=4),
    },
}


@pytest.mark.parametrize(
    ("family", "algorithm", "spec"),
    [
        (family, algorithm, spec)
        for family in FAMILIES
        for algorithm, spec in (
            *(
                ("EAGLE", CHAIN),
                ("EAGLE", TREE),
                ("EAGLE3", CHAIN),
                ("EAGLE3", TREE),
                ("STANDALONE", CHAIN),
                ("DFLASH", CHAIN),
                ("NGRAM", CHAIN),
            ),
        )
        if family != "qwen3.5" or spec is CHAIN  # branches cannot run side by side through recurrent states
    ],
)
def test_greedy_text_is_the_same_for_every_model_family(tmp_path: Path, family: str, algorithm: str, spec: dict[str, Any]) -> None:
    driver = Driver(speculating(tmp_path, algorithm, "eager", [2, 4, 8], model=model_config(**FAMILIES[family]), **spec))
    assert driver.generate(PROMPTS, 24, chunk=5) == greedy_text(family)
    assert driver.mean_accept_len() > 1.1


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("page", [1, 16])
def test_a_draft_that_is_the_target_is_always_right(tmp_path: Path, steps: int, page: int) -> None:
    worker = speculating(tmp_path, "STANDALONE", num_steps=steps, runtime={"page_size": page})
    for mine, its in zip(worker.parts.drafter.model.model.layers, worker.parts.target.runner.model.layers, strict=True):
        mine.attention.o_proj.weight.copy_(its.attention.o_proj.weight)
    driver = Driver(worker)
    assert driver.generate(PROMPTS, 24, chunk=5) == greedy_text()
    assert driver.mean_accept_len() == steps + 1


@pytest.mark.parametrize("replay", [None, "eager"])
def test_prompt_lookup_continues_each_request_alone(tmp_path: Path, replay: str | None) -> None:
    driver = Driver(speculating(tmp_path, "NGRAM", replay, [4] if replay else None))
    together = driver.generate(ECHO, 40)
    assert together == Driver(plain()).generate(ECHO, 40)
    alone = []
    for row, prompt in ECHO.items():
        one = Driver(speculating(tmp_path, "NGRAM"))
        one.generate({row: prompt}, 40)
        alone.append(one.mean_accept_len())
    assert max(alone) > 1.5
    accepted = sum(int(a.sum()) for a in driver.accepts)
    steps = sum(len(a) for a in driver.accepts)
    assert accepted / steps == pytest.approx(np.mean(alone), rel=0.15)


def test_prompt_lookup_searches_only_the_request_of_the_row(tmp_path: Path) -> None:
    worker = speculating(tmp_path, "NGRAM")
    driver, made = Driver(worker), list[torch.Tensor]()
    watch_drafts(worker, lambda draft: made.append(draft.tokens[:, 1:]))
    driver.prefill(ECHO, room=160)
    for turn in range(30):
        if turn == 25:
            driver.release(1)
            # it says 7 8, which only its last owner's text goes on from
            driver.prefill({1: [50, 7]}, sampling=SamplingParams(temperature=0.0, logit_bias={8: 100.0}))
        expected = np.zeros((3, 3), dtype=np.int32)
        for i, row in enumerate(ECHO):
            history = NgramHistory()
            history.extend(np.array(driver.prompts[row] + driver.out[row], dtype=np.int32))
            expected[i] = history.propose(3) or 0
        driver.decode(list(ECHO))
        assert made[-1].tolist() == expected.tolist()
    assert driver.mean_accept_len() > 1.2


# ---- the draft's KV


def check_draft_from_scratch(tmp_path: Path, worker: Any, driver: Driver, algorithm: str, spec: dict[str, Any], page: int) -> None:
    """Everything that the draft has of each request, against one prefill of all its text on a worker that drafted nothing."""
    driver.catch_up()
    fresh = speculating(tmp_path, algorithm, runtime={"page_size": page}, **spec)
    for row, text in driver.prompts.items():
        if row not in driver.kv:
            continue
        kv_len = driver.kv[row]
        known = (text + driver.out[row])[: kv_len + 1]
        assert len(known) == kv_len + 1, "the committed length is the text without its last token"
        reference = Driver(fresh, seed=5)
        # the last token is given, not sampled: the reference must see what was really generated
        reference.prefill({9: known}, chunk=kv_len, room=16)
        # it has one position more, which is not compared
        mine, theirs = torch.from_numpy(driver.slots(row, kv_len)), torch.from_numpy(reference.slots(9, kv_len))
        for pool, other in zip(pools(worker), pools(fresh), strict=True):
            for a, b in zip((*pool.k, *pool.v), (*other.k, *other.v), strict=True):
                torch.testing.assert_close(a.flatten(0, 1)[mine], b.flatten(0, 1)[theirs], rtol=1e-4, atol=2e-5)
        assert int(worker.parts.target.rows.kv_lens[row]) == kv_len


@pytest.mark.parametrize(
    ("algorithm", "spec", "mixed", "page"),  # every algorithm with both sizes of pages, and each size with mixed passes and without
    [
        ("EAGLE", CHAIN, False, 1),
        ("EAGLE", CHAIN, True, 16),
        ("EAGLE", TREE, False, 16),
        ("EAGLE", {"num_steps": 1}, False, 16),
        ("EAGLE", {"num_steps": 1}, True, 1),
        ("EAGLE", {"num_steps": 1, "topk": 3, "num_draft_tokens": 4}, False, 1),
        ("EAGLE3", CHAIN, False, 16),
        ("EAGLE3", CHAIN, True, 1),
        ("EAGLE3", TREE, False, 1),
        ("STANDALONE", CHAIN, False, 1),
        ("STANDALONE", CHAIN, True, 16),
        ("DFLASH", CHAIN, False, 16),
        ("DFLASH", CHAIN, True, 1),
    ],
)
def test_draft_kv_equals_a_prefill_of_the_whole_text(tmp_path: Path, algorithm: str, spec: dict[str, Any], mixed: bool, page: int) -> None:
    """Chunk ends inside the prompt, a shared prefix, windows accepted in part: draft KV reaches as far as the target's."""
    worker = speculating(tmp_path, algorithm, runtime={"page_size": page, "mixed_chunk": mixed}, **spec)
    driver = Driver(worker)
    driver.prefill({1: PROMPTS[5], 2: PROMPTS[2]}, chunk=5)
    for _ in range(6):
        driver.decode([2, 1])
    known = (PROMPTS[5] + driver.out[1])[: driver.kv[1]]
    driver.prefill({3: [*known, 11, 12, 13]}, shared={3: (1, len(known) - 1)}, chunk=2, along=lambda: [2, 1])
    for rows in ([3], [1, 3], [2, 3, 1]):
        driver.decode(rows)
    check_draft_from_scratch(tmp_path, worker, driver, algorithm, spec, page)


def test_the_check_of_draft_kv_notices_a_wrong_token_at_a_chunk_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = speculating(tmp_path)
    prompt_pass = worker.parts.drafter.follow_prompt

    def forgetful(extend: Any) -> None:
        extend.next_tokens.zero_()  # the token after the chunk is not looked at
        prompt_pass(extend)

    monkeypatch.setattr(worker.parts.drafter, "follow_prompt", forgetful)
    driver = Driver(worker)
    driver.prefill({1: PROMPTS[5]}, chunk=5)
    with pytest.raises(AssertionError, match="not close"):
        check_draft_from_scratch(tmp_path, worker, driver, "EAGLE", CHAIN, 1)


@pytest.mark.parametrize(
    ("algorithm", "spec", "sampling"),
    [
        ("EAGLE", CHAIN, GREEDY),
        ("EAGLE", CHAIN, SamplingParams(temperature=0.9)),
        ("EAGLE", {"num_steps": 1}, SamplingParams(temperature=0.9)),
        ("EAGLE", TREE, GREEDY),
        ("EAGLE3", {"head": {"draft_vocab_size": 40}}, SamplingParams(temperature=0.9)),
        ("EAGLE3", {**TREE, "head": {"draft_vocab_size": 40}}, GREEDY),
    ],
)
def test_draft_state_equals_a_prefill_of_the_whole_text(
    tmp_path: Path, algorithm: str, spec: dict[str, Any], sampling: SamplingParams
) -> None:
    """Its hidden state and first guesses depend on the text and the seed, and not on the windows in which the text was accepted."""
    worker, fresh = (speculating(tmp_path, algorithm, **spec) for _ in range(2))
    driver = Driver(worker)
    driver.prefill(PROMPTS, sampling=sampling)
    for _ in range(5):
        driver.decode(list(PROMPTS))
        check_first_states(driver, fresh, sampling)


def check_first_states(driver: Driver, fresh: Any, sampling: SamplingParams) -> None:
    """That the draft of each request of `driver`'s worker goes on from what a prefill of all its text leaves in the worker `fresh`."""
    driver.catch_up()
    guess_after_each_chunk(fresh)
    for row, prompt in driver.prompts.items():
        left: list[tuple[torch.Tensor, ...]] = []
        reference = Driver(fresh, before=lambda row=row, left=left: left.append(first_state(fresh, row)))
        reference.prefill({row: prompt + driver.out[row]}, chunk=driver.kv[row], sampling=sampling)
        tokens, *numbers = first_state(driver.worker, row)
        assert torch.equal(tokens, left[1][0])
        for mine, its in zip(numbers, left[1][1:], strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)


def guess_after_each_chunk(worker: Any) -> None:
    """From now on the draft's first guesses are also computed after chunks that do not end a prompt, which a server does not need."""
    follow_prompt = type(worker.parts.drafter).follow_prompt.__get__(worker.parts.drafter)
    worker.parts.drafter.follow_prompt = lambda extend: follow_prompt(replace(extend, ended=np.zeros(1, dtype=np.int32)))


def first_state(worker: Any, row: int) -> tuple[torch.Tensor, ...]:
    state = worker.parts.drafter.state
    return tuple(t[row].clone() for t in (state.guesses, state.hidden, state.scores, state.probs))


# ---- the draft's own passes

SEVERAL: dict[str, Any] = {"num_steps": 5}
BUSHY = {"num_steps": 4, "topk": 3, "num_draft_tokens": 9}
REDUCED: dict[str, Any] = {"head": {"draft_vocab_size": 40}}
WARM = SamplingParams(temperature=0.9)


def drafted(worker: Any, warm: Collection[int] = ()) -> tuple[dict[int, tuple[int, tuple[torch.Tensor, ...]]], DraftWindow]:
    """One iteration after a few, rows `warm` sampled: KV length and `first_state` of each row before it, the drafts made."""
    driver = Driver(worker)
    driver.prefill(PROMPTS, sampling={row: WARM if row in warm else GREEDY for row in PROMPTS})
    for _ in range(3):
        driver.decode(list(PROMPTS))
    before = {row: (driver.kv[row], first_state(worker, row)) for row in PROMPTS}
    made: list[DraftWindow] = []
    watch_drafts(worker, lambda draft: made.append(copy_of(draft)))
    driver.decode(list(PROMPTS))
    return before, made[0]


def copy_of(draft: DraftWindow) -> DraftWindow:
    tensors = (getattr(draft, name) for name in ("tokens", "parents", "depths", "mask", "probs"))
    return DraftWindow(*(None if tensor is None else tensor.clone() for tensor in tensors))  # type: ignore[arg-type]


def watch_drafts(worker: Any, see: Callable[[DraftWindow], object]) -> None:
    """From now on `see` is called with what the drafter proposes."""
    propose = worker.parts.drafter.propose

    def watched(iteration: Any) -> DraftWindow:
        draft = propose(iteration)
        see(draft)
        return draft

    worker.parts.drafter.propose = watched


def branch_logits(worker: Any, row: int, kv_len: int, hidden: torch.Tensor, inputs: list[int]) -> torch.Tensor:
    """What the draft says [Vd] after `inputs`, run one at a time from `kv_len` on as a prompt is, beside no other branch."""
    draft, state = worker.parts.drafter, hidden[None]
    for i, token in enumerate(inputs):
        at, one, none = (np.array([n], dtype=np.int32) for n in (kv_len + i, 1, -1))
        ids, which = np.array([token], dtype=np.int32), torch.tensor([row])
        step = ScheduleBatch(0, which.numpy(), at, none, prefix_lens=at, extend_lens=one, token_ids=ids, next_tokens=none)
        batch = replace(worker.parts.target.stage_chunks(step, which).batch, hidden_states=state)
        plan_pass(draft.runner.backend, batch)
        state = draft.model.forward(batch)
    return draft.model.logits(state)[0]


@pytest.mark.parametrize(
    ("algorithm", "spec"),
    [
        ("EAGLE", CHAIN),
        ("EAGLE", {"num_steps": 1}),
        ("EAGLE", SEVERAL),
        ("EAGLE3", {**SEVERAL, **REDUCED}),
        ("STANDALONE", CHAIN),
    ],
)
@pytest.mark.parametrize("warm", [(), (1, 3), tuple(PROMPTS)])
@torch.inference_mode()
def test_chain_drafts_equal_one_by_one_drafting(tmp_path: Path, algorithm: str, spec: dict[str, Any], warm: tuple[int, ...]) -> None:
    worker = speculating(tmp_path, algorithm, **spec)
    before, made = drafted(worker, warm)
    model, known = worker.parts.drafter.model, worker.parts.drafter.model.lookahead
    for i, (row, (kv_len, (_, hidden, _, _))) in enumerate(before.items()):
        window = made.tokens[i].tolist()
        for at in range(1, len(window)):
            logits = branch_logits(worker, row, kv_len, hidden, window[known:at])
            chosen = logits.argmax()
            if row in warm:
                probs = torch.softmax(logits / WARM.temperature, -1)
                torch.testing.assert_close(made.probs[i, at - 1], probs, rtol=1e-3, atol=1e-5)
                place = torch.tensor([kv_len + at])
                chosen = draw(probs[None], uniforms(worker.parts.target.rows.tables.seeds[row : row + 1], place, RandomStream.DRAFT))[0]
            assert window[at] == int(model.map_to_target(chosen))


@pytest.mark.parametrize(
    ("algorithm", "spec"),
    [
        ("EAGLE", TREE),
        ("EAGLE", {"num_steps": 1, "topk": 3, "num_draft_tokens": 4}),
        ("EAGLE", BUSHY),
        ("EAGLE3", {**BUSHY, **REDUCED}),
    ],
)
@torch.inference_mode()
def test_a_tree_is_that_of_its_branches_drafted_one_by_one(tmp_path: Path, algorithm: str, spec: dict[str, Any]) -> None:
    worker = speculating(tmp_path, algorithm, **spec)
    before, made = drafted(worker)
    model, topk = worker.parts.drafter.model, spec["topk"]
    for i, (row, (kv_len, (_, hidden, _, _))) in enumerate(before.items()):
        beam: list[tuple[list[int], float]] = [([], 0.0)]
        known: list[tuple[list[int], float]] = []
        for _ in range(spec.get("num_steps", 3)):
            level: list[tuple[list[int], float]] = []
            for path, score in beam:
                ids, more = top_log_probs(branch_logits(worker, row, kv_len, hidden, path)[None], topk)
                children = zip(model.map_to_target(ids)[0].tolist(), more[0].tolist(), strict=True)
                level += [([*path, token], score + further) for token, further in children]
            beam = sorted(level, key=lambda node: -node[1])[:topk]
            known += level
        best = sorted(known, key=lambda node: -node[1])[: spec["num_draft_tokens"] - 1]
        paths: list[list[int]] = [[]]
        for token, parent in zip(made.tokens[i, 1:].tolist(), made.parents[i, 1:].tolist(), strict=True):
            paths.append([*paths[parent], token])
        assert sorted(paths[1:]) == sorted(path for path, _ in best)


def test_the_branches_of_a_pass_have_a_slot_each_and_one_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = speculating(tmp_path, **BUSHY)
    driver, rows, topk = Driver(worker), [3, 1, 5], BUSHY["topk"]
    driver.prefill(PROMPTS)
    forward, passes = worker.parts.drafter.model.forward, list[tuple[torch.Tensor, torch.Tensor]]()

    def watched(batch: Any, wanted: torch.Tensor | None = None) -> torch.Tensor:
        passes.append((batch.positions.view(3, -1).clone(), batch.out_cache_loc.view(3, -1).clone()))
        return forward(batch, wanted)

    monkeypatch.setattr(worker.parts.drafter.model, "forward", watched)
    for _ in range(3):
        kv_lens = [driver.kv[row] for row in rows]
        passes.clear()
        driver.decode(rows)
        for step, (positions, slots) in enumerate(passes[:-1]):
            assert positions.tolist() == [[n + step] * topk for n in kv_lens]
            first = [n + step * topk for n in kv_lens]
            assert slots.tolist() == [driver.slots(row, n + topk)[n:].tolist() for row, n in zip(rows, first, strict=True)]
        assert len(passes) == BUSHY["num_steps"], "the last is draft-extend"


@pytest.mark.parametrize(("algorithm", "steps", "decodes"), [("EAGLE", 1, False), ("EAGLE", 2, True), ("STANDALONE", 1, True)])
def test_draft_decode_exists_where_the_draft_has_passes_of_its_own(tmp_path: Path, algorithm: str, steps: int, decodes: bool) -> None:
    names = [runner.spec.name for runner in speculating(tmp_path, algorithm, num_steps=steps).runners]
    assert names == ["verify", *(["draft decode"] if decodes else []), "draft extend", "target decode", "draft extend K=0"]


@pytest.mark.parametrize("spec", [CHAIN, TREE])
def test_the_drafts_head_reads_no_more_rows_than_it_guesses_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    worker = speculating(tmp_path, **spec)
    rows = list[int]()
    for name in ("logits", "greedy"):  # a chain's greedy guesses need no logits
        head = getattr(worker.parts.drafter.model, name)
        monkeypatch.setattr(worker.parts.drafter.model, name, lambda hidden, head=head: rows.append(len(hidden)) or head(hidden))
    follow_prompt, guessed = worker.parts.drafter.follow_prompt, list[tuple[bool, int, int]]()

    def counting(extend: Any) -> None:
        before = sum(rows)
        follow_prompt(extend)
        guessed.append((len(extend.ended) > 0, len(extend.chunks.last), sum(rows) - before))

    monkeypatch.setattr(worker.parts.drafter, "follow_prompt", counting)
    driver = Driver(worker)
    driver.prefill(PROMPTS, chunk=5)
    assert {ends for ends, _, _ in guessed} == {True, False}
    for ends, chunks, count in guessed:
        assert count == (chunks if ends else 0), "the last row of each chunk, if any of them ends a prompt"
    rows.clear()
    driver.decode([1, 2, 3])
    topk = spec.get("topk", 1)
    assert rows == [3 * topk, 3 * topk, 3], "K - 1 passes of the draft, and the last accepted row of each window"


@pytest.mark.parametrize(
    ("algorithm", "overlap"), [("EAGLE", True), ("EAGLE3", True), ("STANDALONE", True), ("DFLASH", True), ("NGRAM", False)]
)
def test_only_prompt_lookup_gives_up_overlap(tmp_path: Path, algorithm: str, overlap: bool) -> None:
    assert speculating(tmp_path, algorithm).limits.overlap == overlap
    assert not speculating(tmp_path, algorithm, runtime={"overlap": False}).limits.overlap


# ---- sampling parameters

FIELDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3),
    "negative penalties": SamplingParams(temperature=0.0, repetition_penalty=0.7, frequency_penalty=-0.2, presence_penalty=-0.5),
    "bias": SamplingParams(temperature=0.0, logit_bias={3: 6.0, VOCAB - 1: 5.5, 0: -100.0}),
    "least length": SamplingParams(temperature=0.0, logit_bias={1: 100.0}, min_new_tokens=9),
    "all": SamplingParams(
        temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1, logit_bias={1: 5.0, 7: 3.0}, min_new_tokens=6
    ),
}
SAMPLED: dict[str, SamplingParams] = {
    "temperature": SamplingParams(temperature=0.8),
    "hardly any temperature": SamplingParams(temperature=1e-30),
    "top_k": SamplingParams(top_k=5),
    "top_k of more than there are": SamplingParams(top_k=1 << 29),
    "top_p": SamplingParams(top_p=0.6),
    "tiny top_p": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.3),
    "everything": SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.3,
                                 presence_penalty=0.2, logit_bias={2: 2.0}, min_new_tokens=3),
}  # fmt: skip
WORKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("EAGLE", CHAIN),
    "one draft": ("EAGLE", {"num_steps": 1}),
    "tree": ("EAGLE", TREE),
    "eagle3": ("EAGLE3", {"head": {"draft_vocab_size": 40}}),
    "standalone": ("STANDALONE", CHAIN),
    "dflash": ("DFLASH", CHAIN),
    "ngram": ("NGRAM", CHAIN),
}


LENGTH = 12
"""Tokens of a text: more than the least lengths above, and several windows."""


def prompts_for(count: int) -> dict[int, list[int]]:
    return {r: np.random.default_rng(r).integers(0, VOCAB, 4 + r).tolist() for r in range(1, count + 1)}


@functools.cache
def without_speculation(field: str, count: int) -> dict[int, list[int]]:
    return Driver(plain()).generate(prompts_for(count), LENGTH, sampling=(FIELDS | SAMPLED)[field])


@functools.cache
def greedy_text(family: str | None = None) -> dict[int, list[int]]:
    return Driver(plain(model=model_config(**FAMILIES.get(family or "", {})))).generate(PROMPTS, 24)


@pytest.mark.parametrize("name", WORKERS)
def test_logits_processors_keep_greedy_text(tmp_path: Path, name: str) -> None:
    """Of several requests; a test below compares single ones with them."""
    algorithm, spec = WORKERS[name]
    worker = speculating(tmp_path, algorithm, **spec)
    for field, wanted in FIELDS.items():
        assert Driver(worker).generate(prompts_for(8), LENGTH, sampling=wanted) == without_speculation(field, 8), field


@pytest.mark.parametrize("name", WORKERS)
def test_every_sampling_field_runs_and_stays_inside_the_vocabulary(tmp_path: Path, name: str) -> None:
    algorithm, spec = WORKERS[name]
    worker = speculating(tmp_path, algorithm, **spec)
    for wanted in SAMPLED.values():
        out = Driver(worker).generate(prompts_for(8), 8, sampling=wanted)
        assert all(0 <= t < VOCAB for text in out.values() for t in text)


def test_trees_and_no_speculation_draw_the_same_tokens_for_a_seed(tmp_path: Path) -> None:
    for spec in (TREE, {"num_steps": 1, "topk": 2, "num_draft_tokens": 3}):
        worker = speculating(tmp_path, "EAGLE", **spec)
        for field, wanted in SAMPLED.items():
            assert Driver(worker).generate(prompts_for(4), LENGTH, sampling=wanted) == without_speculation(field, 4), field


def test_hardly_any_temperature_is_greedy(tmp_path: Path) -> None:
    cold = SamplingParams(temperature=1e-38)
    expected = Driver(plain()).generate(prompts_for(4), 15)
    for worker in (plain(), speculating(tmp_path), speculating(tmp_path, **TREE)):
        assert Driver(worker).generate(prompts_for(4), 15, sampling=cold) == expected


@pytest.mark.parametrize("name", WORKERS)
def test_logprobs_are_the_same_with_speculation(tmp_path: Path, name: str) -> None:
    algorithm, spec = WORKERS[name]
    check_logprobs(speculating(tmp_path, algorithm, **spec))


@pytest.mark.parametrize("name", [None, "chain", "one draft", "eagle3", "standalone"])
def test_logprobs_are_the_same_beside_prompts(tmp_path: Path, name: str | None) -> None:
    mixed = {"mixed_chunk": True}
    check_logprobs(plain(**mixed) if name is None else speculating(tmp_path, WORKERS[name][0], runtime=mixed, **WORKERS[name][1]), True)


LogprobsByRow = dict[int, list[tuple[float, list[int], list[float]]]]


def logprobs_of(worker: Any, beside_prompts: bool = False) -> LogprobsByRow:
    """Of fourteen tokens each of three requests: what was chosen and the two most probable."""
    driver = Driver(worker)
    driver.prefill(prompts_for(3))
    found: LogprobsByRow = {1: [], 2: [], 3: []}
    while any(len(f) < 14 for f in found.values()):
        if beside_prompts:
            (prompt,) = driver.prefill({9: [5, 6, 7, 8]}, logprobs=2, along=lambda: [1, 2, 3], prompt_logprobs=True)
            driver.release(9)
            assert len(prompt.prompt_logprobs[0].chosen) == 4
            result = driver.results[-1]
        else:
            result = driver.decode([1, 2, 3], logprobs=2)
        assert result.logprobs is not None
        rows = np.repeat([1, 2, 3], result.accept_lens)
        entries = zip(result.logprobs.chosen, result.logprobs.top_ids, result.logprobs.top, strict=True)
        for row, (chosen, ids, top) in zip(rows.tolist(), entries, strict=True):
            found[row].append((float(chosen), ids.tolist(), top.tolist()))
    return {row: f[:14] for row, f in found.items()}


@functools.cache
def plain_logprobs() -> LogprobsByRow:
    return logprobs_of(plain())


def check_logprobs(worker: Any, beside_prompts: bool = False) -> None:
    """Against the worker without speculation."""

    got = logprobs_of(worker, beside_prompts)
    for row, entries in plain_logprobs().items():
        assert len(got[row]) == 14
        for (chosen, ids, top), (chosen2, ids2, top2) in zip(entries, got[row], strict=True):
            assert ids == ids2
            assert chosen2 == pytest.approx(chosen, abs=1e-4)
            assert top2 == pytest.approx(top, abs=1e-4)


# ---- isolation


@pytest.mark.parametrize("name", [None, *WORKERS])
def test_a_request_gives_the_same_text_alone_and_among_others(tmp_path: Path, exact_products: None, name: str | None) -> None:
    """Neighbours with penalties, filters, log-probabilities and other temperatures; sampled requests too."""
    mix = [*FIELDS.values(), *SAMPLED.values()]
    samplings = {r: mix[r % len(mix)] for r in range(1, 15)}

    def worker() -> Any:
        return plain() if name is None else speculating(tmp_path, WORKERS[name][0], **WORKERS[name][1])

    together = Driver(worker()).generate(prompts_for(14), 8, sampling=samplings)
    one = worker()
    for row in range(1, 15):
        alone = Driver(one, seed=row).generate({row: prompts_for(14)[row]}, 8, sampling=samplings)
        assert alone[row] == together[row], f"request {row} depends on its neighbours"


# ---- distributions


SMALL = 11


def filtered_by_definition(logprobs: np.ndarray, params: SamplingParams) -> np.ndarray:
    p = np.exp(logprobs.astype(np.float64) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept, mass = [], 0.0
    top_k = params.top_k if params.top_k > 0 else len(p)
    head = p[order[:top_k]].sum()
    for token in order[:top_k]:
        if mass >= params.top_p * head and kept:
            break
        kept.append(token)
        mass += p[token]
    out = np.zeros_like(p)
    for token in kept:
        if p[token] >= params.min_p * p[order[0]]:
            out[token] = p[token]
    return out / out.sum()


@functools.cache
def next_log_probs(prompt: tuple[int, ...], contexts: frozenset[tuple[int, ...]]) -> dict[tuple[int, ...], np.ndarray]:
    """What the plain worker says of every token after `prompt` and each of the contexts, which are as long as each other."""
    driver, found = Driver(plain(model=model_config(vocab_size=SMALL), sharp=0.6)), dict[tuple[int, ...], np.ndarray]()
    ordered = sorted(contexts)
    for start in range(0, len(ordered), 32):
        some = ordered[start : start + 32]
        (result,) = driver.prefill({row: [*prompt, *said] for row, said in enumerate(some, 1)}, logprobs=SMALL, room=0)
        assert result.logprobs is not None
        for row, said in enumerate(some):
            driver.release(row + 1)
            found[said] = np.zeros(SMALL)
            found[said][result.logprobs.top_ids[row]] = result.logprobs.top[row]
    return found


def next_distribution(logprobs: np.ndarray, said: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """What is drawn from after `said`, by definition."""
    logprobs = logprobs.copy()
    for token, added in (params.logit_bias or {}).items():
        logprobs[token] += added
    for token in set(said):
        logprobs[token] -= params.presence_penalty + params.frequency_penalty * said.count(token)
    return filtered_by_definition(logprobs, params)


DISTRIBUTIONS: dict[str, SamplingParams] = {
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=1.5, top_k=4),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.25, temperature=1.2),
    "penalties": SamplingParams(temperature=0.5, frequency_penalty=0.7, presence_penalty=0.5, logit_bias={4: 1.0}),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in WORKERS for kind in ("temperature", "penalties")),
        *((name, kind) for name in ("chain", "tree") for kind in ("top_k", "top_p", "min_p")),
    ],
)
def test_sampled_text_has_the_targets_distribution(tmp_path: Path, name: str, kind: str) -> None:
    """The second and third token of many seeds, both from a verified window, given those before them."""
    params = DISTRIBUTIONS[kind]
    rows, rounds, prompt = 200, 3, [3, 5, 3, 5, 3]
    small = {"vocab_size": SMALL}
    algorithm, spec = WORKERS[name]
    runtime = {"max_running_requests": rows}
    head = {"vocab_size": SMALL, **({"draft_vocab_size": 7} if name == "eagle3" else {})}
    worker = speculating(tmp_path, algorithm, model=model_config(**small), runtime=runtime, sharp=0.6, **{**spec, "head": head})
    texts: list[list[int]] = []
    accepts: list[float] = []
    for turn in range(rounds):
        driver = Driver(worker)
        samplings = {r: SamplingParams(**{**_fields(params), "seed": turn * rows + r}) for r in range(1, rows + 1)}
        out = driver.generate(dict.fromkeys(samplings, prompt), 3, sampling=samplings, room=30)
        texts += list(out.values())
        accepts.append(driver.mean_accept_len())
    assert np.mean(accepts) > 1.1
    check_distribution(texts, prompt, params)


def check_distribution(texts: list[list[int]], prompt: list[int], params: SamplingParams) -> None:
    """Chi-square of the second and third tokens, each given those before it, of the target with `SMALL` tokens."""
    for depth in (1, 2):
        statistic, freedom = 0.0, 0
        said = next_log_probs(tuple(prompt), frozenset(itertools.product(range(SMALL), repeat=depth)))
        for context in {tuple(t[:depth]) for t in texts}:
            drawn = np.bincount([t[depth] for t in texts if tuple(t[:depth]) == context], minlength=SMALL)
            p = next_distribution(said[context], context, params)
            assert drawn[p == 0].sum() == 0, "a token was drawn that a filter excludes"
            if drawn.sum() < 30:
                continue
            expected = p * drawn.sum()
            often = expected >= 4
            pooled = np.array([*drawn[often], drawn[~often].sum()]), np.array([*expected[often], expected[~often].sum()])
            live = pooled[1] > 1
            statistic += float(((pooled[0] - pooled[1])[live] ** 2 / pooled[1][live]).sum())
            freedom += int(live.sum()) - 1
        assert freedom > 0
        assert statistic < freedom + 6 * np.sqrt(2 * freedom) + 6, f"token {depth}: {statistic:.1f} at {freedom} degrees"


def test_sampled_text_has_the_targets_distribution_with_a_token_map(tmp_path: Path) -> None:
    """Drafts are drawn from a distribution over the hot tokens alone, and verified with it."""
    torch.save(torch.tensor([0, 2, 3, 5, 6, 9, 10]), tmp_path / "hot.pt")
    params, small = DISTRIBUTIONS["temperature"], model_config(vocab_size=SMALL)
    runtime, head = {"max_running_requests": 200}, {"vocab_size": SMALL}
    worker = speculating(tmp_path, model=small, runtime=runtime, sharp=0.6, head=head, token_map=str(tmp_path / "hot.pt"))
    prompt, texts, accepts = [3, 5, 3, 5, 3], list[list[int]](), list[float]()
    for turn in range(3):
        driver = Driver(worker)
        samplings = {r: SamplingParams(**{**_fields(params), "seed": turn * 200 + r}) for r in range(1, 201)}
        texts += driver.generate(dict.fromkeys(samplings, prompt), 3, sampling=samplings, room=30).values()
        accepts.append(driver.mean_accept_len())
    assert np.mean(accepts) > 1.1
    check_distribution(texts, prompt, params)


def test_the_check_of_distributions_notices_a_draft_that_misstates_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts drawn at one temperature, verified as if drawn at another."""
    small = model_config(vocab_size=SMALL)
    worker = speculating(tmp_path, model=small, runtime={"max_running_requests": 200}, sharp=0.6, head={"vocab_size": SMALL})
    propose = worker.parts.drafter.propose

    def misstated(iteration: Any) -> DraftWindow:
        draft = propose(iteration)
        return replace(draft, probs=draft.probs.square() / draft.probs.square().sum(-1, keepdim=True))

    monkeypatch.setattr(worker.parts.drafter, "propose", misstated)
    prompt = [3, 5, 3, 5, 3]
    texts: list[list[int]] = []
    for turn in range(4):
        samplings = {r: SamplingParams(temperature=0.8, seed=1000 * turn + r) for r in range(1, 201)}
        texts += Driver(worker).generate(dict.fromkeys(samplings, prompt), 3, sampling=samplings, room=30).values()
    with pytest.raises(AssertionError, match="degrees"):
        check_distribution(texts, prompt, DISTRIBUTIONS["temperature"])


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {f: getattr(params, f) for f in params.__struct_fields__}


# ---- ends of the world


@pytest.mark.parametrize(
    ("algorithm", "spec", "page", "replay"),
    [
        (*worker, page, replay)
        for i, worker in enumerate([("EAGLE", CHAIN), ("EAGLE", TREE), ("EAGLE3", CHAIN), ("STANDALONE", CHAIN), ("NGRAM", CHAIN)])
        for page, replay in ([(1, None), (16, "eager")], [(16, None), (1, "eager")])[i % 2]
    ],
)
def test_a_text_can_grow_to_the_end_of_the_context(
    tmp_path: Path, algorithm: str, spec: dict[str, Any], page: int, replay: str | None
) -> None:
    """And a step that was in flight then may run past it."""
    sizes = [4] if replay else None
    worker = speculating(tmp_path, algorithm, replay, sizes, runtime={"page_size": page, "context_length": 64}, **spec)
    poison = Poison(worker)
    prompt = np.random.default_rng(3).integers(0, VOCAB, 50).tolist()
    expected = Driver(plain(context_length=64)).generate({1: prompt}, 14, room=14)
    driver = Driver(worker, before=lambda: poison(driver) if replay else None)
    driver.prefill({1: prompt}, room=14 + 2 * worker.limits.tokens_per_step)
    while len(driver.out[1]) < 14:
        driver.decode([1])
    assert driver.out[1][:14] == expected[1]
    driver.decode([1])


def test_prompt_lookup_keeps_seeded_text(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.95, max_new_tokens=1 << 20)
    prompts = {1: [5, 6, 7, 8, 9] * 5, 2: [1, 2, 3, 4] * 4}
    plain = Driver(build_worker(tiny_runtime(), tiny_model())).generate(prompts, 40, sampling=sampling)
    ngram = tiny_speculative("", algorithm="NGRAM", draft_model_path=None)
    driver = Driver(build_worker(tiny_runtime(ngram), tiny_model(), make_drafter))
    assert driver.generate(prompts, 40, sampling=sampling) == plain
    assert np.concatenate(driver.accepts).mean() > 1.0
