"""The bytes that a step of any served shape must read: dense, sparse and latent layers, whole or quantised weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WIDE = 2.0
"""Bytes of a bf16 number."""
_SCALED_BYTES = {"fp8": 1.0 + 4 / 128**2, "mxfp4": 4.25 / 8}
"""Bytes of one weight with its share of the scales, by quantisation method."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The sparse layers of a model.

    Attributes:
        count, top_k: experts of a layer, and those that a token chooses.
        bytes: of one expert.
        layers: how many layers are sparse.
    """

    count: int
    top_k: int
    bytes: float
    layers: int

    def distinct(self, tokens: float) -> float:
        """Experts of a layer that `tokens` choose together, expected for uniform and independent routing."""
        return self.count * (1 - (1 - self.top_k / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What one pass reads.

    Attributes:
        fixed: bytes of the weights that every pass reads: attention, dense MLPs, shared experts, routers, LM head.
        experts: the sparse layers, None in a dense model.
        full_kv, window_kv: bytes of KV per token in the layers with full attention, and in those with a window.
        window: tokens that a layer with a window keeps.
    """

    fixed: float
    experts: Experts | None
    full_kv: float
    window_kv: float = 0.0
    window: int = 0

    @classmethod
    def of_target(cls, folder: Path) -> StepBytes:
        """The target in `folder`."""
        return _target(_config(folder))

    @classmethod
    def of_draft(cls, folder: Path, target: Path) -> StepBytes:
        """One pass of the EAGLE head in `folder`, with its LM head."""
        raw, wide = _config(folder), _config(target)
        hidden, vocab = raw["hidden_size"], raw.get("draft_vocab_size") or raw["vocab_size"]
        is_eagle3 = "Eagle3" in raw["architectures"][0] or "draft_vocab_size" in raw
        attention = _grouped(raw, 2 * hidden if is_eagle3 else hidden)
        # EAGLE-3 projects the target's states once an iteration, EAGLE-1 each state in each pass.
        project = 0 if is_eagle3 else 2 * hidden * wide["hidden_size"]
        weights = attention + 3 * hidden * raw["intermediate_size"] + vocab * hidden + project
        return cls(weights * _WIDE, None, 2 * raw["num_key_value_heads"] * _head_dim(raw) * _WIDE)

    def read(self, requests: float, tokens: float, context: float) -> float:
        """Bytes of a pass over `tokens` of `requests` at a mean `context`."""
        sparse = self.experts.layers * self.experts.distinct(tokens) * self.experts.bytes if self.experts else 0.0
        kv = requests * (context * self.full_kv + min(context, self.window) * self.window_kv)
        return self.fixed + sparse + kv


@dataclass(frozen=True, slots=True)
class ModelRoof:
    """The limit of a target with a draft."""

    target: StepBytes
    draft: StepBytes

    def bytes(self, steps: int, batch: float, context: float) -> float:
        """Bytes of one iteration: a verify pass over `steps` + 1 tokens of each request, and `steps` passes of the draft."""
        drafts = steps * self.draft.read(batch, batch, context)
        return self.target.read(batch, batch * (steps + 1), context) + drafts

    def roof_ms(self, steps: int, batch: int, context: float, bytes_per_second: float) -> float:
        """Milliseconds of an iteration of `steps` drafts, or of a plain step, by its bytes alone."""
        return self.bytes(steps, batch, context) / bytes_per_second * 1000


def _config(folder: Path) -> dict[str, Any]:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return raw.get("text_config", raw)


def _head_dim(raw: Mapping[str, Any]) -> int:
    return raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]


def _grouped(raw: Mapping[str, Any], inputs: int) -> int:
    """Weights of a grouped-query attention layer whose projections read rows of `inputs`."""
    heads, kv = raw["num_attention_heads"], raw.get("num_key_value_heads", raw["num_attention_heads"])
    return _head_dim(raw) * (inputs * (heads + 2 * kv) + heads * raw["hidden_size"])


def _latent(raw: Mapping[str, Any]) -> int:
    """Weights of a latent attention layer."""
    hidden, heads, rank = raw["hidden_size"], raw["num_attention_heads"], raw["kv_lora_rank"]
    nope, rope, value = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    query = raw.get("q_lora_rank") or 0
    into_query = hidden * query + query * heads * (nope + rope) if query else hidden * heads * (nope + rope)
    return into_query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _target(raw: Mapping[str, Any]) -> StepBytes:
    method = (raw.get("quantization_config") or {}).get("quant_method")
    small = _SCALED_BYTES.get(method or "", _WIDE)
    dense_bytes = _WIDE if method == "mxfp4" else small  # gpt-oss quantises its experts only
    hidden, layers = raw["hidden_size"], raw["num_hidden_layers"]
    attention = _latent(raw) if "kv_lora_rank" in raw else _grouped(raw, hidden)
    experts, dense_layers = _experts(raw, small)
    fixed = layers * attention * dense_bytes + dense_layers * 3 * hidden * raw["intermediate_size"] * dense_bytes
    if experts:
        shared = raw.get("n_shared_experts", 0) * experts.bytes + raw.get("shared_expert_intermediate_size", 0) * 3 * hidden * small
        fixed += experts.layers * (shared + experts.count * hidden * _WIDE)
    fixed += raw["vocab_size"] * hidden * _WIDE
    if "kv_lora_rank" in raw:
        return StepBytes(fixed, experts, layers * (raw["kv_lora_rank"] + raw["qk_rope_head_dim"]) * _WIDE)
    token = 2 * raw.get("num_key_value_heads", raw["num_attention_heads"]) * _head_dim(raw) * _WIDE
    sliding = sum(kind == "sliding_attention" for kind in raw.get("layer_types") or [])
    return StepBytes(fixed, experts, (layers - sliding) * token, sliding * token, raw.get("sliding_window") or 0)


def _experts(raw: Mapping[str, Any], small: float) -> tuple[Experts | None, int]:
    """The sparse layers, and the number of dense ones."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((raw[name] for name in names if raw.get(name)), 0)
    if not count:
        return None, raw["num_hidden_layers"]
    inner = raw.get("moe_intermediate_size") or raw["intermediate_size"]
    dense = raw.get("first_k_dense_replace", 0) + len(raw.get("mlp_only_layers") or [])
    top_k = raw.get("num_experts_per_tok") or raw["experts_per_token"]
    return Experts(count, top_k, 3 * raw["hidden_size"] * inner * small, raw["num_hidden_layers"] - dense), dense
