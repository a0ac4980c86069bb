"""The trainable EAGLE-3 head: a plain form of `runtime.models.eagle3.LlamaForCausalLMEagle3`, unrolled over its own states.

Source: EAGLE-3, Li et al. 2025, arXiv:2503.01840 (training-time test). Tensor names follow the published checkpoints.

Position `b` of pass 0 reads the token at `b + 1` and the target's states at `b`, and predicts the token at `b + 2`. Pass `i` continues
from each base `b` independently: at position `b + i` it reads the token at `b + i + 1` and the head's state of pass `i - 1` at base `b`,
predicts the token at `b + i + 2`, and attends to pass 0 up to `b` and to the later passes of its own base. The server's draft-extend and
draft-decode passes compute the same if all drafts so far are correct.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from eagle_training.chain_attention import Pair, definition
from eagle_training.vocabulary import draft_to_target, target_in_draft
from runtime.models.config import ModelConfig, RopeScaling
from runtime.models.rotary import build_rope

INIT_STD = 0.02
FC_NOISE = 0.1
SCALING_FIELDS = {
    "linear": {},
    "llama3": {
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position": "original_max_position_embeddings",
    },
    "yarn": {
        "original_max_position": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "magnitude": "attention_factor",
    },
}
"""The fields of a rotary scaling, other than kind and factor, and their names in config.json."""


def head_config(target: ModelConfig, intermediate_size: int, draft_vocab_size: int) -> ModelConfig:
    """The configuration of a head with the width, the attention heads and the rotary embedding of its target. The rotary embedding is
    unscaled if published heads do not have the target's kind of scaling.
    """
    scaling = target.rope_scaling
    return ModelConfig(
        architecture="LlamaForCausalLMEagle3",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_layers=1,
        num_q_heads=target.num_q_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_eps=target.rms_eps,
        rope_theta=target.rope_theta,
        rope_scaling=scaling if scaling is not None and scaling.kind in SCALING_FIELDS else None,
        max_context_len=target.max_context_len,
        tie_embeddings=False,
        window=(-1,),
        eos_ids=target.eos_ids,
        bos_id=target.bos_id,
        dtype=target.dtype,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
    )


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size], float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Attention of the chain of passes; `later` is `chain_attention.definition` or `chain_attention.chain_attention`."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.later = definition
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_q_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_q_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, earlier: list[Pair]) -> torch.Tensor:
        """One pass: x [B, L, 2 * hidden] -> [B, L, hidden].

        Appends its keys and values [B, G, L, head_dim] to `earlier`, pass 0 first.
        """
        q, k, v = (proj(x).unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos_sin).to(v.dtype), rotate(k, cos_sin).to(v.dtype)
        earlier.append((k, v))
        out = self._first(q, k, v) if len(earlier) == 1 else self.later(q, earlier[0], earlier[1:])
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _first(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = self.c.num_q_heads // self.c.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Mlp(nn.Module):
    """SwiGLU: silu(gate) * up, then down."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The head's only block; it reads the token's embedding and the state."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_eps)
        self.hidden_norm = Norm(c.hidden_size, c.rms_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_eps)
        self.self_attn = Attention(c)
        self.mlp = Mlp(c)

    def forward(self, embeds: torch.Tensor, h: torch.Tensor, cos_sin: torch.Tensor, earlier: list[Pair]) -> torch.Tensor:
        """embeds [B, L, hidden] (normed) and the float32 stream h -> the stream after the block."""
        x = torch.cat([embeds, self.hidden_norm(h)], dim=-1)
        h = h + self.self_attn(x, cos_sin, earlier)
        return h + self.mlp(self.post_attention_layernorm(h))


class EagleHead(nn.Module):
    """The head and the frozen tensors that it reads.

    The channels of the features differ in magnitude by orders, so `fc` is trained on features divided by `feature_size`; `export` folds
    the division into its weight.

    Attributes:
        config: the result of `head_config`.
        embed: [V, H], the target's embedding.
        vocabulary: int64 [Vd], the target id of each draft id.
    """

    def __init__(self, config: ModelConfig, embed: torch.Tensor, vocabulary: npt.NDArray[np.int64], feature_size: torch.Tensor) -> None:
        super().__init__()
        c = self.config = config
        self.vocabulary = vocabulary
        self.fc = nn.Linear(3 * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = MidLayer(c)
        self.norm = Norm(c.hidden_size, c.rms_eps)
        self.lm_head = nn.Linear(c.hidden_size, len(vocabulary), bias=False)
        self.embed: torch.Tensor
        self.feature_scale: torch.Tensor
        self.cos_sin: torch.Tensor
        self.register_buffer("embed", embed.detach(), persistent=False)
        self.register_buffer("feature_scale", 1.0 / feature_size.float())
        self.register_buffer("cos_sin", build_rope(c, embed.device).cos_sin, persistent=False)

    def init_weights(self, target_head: torch.Tensor, final_norm: torch.Tensor, generator: torch.Generator) -> None:
        """Start from the target's LM head and norm over its highest feature layer, with small random weights elsewhere.

        `generator` is a CPU generator.
        """
        high = 2 * self.config.hidden_size
        size = 1.0 / self.feature_scale[high:]
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    std = FC_NOISE * parameter.shape[1] ** -0.5 if name == "fc.weight" else INIT_STD
                    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
            self.fc.weight[:, high:] += torch.diag(size / size.median())
            self.lm_head.weight.copy_(target_head[torch.from_numpy(self.vocabulary).to(target_head.device)])
            self.norm.weight.copy_(final_norm)

    def continue_from(self, folder: Path, target_head: torch.Tensor) -> None:
        """Load the weights of a trained head of the same target. Weights that it lacks are initialised so that they have no effect.

        A wider MLP keeps its new input weights and gets zeros as new output weights. The LM head's row for a token that the trained head
        does not draft is the target's, scaled to the trained rows.

        Raises:
            SystemExit: the trained head's tensors do not fit into this head.
        """
        old = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        for name, parameter in self.named_parameters():
            known_size = old[name].shape if name in old else ()
            sizes = list(zip(known_size, parameter.shape, strict=False))
            if len(known_size) != parameter.dim() or any(a > b for a, b in sizes if name != "lm_head.weight"):
                raise SystemExit(f"--initial-head {folder}: {name} {list(known_size)} does not fit into {list(parameter.shape)}")
        known = (old.pop("d2t").long() + torch.arange(len(old["lm_head.weight"]))).tolist()
        rows = {token: row for row, token in enumerate(known)}
        trained = old["lm_head.weight"]
        base = target_head.detach().float().cpu()
        scale = (trained * base[known]).sum() / base[known].square().sum()
        old["lm_head.weight"] = torch.stack([trained[rows[t]] if t in rows else base[t] * scale for t in self.vocabulary.tolist()])
        old["fc.weight"] = old["fc.weight"] / self.feature_scale.cpu()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("down_proj.weight"):
                    parameter.zero_()
                corner = tuple(slice(0, size) for size in old[name].shape)
                parameter[corner].copy_(old[name])

    def unroll(self, ids: torch.Tensor, features: torch.Tensor, passes: int) -> Iterator[torch.Tensor]:
        """The residual stream after each pass, by base.

        Args:
            ids: int64 [B, L].
            features: [B, L, 3 * H], any float dtype.
            passes: number of passes.

        Yields:
            float32 [B, L, H]. Position `b` of pass `i` is valid if `b + i + 1 < L`.
        """
        L = ids.shape[1]
        h = self.fc(features * self.feature_scale).float()
        embeds = self.midlayer.input_layernorm(F.embedding(ids, self.embed))
        earlier: list[Pair] = []
        for i in range(passes):
            ahead = F.pad(embeds[:, i + 1 :], (0, 0, 0, min(i + 1, L)))
            h = self.midlayer(ahead, h, self.cos_sin[i : i + L], earlier)
            yield h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N, Vd]."""
        return self.lm_head(self.norm(h)).float()

    def checkpoint(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors with their published names, on the CPU."""
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        tensors["fc.weight"] = tensors["fc.weight"] * self.feature_scale
        found = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
        found["d2t"] = torch.from_numpy(draft_to_target(self.vocabulary))
        found["t2d"] = torch.from_numpy(target_in_draft(self.vocabulary, self.config.vocab_size))
        return found

    def export(self, folder: Path, aux_layers: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Path:
        """Write config.json and model.safetensors in the published layout; return the weight file."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config_json(self.config, aux_layers, dtype), indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        save_file(self.checkpoint(dtype), folder / "model.safetensors", metadata={"format": "pt"})
        return folder / "model.safetensors"


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to x [B, heads, L, head_dim] with the rows [L, head_dim] of the table; returns float32."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def aux_json(aux_layers: tuple[int, ...]) -> dict[str, object]:
    """The config.json fields for the auxiliary layers. They name layers by output, so each number is one less than in `aux_layers`."""
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in aux_layers], "use_aux_hidden_state": True}}


def config_json(c: ModelConfig, aux_layers: tuple[int, ...], dtype: torch.dtype) -> dict[str, object]:
    """The fields of a draft head's config.json."""
    raw: dict[str, object] = {
        "architectures": [c.architecture],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "hidden_size": c.hidden_size,
        "target_hidden_size": c.target_hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_q_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_context_len,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": c.bos_id,
        "eos_token_id": list(c.eos_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **aux_json(aux_layers),
    }
    if c.rope_scaling is not None:
        raw["rope_scaling"] = scaling_fields(c.rope_scaling)
    return raw


def scaling_fields(scaling: RopeScaling) -> dict[str, object]:
    """`rope_scaling` of a config.json."""
    names = SCALING_FIELDS[scaling.kind]
    return {"rope_type": scaling.kind, "factor": scaling.factor} | {there: getattr(scaling, here) for here, there in names.items()}
