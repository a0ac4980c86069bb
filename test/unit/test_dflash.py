"""The DFlash draft proposes what its published definition proposes (arXiv:2602.06036), in blocks behind the target's states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from runtime.batch import ForwardMode
from runtime.config.flag_parser import parse
from runtime.config.runtime_config import SpeculativeConfig
from runtime.config.server_args import ServerArgs
from runtime.config.speculative import AUTO_DEPTHS, with_block_size
from runtime.entrypoints.prepare import prepare
from runtime.errors import ConfigError
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.build import build_worker
from runtime.model_executor.context import BuildOptions
from runtime.model_executor.draft_window import DraftWindow
from runtime.model_executor.drift_alarm import Pairs
from runtime.model_executor.weight_loader import dummy_weights
from runtime.models.config import FullAttention, RopeScaling
from runtime.models.decoder import DecoderModel
from runtime.models.dflash_config import read_block_size
from runtime.models.draft_config import load_draft_config
from runtime.models.registry import build_model
from runtime.speculative.registry import make_drafter
from unit.driver import Driver, EveryNth
from unit.predicting import draft_folder, plain, speculating
from unit.small_tokenizer import write_small_tokenizer
from unit.test_eagle_worker import copy_of, watch_drafts
from unit.test_models import Runner
from unit.tiny import tiny_model, tiny_runtime, tiny_speculative

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK, MASK, VOCAB = 64, 4, 2, 16, 2, 8, 90, 96
PROMPTS = {row: np.random.default_rng(row).integers(0, VOCAB, 7 + 6 * row).tolist() for row in (1, 2, 3)}
Tensors = dict[str, torch.Tensor]


def draft_json(own: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 80,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "max_position_embeddings": 32, "hidden_act": "silu", "torch_dtype": "float32",
        "block_size": BLOCK, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1], **(own or {})}, **changes,
    }  # fmt: skip


def weights(bias: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for i in range(LAYERS):
        layer = f"layers.{i}."
        rows = {"q": (q, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, q)}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (80, HIDDEN) for name in ("gate", "up")} | {
            f"{layer}mlp.down_proj.weight": (HIDDEN, 80)
        }
        shapes |= {f"{layer}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        if bias:
            shapes |= {f"{layer}self_attn.{name}_proj.bias": shape[:1] for name, shape in rows.items()}
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0) for name, shape in sorted(shapes.items())
    }


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] by the angle of each position."""
    angles = torch.outer(positions.float(), 5000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))[:, None]
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


def block_logits(w: Tensors, raw: dict[str, Any], embeds: torch.Tensor, states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """By definition: a block of noise attends to the projected states of the target and to itself. -> [block, vocab].

    Args:
        embeds: [block, hidden], of the last token and of masks.
        states: [context, 2 * hidden], of the target.
    """
    context = norm(states @ w["fc.weight"].T, w["hidden_norm.weight"])
    block, length = len(embeds), len(context) + len(embeds)
    positions = torch.arange(length)
    h = embeds
    for i in range(LAYERS):
        own = {name.removeprefix(f"layers.{i}."): tensor for name, tensor in w.items()}

        def project(x: torch.Tensor, name: str, own: Tensors = own) -> torch.Tensor:
            return F.linear(x, own[f"self_attn.{name}_proj.weight"], own.get(f"self_attn.{name}_proj.bias"))

        x = norm(h, own["input_layernorm.weight"])
        both = torch.cat([context, x])
        q = rotated(norm(project(x, "q").view(block, -1, HEAD_DIM), own["self_attn.q_norm.weight"]), positions[-block:])
        k = rotated(norm(project(both, "k").view(length, -1, HEAD_DIM), own["self_attn.k_norm.weight"]), positions)
        v = project(both, "v").view(length, -1, HEAD_DIM)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        sliding = raw.get("layer_types", ["full_attention"] * LAYERS)[i] == "sliding_attention"
        distance = positions[-block:, None] - positions
        seen = torch.ones_like(distance, dtype=torch.bool)
        if raw.get("is_causal", sliding):
            seen &= distance >= 0
        if sliding:
            seen &= distance < raw["sliding_window"]
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)
        h = h + project(attended, "o")
        x = norm(h, own["post_attention_layernorm.weight"])
        h = h + (F.silu(x @ own["mlp.gate_proj.weight"].T) * (x @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return norm(h, w["norm.weight"]) @ head.T


def fresh_target() -> DecoderModel:
    """A copy of the worker's target."""
    model = build_model(tiny_model(), TorchOps(), torch.float32, torch.device("cpu"))
    model.load(dummy_weights(model.expected_weights(), torch.float32, torch.device("cpu"), seed=0))
    return model


def saved_draft(folder: Path, raw: dict[str, Any], tensors: Tensors) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full attention": ({}, {}),
    "a causal layer with a window": ({}, SLIDING),
    "a window and no causal layer": ({}, {**SLIDING, "is_causal": False}),
    "biases and scaled embeddings": ({"input_embedding_scale": 8.0}, {"attention_bias": True}),
}


PASSES = pytest.mark.parametrize(("page", "chunk", "steps", "replay"), [(1, 1 << 30, 7, None), (16, 5, 7, "eager"), (64, 5, 3, None)])


@pytest.mark.parametrize("variant", VARIANTS)
@PASSES
def test_a_block_is_what_the_definition_proposes(tmp_path: Path, variant: str, page: int, chunk: int, steps: int, replay: Any) -> None:
    own, changes = VARIANTS[variant]
    raw, tensors = draft_json(own, **changes), weights(bool(changes.get("attention_bias")))
    folder = saved_draft(tmp_path, raw, tensors)
    check_blocks(folder, raw, tensors, page, chunk, steps, replay, scale=own.get("input_embedding_scale", 1.0))


def of_speculators(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same draft as speculators publish it."""
    own = {"block_size", "dflash_config", "architectures", "model_type"}
    layer = {"model_type": "qwen3", **{name: value for name, value in raw.items() if name not in own}}
    return {
        "architectures": ["DFlashSpeculator"], "model_type": "speculators", "speculators_model_type": "dflash",
        "block_size": BLOCK, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [1, 2], "projector_type": "dflash",
        "sample_from_anchor": False, "draft_vocab_size": VOCAB, "transformer_layer_config": layer, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "causal"), [({}, False), ({"sliding_window_non_causal": False}, True), ({"sliding_window_non_causal": True}, False)]
)
@PASSES
def test_a_draft_of_speculators_with_its_own_vocabulary(
    tmp_path: Path, changes: dict[str, Any], causal: bool, page: int, chunk: int, steps: int, replay: Any
) -> None:
    raw, tensors = draft_json(**SLIDING, **({} if causal else {"is_causal": False})), weights()
    picks = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:40].sort().values
    head = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(6))
    extra = {"lm_head.weight": head, "d2t": picks - torch.arange(40), "t2d": torch.zeros(VOCAB, dtype=torch.bool).scatter(0, picks, True)}
    saved = of_speculators(draft_json(**SLIDING), draft_vocab_size=40, **changes)
    check_blocks(saved_draft(tmp_path, saved, tensors | extra), raw, tensors, page, chunk, steps, replay, head=head, to_target=picks)


def test_a_draft_of_speculators_may_ship_the_matrices_that_it_shares(tmp_path: Path) -> None:
    tensors, target = weights(), fresh_target()
    copies = {"embed_tokens.weight": target.embed.clone(), "lm_head.weight": target.lm_head.weight.clone()}
    saved = saved_draft(tmp_path, of_speculators(draft_json()), tensors | copies)
    check_blocks(saved, draft_json(), tensors, 16, 5, 7, None)


def test_greedy_text_with_a_draft_of_speculators_is_the_targets(tmp_path: Path) -> None:
    changes = of_speculators({}, draft_vocab_size=40, aux_hidden_state_layer_ids=[0, 1])
    driver = Driver(speculating(tmp_path, "DFLASH", num_steps=7, head={**changes, "transformer_layer_config": {"model_type": "qwen3"}}))
    assert driver.generate(PROMPTS, 24) == Driver(plain()).generate(PROMPTS, 24)


def check_blocks(
    folder: str,
    raw: dict[str, Any],
    tensors: Tensors,
    page: int,
    chunk: int,
    steps: int,
    replay: Any,
    scale: float = 1.0,
    head: torch.Tensor | None = None,
    to_target: torch.Tensor | None = None,
) -> None:
    """The draft in `folder` fills blocks like the definition of `raw`, whose LM head scores the tokens `to_target`."""
    spec = tiny_speculative(folder, algorithm="DFLASH", draft_load_format="auto", num_steps=steps, num_draft_tokens=steps + 1)
    options = BuildOptions(replay, [2, 4] if replay else None)
    worker = build_worker(tiny_runtime(spec, page_size=page), tiny_model(), make_drafter, options)
    made: list[DraftWindow] = []
    watch_drafts(worker, lambda draft: made.append(copy_of(draft)))
    driver, target = Driver(worker), fresh_target()
    driver.prefill(PROMPTS, chunk=chunk)
    for _ in range(4):
        before = {row: (driver.kv[row], PROMPTS[row] + driver.out[row]) for row in PROMPTS}
        driver.decode(list(PROMPTS))
        for i, (kv_len, text) in enumerate(before.values()):
            states = Runner(target, 16).hidden(torch.tensor(text[:kv_len]), 0, ForwardMode.EXTEND, aux=(1, 2))[1]
            assert states is not None
            embeds = target.embed[torch.tensor([text[kv_len], *[MASK] * steps])] * scale
            expected = block_logits(tensors, raw, embeds, states, target.lm_head.weight if head is None else head)[1:].argmax(-1)
            expected = expected if to_target is None else to_target[expected]
            assert made[-1].tokens[i].tolist() == [text[kv_len], *expected.tolist()]


def test_drafts_of_a_sampled_request_are_the_likeliest_and_keep_its_seed(tmp_path: Path) -> None:
    from runtime.sampling_params import SamplingParams

    warm = SamplingParams(temperature=0.9, max_new_tokens=1 << 20)
    expected = Driver(plain(), seed=1).generate(PROMPTS, 20, sampling=warm)
    driver = Driver(speculating(tmp_path, "DFLASH", num_steps=7), seed=1)
    assert driver.generate(PROMPTS, 20, sampling=warm) == expected


GEMMA = tiny_model(
    architecture="Gemma4ForCausalLM", vocab_size=97, window=(11, 11, -1), qk_norm=True, v_norm=True, attn_scale=1.0, embed_scale=8.0,
    final_softcap=30.0, full_attention=FullAttention(
        num_kv_heads=1, head_dim=32, rope_theta=1e6, rope_scaling=RopeScaling("proportional", 1.0, rotated=0.25), shared_kv=True
    ),
)  # fmt: skip


@pytest.mark.parametrize(("page", "chunk", "replay"), [(1, 1 << 30, None), (16, 5, "eager"), (64, 5, "eager")])
@pytest.mark.parametrize("algorithm", ["DFLASH", "NGRAM"])
def test_a_target_with_mixed_heads_gives_the_text_of_plain_decoding(
    tmp_path: Path, algorithm: str, page: int, chunk: int, replay: Any
) -> None:
    sizes = [2, 4] if replay else None
    expected = Driver(plain(model=GEMMA)).generate(PROMPTS, 24)
    driver = Driver(speculating(tmp_path, algorithm, replay, sizes, model=GEMMA, runtime={"page_size": page}, num_steps=5))
    assert driver.generate(PROMPTS, 24, chunk=chunk) == expected


@pytest.mark.parametrize(
    ("own", "changes", "message"),
    [
        ({"target_layer_ids": []}, {}, "target_layer_ids must name layers of the target"),
        ({"target_layer_ids": [1, 0]}, {}, "ascending"),
        ({"target_layer_ids": "all"}, {}, "target_layer_ids is 'all'; it must be the number of a layer or a list of them"),
        ({"target_layer_ids": [0, 2]}, {}, "below its last of 3"),
        ({"mask_token_id": None}, {}, "mask_token_id must be a token id below 96"),
        ({"mask_token_id": 96}, {}, "mask_token_id must be a token id below 96"),
        ({}, {"is_causal": "false"}, "is_causal is 'false'; it must be true or false"),
        ({}, {"sliding_window_non_causal": 1}, "sliding_window_non_causal is 1; it must be true or false"),
        ({"selector_rank": 8}, {}, "selector_rank is given: drafts of DFlash 2 are not supported"),
        ({"projector_type": "dspark"}, {}, "projector_type is 'dspark'; only 'dflash' is supported"),
        ({"shift_label": True}, {}, "shift_label is True; only False is supported"),
        ({}, of_speculators({}, speculators_model_type="dspark"), "speculators_model_type is 'dspark'; supported are eagle3, dflash"),
        ({}, of_speculators({}, projector_type="domino"), "projector_type is 'domino'; only 'dflash' is supported"),
        ({}, of_speculators({}, sample_from_anchor=True), "sample_from_anchor is True; only False is supported"),
        ({}, of_speculators({}, aux_hidden_state_layer_ids=[1, 4]), "aux_hidden_state_layer_ids must name layers of the target"),
        ({}, of_speculators({}, transformer_layer_config={"model_type": "llama"}), "a decoder layer of model_type llama is not supported"),
        ({}, {"hidden_size": 32}, "the draft head was made for a target of hidden size 32"),
        ({}, {"vocab_size": 97}, "the draft has a vocabulary of 97"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(tmp_path: Path, own: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    saved_draft(tmp_path, draft_json(own, **changes), {})
    with pytest.raises(ConfigError, match=message):
        load_draft_config(tmp_path, "DFLASH", tiny_model())


def test_a_draft_of_blocks_is_not_taken_for_another_one(tmp_path: Path) -> None:
    saved_draft(tmp_path, draft_json(), {})
    with pytest.raises(ConfigError, match="a DFLASH draft; use --speculative-algorithm DFLASH"):
        load_draft_config(tmp_path, "EAGLE3", tiny_model())


def test_depth_is_that_of_whole_blocks_unless_asked(tmp_path: Path) -> None:
    saved_draft(tmp_path, draft_json(), {})
    assert read_block_size(tmp_path) == BLOCK
    args = ServerArgs(speculative_algorithm="DFLASH", speculative_draft_model_path=str(tmp_path))
    assert with_block_size(args, BLOCK).speculative_num_draft_tokens == BLOCK
    asked = ServerArgs(speculative_algorithm="DFLASH", speculative_draft_model_path=str(tmp_path), speculative_num_steps=3)
    assert with_block_size(asked, BLOCK) == asked


def prepared(tmp_path: Path, block_size: int, *flags: str) -> SpeculativeConfig:
    """The drafts of a server with a draft of such blocks."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    draft_folder(target, "STANDALONE", vocab_size=800)
    write_small_tokenizer(target)
    draft_folder(draft, "DFLASH", vocab_size=800, block_size=block_size)
    common = ["--model-path", str(target), "--load-format", "dummy", "--device", "cpu", "--speculative-algorithm", "DFLASH"]
    found = prepare(parse([*common, "--speculative-draft-model-path", str(draft), *flags]).args)[0].speculative
    assert found is not None
    return found


@pytest.mark.parametrize(("block", "depths"), [(4, (0, 1, 2, 3)), (6, (0, 1, 2, 3, 5)), (7, (0, 1, 2, 3, 5, 6)), (16, AUTO_DEPTHS)])
def test_depths_to_choose_from_end_with_the_block(tmp_path: Path, block: int, depths: tuple[int, ...]) -> None:
    found = prepared(tmp_path, block, "--speculative-num-steps", "auto", "--speculative-synthetic-accept-length", "2")
    assert (found.depths, found.num_steps, found.num_draft_tokens) == (depths, depths[-1], depths[-1] + 1)
    assert found.synthetic_accept is not None
    assert len(found.synthetic_accept) == found.num_steps


def test_a_fixed_depth_must_fit_into_the_block(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this draft fills blocks of 16 tokens and drafts 15 of them"):
        prepared(tmp_path, 16, "--speculative-num-steps", "20")
    with pytest.raises(ConfigError, match="block_size is 1; a block needs a second token"):
        prepared(tmp_path, 1)
    assert prepared(tmp_path, 100).num_draft_tokens == 64, "a window is no longer"


def test_more_drafts_than_a_block_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this draft fills blocks of 16 tokens and drafts 15 of them"):
        speculating(tmp_path, "DFLASH", num_steps=16)


def test_eager_blocks_are_not_compared_with_blocks_of_another_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked tokens attend to each other, so the first draft of a shorter block is another one without any fault of a graph."""
    worker = speculating(tmp_path, "DFLASH", "eager", [1, 2, 4], num_steps=7, depths=(7, 1, 0))
    worker.parts.monitor.schedule = EveryNth(2, verify=False)
    found = list[Pairs]()
    monkeypatch.setattr(worker.parts.monitor.alarm, "add", found.append)
    driver = Driver(worker)
    driver.prefill(PROMPTS, room=200)
    for depth in [7, 7, 1, 1, 7] * 8:
        with worker.parts.depths.forced(depth):
            driver.decode(list(PROMPTS))
    assert worker.eager_drafts.samples > 8
    assert {pairs.depth for pairs in found} == {7}
    assert all((pairs.graph == pairs.eager).all() for pairs in found)
