"""Training an EAGLE-3 head: its parts against their definitions, and the trained head against the server's."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_eagle
from eagle_training.batches import epoch_batches, join_rows, make_batch, row_lengths
from eagle_training.chain_attention import chain_attention, definition, kernel_agrees
from eagle_training.conversations import Conversation, ShardFolder, cut_loop, loop_period
from eagle_training.estimate import estimate, walk
from eagle_training.evaluation import EVERYDAY, count_drafts, read_prompts
from eagle_training.features import see
from eagle_training.head import EagleHead, config_json, head_config
from eagle_training.kinds import PromptKinds, Turn, is_held_out_kind
from eagle_training.loss import Teacher, cross_entropy
from eagle_training.pipeline import Notes
from eagle_training.synthesis import Amount, Synthesizer, enough, own_text, synthesize, user_prefix
from eagle_training.target import FrozenTarget
from eagle_training.trainer import Course, Trainer, rate_at
from eagle_training.vocabulary import answer_counts, coverage, draft_to_target, pick_vocabulary, target_in_draft
from safetensors.torch import load_file, save_file

from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.errors import ConfigError, ServingError
from runtime.layers.attention.base import AttentionShape, plan_pass
from runtime.layers.attention.torch_native import TorchNativeAttention
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.torch_ops import TorchOps
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.model_executor.weight_loader import safetensors_weights
from runtime.models.config import MoeConfig
from runtime.models.decoder import DecoderModel
from runtime.models.draft_config import load_draft_config
from runtime.models.eagle3 import LlamaForCausalLMEagle3
from runtime.models.registry import build_model, load_hf_config
from runtime.text.tokenizer import Tokenizer
from unit.small_tokenizer import write_small_tokenizer
from unit.test_models import Checkpoint

CPU = torch.device("cpu")
AUX = (1, 2, 4)
WIDTH = 64
VOCAB = 96
RAW = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "eos_token_id": 1, "bos_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "float32",
    "hidden_act": "silu",
}  # fmt: skip


def write_model(folder: Path, raw: dict[str, Any]) -> Path:
    """A checkpoint whose every part matters: weights large enough that its answers depend on the text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    g = torch.Generator().manual_seed(3)
    shapes = build_model(load_hf_config(folder), TorchOps(), torch.float32, CPU).expected_weights()
    tensors = {
        name: 1 + 0.2 * torch.randn(shape, generator=g) if len(shape) == 1 else torch.randn(shape, generator=g) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["gpt-oss", "gemma4-shared-kv", "deepseek-experts", "qwen2-window-on-late-layers"])
def test_the_target_computes_what_transformers_does(tmp_path: Path, family: str) -> None:
    reference = Checkpoint(family, tmp_path)
    frozen = FrozenTarget(str(tmp_path), load_hf_config(tmp_path), (0, 1, 2), torch.float32, CPU, 256)
    features, hidden = frozen.run(torch.stack((reference.ids.flip(0), reference.ids)))
    scale = float(reference.logits.abs().max())
    torch.testing.assert_close(frozen.logits(hidden[1]), reference.logits, rtol=1e-4, atol=1e-4 * scale)
    entering = torch.cat([states[0] for states in reference.hidden[:3]], dim=1)
    torch.testing.assert_close(features[1], entering, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", RAW)


@pytest.fixture(scope="module")
def target(model_folder: Path) -> FrozenTarget:
    return FrozenTarget(str(model_folder), load_hf_config(model_folder), AUX, torch.float32, CPU, 4096)


def make_head(
    target: FrozenTarget, seed: int = 0, feature_size: torch.Tensor | None = None, talks: Sequence[Conversation] = ()
) -> EagleHead:
    vocabulary = pick_vocabulary(answer_counts(talks, VOCAB) + np.random.default_rng(1).integers(0, 2, VOCAB), 40, [1])
    config = head_config(target.config, 80, len(vocabulary))
    head = EagleHead(config, target.embed, vocabulary, torch.ones(3 * WIDTH) if feature_size is None else feature_size)
    head.init_weights(target.model.lm_head.weight, target.model.final_norm.weight, torch.Generator().manual_seed(seed))
    return head


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False, "beta_fast": 8.0},
    ],
)  # fmt: skip
def test_a_head_keeps_the_rotary_scaling_of_its_target(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "rope_scaling": scaling}))
    target = load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(head_config(target, 80, 40), AUX, torch.float32)))
    read = load_draft_config(tmp_path, "EAGLE3", target).model
    assert (read.rope_theta, read.rope_scaling, read.max_context_len) == (target.rope_theta, target.rope_scaling, target.max_context_len)


def test_a_head_for_a_sparse_target_is_a_plain_one(tmp_path: Path) -> None:
    moe = MoeConfig(num_experts=4, top_k=2, intermediate_size=8, scoring="softmax", renormalize=True, layers=(True,) * 4)
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))
    target = dataclasses.replace(load_hf_config(tmp_path), moe=moe, sinks=True)
    head = head_config(target, 80, 40)
    assert (head.moe, head.sinks, head.rope_scaling, head.head_dim) == (None, False, None, target.head_dim)


# ---- the server's side


class ServedModel:
    """A model of the server's, with a KV pool and one request in row 1."""

    def __init__(self, model: DecoderModel | LlamaForCausalLMEagle3) -> None:
        layers = model.attention_specs
        pool = KVPool([layer.kv for layer in layers], 256, 1, CPU)
        self.table = PageTable(2, 256, 1, CPU)
        self.table.pages[1] = torch.arange(1, 257)
        shape = AttentionShape(layers, 1, 4, 256, tuning=H200)
        self.model, self.backend = model, TorchNativeAttention(shape, pool, self.table)
        model.bind(pool, self.backend)

    def batch(self, ids: Sequence[int], before: int, hidden: torch.Tensor | None = None) -> ForwardBatch:
        """`ids` after `before` positions, planned."""
        n = len(ids)
        positions = torch.arange(before, before + n)
        lens = torch.tensor([before + n], dtype=torch.int32)
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND, batch_size=1, tokens_per_req=0, input_ids=torch.tensor(ids), positions=positions,
            out_cache_loc=self.table.slots(torch.ones(n, dtype=torch.int64), positions), req_pool_indices=torch.ones(1, dtype=torch.int64),
            seq_lens=lens, qo_indptr=torch.tensor([0, n], dtype=torch.int32), seq_len_bounds=lens.numpy(),
            extend_lens=np.array([n], dtype=np.int32), hidden_states=hidden,
        )  # fmt: skip
        plan_pass(self.backend, batch)
        return batch


def served_target(folder: Path) -> tuple[DecoderModel, ServedModel]:
    model = build_model(load_hf_config(folder), TorchOps(), torch.float32, CPU)
    model.load(safetensors_weights(folder, progress=False))
    return model, ServedModel(model)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": False},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    ],
)
def test_the_frozen_target_computes_what_the_server_computes(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "m", RAW | changes)
    model, served = served_target(folder)
    frozen = FrozenTarget(str(folder), model.config, AUX, torch.float32, CPU, 256)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (3, 20), generator=g)
    lengths = [20, 13, 7]
    features, hidden = frozen.run(ids)
    with torch.inference_mode():
        for row, length in enumerate(lengths):
            expected, aux = model.forward(served.batch(ids[row, :length].tolist(), 0), AUX)
            assert aux is not None
            torch.testing.assert_close(features[row, :length], aux, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(hidden[row, :length], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(frozen.logits(hidden[row, :length]), model.logits(expected), rtol=1e-4, atol=1e-4)


def test_the_exported_head_computes_in_the_server_what_it_computed_in_training(
    tmp_path: Path, model_folder: Path, target: FrozenTarget
) -> None:
    """For several bases: draft-extend over the text so far, then draft-decode passes fed with the head's own states."""
    head = make_head(target, feature_size=torch.rand(3 * WIDTH, generator=torch.Generator().manual_seed(8)) * 5 + 0.1)
    with torch.no_grad():
        g = torch.Generator().manual_seed(4)
        for name, parameter in head.named_parameters():
            parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=g) if parameter.dim() == 1 else parameter * 4)
            assert name
    head.export(tmp_path / "head", AUX, torch.float32)
    model, _ = served_target(model_folder)
    config = load_draft_config(tmp_path / "head", "EAGLE3", model.config)
    assert config.aux_layers == AUX
    served_head = LlamaForCausalLMEagle3(config, model)
    served_head.load(safetensors_weights(tmp_path / "head", progress=False))
    served = ServedModel(served_head)
    passes, length = 4, 17
    ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        features, _ = target.run(ids)
        unrolled = list(head.unroll(ids, features, passes))
        text = ids[0].tolist()
        for base in (0, 3, 9, length - passes - 1):
            state = served_head.forward(served.batch(text[1 : base + 2], 0, features[0, : base + 1]))[-1:]
            for i in range(passes):
                if i > 0:
                    state = served_head.forward(served.batch([text[base + i + 1]], base + i, state))
                torch.testing.assert_close(unrolled[i][0, base], state[0], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(head.logits(unrolled[i][0, base : base + 1]), served_head.logits(state), rtol=1e-4, atol=1e-3)


def test_the_exported_vocabulary_is_the_trained_one(tmp_path: Path, model_folder: Path, target: FrozenTarget) -> None:
    head = make_head(target)
    head.export(tmp_path / "head", AUX)
    model, _ = served_target(model_folder)
    served = LlamaForCausalLMEagle3(load_draft_config(tmp_path / "head", "EAGLE3", model.config), model)
    served.load(safetensors_weights(tmp_path / "head", progress=False))
    assert served.to_target is not None
    assert served.to_target.tolist() == head.vocabulary.tolist()
    tensors = load_file(next((tmp_path / "head").glob("*.safetensors")))
    assert torch.nonzero(tensors["t2d"]).flatten().tolist() == head.vocabulary.tolist()
    assert tensors["lm_head.weight"].dtype == torch.bfloat16


# ---- vocabulary


def talk(ids: Sequence[int], start: int, temperature: float = 0.0, prompt: str = "a", held_out: bool = False) -> Conversation:
    return Conversation(np.array(ids, dtype=np.int32), start, temperature, prompt, held_out)


def test_the_most_frequent_answer_tokens_are_picked_and_maps_are_inverse() -> None:
    conversations = [talk([9, 9, 9, 4, 4, 7], 3), talk([9, 7, 7, 2], 1)]
    counts = answer_counts(conversations, 12)
    assert counts.tolist() == [0, 0, 1, 0, 2, 0, 0, 3, 0, 0, 0, 0]
    ids = pick_vocabulary(counts, 3, always=[11])
    assert ids.tolist() == [4, 7, 11]
    assert coverage(counts, ids) == 5 / 6
    assert (draft_to_target(ids) + np.arange(3)).tolist() == ids.tolist()
    assert np.flatnonzero(target_in_draft(ids, 12)).tolist() == ids.tolist()
    assert pick_vocabulary(counts, 5).tolist() == [0, 1, 2, 4, 7]


# ---- loss


@pytest.mark.parametrize("chunk", [2, 5, 64])
def test_the_chunked_loss_and_its_gradients_are_those_of_the_definition(chunk: int) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(11, 8, generator=g, requires_grad=True)
    weight = torch.randn(6, 8, generator=g, requires_grad=True)
    scores = torch.randn(11, 20, generator=g) * 2
    vocabulary = torch.tensor([0, 3, 4, 9, 15, 19])
    to_draft = torch.full((20,), -1).scatter(0, vocabulary, torch.arange(6))
    hidden, head = torch.eye(11), scores[:, vocabulary].T
    lesson = Teacher(hidden, head, to_draft[scores.argmax(-1)])
    loss, guesses = cross_entropy(x * 1.5, weight, lesson, 0.25, torch.float32, chunk)
    (loss * 3).backward()
    mine = (x.grad, weight.grad)
    x.grad = weight.grad = None
    log_probs = ((x * 1.5) @ weight.T).log_softmax(-1)
    expected = torch.zeros(())
    for row in range(11):
        best = int(scores[row].argmax())
        if best in vocabulary.tolist():
            soft = scores[row][vocabulary].softmax(-1)
            expected = expected - 0.75 * (soft * log_probs[row]).sum() - 0.25 * log_probs[row, vocabulary.tolist().index(best)]
    (expected * 3).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine, (x.grad, weight.grad))
    assert guesses.tolist() == log_probs.argmax(-1).tolist()
    assert 0 < int((lesson.best < 0).sum()) < 11, "the case of a token that the draft cannot say must occur"


def test_what_the_draft_cannot_say_teaches_nothing() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    loss, _ = cross_entropy(x, torch.randn(5, 4), Teacher(torch.randn(3, 4), torch.randn(5, 4), torch.full((3,), -1)), 0.5, torch.float32)
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert not x.grad.any()


# ---- attention of later passes


@pytest.mark.parametrize("own", [1, 3])
def test_chain_attention_computes_the_definition_and_its_gradients(own: int) -> None:
    g = torch.Generator().manual_seed(own)
    q = torch.randn((2, 6, 21, 16), generator=g, requires_grad=True)
    tensors = [torch.randn((2, 3, 21, 16), generator=g, requires_grad=True) for _ in range(2 * own + 2)]
    pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
    wanted = torch.randn(q.shape, generator=g)
    found = []
    for attention in (definition, chain_attention):
        out = attention(q, pairs[0], pairs[1:])
        found.append([out, *torch.autograd.grad(out, [q, *tensors], wanted)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_attention_kernel_is_used_where_it_agrees(tmp_path: Path, target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_agrees(4, 2, 16, CPU, torch.float32)
    assert make_trainer(target, tmp_path, 2).head.midlayer.self_attn.later is chain_attention
    monkeypatch.setattr("eagle_training.chain_attention._flash_backward", lambda grad, q, k, v, *rest: (q, k, v))
    assert not kernel_agrees(4, 2, 16, CPU, torch.float32)


# ---- batches


def random_talks(count: int, seed: int = 0, longest: int = 60) -> list[Conversation]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        n = int(rng.integers(8, longest))
        found.append(talk(rng.integers(2, VOCAB, n).tolist(), int(rng.integers(2, n - 3)), prompt=f"p{i}"))
    return found


def test_an_epoch_holds_every_conversation_once_within_the_batch() -> None:
    conversations = random_talks(50)
    rows = join_rows(conversations, 128, 0.3, seed=1)
    assert sorted(c.prompt for row in rows for c in row) == sorted(c.prompt for c in conversations)
    assert any(len(row) > 1 for row in rows)
    lengths = row_lengths(rows, 128)
    batches = epoch_batches(lengths, 512, seed=1, epoch=0)
    assert sorted(number for batch in batches for number in batch) == list(range(len(rows)))
    assert all(make_batch([rows[number] for number in batch], 128).ids.numel() <= 512 for batch in batches)
    assert epoch_batches(lengths, 512, seed=1, epoch=0) == batches
    assert epoch_batches(lengths, 512, seed=1, epoch=1) != batches


def test_depth_counts_answer_tokens_seen_where_one_more_follows() -> None:
    batch = make_batch([[talk([10, 11, 12, 13, 14], 2), talk([20, 21, 22], 1)], [talk([30, 31, 32], 2)]], 7)
    assert batch.ids[0, :7].tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert batch.depth[0, :7].tolist() == [-1, -1, 0, 1, -1, -1, -1]
    assert not (batch.depth[1] >= 0).any()
    assert batch.ids.shape[1] % 32 == 0
    assert batch.tokens == 10


# ---- acceptance


def slow_walk(guesses: list[list[int]], text: list[int], start: int) -> list[int]:
    """Serve one greedy answer: `guesses[i][b]` is what pass `i` says at base `b`; windows follow one another to the text's end."""
    lens, committed = [], start + 1  # the first answer token comes from the prompt pass
    while committed < len(text):
        base = committed - 2
        accepted = 0
        for i in range(len(guesses)):
            if committed + accepted < len(text) and guesses[i][base] == text[committed + accepted]:
                accepted += 1
            else:
                break
        lens.append(accepted + 1)
        committed += accepted + 1
    return lens


@pytest.mark.parametrize("seed", range(10))
def test_the_estimate_walks_as_the_server_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 2, 30).tolist()
    guesses = rng.integers(0, 2, (3, 30)).tolist()
    hits = np.array([[b + i + 2 < 30 and guesses[i][b] == text[b + i + 2] for b in range(30)] for i in range(3)])
    start = int(rng.integers(1, 27))
    assert walk(hits, start - 1, 30) == slow_walk(guesses, text, start)


def test_drafts_are_counted_from_what_the_engine_reports() -> None:
    meta = {"spec_verify_ct": 10, "spec_accepted_by_position": [7, 4, 1], "completion_tokens": 23}
    counters = count_drafts([{"meta_info": meta}, {"meta_info": {"completion_tokens": 1}}], 3)
    assert counters.mean_accept_len == pytest.approx(1 + 12 / 10)
    assert counters.rates() == pytest.approx([0.7, 4 / 7, 0.25])


# ---- training


def greedy_talks(target: FrozenTarget, count: int) -> list[Conversation]:
    """What the tiny target says after random prompts."""
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(2, VOCAB, (count, 4), generator=g)
    for _ in range(24):
        _, hidden = target.run(ids)
        ids = torch.cat([ids, target.logits(hidden[:, -1]).argmax(-1, keepdim=True)], 1)
    return [talk(row, 4, prompt=str(i)) for i, row in enumerate(ids.tolist())]


def make_trainer(target: FrozenTarget, folder: Path, steps: int, seed: int = 0, max_length: int = 64) -> Trainer:
    talks = greedy_talks(target, 24)
    course = Course(
        seed=seed,
        steps=steps,
        seconds=0.0,
        passes=3,
        learning_rate=3e-3,
        batch_tokens=256,
        max_length=max_length,
        log_steps=2,
        checks=2,
        hard_share=1.0,
    )
    return Trainer(make_head(target, talks=talks), target, talks[4:], talks[:4], course, folder)


def test_rows_too_short_for_any_answer_are_refused(tmp_path: Path, target: FrozenTarget) -> None:
    make_trainer(target, tmp_path, 1, max_length=6).run(lambda: None)
    with pytest.raises(SystemExit, match="--max-length 5 cuts off all answers of the training text; raise it"):
        make_trainer(target, tmp_path, 1, max_length=5)


def test_the_loss_falls_and_acceptance_rises(tmp_path: Path, target: FrozenTarget) -> None:
    trainer = make_trainer(target, tmp_path, 60)
    talks = [c for row in trainer._rows for c in row]
    batch = make_batch([[c] for c in talks], 64)
    seen = see(target, batch)

    def now() -> tuple[float, float]:
        with torch.no_grad():
            loss, _ = trainer._loss(batch, seen)
        return loss.item(), estimate(trainer.head, target, talks, 3, 512, torch.float32).mean_accept_len

    loss, accept_len = now()
    trainer.run()
    assert now()[0] < 0.7 * loss
    assert now()[1] > accept_len + 0.3
    figures = json.loads((tmp_path / "training.json").read_text())
    assert figures["checks"][-1]["step"] == figures["history"][-1]["step"] == 60


def test_calibration_lowers_the_first_loss_and_takes_no_batch(tmp_path: Path, target: FrozenTarget) -> None:
    trainer, fresh = make_trainer(target, tmp_path, 60), make_trainer(target, tmp_path, 60)
    with torch.no_grad():
        trainer.head.norm.weight.mul_(30.0)
        batch = next(fresh._batches())
        before = trainer._loss(batch, see(target, batch))[0].item()
        trainer.calibrate()
        assert trainer._loss(batch, see(target, batch))[0].item() < before
    assert torch.equal(next(trainer._batches()).ids, batch.ids)


def test_the_targets_states_are_computed_once(tmp_path: Path, target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(target, tmp_path, 60)
    first = [(batch, trainer.seen.get(batch)) for batch, _ in zip(trainer._batches(), range(4), strict=False)]
    monkeypatch.setattr(target, "run", lambda ids: pytest.fail("the states must come from memory"))
    for batch, seen in first:
        again, inside = trainer.seen.get(batch), batch.depth >= 0
        for name in ("features", "hidden", "best"):
            assert torch.equal(getattr(again, name)[inside], getattr(seen, name)[inside]), name


def test_a_head_continues_from_a_narrower_one_with_another_vocabulary(tmp_path: Path, target: FrozenTarget) -> None:
    size = torch.rand(3 * WIDTH, generator=torch.Generator().manual_seed(8)) + 0.5
    old = make_head(target, feature_size=size)
    old.export(tmp_path, AUX, torch.float32)
    vocabulary = np.sort(np.concatenate([old.vocabulary[5:], np.setdiff1d(np.arange(VOCAB), old.vocabulary)[:5]]))
    new = EagleHead(head_config(target.config, 96, 40), target.embed, vocabulary, torch.ones(3 * WIDTH))
    new.init_weights(target.model.lm_head.weight, target.model.final_norm.weight, torch.Generator().manual_seed(5))
    new.continue_from(tmp_path, target.model.lm_head.weight)
    ids = torch.randint(0, VOCAB, (2, 15), generator=torch.Generator().manual_seed(5))
    features, _ = target.run(ids)
    shared = np.intersect1d(old.vocabulary, vocabulary)
    for mine, theirs in zip(new.unroll(ids, features, 2), old.unroll(ids, features, 2), strict=True):
        torch.testing.assert_close(mine[:, :10], theirs[:, :10], rtol=1e-4, atol=1e-4)
        columns = [torch.from_numpy(np.searchsorted(head.vocabulary, shared)) for head in (new, old)]
        torch.testing.assert_close(
            new.logits(mine[:, :10])[..., columns[0]], old.logits(theirs[:, :10])[..., columns[1]], rtol=1e-3, atol=1e-3
        )


def test_a_wider_head_and_wrong_values_are_refused(tmp_path: Path, target: FrozenTarget) -> None:
    make_head(target).export(tmp_path, AUX, torch.float32)
    narrow = EagleHead(head_config(target.config, 64, 40), target.embed, make_head(target).vocabulary, torch.ones(3 * WIDTH))
    with pytest.raises(SystemExit, match=r"midlayer\.mlp\.\w+\.weight \[80, 64\] does not fit"):
        narrow.continue_from(tmp_path, target.model.lm_head.weight)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--initial-head", "nowhere"], "no model.safetensors"),
        (["--initial-head", "x" * 300], "no model.safetensors"),
        (["--engines", "0"], "--engines is 0; it must be at least 1"),
        (["--passes", "0"], "--passes is 0; it must be at least 1"),
        (["--joined-share", "1.5"], "--joined-share is 1.5; it must be between 0 and 1"),
        (["--learning-rate", "nan"], "--learning-rate is nan; it must be a positive number"),
        (["--shapes", "3/1"], "--shapes 3/1: it must list steps/topk/draft tokens"),
        (["--shapes", "0/1/4"], "--speculative-num-steps must be between 1 and 63; got 0"),
        (["--aux-layers", "2", "1", "0"], "--aux-layers: EAGLE-3 needs three different layers of its target, ascending"),
        (["--aux-layers", "0", "1", "99"], r"got \[0, 1, 99\] of 4"),
        (["--output", "/proc/head"], "--output /proc/head cannot be written: no such file or directory"),
    ],
)
def test_what_no_run_can_use_is_refused_at_once(tmp_path: Path, model_folder: Path, flags: list[str], why: str) -> None:
    write_small_tokenizer(model_folder)
    with pytest.raises(SystemExit, match=why):
        train_eagle.main(["--model-path", str(model_folder), "--output", str(tmp_path / "head"), "--device", "cpu", *flags])
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--output", "h", "--engines", "0"], "train_eagle: --engines is 0; it must be at least 1"),
        (["--output", "h", "--engines", "two"], "train_eagle: argument --engines: invalid int value: 'two'; --help lists all options"),
        ([], "train_eagle: the following arguments are required: --output; --help lists all options"),
        (
            ["--output", "h", "--model-path", "nowhere"],
            "train_eagle: --model-path 'nowhere' is neither a folder, a .gguf file, nor a hub id",
        ),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_eagle.command(flags) == 2
    told = capsys.readouterr().err
    assert told.startswith(line)
    assert told.count("\n") == 1


def test_ctrl_c_ends_a_training_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_eagle, "main", interrupted)
    assert train_eagle.command([]) == 130
    assert capsys.readouterr().err == "train_eagle: interrupted; the same command continues\n"


def test_layers_that_a_head_cannot_name_are_refused(tmp_path: Path) -> None:
    Checkpoint("deepseek-experts", tmp_path)
    write_small_tokenizer(tmp_path)
    with pytest.raises(SystemExit, match="--aux-layers 1 2 3: the first must be 2 for a target of class DeepseekV3ForCausalLM"):
        train_eagle.main(["--model-path", str(tmp_path), "--output", str(tmp_path / "head"), "--aux-layers", "1", "2", "3"])


@pytest.mark.parametrize(
    ("flag", "note", "why"),
    [
        ("--output", {"model": "another"}, "was made for model another, not target"),
        ("--work", {"model": "another"}, "was made for model another, not target"),
        ("--work", {"model": "target", "aux_layers": [0, 1, 2]}, r"was made for aux_layers \[0, 1, 2\], not \[1, 2, 3\]"),
    ],
)
def test_a_folder_of_another_model_or_of_other_layers_is_refused(tmp_path: Path, flag: str, note: dict[str, Any], why: str) -> None:
    Checkpoint("qwen3", tmp_path / "target")
    write_small_tokenizer(tmp_path / "target")
    folders = {"--output": tmp_path / "head", "--work": tmp_path / "data"}
    folders[flag].mkdir()
    (folders[flag] / "run.json").write_text(json.dumps(note))
    flags = [part for name, folder in folders.items() for part in (name, str(folder))]
    with pytest.raises(SystemExit, match=f"{flag} .* {why}"):
        train_eagle.main(["--model-path", str(tmp_path / "target"), *flags, "--phases", "train"])


def test_a_run_that_was_cut_off_ends_with_the_same_weights(tmp_path: Path, target: FrozenTarget) -> None:
    whole = make_trainer(target, tmp_path / "whole", 12)
    whole.run()
    first = make_trainer(target, tmp_path / "cut", 12)
    first.course = dataclasses.replace(first.course)
    for batch in first._batches():
        first.learn(batch)
        first.progress.step += 1
        if first.progress.step == 7:
            break
    first.save()
    second = make_trainer(target, tmp_path / "cut", 12)
    assert second.resume()
    assert second.progress.step == 7
    second.run()
    for name, parameter in whole.head.named_parameters():
        assert torch.equal(parameter, dict(second.head.named_parameters())[name]), name


def test_a_state_with_another_vocabulary_is_refused(tmp_path: Path, target: FrozenTarget) -> None:
    first = make_trainer(target, tmp_path, 1)
    first.save()
    second = make_trainer(target, tmp_path, 1)
    second.head.vocabulary = np.roll(second.head.vocabulary, 1)
    with pytest.raises(SystemExit, match=r"training\.pt is the state of a head of another size or vocabulary"):
        second.resume()


def test_a_state_of_another_size_is_refused(tmp_path: Path, target: FrozenTarget) -> None:
    make_trainer(target, tmp_path, 1).save()
    other = make_trainer(target, tmp_path, 1)
    other.head.norm = torch.nn.LayerNorm(3)
    with pytest.raises(SystemExit, match="another size"):
        other.resume()


@pytest.mark.parametrize("kept", [0, 300])
def test_damaged_files_are_named(tmp_path: Path, target: FrozenTarget, kept: int) -> None:
    """A run continues from these, so what is left of one after a full disk must not end in a traceback."""

    def damage(file: Path) -> str:
        file.write_bytes(file.read_bytes()[:kept])
        return f"{file.name} "

    trainer, shards, prompts = make_trainer(target, tmp_path, 1), ShardFolder(tmp_path / "data"), tmp_path / "prompts.jsonl"
    trainer.save()
    with pytest.raises(SystemExit, match=damage(tmp_path / "training.pt") + "is damaged"):
        trainer.resume()
    shards.save(0, [Conversation(np.arange(900, dtype=np.int32), 3, 0.0, "", False)])
    with pytest.raises(ConfigError, match=damage(shards.files()[0]) + "is damaged"):
        shards.load()
    shards.put_note(made="x" * 400)
    with pytest.raises(ConfigError, match=damage(shards.folder / "data.json") + "cannot be read: it is not valid JSON"):
        shards.put_note(seconds=1.0)
    Notes(tmp_path).put("note", "x" * 400)
    with pytest.raises(ConfigError, match=damage(tmp_path / "run.json") + "cannot be read: it is not valid JSON"):
        Notes(tmp_path)
    prompts.write_text(json.dumps({"kind": "a", "prompt": "x" * 400, "held_out": True}))
    with pytest.raises(SystemExit, match=damage(prompts) + ("is damaged" if kept else "is empty")):
        read_prompts("held-out", prompts)


def test_a_finished_run_is_not_checked_again(tmp_path: Path, target: FrozenTarget) -> None:
    make_trainer(target, tmp_path, 3).run()
    again = make_trainer(target, tmp_path, 3)
    assert again.resume()
    again.run()
    steps = [check["step"] for check in again.progress.checks]
    assert steps == sorted(set(steps))


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [rate_at(done / 100, 0.1) for done in range(101)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.02)


# ---- the card


def measured_head(folder: Path, seed: int, length: float) -> Path:
    """What a trained and measured head's folder holds, figures alone."""
    folder.mkdir()
    machine = {"device": "a GPU", "packages": {"torch": "2.11.0"}}
    made = {
        "seed": seed,
        "command": f"python scripts/train_eagle.py --output /data/h --seed {seed}",
        "commit": f"c{seed}",
        "machine": machine,
    }
    head = {"hidden_size": 8, "intermediate_size": 8, "draft_vocab_size": 4, "vocab_size": 8, "aux_layers": [1, 2, 3],
            "parameters": 100, "megabytes": 1.0}  # fmt: skip
    training = made | {"steps": 10, "tokens": 1000, "seconds": 60.0, "settings": {"passes": 5}}
    (folder / "run.json").write_text(json.dumps({"model": "m", "training": training, "head": head}))
    row = {"device": "cuda", "dtype": "bfloat16", "shape": "3/1/4", "new_tokens": 256, "set": "held-out", "prompts": 256, "tokens": 9000,
           "accept_length": length, "rates": [0.7], "looping_answers": 0, "accept_length_without_loops": length,
           "accept_length_by_kind": {"held-out": length}}  # fmt: skip
    (folder / "evaluation.json").write_text(json.dumps([row, row | {"shape": f"{seed}/1/{seed + 1}"}]))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_another_seeds_figures_stand_beside_the_heads_own_where_measured_alike(tmp_path: Path) -> None:
    own, other = measured_head(tmp_path / "own", 0, 2.604), measured_head(tmp_path / "other", 1, 2.551)
    for _ in range(2):  # again: in place of the row, not beside it
        train_eagle.main(["--output", str(own), "--phases", "compare", "--other-seed", str(other)])
    card = (own / "README.md").read_text()
    header, rule, *lines = card.split("## Other seeds\n\n")[1].split("\n\n")[1].splitlines()
    assert header.count("|") == rule.count("|") == 8
    assert lines == ["| 3/1/4 | held-out | cuda bfloat16 | 2.604 | 1 | 2.551 | -0.053 |"], "0/1/1 was measured of one head alone"
    assert "python scripts/train_eagle.py --output h --seed 1" in card
    assert not (other / "README.md").exists()


def test_heads_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    own, same = measured_head(tmp_path / "own", 0, 2.6), measured_head(tmp_path / "same", 0, 2.5)
    for other, why in ((same, "both heads were trained with seed 0"), (tmp_path / "none", "no run.json and no evaluation.json")):
        with pytest.raises(SystemExit, match=why):
            train_eagle.main(["--output", str(own), "--phases", "compare", "--other-seed", str(other)])
    for flags in (["--phases", "compare"], ["--other-seed", str(same)], ["--phases", "train,compare"]):
        with pytest.raises(SystemExit, match="compare"):
            train_eagle.main(["--output", str(own), *flags])


# ---- data


def test_loops_are_found_and_cut() -> None:
    rng = np.random.default_rng(0)
    head = rng.integers(0, 1000, 50).tolist()
    assert loop_period(head) == (0, 0)
    assert loop_period([*head, *[5] * 60])[0] == 1
    turn = [7, 8, 9, 10, 11]
    looping = np.array([*head, *turn * 20], dtype=np.int32)
    period, repeated = loop_period(looping)
    assert period == 5
    assert repeated >= 100
    cut = cut_loop(looping)
    assert cut.tolist() == looping[: len(cut)].tolist()
    assert 50 + 5 <= len(cut) <= 50 + 15
    assert loop_period([*head, *turn * 3]) == (0, 0), "three short turns are no loop yet"


def test_shards_keep_every_field(tmp_path: Path) -> None:
    shards = ShardFolder(tmp_path)
    shards.save(0, [talk([1, 2, 3], 1, 0.5, "Grüße 'x'", True)])
    shards.save(4, [])
    shards.save(2, [talk([4], 0), talk([5, 6], 1)])
    assert shards.next_number() == 5
    assert [(c.ids.tolist(), c.answer_start, c.temperature, c.prompt, c.held_out) for c in shards.load()] == [
        ([1, 2, 3], 1, 0.5, "Grüße 'x'", True), ([4], 0, 0.0, "a", False), ([5, 6], 1, 0.0, "a", False),
    ]  # fmt: skip


class ParrotEngine:
    """An engine whose answers depend on the prompt alone; users' turns come twice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.prompts: list[list[int]] = []
        self._lock = threading.Lock()
        self._turns = 0

    def generate(self, prompt: Any = None, sampling_params: Any = None, *, input_ids: Any = None) -> Any:
        many = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(input_ids)
        return [self._one(ids, sampling) for ids, sampling in zip(input_ids, many, strict=True)]

    def _one(self, ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.prompts.append(ids)
            self._turns += 1
            number = self._turns // 2
        if "top_p" in sampling:
            text = f" tell me of the number {number}"
        else:
            text = f"the answer {sum(ids) % 97} at {sampling['temperature']} is long enough"
        return {"text": text, "output_ids": self._tokenizer.encode_plain(text)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_small_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_the_users_prefix_ends_where_the_users_words_begin(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode_chat([{"role": "user", "content": "Hello there"}])
    prefix = user_prefix(tokenizer)
    assert whole[: len(prefix)] == prefix
    assert tokenizer.decode(whole[len(prefix) :]).startswith("Hello there")


def test_prompts_are_new_and_held_out_ones_stay_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    amount = Amount(seed=1, seconds=60.0, tokens=2500, held_out=5, round_size=12, workers=2)
    shards = ShardFolder(tmp_path)
    synthesize(ParrotEngine(tokenizer), tokenizer, amount, shards)
    made = shards.load()
    held_out, train = [c for c in made if c.held_out], [c for c in made if not c.held_out]
    assert len(held_out) == 5
    assert all(c.temperature == 0.0 for c in held_out)
    assert not {c.prompt for c in held_out} & {c.prompt for c in train}
    assert {round(c.temperature, 3) for c in train} >= {0.0, 0.2, 1.0}
    assert sum(c.answer_tokens for c in train) >= 2500
    for c in held_out:
        assert c.ids[: c.answer_start].tolist() == tokenizer.encode_chat([{"role": "user", "content": c.prompt}])
    firsts, again = [c for c in train if c.prompt.strip() in tokenizer.decode(c.ids[: c.answer_start].tolist())], []
    for c in firsts:
        text = tokenizer.decode(c.ids[: c.answer_start].tolist())
        again += [c] if "the answer" in text.split(c.prompt.strip())[-1] else []
    assert 0 < len(again) < len(firsts) / 2, "some conversations have a second turn, after the first answer"
    singles = [c.prompt for c in firsts if not any(c is one for one in again)]
    assert len(singles) == len(set(singles))
    assert enough(shards, amount)
    assert not enough(shards, dataclasses.replace(amount, tokens=10**6))


def test_ctrl_c_does_not_wait_for_the_rounds_that_are_open(tmp_path: Path, tokenizer: Tokenizer) -> None:
    interrupted, shut_down, ended = threading.Event(), threading.Event(), threading.Event()

    class Engine(ParrotEngine):
        def generate(self, *given: Any, **named: Any) -> Any:
            if not interrupted.is_set():
                interrupted.set()
                raise KeyboardInterrupt
            shut_down.wait(30.0)
            ended.set()
            raise ServingError("The engine was shut down.")

    amount = Amount(seed=1, seconds=60.0, tokens=100, held_out=3, round_size=8, workers=2)
    with pytest.raises(KeyboardInterrupt):
        synthesize(Engine(tokenizer), tokenizer, amount, ShardFolder(tmp_path))
    assert not ended.is_set()
    shut_down.set()


def test_synthesis_goes_on_where_it_was_cut_off(tmp_path: Path, tokenizer: Tokenizer) -> None:
    shards = ShardFolder(tmp_path)
    amount = Amount(seed=1, seconds=60.0, tokens=1, held_out=100, round_size=8, workers=1)
    engine = ParrotEngine(tokenizer)
    synthesize(engine, tokenizer, dataclasses.replace(amount, held_out=3), shards)
    first = {c.prompt for c in shards.load()}
    seconds = shards.note["seconds"]
    synthesize(engine, tokenizer, dataclasses.replace(amount, tokens=2000, held_out=3), shards)
    later = shards.load()
    assert len({c.prompt for c in later}) > len(first)
    assert sum(c.held_out for c in later) == 3
    assert shards.note["seconds"] > seconds
    maker = Synthesizer(engine, tokenizer, amount, later)
    assert all(maker._claim(prompt, True) == "known" for prompt in first)


def test_turns_are_of_many_kinds_and_of_none_that_is_held_out() -> None:
    kinds, rng = PromptKinds(), np.random.default_rng(0)
    turns = [kinds.draw(rng, ["The river was high."]) for _ in range(4000)]
    prompts = [turn.prompt for turn in turns]
    assert len(set(prompts)) > 3200
    assert len(kinds.names) >= 12
    assert any("The river was high." in prompt for prompt in prompts)
    assert not any("{own}" in prompt or "{thing" in prompt for prompt in prompts)
    assert not any(map(is_held_out_kind, prompts))
    assert 0.15 < np.mean([turn.system is not None for turn in turns]) < 0.35
    assert 0.2 < np.mean([turn.follow_up is not None for turn in turns]) < 0.4
    assert kinds.draw(np.random.default_rng(3)) == kinds.draw(np.random.default_rng(3))


def test_held_out_kinds_are_recognised_and_have_no_templates() -> None:
    rows = [json.loads(line) for line in EVERYDAY.read_text(encoding="utf-8").splitlines()]
    unseen = {row["kind"] for row in rows if row["held_out"]}
    assert len(unseen) >= 6
    assert not unseen & set(PromptKinds().names)
    assert {row["kind"] for row in rows if not row["held_out"]} <= set(PromptKinds().names)
    for kind in unseen:
        assert sum(row["kind"] == kind for row in rows) == 16
        assert any(is_held_out_kind(row["prompt"]) for row in rows if row["kind"] == kind), kind
    recognised = sum(is_held_out_kind(row["prompt"]) for row in rows if row["held_out"])
    guide = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
    assert f"{recognised} of their {sum(row['held_out'] for row in rows)} everyday prompts" in guide


def test_a_turn_becomes_a_chat_with_its_system_prompt_and_follow_up() -> None:
    turn = Turn("Hi", "Be kind.", "Why?")
    assert [(m["role"], m["content"]) for m in turn.messages("Hello.")] == [
        ("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Why?"),
    ]  # fmt: skip
    assert turn.messages() == turn.messages("Hello.")[:2]


@pytest.mark.parametrize(("text", "kept"), [("One. Two. Thr", "One. Two."), ("No end", "No end"), ("  A b c. ", "A b c.")])
def test_own_texts_end_with_a_sentence(text: str, kept: str) -> None:
    assert own_text(text) == kept
