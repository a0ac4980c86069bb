"""Converts the architecture of a GGUF file to Hugging Face's config.json and tensor names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.errors import ConfigError
from runtime.model_files.gguf_file import GGUFFile

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
WINDOW_CLASS = "MistralForCausalLM"
"""The class for files of the llama architecture with a sliding window."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's frequency factors: part of the configuration, not a weight


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The target of one stored tensor. If `heads` > 0, its rows are interleaved per head (see `unpermute`)."""

    source: str
    target: str
    heads: int


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order of the q and k projections of Llama-like models.

    GGUF rotates adjacent pairs of a head, Hugging Face rotates its two halves: stored row `2 i + j` of a head is row `j d / 2 + i`.

    Args:
        rows: [heads * d, ...].
        heads: query heads for q, KV heads for k.
    """
    d = rows.shape[0] // heads
    return rows.reshape(heads, d // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def plan_tensors(file: GGUFFile, config: dict[str, Any]) -> list[TensorPlan]:
    """Map every stored tensor to its Hugging Face name.

    Raises:
        ConfigError: a tensor is unknown, or one is missing.
    """
    plans = []
    for name in file.tensor_names:
        if name == ROPE_FACTORS:
            continue
        plans.append(TensorPlan(name, _target_name(file, name), _heads_to_unpermute(file, name, config)))
    _require_all(file, {plan.source for plan in plans}, config)
    return plans


def _target_name(file: GGUFFile, name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise ConfigError(f"{file.path}: tensor {name!r} does not belong to a supported architecture ({', '.join(CLASSES)})")
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"


def _heads_to_unpermute(file: GGUFFile, name: str, config: dict[str, Any]) -> int:
    if file.architecture != "llama":
        return 0
    key = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    heads, rows = config[key] if key else 0, file.shape(name)[0]
    if heads and rows % (2 * heads):
        raise ConfigError(f"{file.path}: tensor {name!r} has {rows} rows, which {heads} heads cannot share in pairs")
    return heads


def _require_all(file: GGUFFile, present: set[str], config: dict[str, Any]) -> None:
    layers = range(min(config["num_hidden_layers"], len(present) + 1))  # a wrong count may be huge
    parts = [part for part in _BLOCK_NAMES if file.architecture == "qwen3" or not part.endswith(("q_norm", "k_norm"))]
    wanted = {"token_embd.weight", "output_norm.weight"} | {f"blk.{i}.{part}.weight" for i in layers for part in parts}
    missing = sorted(wanted - present)
    if missing:
        raise ConfigError(f"{file.path} lacks {len(missing)} tensors of the model, among them {missing[0]!r}")


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return the config.json of a GGUF file, without its dtype.

    Raises:
        ConfigError: the architecture is not supported, or its metadata is incomplete.
    """
    arch, parts = file.architecture, file.get("split.count", int, 1)
    if parts > 1:
        raise ConfigError(f"{file.path} is one of {parts} parts of a model; join them with 'llama-gguf-split --merge' and give the result")
    if arch not in CLASSES:
        raise ConfigError(f"{file.path} is of architecture {arch!r}; supported are {', '.join(CLASSES)} (Mistral files are 'llama')")
    if file.get(f"{arch}.expert_count", int, 0):
        raise ConfigError(f"{file.path} is a mixture of experts; only dense models are supported")
    if (heads := file.get(f"{arch}.attention.head_count", int)) < 1:
        raise ConfigError(f"{file.path}: {arch}.attention.head_count is {heads}; a model has at least one head")
    hidden = file.get(f"{arch}.embedding_length", int)
    config: dict[str, Any] = {
        "architectures": [CLASSES[arch]],
        "model_type": arch,
        "vocab_size": file.shape("token_embd.weight")[0] if "token_embd.weight" in file.tensor_names else 0,
        "hidden_size": hidden,
        "intermediate_size": file.get(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": file.get(f"{arch}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{arch}.attention.head_count_kv", int, heads),
        "head_dim": file.get(f"{arch}.attention.key_length", int, hidden // heads),
        "max_position_embeddings": file.get(f"{arch}.context_length", int),
        "rms_norm_eps": _shortest(file.get(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": file.get(f"{arch}.rope.freq_base", float, 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
    }
    return config | _token_ids(file) | _biases(file) | _window(file) | _rope_scaling(file, config)


def eos_ids(file: GGUFFile) -> list[int]:
    """The ids of the tokens for end of sequence, of turn, and of message."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(file.get(key, int) for key in keys if file.has(key)))


def _shortest(value: float) -> float:
    """Undo the widening of a float32 (9.999999747378752e-06 was written as 1e-05)."""
    return float(str(np.float32(value)))


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    ids = eos_ids(file)
    found: dict[str, Any] = {"eos_token_id": ids[0] if len(ids) == 1 else ids} if ids else {}
    if file.has("tokenizer.ggml.bos_token_id"):
        found["bos_token_id"] = file.get("tokenizer.ggml.bos_token_id", int)
    return found


def _biases(file: GGUFFile) -> dict[str, Any]:
    if file.architecture == "qwen2":
        return {}
    names = set(file.tensor_names)
    on_qkv, on_output = "blk.0.attn_q.bias" in names, "blk.0.attn_output.bias" in names
    if on_qkv != on_output:
        raise ConfigError(f"{file.path} has a bias on only some of the attention projections; that is not supported")
    return {"attention_bias": on_qkv, "mlp_bias": "blk.0.ffn_gate.bias" in names}


def _window(file: GGUFFile) -> dict[str, Any]:
    key = f"{file.architecture}.attention.sliding_window"
    if not file.has(key):
        return {}
    if file.architecture != "llama":
        raise ConfigError(f"{file.path} has a sliding window, which is supported in GGUF files of the llama architecture only")
    return {"architectures": [WINDOW_CLASS], "model_type": "mistral", "sliding_window": file.get(key, int)}


def _rope_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    if ROPE_FACTORS in file.tensor_names:
        return {"rope_scaling": _llama3_scaling(file, config)}
    prefix = f"{file.architecture}.rope.scaling."
    kind = file.get(prefix + "type", str, "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{file.path} scales positions by {kind!r}; supported are 'linear', 'yarn' and Llama 3.1's")
    factor = file.get(prefix + "factor", float)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.get(prefix + "original_context_length", int)
        # llama.cpp multiplies its own correction factor, in the parentheses, by attn_factor.
        scaling["attention_factor"] = file.get(prefix + "attn_factor", float, 1.0) * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return {"rope_scaling": scaling}


def _llama3_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Recover Llama 3.1's parameters from the frequency factors, and check that they give the same factors."""
    stored = file.tensor(ROPE_FACTORS).astype(np.float64)
    factor = float(stored.max(initial=1.0))
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_factors(config["rope_theta"], config["head_dim"], factor)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ConfigError(f"{file.path} holds rotary factors that are not Llama 3.1's; use the safetensors checkpoint instead")
    return scaling


def llama3_factors(theta: float, dim: int, factor: float) -> np.ndarray:
    """The divisor of each rotary frequency [dim / 2] in Llama 3.1, for low 1, high 4 and an original context of 8192.

    Wavelengths above 8192 are divided by `factor`, those below 2048 stay. Source: `rope_scaling` of
    meta-llama/Llama-3.1-8B.
    """
    wavelength = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((8192 / wavelength - 1.0) / 3.0, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
