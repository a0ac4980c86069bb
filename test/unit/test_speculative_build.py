"""What the flags of speculation and graphs ask for is what the worker that is built does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import ConfigError
from runtime.model_executor import build as target_build
from runtime.model_executor.model_runner import ModelRunner
from runtime.sampling_params import SamplingParams
from runtime.speculative import draft_loader
from unit.driver import Driver
from unit.predicting import VOCAB, plain, speculating
from unit.storm import runners
from unit.test_eagle_worker import watch_drafts

PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 5 + r).tolist() for r in (1, 2, 3)}


@pytest.mark.parametrize(("algorithm", "spec"), [("EAGLE", {}), ("EAGLE3", {}), ("STANDALONE", {}), ("NGRAM", {})])
@pytest.mark.parametrize(("by_position", "length"), [((1.0, 1.0, 0.0), 3), ((0.0, 1.0, 1.0), 1), ((1.0, 1.0, 1.0), 4)])
def test_synthetic_acceptance_is_what_was_asked_whatever_the_weights(
    tmp_path: Path, algorithm: str, spec: dict[str, Any], by_position: tuple[float, ...], length: int
) -> None:
    driver = Driver(speculating(tmp_path, algorithm, synthetic_accept=by_position, **spec))
    driver.generate(PROMPTS, 20)
    assert set(np.concatenate(driver.accepts).tolist()) == {length}


def test_synthetic_acceptance_has_its_mean_by_position(tmp_path: Path) -> None:
    worker = speculating(tmp_path, synthetic_accept=(0.9, 0.5, 0.2))
    prompts = {r: [r, r + 1] for r in range(1, 41)}
    Driver(worker).generate(prompts, 100, room=120)
    counted = worker.parts.monitor.counted()
    assert counted.iterations > 1500
    assert counted.rates() == pytest.approx([0.9, 0.5, 0.2], abs=0.06)


def test_synthetic_acceptance_never_reaches_a_tree_unheeded(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="synthetic acceptance needs a chain"):
        speculating(tmp_path, topk=2, num_draft_tokens=5, synthetic_accept=(0.9, 0.5, 0.2))


@pytest.mark.parametrize(
    ("algorithm", "head"), [("EAGLE", {}), ("DFLASH", {}), ("STANDALONE", {}), ("STANDALONE", {"vocab_size": VOCAB - 9})]
)
def test_with_a_token_map_the_draft_guesses_those_tokens_only(tmp_path: Path, algorithm: str, head: dict[str, Any]) -> None:
    hot = torch.arange(1, VOCAB - 9, 3)
    torch.save(hot, tmp_path / "hot.pt")
    worker = speculating(tmp_path, algorithm, head=head, token_map=str(tmp_path / "hot.pt"))
    draft = worker.parts.drafter.model
    assert (draft.vocab_size, draft.to_target.tolist()) == (len(hot), hot.tolist())
    guesses: list[int] = []
    watch_drafts(worker, lambda draft: guesses.extend(draft.tokens[:, 1:].flatten().tolist()))
    prompts = {**PROMPTS, 6: [VOCAB - 1] * 4}
    out = Driver(worker).generate(prompts, 20)
    assert set(guesses) <= set(hot.tolist())
    assert len(set(guesses)) > 3
    assert out == Driver(plain()).generate(prompts, 20)


def test_a_standalone_draft_with_a_token_map_drafts_what_the_target_writes(tmp_path: Path) -> None:
    """The draft is the target itself, with the tokens of its text."""
    text = Driver(plain()).generate(PROMPTS, 20)
    hot = torch.tensor(sorted({token for tokens in text.values() for token in tokens}))
    torch.save(hot, tmp_path / "hot.pt")
    worker = speculating(tmp_path, "STANDALONE", token_map=str(tmp_path / "hot.pt"))
    draft, target = worker.parts.drafter.model.model, worker.parts.target.runner.model
    draft.embed.copy_(target.embed)
    draft.lm_head.weight.copy_(target.lm_head.weight[hot])
    for mine, its in zip(draft.layers, target.layers, strict=True):
        for part, layer in (("attention", "qkv_proj"), ("attention", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj")):
            getattr(getattr(mine, part), layer).weight.copy_(getattr(getattr(its, part), layer).weight)
    driver = Driver(worker)
    assert driver.generate(PROMPTS, 20) == text
    assert driver.mean_accept_len() > 3


def test_token_maps_that_a_draft_cannot_use_are_refused(tmp_path: Path) -> None:
    torch.save(torch.arange(VOCAB), tmp_path / "all.pt")
    with pytest.raises(ConfigError, match=rf"--speculative-token-map names token ids outside 0\.\.{VOCAB - 10}"):
        speculating(tmp_path, "STANDALONE", head={"vocab_size": VOCAB - 9}, token_map=str(tmp_path / "all.pt"))
    with pytest.raises(ConfigError, match=r"--speculative-token-map: this draft has its own vocabulary, of 32 tokens\. Leave it out"):
        speculating(tmp_path, "DFLASH", head={"draft_vocab_size": 32}, token_map=str(tmp_path / "all.pt"))


@pytest.mark.parametrize(
    ("algorithm", "spec", "drafts"), [("EAGLE", {}, 3), ("EAGLE", {"topk": 3, "num_draft_tokens": 7}, 6), ("NGRAM", {"num_steps": 5}, 5)]
)
def test_the_worker_counts_every_draft_that_is_verified(tmp_path: Path, algorithm: str, spec: dict[str, Any], drafts: int) -> None:
    """Nodes of a tree, and not its depths: as the scheduler counts them."""
    worker = speculating(tmp_path, algorithm, **spec)
    Driver(worker).generate(PROMPTS, 12)
    counted = worker.parts.monitor.counted().stats()
    assert counted.drafted_tokens == drafts * counted.iterations > 0
    assert counted.accepted_tokens == sum(counted.accepted)
    assert worker.info().acceptance.eager == counted


@pytest.mark.parametrize(
    ("algorithm", "spec", "most", "reach"),
    [
        ("EAGLE", {}, 4, 4),
        ("EAGLE", {"topk": 3, "num_draft_tokens": 7}, 4, 9),
        ("EAGLE3", {"num_steps": 2, "topk": 2, "num_draft_tokens": 7}, 3, 7),
        ("STANDALONE", {"num_steps": 1}, 2, 2),
        ("NGRAM", {"num_steps": 5}, 6, 6),
    ],
)
def test_the_limits_say_what_a_step_commits_at_most_and_how_far_it_writes(
    tmp_path: Path, algorithm: str, spec: dict[str, Any], most: int, reach: int
) -> None:
    """K + 1 tokens, however many nodes are verified; max(K * topk, D) slots."""
    limits = speculating(tmp_path, algorithm, **spec).limits
    assert (limits.max_accept_len, limits.tokens_per_step) == (most, reach)


def test_more_branches_than_the_draft_knows_tokens_are_refused_by_flag(tmp_path: Path) -> None:
    torch.save([5, 6, 7], tmp_path / "hot.pt")
    for algorithm, less in (("EAGLE", {"token_map": str(tmp_path / "hot.pt")}), ("EAGLE3", {"head": {"draft_vocab_size": 3}})):
        worker = speculating(tmp_path, algorithm, topk=3, num_draft_tokens=5, **less)
        assert Driver(worker).generate(PROMPTS, 8) == Driver(plain()).generate(PROMPTS, 8)
        with pytest.raises(ConfigError, match="--speculative-eagle-topk is 4; this draft has 3 tokens"):
            speculating(tmp_path, algorithm, topk=4, num_draft_tokens=5, **less)


@pytest.mark.parametrize("algorithm", [None, "EAGLE", "NGRAM"])
def test_without_padding_only_captured_sizes_are_replayed(tmp_path: Path, algorithm: str | None) -> None:
    for padding in (True, False):
        runtime: dict[str, Any] = {"cuda_graph_padding": padding}
        worker = plain("eager", [4], **runtime) if algorithm is None else speculating(tmp_path, algorithm, "eager", [4], runtime=runtime)
        assert {runner.size_for(3) for runner in runners(worker).values()} == {4 if padding else 3}


def test_the_draft_has_the_attention_that_was_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(model: Any, attention: str, *more: Any, **named: Any) -> ModelRunner:
        asked.append(attention)
        return ModelRunner(model, "torch_native", *more, **named)

    for module in (draft_loader, target_build):
        monkeypatch.setattr(module, "ModelRunner", noted)
    speculating(tmp_path, attention_backend="flashinfer", runtime={"attention_backend": "fa3"})
    assert sorted(asked) == ["fa3", "flashinfer"]


def test_thresholds_below_one_accept_what_is_likely_enough(tmp_path: Path) -> None:
    warm = SamplingParams(temperature=1.0)
    for changes, whole in (({}, False), ({"accept_threshold_single": 1e-12}, True), ({"accept_threshold_acc": 1e-12}, True)):
        driver = Driver(speculating(tmp_path, **changes))
        driver.generate(PROMPTS, 40, sampling=warm)
        assert (driver.mean_accept_len() == 4) == whole


def test_the_log_tells_the_graphs_of_each_runner_and_the_admission_limits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        speculating(tmp_path, replay="eager", sizes=[1, 2, 4])
    for name in ("draft decode", "verify", "draft extend"):
        assert re.search(rf"graphs: {name} +3 sizes up to +4, +[\d.]+ s, reserved +[\d.]+ MiB, used +[\d.]+ MiB", caplog.text)
    assert "admission: at most 40 running requests, 8192 KV tokens, 64 tokens per prompt step" in caplog.text
