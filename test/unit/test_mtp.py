"""Drafting with the layer for multi-token prediction of the target's own checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.config.quant_config import QuantConfig
from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionShape, plan_pass
from runtime.layers.attention.registry import build_backend
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.torch_ops import TorchOps
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.model_executor.build import build_worker
from runtime.model_executor.context import BuildOptions
from runtime.models.config import DeltaConfig, ModelConfig, MoeConfig
from runtime.models.decoder import DecoderModel
from runtime.models.delta_fields import MTP as QWEN_MTP
from runtime.models.mimo import MTP as MIMO_MTP
from runtime.models.mtp import MtpDraft, mtp_config
from runtime.models.registry import build_model, load_hf_config
from runtime.sampling_params import SamplingParams
from runtime.speculative.registry import make_drafter
from unit.driver import Driver, EveryNth
from unit.latent import MTP, latent_model
from unit.ranks import ranks
from unit.test_quantization import PROJECTION, quantized
from unit.tiny import tiny_model, tiny_runtime, tiny_speculative

CPU = torch.device("cpu")
LENGTH = 20
Tensors = dict[str, torch.Tensor]


def mimo_model() -> ModelConfig:
    return tiny_model(architecture="MiMoForCausalLM", vocab_size=97, qkv_bias=True, mtp=MIMO_MTP, unused_weights=(MIMO_MTP.prefix,))


MOE = MoeConfig(
    num_experts=8, top_k=2, intermediate_size=32, scoring="sigmoid", renormalize=True, scaling=1.5, num_groups=2, top_groups=1,
    shared_intermediate_size=32, layers=(False, True, True), correction=True,
)  # fmt: skip


def glm_model(**changes: object) -> ModelConfig:
    values: dict[str, object] = dict(
        architecture="Glm4MoeForCausalLM", vocab_size=97, qkv_bias=True, qk_norm=True, rotary_dim=8, moe=MOE, mtp=MTP,
        unused_weights=(MTP.prefix,),
    )  # fmt: skip
    return tiny_model(**{**values, **changes})


def qwen_model(**changes: object) -> ModelConfig:
    """Linear attention in two of three layers, so that the draft layer is like the second."""
    delta = DeltaConfig((True, False, True), num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, conv_width=4)
    values: dict[str, object] = dict(
        architecture="Qwen3_5ForCausalLM", vocab_size=97, qk_norm=True, rotary_dim=8, delta=delta, output_gate=True, norm_offset=1.0,
        mtp=QWEN_MTP, unused_weights=(QWEN_MTP.prefix,),
    )  # fmt: skip
    return tiny_model(**{**values, **changes})


MODELS: dict[str, Callable[[], ModelConfig]] = {
    "deepseek": latent_model,
    "direct queries": lambda: latent_model(q_rank=None),
    "experts": lambda: latent_model(moe=MOE),
    "mimo": mimo_model,
    "glm": glm_model,
    "qwen": qwen_model,
    "glm without norms": lambda: glm_model(qkv_bias=False, qk_norm=False, moe=dataclasses.replace(MOE, num_groups=1, renormalize=False)),
}


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


# ---- the layer against its definition


def checkpoint(config: ModelConfig) -> tuple[DecoderModel, Tensors]:
    """A target and the whole checkpoint that it comes from, with weights large enough that every part of it matters."""
    target = build_model(config, TorchOps(), torch.float32, CPU)
    shapes = target.expected_weights() | MtpDraft(target).expected_weights()
    g = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=g) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5) for name, shape in shapes.items()}
    tensors |= {name: 1 + tensor for name, tensor in tensors.items() if "norm" in name}
    target.load(tensors.items())
    return target, tensors


class Draft:
    """The draft over a pool of its own, for one request in row 1."""

    def __init__(self, target: DecoderModel, tensors: Tensors) -> None:
        self.model = MtpDraft(target)
        self.model.load(tensors.items())
        pool = KVPool([spec.kv for spec in self.model.attention_specs], 4, 16, CPU)
        self.table = PageTable(2, 64, 16, CPU)
        self.table.pages[1] = torch.tensor([3, 1, 4, 2], dtype=torch.int32)
        self.backend = build_backend("torch_native", AttentionShape(self.model.attention_specs, 1, 4, 64, tuning=H200), pool, self.table)
        self.model.bind(pool, self.backend)

    def run(self, ids: torch.Tensor, hidden: torch.Tensor, start: int, extend: bool) -> torch.Tensor:
        """The states at `start`... of tokens that follow them, and of the target's states there."""
        n = len(ids)
        positions, rows = torch.arange(start, start + n), torch.full((n,), 1)
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND if extend else ForwardMode.DRAFT_EXTEND,
            batch_size=1,
            tokens_per_req=0 if extend else n,
            input_ids=ids,
            positions=positions,
            out_cache_loc=self.table.slots(rows, positions),
            req_pool_indices=rows[:1],
            seq_lens=torch.tensor([start + n], dtype=torch.int32),
            qo_indptr=torch.tensor([0, n], dtype=torch.int32),
            seq_len_bounds=np.array([start + n], dtype=np.int32),
            extend_lens=np.array([n], dtype=np.int32) if extend else None,
            hidden_states=hidden,
        )
        plan_pass(self.backend, batch)
        return self.model.forward(batch)


class Definition:
    """The published definition, over one whole sequence at a time, from the checkpoint's own tensors."""

    def __init__(self, config: ModelConfig, tensors: Tensors) -> None:
        self.c, self.t = config, tensors
        assert config.mtp is not None
        self.prefix = config.mtp.prefix
        self.mimo, self.qwen = (config.architecture == name for name in ("MiMoForCausalLM", "Qwen3_5ForCausalLM"))

    def weight(self, name: str) -> torch.Tensor:
        """The weight of that name, of the layer's own parts or of its block."""
        own = f"{self.prefix}{name}.weight"
        return self.t[own] if own in self.t else self.t[f"{self.prefix}layers.0.{name}.weight"]

    def norm(self, x: torch.Tensor, name: str, eps: float = 1e-5) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * (self.weight(name) + self.c.norm_offset)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weight(name), self.t.get(f"{self.prefix}{name}.bias"))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[n, heads, size]: neighbours turn together with latent attention, else the halves of the part that is rotated."""
        rotated = self.c.rotary_dim or x.shape[-1]
        x, rest = x[..., :rotated], x[..., rotated:]
        n, _, size = x.shape
        turn = torch.polar(torch.ones(n, size // 2), torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size))[:, None]
        pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2) if self.c.latent is None else x.unflatten(-1, (-1, 2))
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn).flatten(-2)  # dot products ignore the order
        return torch.cat((turned, rest), -1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    def grouped_attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.linear(x, f"self_attn.{name}_proj").unflatten(-1, (-1, self.c.head_dim)) for name in "qkv")
        gate = torch.ones_like(q) if not self.c.output_gate else q[:, 1::2].sigmoid()
        q = q if not self.c.output_gate else q[:, ::2]
        if self.c.qk_norm:
            q, k = self.norm(q, "self_attn.q_norm"), self.norm(k, "self_attn.k_norm")
        k, v = (part.repeat_interleave(self.c.num_q_heads // self.c.num_kv_heads, 1) for part in (k, v))
        return self.attend(self.rotate(q), self.rotate(k), v) * gate.flatten(1)

    def latent_attention(self, x: torch.Tensor) -> torch.Tensor:
        latent, H = self.c.latent, self.c.num_q_heads
        assert latent is not None
        if latent.q_rank is None:
            q = self.linear(x, "self_attn.q_proj")
        else:
            q = self.linear(self.norm(self.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", 1e-6), "self_attn.q_b_proj")
        nope, rotated = q.unflatten(-1, (H, -1)).split((latent.nope_dim, self.c.head_dim), -1)
        compressed, shared = self.linear(x, "self_attn.kv_a_proj_with_mqa").split((latent.kv_rank, self.c.head_dim), -1)
        made = self.linear(self.norm(compressed, "self_attn.kv_a_layernorm", 1e-6), "self_attn.kv_b_proj").unflatten(-1, (H, -1))
        key = torch.cat((made[..., : latent.nope_dim], self.rotate(shared[:, None]).expand(-1, H, -1)), -1)
        return self.attend(torch.cat((nope, self.rotate(rotated)), -1), key, made[..., latent.nope_dim :])

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.linear(F.silu(self.linear(x, name + "gate_proj")) * self.linear(x, name + "up_proj"), name + "down_proj")

    def experts(self, x: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
        """Sigmoid scores; the bias and the sum of a group's two best take part in the choice alone."""
        scores = self.linear(x, "mlp.gate").sigmoid()
        choice = (scores + self.t[f"{self.prefix}mlp.gate.e_score_correction_bias"]).unflatten(1, (moe.num_groups, -1))
        best = choice.topk(2).values.sum(-1).topk(moe.top_groups).indices
        kept = torch.zeros(choice.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        ids = choice.masked_fill(~kept[:, :, None], -torch.inf).flatten(1).topk(moe.top_k).indices
        weights = scores.gather(1, ids)
        weights = (weights / weights.sum(1, keepdim=True) if moe.renormalize else weights) * moe.scaling
        every = torch.stack([self.mlp(x, f"mlp.experts.{e}.") for e in range(moe.num_experts)], 1)
        chosen = every.gather(1, ids[:, :, None].expand(-1, -1, x.shape[1]))
        return (chosen * weights[:, :, None]).sum(1) + self.mlp(x, "mlp.shared_experts.")

    def __call__(self, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next step is fed, and logits, from the target's states and the token after each of them."""
        embeds = self.t["model.embed_tokens.weight"][ids]
        if self.mimo:
            embeds[0] = 0
            parts = self.norm(hidden, "hidden_layernorm"), self.norm(embeds, "token_layernorm")
        elif self.qwen:
            parts = self.norm(embeds, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")
        else:
            parts = self.norm(embeds, "enorm"), self.norm(hidden, "hnorm")
        h = self.linear(torch.cat(parts, -1), "input_proj" if self.mimo else "fc" if self.qwen else "eh_proj")
        x = self.norm(h, "input_layernorm")
        h = h + self.linear(self.grouped_attention(x) if self.c.latent is None else self.latent_attention(x), "self_attn.o_proj")
        m = self.norm(h, "post_attention_layernorm")
        h = h + (self.mlp(m, "mlp.") if self.c.moe is None else self.experts(m, self.c.moe))
        last = self.norm(h, "final_layernorm" if self.mimo else "norm" if self.qwen else "shared_head.norm")
        return last if self.mimo or self.qwen else h, last @ self.t["lm_head.weight"].T


@pytest.mark.parametrize("name", MODELS)
def test_states_and_logits_follow_the_definition(name: str) -> None:
    config = MODELS[name]()
    target, tensors = checkpoint(config)
    g = torch.Generator().manual_seed(0)
    ids, hidden = torch.randint(0, 97, (LENGTH,), generator=g), torch.randn(LENGTH, 64, generator=g)
    states, logits = Definition(config, tensors)(ids, hidden)
    draft = Draft(target, tensors)
    pieces = [(0, 11, True), (11, 12, True), (12, 16, False), *((at, at + 1, False) for at in range(16, LENGTH))]
    got = torch.cat([draft.run(ids[a:b], hidden[a:b], a, extend) for a, b, extend in pieces])
    torch.testing.assert_close(got.float(), states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(draft.model.logits(got), logits, rtol=1e-4, atol=1e-3)
    assert torch.equal(draft.model.greedy(got), logits.argmax(-1))


def test_the_layer_of_glm_matches_transformers(tmp_path: Path) -> None:
    # transformers finds the layer only after the 46 or 92 layers of the published models.
    raw = Glm4MoeConfig(
        architectures=["Glm4MoeForCausalLM"], vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=46,
        first_k_dense_replace=45, num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_bias=True, use_qk_norm=True,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_group=2, topk_group=1, routed_scaling_factor=1.5,
        max_position_embeddings=256,
    )  # fmt: skip
    raw.save_pretrained(tmp_path)
    target, tensors = checkpoint(load_hf_config(tmp_path))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    main = Glm4MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    reference: Any = MtpModel.from_pretrained(main)
    ids = torch.randint(0, 97, (LENGTH + 1,), generator=torch.Generator().manual_seed(0))
    hidden = main.model(ids[None, :-1]).last_hidden_state
    expected = reference.forward_layer(0, hidden, torch.arange(LENGTH)[None], None, input_ids=ids[None, 1:])[0] @ main.lm_head.weight.T
    draft = Draft(target, tensors)
    torch.testing.assert_close(draft.model.logits(draft.run(ids[1:], hidden[0], 0, True)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["experts", "glm"])
def test_a_layer_stored_in_fp8_follows_the_definition(name: str) -> None:
    config = dataclasses.replace(MODELS[name](), quant=QuantConfig("fp8", "row", "weight_scale"))
    target, tensors = checkpoint(dataclasses.replace(config, quant=None))
    stored, wide = dict(tensors), dict(tensors)
    for weight in [weight for weight in tensors if PROJECTION.search(weight) and not weight.endswith("eh_proj.weight")]:
        stored[weight], stored[weight + "_scale"], wide[weight] = quantized(tensors[weight], "channel")
    target = build_model(config, TorchOps(), torch.float32, CPU)
    target.load(stored.items())
    draft = Draft(target, stored)
    g = torch.Generator().manual_seed(0)
    ids, hidden = torch.randint(0, 97, (LENGTH,), generator=g), torch.randn(LENGTH, 64, generator=g)
    states, logits = Definition(config, wide)(ids, hidden)
    got = draft.run(ids, hidden, 0, True)
    torch.testing.assert_close(got, states, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(draft.model.logits(got), logits, rtol=1e-3, atol=1e-2)


def test_embedding_and_head_are_the_targets() -> None:
    target, tensors = checkpoint(latent_model())
    # FP8 checkpoints of GLM-4.5 quantise the head that they repeat.
    repeated = {"embed_tokens.weight": (97, 64), "shared_head.head.weight": (97, 64), "shared_head.head.weight_scale": (97, 1)}
    draft = Draft(target, tensors | {f"model.layers.3.{name}": torch.zeros(shape) for name, shape in repeated.items()}).model
    assert draft.lm_head is target.lm_head
    own = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("model.layers.3."))
    assert draft.embed is target.embed
    assert draft.parts.weights.num_bytes == own
    assert draft.parts.rope.cos_sin.nbytes == target.config.max_context_len * 8 * 4 + 128 * 8 * 4


def test_a_checkpoint_without_the_layer_is_refused() -> None:
    target, tensors = checkpoint(latent_model())
    draft = MtpDraft(target)
    del tensors["model.layers.3.eh_proj.weight"]
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.3\.eh_proj\.weight"):
        draft.load(tensors.items())
    with pytest.raises(ConfigError, match=r"no layer for multi-token prediction .* --speculative-algorithm NGRAM"):
        mtp_config(latent_model(mtp=None))


# ---- served

PROMPTS = {r: np.random.default_rng(r).integers(0, 97, 5 + 7 * r).tolist() for r in (1, 2, 3)}
RUNTIME: dict[str, Any] = dict(max_running_requests=40, max_total_tokens=8192)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=64)


def easy(target: Any, draft: Any = None) -> None:
    """A target that mostly goes by its last token, and a draft that knows it."""
    for layer in (*target.layers, *(() if draft is None else (draft.layer,))):
        layer.attention.o_proj.weight.mul_(0.4)
    target.lm_head.weight.mul_(8.0)
    if draft is not None:
        width = target.config.hidden_size
        first, second = draft.proj.weight[:, :width], draft.proj.weight[:, width:]
        token, hidden = (second, first) if draft.config.mtp.hidden_first else (first, second)
        token.copy_(torch.eye(width))
        hidden.mul_(0.5)


def plain(model: ModelConfig, **runtime: Any) -> Any:
    worker = build_worker(tiny_runtime(**{**RUNTIME, **runtime}), model)
    easy(worker.parts.target.runner.model)
    return worker


def drafting(
    model: ModelConfig, runtime: dict[str, Any] | None = None, replay: Any = None, sizes: Any = None, group: Any = None, **spec: Any
) -> Any:
    spec.setdefault("num_draft_tokens", spec.get("num_steps", 3) + 1)
    config = tiny_runtime(tiny_speculative("", **{"algorithm": "MTP", "draft_model_path": None, **spec}), **{**RUNTIME, **(runtime or {})})
    worker: Any = build_worker(config, model, make_drafter, BuildOptions(replay, sizes), **(group or {}))
    worker.parts.monitor.schedule = EveryNth(512)
    easy(worker.parts.target.runner.model, worker.parts.drafter.model)
    return worker


@functools.cache
def plain_text(name: str) -> dict[int, list[int]]:
    return Driver(plain(MODELS[name]())).generate(PROMPTS, 16)


SPECS: dict[str, dict[str, Any]] = {
    "one": {"num_steps": 1},
    "chain": {"num_steps": 3},
    "tree": {"num_steps": 3, "topk": 3, "num_draft_tokens": 8},
}


@pytest.mark.parametrize(
    ("name", "spec", "page"),  # all pairs, except trees through recurrent states
    [
        (name, spec, (1, 16, 64)[(i + j) % 3])
        for i, name in enumerate(MODELS)
        for j, spec in enumerate(SPECS)
        if (name, spec) != ("qwen", "tree")
    ],
)
def test_greedy_text_is_that_without_drafts(name: str, spec: str, page: int) -> None:
    driver = Driver(drafting(MODELS[name](), {"page_size": page}, "eager", [2, 4], **SPECS[spec]))
    assert driver.generate(PROMPTS, 16, chunk=5) == plain_text(name)
    assert driver.mean_accept_len() > 1.2


@pytest.mark.parametrize("spec", ["chain", "tree"])
@pytest.mark.parametrize(("name", "page"), [("deepseek", 1), ("deepseek", 16), ("glm", 16)])
def test_shared_prefixes_and_lost_rows_keep_the_text(spec: str, name: str, page: int) -> None:
    model, long = MODELS[name](), np.random.default_rng(0).integers(0, 97, 40).tolist()
    expected = Driver(plain(model)).generate({1: long, 2: [*long[:32], 5, 6]}, 16)
    driver = Driver(drafting(model, {"page_size": page}, **SPECS[spec]))
    driver.prefill({1: long}, chunk=7)
    # The draft's KV of a position depends on the next token, so one token more than the shared part must be equal.
    driver.prefill({2: [*long[:32], 5, 6]}, shared={2: (1, 31)})
    for _ in range(3):
        driver.decode([2, 1])
    so_far = driver.out[1]
    driver.release(1)
    driver.prefill({3: PROMPTS[3]})
    driver.prefill({1: long + so_far}, resumed={1: len(long)}, chunk=4)
    while min(len(driver.out[1]), len(driver.out[2])) < 16:
        driver.decode([3, 2, 1])
    assert {row: driver.out[row][:16] for row in (1, 2)} == expected


def test_sampled_requests_run_beside_greedy_ones() -> None:
    model = latent_model()
    mixed = {1: GREEDY, 2: SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_new_tokens=64), 3: GREEDY}
    expected = Driver(plain(model)).generate(PROMPTS, 20)
    out = Driver(drafting(model, num_steps=3)).generate(PROMPTS, 20, sampling=mixed)
    assert {row: out[row] for row in (1, 3)} == {row: expected[row] for row in (1, 3)}
    assert all(0 <= token < 97 for token in out[2])


@pytest.mark.parametrize("name", MODELS)
def test_a_token_map_restricts_the_draft_and_keeps_the_text(name: str, tmp_path: Path) -> None:
    model, hot = MODELS[name](), [token for token in range(97) if token % 3]
    torch.save(torch.tensor(hot), tmp_path / "map.pt")
    worker = drafting(model, num_steps=3, token_map=str(tmp_path / "map.pt"))
    draft = worker.parts.drafter.model
    assert (draft.vocab_size, draft.lm_head.out_features) == (len(hot), len(hot))
    draft.lm_head.weight.copy_(worker.parts.target.runner.model.lm_head.weight[torch.tensor(hot)])
    driver = Driver(worker)
    assert driver.generate(PROMPTS, 16) == plain_text(name)
    assert driver.mean_accept_len() > 1.1


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_generate_the_text_of_one(name: str) -> None:
    model = MODELS[name]()
    alone = Driver(drafting(model, num_steps=3))
    expected = alone.generate(PROMPTS, 16)

    def build(group: Any, followers: Any) -> Any:
        return drafting(model, {"tp_size": group.size}, num_steps=3, group={"group": group, "followers": followers})

    with ranks(2, build) as worker:
        sharded = Driver(worker)
        assert sharded.generate(PROMPTS, 16) == expected
        assert sharded.mean_accept_len() == alone.mean_accept_len() > 1.2
        assert not worker.parts.target.agreement.differs.item()
