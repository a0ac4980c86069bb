"""Variants of config.json, read as transformers reads them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from runtime.models.registry import load_hf_config
from runtime.models.rotary import build_rope

MODEL_TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
ROPES: list[dict[str, Any] | None] = [
    None,
    {},
    {"rope_type": "default"},
    {"rope_theta": 777.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "dynamic", "factor": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
]
CHOICES: dict[str, list[Any]] = {
    "num_key_value_heads": [2, 4],
    "head_dim": [16, 32],
    "rope_theta": [5000.0, 1e6],
    "use_sliding_window": [True, False],
    "sliding_window": [6, None],
    "max_window_layers": [0, 1, 28],
    "layer_types": [["full_attention", "sliding_attention"], ["sliding_attention"] * 2, ["full_attention"] * 2],
    "tie_word_embeddings": [True, False],
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
}


def variant(seed: int) -> dict[str, Any]:
    """A config.json in which each optional field is there or not."""
    chosen = random.Random(seed)
    name = chosen.choice(sorted(MODEL_TYPES))
    raw: dict[str, Any] = {
        "architectures": [name], "model_type": MODEL_TYPES[name], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": chosen.choice([2, 30]), "num_attention_heads": 4, "max_position_embeddings": 128,
    }  # fmt: skip
    raw |= {field: chosen.choice(values) for field, values in CHOICES.items() if chosen.random() < 0.5}
    if raw["num_hidden_layers"] != 2:
        raw.pop("layer_types", None)
    if "yarn" in json.dumps(raw):
        raw.setdefault("head_dim", 16)  # transformers' yarn does not derive it
    return raw


def reference_windows(config: Any) -> list[int]:
    """Keys before its own that a query of each layer sees, as transformers' masks say."""
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "llama" or size is None:
        return [-1] * config.num_hidden_layers
    if config.model_type == "mistral":
        return [size - 1] * config.num_hidden_layers
    return [size - 1 if kind == "sliding_attention" else -1 for kind in kinds]


@pytest.mark.parametrize("seed", range(150))
def test_a_variant_is_read_as_in_transformers(tmp_path: Path, seed: int) -> None:
    raw = variant(seed)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mine, reference = load_hf_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert mine.head_dim == (getattr(reference, "head_dim", None) or 16)
    assert mine.num_kv_heads == (4 if 4 % reference.num_key_value_heads else reference.num_key_value_heads)
    assert mine.tie_embeddings == reference.tie_word_embeddings
    assert list(mine.window) == reference_windows(reference)
    cos, sin = LlamaRotaryEmbedding(reference)(torch.zeros(1), torch.arange(100)[None])
    half = cos.shape[-1] // 2
    table = build_rope(replace(mine, max_context_len=128), torch.device("cpu")).cos_sin[:100]
    torch.testing.assert_close(table, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1), rtol=1e-5, atol=1e-5)
