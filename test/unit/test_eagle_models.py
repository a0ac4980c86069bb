"""Draft heads load the published layouts and compute what their plain definition computes."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionShape, plan_pass
from runtime.layers.attention.torch_native import TorchNativeAttention
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.torch_ops import TorchOps
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.model_executor.weight_loader import dummy_weights, safetensors_weights
from runtime.models.config_fields import ConfigFields
from runtime.models.decoder import DecoderModel
from runtime.models.draft_config import load_draft_config
from runtime.models.draft_head import DraftModel
from runtime.models.eagle import LlamaForCausalLMEagle
from runtime.models.eagle3 import LlamaForCausalLMEagle3
from runtime.models.eagle3_layout import Eagle3Layout, default_aux_layers, read_aux_layers
from runtime.models.registry import build_model
from runtime.models.token_map import load_token_map
from unit.tiny import tiny_model

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
CONTEXT = 64
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def make_target(quantization: str | None = None, dtype: torch.dtype = torch.float32) -> DecoderModel:
    model = build_model(tiny_model(), TorchOps(), dtype, CPU, quantization)
    model.load(dummy_weights(model.expected_weights(), torch.float32, CPU, seed=5))
    return model


def draft_json(architecture: str, **changes: object) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "architectures": [architecture], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "max_position_embeddings": 32,
        "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    return raw | changes


def checkpoint(raw: dict[str, Any], fc_bias: bool = False, qkv_bias: bool = False, **extra: Any) -> Tensors:
    """A head in the published layout, with weights large enough that every part of it matters."""
    g = torch.Generator().manual_seed(0)
    hidden, width, layers = raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"]
    head_dim = raw.get("head_dim", hidden // raw["num_attention_heads"])
    kv, heads = head_dim * raw["num_key_value_heads"], head_dim * raw["num_attention_heads"]
    eagle3 = raw["architectures"][0].endswith("3")

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g) / columns**0.5

    def vector(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=g)

    tensors: Tensors = {}
    if raw.get("eagle_config", {}).get("use_aux_hidden_state", True):
        tensors["fc.weight"] = matrix(hidden, 3 * raw.get("target_hidden_size", hidden) if eagle3 else 2 * hidden)
    if fc_bias:
        tensors["fc.bias"] = vector(hidden)
    for i in range(layers):
        name = "midlayer." if eagle3 and i == 0 else f"layers.{i}."
        width_in = 2 * hidden if name == "midlayer." else hidden
        for part, rows in (("q", heads), ("k", kv), ("v", kv)):
            tensors[f"{name}self_attn.{part}_proj.weight"] = matrix(rows, width_in)
            if qkv_bias:
                tensors[f"{name}self_attn.{part}_proj.bias"] = vector(rows)
        tensors[f"{name}self_attn.o_proj.weight"] = matrix(hidden, heads)
        tensors[f"{name}mlp.gate_proj.weight"] = matrix(width, hidden)
        tensors[f"{name}mlp.up_proj.weight"] = matrix(width, hidden)
        tensors[f"{name}mlp.down_proj.weight"] = matrix(hidden, width)
        tensors[f"{name}post_attention_layernorm.weight"] = vector(hidden)
        if eagle3 or i > 0:
            tensors[f"{name}input_layernorm.weight"] = vector(hidden)
    if eagle3:
        tensors["midlayer.hidden_norm.weight"] = vector(hidden)
        tensors["norm.weight"] = vector(hidden)
        state = raw.get("target_hidden_size", hidden)
        if raw.get("norm_before_fc") and "fc.weight" in tensors:
            tensors["input_norm.weight"] = vector(3 * state)
        if raw.get("fc_norm") or raw.get("use_aux_norm"):
            tensors |= {f"fc_norm.{i}.weight": vector(state) for i in range(3)}
        if "draft_vocab_size" in raw:
            tensors["lm_head.weight"] = matrix(raw["draft_vocab_size"], hidden)
    return tensors | extra


def save(folder: Path, raw: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load_head(folder: Path, target: DecoderModel, token_map: torch.Tensor | None = None) -> DraftModel:
    raw = json.loads((folder / "config.json").read_text())
    eagle3 = raw["architectures"][0].endswith("3")
    config = load_draft_config(folder, "EAGLE3" if eagle3 else "EAGLE", target.config)
    head = LlamaForCausalLMEagle3(config, target) if eagle3 else LlamaForCausalLMEagle(config, target, token_map)
    head.load(safetensors_weights(folder, progress=False))
    return head


class SlowHead:
    """The definition, over one whole sequence at a time, from the checkpoint's own tensors."""

    def __init__(self, raw: dict[str, Any], tensors: Tensors, target: DecoderModel) -> None:
        self.raw, self.t = raw, tensors
        self.eagle3 = raw["architectures"][0].endswith("3")
        self.embed: Any = tensors.get("embed_tokens.weight", target.embed)
        self.head: Any = tensors.get("lm_head.weight", target.lm_head.weight)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.raw["rms_norm_eps"]) * self.t[name]

    def project(self, x: torch.Tensor) -> torch.Tensor:
        if self.raw.get("norm_before_fc"):
            x = self.norm(x, "input_norm.weight")
        if self.raw.get("fc_norm") or self.raw.get("use_aux_norm"):
            x = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(x.chunk(3, -1))], -1)
        return F.linear(x, self.t["fc.weight"], self.t.get("fc.bias"))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        n, _, size = x.shape
        freqs = self.raw["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        turn = torch.polar(torch.ones(n, size // 2), torch.arange(n)[:, None] * freqs)[:, None]
        turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def block(self, name: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self.raw["num_attention_heads"], self.raw["num_key_value_heads"]
        q, k, v = (
            F.linear(x, self.t[f"{name}self_attn.{p}_proj.weight"], self.t.get(f"{name}self_attn.{p}_proj.bias"))
            .unflatten(-1, (-1, self.raw.get("head_dim", self.raw["hidden_size"] // heads)))
            for p in "qkv"
        )  # fmt: skip
        if f"{name}self_attn.q_norm.weight" in self.t:
            q, k = (self.norm(a, f"{name}self_attn.{p}_norm.weight") for p, a in (("q", q), ("k", k)))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (a.repeat_interleave(heads // kv_heads, 1) for a in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        h = residual + attended @ self.t[name + "self_attn.o_proj.weight"].T
        m = self.norm(h, name + "post_attention_layernorm.weight")
        gated = F.silu(m @ self.t[name + "mlp.gate_proj.weight"].T) * (m @ self.t[name + "mlp.up_proj.weight"].T)
        return h + gated @ self.t[name + "mlp.down_proj.weight"].T

    def __call__(self, ids: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
        """`states[i]` is the hidden state beside token i: the target's (to be projected in EAGLE-3) or the head's own."""
        embeds = self.embed[ids]
        if self.eagle3:
            h = torch.stack([self.project(s) if len(s) != self.raw["hidden_size"] else s for s in states])
            normed = self.norm(h, "midlayer.hidden_norm.weight")
            x = torch.cat([self.norm(embeds, "midlayer.input_layernorm.weight"), normed], 1)
            h = self.block("midlayer.", x, normed if self.raw.get("norm_before_residual") else h)
            for i in range(1, self.raw["num_hidden_layers"]):
                h = self.block(f"layers.{i}.", self.norm(h, f"layers.{i}.input_layernorm.weight"), h)
            return self.norm(h, "norm.weight") if self.raw.get("norm_output") else h
        h = self.project(torch.cat([embeds, torch.stack(states)], 1))
        for i in range(self.raw["num_hidden_layers"]):
            h = self.block(f"layers.{i}.", h if i == 0 else self.norm(h, f"layers.{i}.input_layernorm.weight"), h)
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        ends_with_norm = self.eagle3 and not self.raw.get("norm_output")
        return (self.norm(hidden, "norm.weight") if ends_with_norm else hidden) @ self.head.T


class Rig:
    """A head with a KV pool of its own and two requests in rows 1 and 2."""

    def __init__(self, head: DraftModel, page_size: int, dtype: torch.dtype = torch.float32) -> None:
        pages = 2 * CONTEXT // page_size
        layers = head.attention_specs
        self.pool = pool = KVPool([layer.kv for layer in layers], pages, page_size, CPU)
        self.table = PageTable(3, CONTEXT, page_size, CPU)
        self.table.pages[1:] = (torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1).view(2, -1).to(torch.int32)
        shape = AttentionShape(layers, 2, 4, CONTEXT, tuning=H200)
        self.head, self.backend = head, TorchNativeAttention(shape, pool, self.table)
        head.bind(pool, self.backend)

    def run(self, ids: list[list[int]], states: list[torch.Tensor], before: list[int]) -> list[torch.Tensor]:
        """Feed each request new tokens beside their states, after `before` positions; the head's states of each."""
        lens = [len(i) for i in ids]
        rows = torch.tensor([1, 2])
        positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, lens, strict=True)])
        seq_lens = torch.tensor([b + n for b, n in zip(before, lens, strict=True)], dtype=torch.int32)
        extend = len(set(lens)) > 1
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND if extend else ForwardMode.DRAFT_EXTEND,
            batch_size=2,
            tokens_per_req=0 if extend else lens[0],
            input_ids=torch.tensor(ids[0] + ids[1]),
            positions=positions,
            out_cache_loc=self.table.slots(rows.repeat_interleave(torch.tensor(lens)), positions),
            req_pool_indices=rows,
            seq_lens=seq_lens,
            qo_indptr=torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32),
            seq_len_bounds=seq_lens.numpy(),
            extend_lens=np.array(lens, dtype=np.int32) if extend else None,
            hidden_states=torch.cat(states),
        )
        given = torch.cat(states)
        plan_pass(self.backend, batch)
        out = self.head.forward(batch)
        assert batch.hidden_states is not None
        assert torch.equal(batch.hidden_states, given), "the caller's hidden states were overwritten"
        assert out.shape == (sum(lens), self.head.hidden_width)
        assert out.dtype == self.head.hidden_dtype
        self.last = batch, out
        return list(out.split(lens))

    def check_wanted(self) -> None:
        """The states of each request's last token alone are those of the run before, and KV is written for every token."""
        batch, out = self.last
        wanted = batch.qo_indptr[1:].to(torch.int64) - 1
        caches = [*self.pool.k, *self.pool.v]
        written = [cache.clone() for cache in caches]
        for cache in caches:
            cache.view(-1, *cache.shape[2:])[batch.out_cache_loc] = float("nan")
        torch.testing.assert_close(self.head.forward(batch, wanted), out[wanted], rtol=1e-5, atol=1e-5)
        for cache, before in zip(caches, written, strict=True):
            torch.testing.assert_close(cache, before, rtol=1e-5, atol=1e-5)
            cache.copy_(before)


def variants() -> list[Any]:
    g = torch.Generator().manual_seed(9)
    own_embed, own_head = torch.randn(96, 64, generator=g), torch.randn(96, 64, generator=g)
    eagle, eagle3 = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"
    picks = torch.randperm(96, generator=g)[:40].sort().values
    d2t = {"d2t": picks - torch.arange(40), "t2d": torch.zeros(96, dtype=torch.bool).scatter(0, picks, True)}
    narrow_embed = {"embed_tokens.weight": own_embed[:, :32].contiguous()}
    narrow = draft_json(eagle3, hidden_size=32, target_hidden_size=64, draft_vocab_size=40)
    params: list[Any] = [
        pytest.param(draft_json(eagle), {}, id="EAGLE, all shared"),
        pytest.param(draft_json("LlamaForCausalLM"), {"fc_bias": True, "embed_tokens.weight": own_embed}, id="EAGLE, own embedding"),
        pytest.param(draft_json(eagle, num_hidden_layers=2), {"lm_head.weight": own_head}, id="EAGLE, two layers, own head"),
        pytest.param(draft_json("Qwen2ForCausalLMEagle"), {"qkv_bias": True, "fc_bias": True}, id="EAGLE for Qwen2"),
        pytest.param(draft_json(eagle3, draft_vocab_size=40), d2t, id="EAGLE-3, reduced vocabulary"),
        pytest.param(draft_json(eagle3), {}, id="EAGLE-3, the target's head"),
        pytest.param(narrow, d2t | narrow_embed, id="EAGLE-3, narrower than its target"),
        pytest.param(draft_json(eagle3, draft_vocab_size=40, norm_before_fc=True), d2t, id="EAGLE-3, states normed together"),
        pytest.param(draft_json(eagle3, draft_vocab_size=40, fc_norm=True), d2t, id="EAGLE-3, states normed apart"),
        pytest.param(
            {**narrow, "use_aux_norm": True, "norm_before_fc": True},
            d2t | narrow_embed,
            id="EAGLE-3, narrow, states normed twice",
        ),
        pytest.param(draft_json(eagle3, norm_before_residual=True), {}, id="EAGLE-3, normed residual"),
        pytest.param(draft_json(eagle3, draft_vocab_size=40, tie_word_embeddings=True), d2t, id="EAGLE-3, own head, though tied"),
        pytest.param(
            draft_json(eagle3, draft_vocab_size=40, norm_before_fc=True, eagle_config={IDS: [], "use_aux_hidden_state": False}),
            d2t,
            id="EAGLE-3, the target's last state",
        ),
        pytest.param(draft_json(eagle3, draft_vocab_size=40, num_hidden_layers=3), d2t, id="EAGLE-3, three layers"),
        pytest.param(draft_json(eagle3, draft_vocab_size=40, norm_output=True), d2t, id="EAGLE-3, normed states fed back"),
        pytest.param(
            draft_json(eagle3, norm_before_fc=True, norm_before_residual=True, norm_output=True, head_dim=8),
            {},
            id="EAGLE-3, as speculators train them, small heads",
        ),
        pytest.param(
            draft_json(eagle3, draft_vocab_size=40, head_dim=8, transformer_layer_config={"model_type": "qwen3"}),
            d2t | {f"midlayer.self_attn.{part}_norm.weight": 1 + 0.3 * torch.randn(8, generator=g) for part in "qk"},
            id="EAGLE-3, Qwen3's layer in speculators",
        ),
    ]
    return params


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("raw", "extra"), variants())
def test_heads_compute_their_definition(tmp_path: Path, raw: dict[str, Any], extra: dict[str, Any], page_size: int) -> None:
    """A prompt in two unequal chunks, one verify window, then two draft steps fed with the head's own state."""
    target = make_target()
    tensors = checkpoint(raw, **extra)
    head = load_head(save(tmp_path / "head", raw, tensors), target)
    slow = SlowHead(raw, tensors, target)
    rig = Rig(head, page_size)
    g = torch.Generator().manual_seed(2)
    ids: list[list[int]] = [[], []]
    states: list[list[torch.Tensor]] = [[], []]
    own: list[torch.Tensor] = []
    for lens in ([5, 9], [20, 3], [4, 4], [1, 1], [1, 1]):
        before = [len(i) for i in ids]
        new = [torch.randint(0, 96, (n,), generator=g).tolist() for n in lens]
        feeds_back = lens == [1, 1]
        given = own if feeds_back else [torch.randn(n, head.feature_width, generator=g) for n in lens]
        for row in range(2):
            ids[row] += new[row]
            states[row] += list(given[row])
        out = rig.run(new, given, before)
        rig.check_wanted()
        own = [o[-1:] for o in out]
        for row in range(2):
            expected = slow(torch.tensor(ids[row]), states[row])[before[row] :]
            torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(head.logits(out[row]), slow.logits(expected), rtol=1e-4, atol=1e-4)
    assert head.logits(own[0]).shape == (1, head.vocab_size)
    assert head.logits(own[0]).dtype == torch.float32
    assert torch.equal(head.greedy(torch.cat(own)), head.logits(torch.cat(own)).argmax(-1))


@pytest.mark.parametrize(("raw", "extra"), variants())
def test_bfloat16_heads_stay_near_float32_and_take_states_of_either(tmp_path: Path, raw: dict[str, Any], extra: dict[str, Any]) -> None:
    folder = save(tmp_path / "head", raw, checkpoint(raw, **extra))
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 96, (2, 6), generator=g).tolist()
    outs: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        head = load_head(folder, make_target(dtype=dtype))
        states = [torch.randn(6, head.feature_width, generator=g.manual_seed(i)) for i in range(2)]
        if "fc.weight" not in head.expected_weights():  # the stream starts with these states, not rounded
            states = [s.bfloat16().float() for s in states]
        rig = Rig(head, 1, dtype)
        out = rig.run(ids, states, [0, 0])
        assert torch.equal(torch.cat(rig.run(ids, [s.to(dtype) for s in states], [0, 0])), torch.cat(out))
        outs.append(head.logits(torch.cat(out)))
    assert outs[1].dtype == torch.float32
    assert (outs[1] - outs[0]).norm() < 0.05 * outs[0].norm()


def nested(raw: dict[str, Any]) -> dict[str, Any]:
    """The same head in the layout of speculators."""
    outer = {"draft_vocab_size", "norm_before_fc", "norm_before_residual", "norm_output"}
    layer = {name: value for name, value in raw.items() if name not in outer | {"architectures"}}
    return {
        "architectures": ["Eagle3Speculator"], "model_type": "speculators", "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/model"}}, "target_hidden_size": None,
        "transformer_layer_config": {"model_type": "llama", **layer}, **{name: raw[name] for name in outer & raw.keys()},
    }  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("flags", [{}, {"norm_before_residual": True}, {"norm_before_fc": True, "norm_output": True}])
def test_speculators_layout_is_the_same_head(tmp_path: Path, flags: dict[str, bool], tied: bool) -> None:
    raw = draft_json("LlamaForCausalLMEagle3", draft_vocab_size=40, **flags)
    picks = torch.arange(40) * 2
    tensors = checkpoint(raw, d2t=picks - torch.arange(40))
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    target = make_target()
    plain = load_head(save(tmp_path / "plain", raw, tensors), target)
    folder = save(tmp_path / "nested", nested(raw | {"tie_word_embeddings": tied}), renamed)
    config = load_draft_config(folder, "EAGLE3", target.config)
    head = LlamaForCausalLMEagle3(config, target)
    head.load(safetensors_weights(folder, progress=False))
    hidden = [torch.randn(2, head.feature_width, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    outs = [torch.cat(Rig(one, 1).run([[1, 2], [3, 4]], hidden, [0, 0])) for one in (plain, head)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(plain.logits(outs[0]), head.logits(outs[1]))
    assert torch.equal(head.map_to_target(torch.arange(40)), picks)


def test_the_type_of_a_nested_layer_says_whether_it_has_a_window(tmp_path: Path) -> None:
    windowed = draft_json("LlamaForCausalLMEagle3", draft_vocab_size=4, sliding_window=8, max_window_layers=0)
    for i, (kind, uses, window) in enumerate((("llama", True, (-1,)), ("qwen3", False, (-1,)), ("qwen3", True, (7,)))):
        raw = nested(windowed | {"model_type": kind, "use_sliding_window": uses})
        config = load_draft_config(save(tmp_path / str(i), raw, {}), "EAGLE3", make_target().config).model
        assert (config.window, config.qk_norm) == (window, kind == "qwen3")


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "GptOssForCausalLMEagle3"])
def test_published_class_names_of_heads_are_read_alike(tmp_path: Path, name: str) -> None:
    config = load_draft_config(save(tmp_path / "head", draft_json(name, draft_vocab_size=4), {}), "EAGLE3", make_target().config)
    assert config.aux_layers == (1, 2, 3)
    assert config.layout == Eagle3Layout()


def test_a_sliding_window_of_a_head_is_kept(tmp_path: Path) -> None:
    windowed = draft_json("LlamaForCausalLMEagle3", draft_vocab_size=4, layer_types=["sliding_attention"], sliding_window=8)
    assert load_draft_config(save(tmp_path / "a", windowed, {}), "EAGLE3", make_target().config).model.window == (7,)
    full = windowed | {"layer_types": ["full_attention"]}
    assert load_draft_config(save(tmp_path / "b", full, {}), "EAGLE3", make_target().config).model.window == (-1,)


@pytest.mark.parametrize(
    ("architecture", "num_layers", "fields", "layers"),
    [
        ("Qwen3MoeForCausalLM", 48, {}, (2, 24, 45)),
        ("Qwen3MoeForCausalLM", 48, {"eagle_config": {IDS: [1, 23, 44]}}, (2, 24, 45)),
        ("LlamaForCausalLM", 32, {"eagle_config": {IDS: []}}, (2, 16, 29)),
        ("LlamaForCausalLM", 32, {IDS: [1, 15, 28]}, (2, 16, 29)),
        ("LlamaForCausalLM", 32, {"transformer_layer_config": {}, IDS: [2, 16, 29]}, (2, 16, 29)),
        ("GptOssForCausalLM", 24, {"eagle_config": {IDS: [1, 11, 21]}}, (2, 12, 22)),
        ("GptOssForCausalLM", 24, {"eagle_config": {IDS: [2, 12, 24]}}, (2, 12, 24)),
        ("DeepseekV3ForCausalLM", 61, {"eagle_config": {IDS: [1, 29, 57]}}, (2, 30, 58)),
        ("DeepseekV3ForCausalLM", 61, {"eagle_config": {IDS: [2, 30, 58]}}, (2, 30, 58)),
        ("Glm4MoeLiteForCausalLM", 47, {"eagle_config": {IDS: [2, 23, 44]}}, (2, 23, 44)),
        ("MiniMaxM2ForCausalLM", 62, {"eagle_config": {IDS: [1, 30, 58]}}, (2, 31, 59)),
    ],
)
def test_heads_name_the_layers_that_they_read(architecture: str, num_layers: int, fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    target = dataclasses.replace(tiny_model(), architecture=architecture, num_layers=num_layers)
    assert read_aux_layers(fields, target, "here") == layers


@pytest.mark.parametrize("within", [True, False])
def test_flags_are_read_beside_and_within_eagle_config(within: bool) -> None:
    flags = {"norm_before_fc": True, "use_aux_norm": True, "norm_output": True}
    read = Eagle3Layout.read(ConfigFields({"eagle_config": flags} if within else flags, "here"))
    assert read == Eagle3Layout(norm_before_fc=True, fc_norm=True, norm_before_residual=False, norm_output=True)


def test_d2t_holds_offsets_and_its_inverse_fits(tmp_path: Path) -> None:
    picks = torch.tensor([3, 4, 10, 95])
    raw = draft_json("LlamaForCausalLMEagle3", draft_vocab_size=4)
    head = load_head(save(tmp_path / "head", raw, checkpoint(raw, d2t=picks - torch.arange(4))), make_target())
    assert head.map_to_target(torch.tensor([[0, 3], [2, 1]])).tolist() == [[3, 95], [10, 4]]
    assert head.to_draft is not None
    assert head.to_draft[picks].tolist() == [0, 1, 2, 3]
    assert int((head.to_draft >= 0).sum()) == 4


def test_a_tied_head_scores_the_tokens_of_its_map(tmp_path: Path) -> None:
    picks, raw = torch.tensor([3, 4, 10, 95]), draft_json("LlamaForCausalLMEagle3", draft_vocab_size=4, tie_word_embeddings=True)
    tensors = without(checkpoint(raw, d2t=picks - torch.arange(4)), "lm_head.weight")
    target = make_target()
    head: Any = load_head(save(tmp_path / "head", raw, tensors), target)
    assert torch.equal(head.lm_head.weight, target.embed[picks])


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_token_map_keeps_those_rows_of_the_head(tmp_path: Path, quantization: str | None) -> None:
    target = make_target(quantization)
    raw = draft_json("LlamaForCausalLMEagle")
    folder = save(tmp_path / "head", raw, checkpoint(raw))
    torch.save(torch.tensor([7, 90, 0, 33]), tmp_path / "hot.pt")
    hot = load_token_map(tmp_path / "hot.pt")
    full, part = load_head(folder, target), load_head(folder, target, hot)
    assert part.lm_head.scheme is target.lm_head.scheme  # type: ignore[attr-defined]
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(part.logits(hidden), full.logits(hidden)[:, hot])
    assert part.map_to_target(torch.tensor([0, 1, 3])).tolist() == [7, 90, 33]
    assert full.map_to_target(torch.tensor([5])).tolist() == [5]
    assert part.vocab_size == 4


def test_copies_of_the_target_matrices_are_not_kept(tmp_path: Path) -> None:
    target = make_target()
    raw = draft_json("LlamaForCausalLMEagle")
    copies = {"embed_tokens.weight": target.embed.clone(), "lm_head.weight": target.lm_head.weight.clone()}
    lean = load_head(save(tmp_path / "a", raw, checkpoint(raw) | copies), target)
    assert lean.embed.data_ptr() == target.embed.data_ptr()  # type: ignore[attr-defined]
    assert lean.lm_head is target.lm_head  # type: ignore[attr-defined]
    own: Any = load_head(save(tmp_path / "b", raw, checkpoint(raw) | {"embed_tokens.weight": target.embed + 1}), target)
    assert own.embed.data_ptr() != target.embed.data_ptr()
    assert own.embed.nbytes == target.embed.nbytes
    assert own.lm_head is target.lm_head
    assert own.parts.weights.num_bytes == lean.parts.weights.num_bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"])
def test_dummy_weights_make_a_working_head(tmp_path: Path, architecture: str) -> None:
    target = make_target()
    raw = draft_json(architecture, **({"draft_vocab_size": 40} if architecture.endswith("3") else {}))
    save(tmp_path / "head", raw, {})
    config = load_draft_config(tmp_path / "head", "EAGLE3" if architecture.endswith("3") else "EAGLE", target.config)
    head = (LlamaForCausalLMEagle3 if architecture.endswith("3") else LlamaForCausalLMEagle)(config, target)
    head.load(dummy_weights(head.expected_weights(), torch.float32, CPU))
    out = Rig(head, 1).run([[1, 2, 3], [4, 5, 6]], [torch.randn(3, head.feature_width) for _ in range(2)], [0, 0])
    ids = head.map_to_target(head.logits(torch.cat(out)).argmax(-1))
    assert ((ids >= 0) & (ids < 96)).all()


def test_a_head_without_rope_theta_uses_10000(tmp_path: Path) -> None:
    raw = {name: value for name, value in EAGLE3.items() if name != "rope_theta"}
    config = load_draft_config(save(tmp_path / "head", raw, {}), "EAGLE3", make_target().config)
    assert config.model.rope_theta == 10000.0


def test_names_with_a_leading_model_are_the_same_names(tmp_path: Path) -> None:
    raw = draft_json("LlamaForCausalLMEagle")
    tensors = checkpoint(raw)
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    plain = load_head(save(tmp_path / "a", raw, tensors), make_target())
    prefixed = load_head(save(tmp_path / "b", raw, {"model." + n: t for n, t in tensors.items()} | inv_freq), make_target())
    hidden = [torch.randn(2, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    outs = [Rig(head, 1).run([[1, 2], [3, 4]], hidden, [0, 0]) for head in (plain, prefixed)]
    assert torch.equal(torch.cat(outs[0]), torch.cat(outs[1]))


EAGLE, EAGLE3 = draft_json("LlamaForCausalLMEagle"), draft_json("LlamaForCausalLMEagle3", draft_vocab_size=4)


def without(tensors: Tensors, name: str) -> Tensors:
    return {n: t for n, t in tensors.items() if n != name}


@pytest.mark.parametrize(
    ("raw", "tensors", "message"),
    [
        (EAGLE, without(checkpoint(EAGLE), "layers.0.mlp.up_proj.weight"), r"lacks layers\.0\.mlp\.up_proj"),
        (EAGLE, checkpoint(EAGLE) | {"layers.0.input_layernorm.weight": torch.ones(64)}, "unexpected layers.0.input_layernorm"),
        (EAGLE, checkpoint(EAGLE) | {"embed_tokens.weight": torch.ones(90, 64)}, "embed_tokens.weight has shape"),
        (EAGLE, checkpoint(EAGLE) | {"fc.weight": torch.ones(64, 64)}, "fc.weight has shape"),
        (EAGLE3, checkpoint(EAGLE3), "lacks d2t"),
        (EAGLE3, checkpoint(EAGLE3, d2t=torch.tensor([0, 0, 0, 93])), "outside 0..95"),
        (EAGLE3, checkpoint(EAGLE3, d2t=torch.tensor([1, 0, 0, 0])), "twice"),
        (EAGLE3, checkpoint(EAGLE3, d2t=torch.zeros(5, dtype=torch.int64)), "d2t has shape"),
        (EAGLE3, checkpoint(EAGLE3, d2t=torch.zeros(4)), r"d2t has dtype torch\.float32; the model expects integers"),
        (EAGLE3, checkpoint(EAGLE3, d2t=torch.zeros(4, dtype=torch.bool)), r"d2t has dtype torch\.bool; the model expects integers"),
        (EAGLE3 | {"num_hidden_layers": 2}, checkpoint(EAGLE3, d2t=torch.zeros(4, dtype=torch.int64)), "lacks layers.1.input_layernorm"),
        (EAGLE3 | {"hidden_size": 32, "target_hidden_size": 64}, None, "lacks embed_tokens"),
        (EAGLE | {"vocab_size": 100}, {}, "vocabulary of 100"),
        (EAGLE | {"hidden_size": 32}, {}, "hidden size 32"),
        (EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}}, {}, "three different layers"),
        (EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["low", 1, 2]}}, {}, "must be a list of layer numbers"),
        (EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 1}}, {}, "must be a list of layer numbers"),
        (EAGLE3 | {"eagle_config": [0, "mid", 2]}, {}, "must be a list of layer numbers"),
        (EAGLE3 | {"eagle_config": [0, 1, 2]}, {}, "eagle_config is .0, 1, 2.; it must be an object"),
        (EAGLE3 | {"eagle_config": {"use_aux_hidden_state": "no"}}, {}, "use_aux_hidden_state is 'no'; it must be true or false"),
        (EAGLE3 | {"hidden_size": 32, "target_hidden_size": 64, "eagle_config": {"use_aux_hidden_state": False}}, {}, "hidden size 32"),
        (EAGLE3 | {"norm_before_residual": "false"}, {}, "norm_before_residual is 'false'; it must be true or false"),
        (EAGLE3 | {"eagle_config": {"use_aux_norm": 0.5}}, {}, "use_aux_norm is 0.5; it must be true or false"),
        (EAGLE | {"architectures": ["PhiForCausalLM"]}, {}, "PhiForCausalLM is not supported"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, raw: dict[str, Any], tensors: Tensors | None, message: str) -> None:
    tensors = checkpoint(raw, d2t=torch.zeros(4, dtype=torch.int64)) if tensors is None else tensors
    folder = save(tmp_path / "head", raw, {n: t.contiguous() for n, t in tensors.items()})
    with pytest.raises(ConfigError, match=message):
        load_head(folder, make_target())


def test_the_other_algorithms_head_is_refused_with_the_flag_to_use(tmp_path: Path) -> None:
    config = make_target().config
    with pytest.raises(ConfigError, match="--speculative-algorithm EAGLE3"):
        load_draft_config(save(tmp_path / "a", EAGLE3, {}), "EAGLE", config)
    with pytest.raises(ConfigError, match=r"--speculative-algorithm EAGLE$"):
        load_draft_config(save(tmp_path / "b", EAGLE, {}), "EAGLE3", config)


WHOLE = draft_json("LlamaForCausalLM", num_hidden_layers=2)


@pytest.mark.parametrize(
    ("raw", "algorithm", "message"),
    [
        (EAGLE3, "EAGLE", "an EAGLE3 head; use --speculative-algorithm EAGLE3$"),
        (EAGLE3, "STANDALONE", "an EAGLE3 head; use --speculative-algorithm EAGLE3$"),
        (draft_json("LlamaForCausalLM", draft_vocab_size=4), "EAGLE", "an EAGLE3 head"),
        (draft_json("LlamaForCausalLM", draft_vocab_size=4), "STANDALONE", "an EAGLE3 head"),
        (EAGLE, "EAGLE3", "an EAGLE head; use --speculative-algorithm EAGLE$"),
        (EAGLE, "STANDALONE", "an EAGLE head; use --speculative-algorithm EAGLE$"),
        (draft_json("LlamaForCausalLM"), "EAGLE3", "an EAGLE head; use --speculative-algorithm EAGLE$"),
        (WHOLE, "EAGLE", "a whole model .*use --speculative-algorithm STANDALONE, or name its class LlamaForCausalLMEagle"),
        (WHOLE, "EAGLE3", "a whole model .*use --speculative-algorithm STANDALONE"),
        (draft_json("Qwen3ForCausalLM"), "EAGLE", "a whole model .*use --speculative-algorithm STANDALONE$"),
        (draft_json("Qwen3ForCausalLM", draft_vocab_size=4), "EAGLE3", "EAGLE3 head of class Qwen3ForCausalLM is not supported; supported"),
        (draft_json("DeepseekV3ForCausalLM"), "EAGLE", "STANDALONE, or leave out --speculative-draft-model-path to draft"),
        (draft_json("DeepseekV3ForCausalLMNextN"), "EAGLE", "is not supported; leave out --speculative-draft-model-path to draft with"),
        (draft_json("LlamaForCausalLM", vocab_size=100), "STANDALONE", "vocabulary of 100 and its target of 96"),
        (EAGLE | {"vocab_size": 90}, "EAGLE", "vocabulary of 90 and its target of 96"),
        (EAGLE | {"architectures": {"class": "LlamaForCausalLM"}}, "EAGLE", "architectures is .*; it must name exactly one model class"),
        (EAGLE | {"architectures": [["LlamaForCausalLM"]]}, "EAGLE", "architectures is .*; it must name exactly one model class"),
        (
            EAGLE3 | {"transformer_layer_config": {"model_type": "mixtral"}},
            "EAGLE3",
            "a decoder layer of model_type mixtral is not supported",
        ),
        (EAGLE | {"layer_types": 1}, "EAGLE", "layer_types must name full_attention or sliding_attention for each of 1 layers"),
    ],
)
def test_a_draft_of_another_algorithm_is_refused_with_the_one_to_ask_for(
    tmp_path: Path, raw: dict[str, Any], algorithm: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_draft_config(save(tmp_path / "draft", raw, {}), algorithm, make_target().config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "algorithm"),
    [
        (draft_json("LlamaForCausalLM"), "EAGLE"),  # as the first published heads
        (draft_json("Qwen2ForCausalLM"), "EAGLE"),
        (EAGLE | {"num_hidden_layers": 2}, "EAGLE"),
        ({name: value for name, value in EAGLE.items() if name != "architectures"}, "EAGLE"),
        (draft_json("LlamaForCausalLM", draft_vocab_size=4), "EAGLE3"),
        (EAGLE3, "EAGLE3"),
        (draft_json("LlamaForCausalLM"), "STANDALONE"),  # a model of one layer looks the same
        (WHOLE | {"hidden_size": 32}, "STANDALONE"),
        (WHOLE | {"vocab_size": 90}, "STANDALONE"),  # with less padding than the target
        (draft_json("Qwen3ForCausalLM", num_hidden_layers=2), "STANDALONE"),
    ],
)
def test_what_may_be_a_draft_of_the_algorithm_is_taken(tmp_path: Path, raw: dict[str, Any], algorithm: Any) -> None:
    config = load_draft_config(save(tmp_path / "draft", raw, {}), algorithm, make_target().config)
    assert config.model.num_layers == raw["num_hidden_layers"]
    assert config.model.max_context_len == make_target().config.max_context_len
    assert bool(config.aux_layers) == (algorithm == "EAGLE3")


def test_the_head_reaches_as_far_as_its_target_and_names_the_streams_it_wants(tmp_path: Path) -> None:
    config = make_target().config
    head = load_draft_config(save(tmp_path / "a", EAGLE3, {}), "EAGLE3", config)
    assert head.model.max_context_len == config.max_context_len == 256
    assert head.aux_layers == (1, 2, 3)
    listed = load_draft_config(
        save(tmp_path / "b", EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, {}), "EAGLE3", config
    )
    assert listed.aux_layers == (1, 2, 3)
    assert default_aux_layers(32) == (2, 16, 29)
    assert load_draft_config(save(tmp_path / "c", EAGLE, {}), "EAGLE", config).aux_layers == ()


NO_IDS = [torch.tensor([[1]]), torch.tensor([0.5]), torch.tensor([True]), {"a": 1}, ["a"], [[1], [2, 3]], [1 << 70],
          torch.tensor([1, 2]).to_sparse(), torch.tensor([1, 2], device="meta")]  # fmt: skip


@pytest.mark.parametrize("content", [*NO_IDS, b"hello", b"[1, 2, 3]", b"", pickle.dumps(Path("x")), None])
def test_a_bad_token_map_is_refused_in_one_line(tmp_path: Path, content: object) -> None:
    if isinstance(content, bytes):
        (tmp_path / "hot.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / "hot.pt")
    with pytest.raises(ConfigError, match=r"--speculative-token-map '.*hot\.pt' (must hold|holds no|cannot be read: No such)") as caught:
        load_token_map(tmp_path / "hot.pt")
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("ids", [[], [-1, 2], [0, 96], [5, 7, 5]])
def test_a_token_map_of_none_or_foreign_or_repeated_tokens_is_refused(tmp_path: Path, ids: list[int]) -> None:
    raw = draft_json("LlamaForCausalLMEagle")
    with pytest.raises(ConfigError, match="--speculative-token-map names"):
        load_head(save(tmp_path / "head", raw, checkpoint(raw)), make_target(), torch.tensor(ids, dtype=torch.int64))
