from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from runtime.errors import ConfigError
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import Stream
from runtime.layers.pass_context import PassContext
from runtime.layers.rope import Rope, RotaryHeads
from runtime.layers.torch_ops import TorchOps, rotate
from runtime.mem_cache.kv_pool import KVPool
from runtime.mem_cache.kv_spec import KVSpec
from runtime.models.config import ModelConfig
from runtime.models.registry import load_hf_config
from runtime.models.rotary import POSITION_MARGIN, build_rope, inverse_frequencies


def table(head_dim: int, positions: int) -> Rope:
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(head_dim, 10000.0, None))
    return Rope(torch.cat((angles.cos(), angles.sin()), dim=1))


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The definition: pair i of a head is a complex number rotated by position * theta ** (-2i / head_dim)."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions.double()[:, None, None] * 10000.0 ** (-torch.arange(half).double() / half)
    out = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((out.real, out.imag), dim=-1).float()


@pytest.mark.parametrize("head_dim", [2, 16, 64])
def test_rotation_rotates_each_pair_by_its_angle(head_dim: int) -> None:
    x, positions = torch.randn(5, 3, head_dim), torch.tensor([0, 1, 7, 30, 99])
    torch.testing.assert_close(rotate(x, table(head_dim, 100), positions), rotated(x, positions), rtol=1e-4, atol=1e-4)


YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn without truncation": {"rope_type": "yarn", **YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn of DeepSeek": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn with its own magnitude": {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
    "yarn without a factor": {"rope_type": "yarn", "original_max_position_embeddings": 64, "factor": None},
    "yarn with nulls": {"rope_type": "yarn", **YARN, "truncate": None, "beta_fast": None, "beta_slow": None, "attention_factor": None},
    "yarn in the older spelling": {"type": "yarn", **YARN},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": 128,
        "short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
    },
    "longrope with a factor": {
        "rope_type": "longrope", "original_max_position_embeddings": 128, "factor": 32.0,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    },
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.25},
}  # fmt: skip


def llama(folder: Path, rope: dict[str, Any], **changes: Any) -> tuple[LlamaConfig, ModelConfig]:
    """One config.json, as transformers and as the server read it."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    raw = {**sizes, "max_position_embeddings": 256, "rope_theta": 5000.0, "rope_scaling": rope, **changes}
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **raw}))
    return LlamaConfig.from_pretrained(folder), load_hf_config(folder)


@pytest.mark.parametrize("length", [100, 256, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_those_of_transformers(tmp_path: Path, kind: str, length: int) -> None:
    reference, config = llama(tmp_path, KINDS[kind])
    # transformers' table follows the text; the server's follows the longest context it serves.
    mine = build_rope(replace(config, max_context_len=length), torch.device("cpu"))
    cos, sin = LlamaRotaryEmbedding(reference)(torch.zeros(1), torch.arange(length)[None])
    both = torch.cat((cos[0, :, :8], sin[0, :, :8]), dim=1)
    torch.testing.assert_close(mine.cos_sin[:length], both, rtol=1e-5, atol=1e-5)


LONGEST = {"yarn": 512, "yarn without a factor": 256, "dynamic": 1024, "linear": 1024, "llama3": 256, "longrope with a factor": 256}


@pytest.mark.parametrize(("kind", "longest"), LONGEST.items())
def test_scaling_lengthens_the_context(tmp_path: Path, kind: str, longest: int) -> None:
    assert llama(tmp_path, KINDS[kind])[1].max_context_len == longest


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "linear"])
def test_a_context_that_is_scaled_already_is_not_scaled_again(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    assert llama(tmp_path, rope)[1].max_context_len == 256


def test_the_original_context_beside_the_scaling_wins(tmp_path: Path) -> None:
    reference, config = llama(tmp_path, KINDS["longrope"], original_max_position_embeddings=64)
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_max_position == 64
    cos, _ = LlamaRotaryEmbedding(reference)(torch.zeros(1), torch.arange(65)[None])
    mine = build_rope(replace(config, max_context_len=65), torch.device("cpu"))
    torch.testing.assert_close(mine.cos_sin[:65, :8], cos[0, :, :8], rtol=1e-5, atol=1e-5)


def test_no_table_is_computed_on_the_meta_device(tmp_path: Path) -> None:
    """There a check of the weights would take as much memory as the table of the longest context."""
    longest = 2**31 - 200
    _, config = llama(tmp_path, KINDS["yarn"])
    rope = build_rope(replace(config, max_context_len=longest), torch.device("meta"))
    assert (rope.cos_sin.device.type, len(rope.cos_sin)) == ("meta", longest + POSITION_MARGIN)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "mrope"}, "rope scaling 'mrope' is not supported; supported are default, linear, llama3, yarn"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "the longrope rope scaling lacks 'long_factor'"),
        ({"rope_type": "longrope", "short_factor": 2.0, "long_factor": []}, "short_factor is 2.0; it must be a list of positive numbers"),
        ({"rope_type": "longrope", "short_factor": [0], "long_factor": []}, r"short_factor\[0\] is 0; it must be a positive number"),
        ({"rope_type": "dynamic"}, "the dynamic rope scaling lacks 'factor'"),
        ({"rope_type": "yarn", "rope_theta": 1}, "rope_theta is 1.0; for yarn it must be larger than 1"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1; for longrope it must be larger",
        ),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor is 4.0; it must be larger than low_freq_factor, 4.0",
        ),
    ],
)
def test_a_scaling_that_cannot_be_read_is_refused_by_name(tmp_path: Path, rope: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
                    "num_hidden_layers": 1, "num_attention_heads": 4, "rope_scaling": rope})
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        load_hf_config(tmp_path)


def test_longrope_needs_one_factor_for_each_pair(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8, "original_max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
                    "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 256, "rope_scaling": rope})
    )  # fmt: skip
    with pytest.raises(ConfigError, match="names 7 factors; heads with 16 rotated entries need 8"):
        build_rope(load_hf_config(tmp_path), torch.device("cpu"))


@pytest.mark.parametrize("dim", [4, 8, 16])
def test_interleaved_pairs_turn_as_in_transformers(dim: int) -> None:
    x, positions = torch.randn(1, 3, 5, 16), torch.tensor([0, 1, 7, 30, 99])
    angles = torch.outer(torch.arange(100).float(), inverse_frequencies(dim, 10000.0, None))
    both = torch.cat((angles, angles), dim=1)[positions][None]
    expected, _ = apply_rotary_pos_emb(x, x, both.cos(), both.sin())
    rope = Rope(torch.cat((angles.cos(), angles.sin()), dim=1), interleaved=True)
    torch.testing.assert_close(rotate(x[0].transpose(0, 1), rope, positions).transpose(0, 1), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [4, 8])
def test_a_part_of_each_head_turns_and_the_rest_stays(dim: int) -> None:
    x, positions = torch.randn(5, 3, 16), torch.tensor([0, 1, 7, 30, 99])
    turned = rotate(x, table(dim, 100), positions)
    torch.testing.assert_close(turned[..., :dim], rotated(x[..., :dim], positions), rtol=1e-4, atol=1e-4)
    assert torch.equal(turned[..., dim:], x[..., dim:])


@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache_writes_only_its_slots(normed: bool) -> None:
    positions, slots = torch.tensor([3, 4, 9]), torch.tensor([7, 1, 5])
    qkv = torch.randn(3, 8 * 16)
    pool = KVPool([KVSpec("gqa", 2, 16, 16, torch.float32)] * 2, 9, 1, torch.device("cpu"))
    for k, v in zip(pool.k, pool.v, strict=True):
        k.fill_(5.0)
        v.fill_(6.0)
    norm = RMSNorm(torch.rand(16) + 0.5, 1e-6) if normed else None
    batch: Any = SimpleNamespace(positions=positions, out_cache_loc=slots)
    context = PassContext(batch, pool, SimpleNamespace())  # type: ignore[arg-type]
    q = TorchOps().rope_and_cache(qkv, RotaryHeads(4, 2, 16, table(16, 20), norm, norm), 1, context)
    k_cache, v_cache = pool.flat(1)
    assert torch.all(pool.k[0] == 5.0), "another layer was written"
    heads = qkv.view(3, 8, 16)
    before = heads[:, :6]
    if norm is not None:
        before = before / (before.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    expected = rotated(before, positions)
    torch.testing.assert_close(q, expected[:, :4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(k_cache[slots], expected[:, 4:], rtol=1e-4, atol=1e-4)
    assert torch.equal(v_cache[slots], heads[:, 6:])
    others = [0, 2, 3, 4, 6, 8, 9]
    assert torch.all(k_cache[others] == 5.0)
    assert torch.all(v_cache[others] == 6.0)


def test_the_residual_stream_stays_float32_beside_narrow_layers() -> None:
    h = torch.full((2, 8), 20000.0)
    linear = Linear.dense(torch.eye(8, dtype=torch.bfloat16))
    out = TorchOps().linear_add(torch.ones(2, 8, dtype=torch.bfloat16), linear, Stream(h)).h
    assert out.dtype == torch.float32
    assert torch.all(out == 20001.0)
