"""Compares the tensors of a checkpoint with its config.json, from the headers of its files. Does not import torch."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from runtime.errors import ConfigError
from runtime.model_files.checkpoint_folder import indexed_tensors, tensor_places
from runtime.models.config import ModelConfig, MoeConfig

Shape = tuple[int, ...]
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
"""The number of an expert in the name of a tensor."""
GATES, UPS, DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
"""The families' names of an expert's projections."""
ROUTERS = ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "router.proj")
"""The families' names of a layer's router."""
EXPERTS = ("mlp.experts.*", "block_sparse_moe.experts.*", "experts.*")
"""The families' names of the experts of a layer, `*` for the number of each."""
SHARED_EXPERTS = ("mlp.shared_experts", "mlp.shared_expert")
"""The families' names of a layer's shared expert."""


def check_shapes(folder: str | Path, config: ModelConfig) -> None:
    """Refuse a checkpoint whose tensors are not those of its config.json, before it is loaded.

    Not all tensors are known here: norms of some families, fused experts and scales are checked while they are loaded.

    Raises:
        ConfigError: the checkpoint lacks tensors, or has tensors of another shape; the message names the first.
    """
    places, known = tensor_places(Path(folder)), KnownShapes(config)
    named = set(known.outer) | {name for name in indexed_tensors(Path(folder)) if known.shape(name) is not None}
    if missing := sorted(named - places.keys()):
        raise _misfit(folder, f"lacks {_counted(missing)}")
    held = {layer for name in places if (layer := known.layer(name)) is not None}
    if absent := [layer for layer in range(config.num_layers) if layer not in held]:
        first = f"{config.weight_prefix}layers.{absent[0]}"
        raise _misfit(folder, f"has {len(held)} of {config.num_layers} layers; the first that it lacks is {first}")
    expected = {name: known.shape(name) for name in places}
    wrong = [(name, shape) for name, shape in expected.items() if shape is not None and places[name][1].shape != shape]
    if not wrong:
        return
    (name, asked), (file, entry) = wrong[0], places[wrong[0][0]]
    others = f", and {len(wrong) - 1} others differ, too" if len(wrong) > 1 else ""
    raise ConfigError(
        f"{file}: tensor {name} has shape {list(entry.shape)}; config.json asks for {list(asked)}{others}. "
        "Use the config.json that belongs to these weights."
    )


class KnownShapes:
    """The shapes that a config.json gives tensors whose names all families share.

    Attributes:
        outer: name and shape of the tensors outside the layers, which every checkpoint must hold.
    """

    def __init__(self, config: ModelConfig) -> None:
        vocabulary, prefix = (config.vocab_size, config.hidden_size), config.weight_prefix
        head = {} if config.tie_embeddings else {"lm_head.weight": vocabulary}
        self.outer: dict[str, Shape] = {
            prefix + "embed_tokens.weight": vocabulary,
            prefix + "norm.weight": (config.hidden_size,),
            **head,
        }
        self._start = prefix + "layers."
        self._layers = [_layer_shapes(config.of_layer(layer)) for layer in range(config.num_layers)]

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor; None if it is not one of those that are known by name."""
        layer = self.layer(name)
        if layer is None:
            return self.outer.get(name)
        rest = name.removeprefix(self._start).partition(".")[2]
        return self._layers[layer].get(_EXPERT.sub("*", rest))

    def layer(self, name: str) -> int | None:
        """The number of the decoder's layer that a tensor belongs to; None for other tensors."""
        number = name.removeprefix(self._start).partition(".")[0] if name.startswith(self._start) else ""
        return int(number) if number.isdecimal() and int(number) < len(self._layers) else None


@cache
def _layer_shapes(c: ModelConfig) -> dict[str, Shape]:
    """Shapes by the name within a layer; the tensors need not exist."""
    rows = _latent_attention(c) if c.latent is not None else _attention(c)
    shapes = {f"self_attn.{name}.weight": shape for name, shape in rows.items()}
    shapes |= {f"{name}_layernorm.weight": (c.hidden_size,) for name in ("input", "post_attention")}
    shapes |= _mlp("mlp", c.hidden_size, c.intermediate_size)
    return shapes if c.moe is None else shapes | _sparse_mlp(c.moe, c.hidden_size)


def _attention(c: ModelConfig) -> dict[str, Shape]:
    q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q_norm, k_norm = (q, kv) if c.qk_row_norm else (c.head_dim, c.head_dim)
    shapes: dict[str, Shape] = {"q_norm": (q_norm,), "k_norm": (k_norm,)}
    hidden = c.hidden_size
    return shapes | {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}


def _latent_attention(c: ModelConfig) -> dict[str, Shape]:
    assert c.latent is not None, "a model with latent attention"
    latent, heads, hidden = c.latent, c.num_q_heads, c.hidden_size
    q = heads * (latent.nope_dim + c.head_dim)
    queries = {"q_proj": (q, hidden)} if latent.q_rank is None else {"q_a_proj": (latent.q_rank, hidden), "q_b_proj": (q, latent.q_rank)}
    return {
        **queries,
        "kv_a_proj_with_mqa": (latent.kv_rank + c.head_dim, hidden),
        "kv_b_proj": (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        "o_proj": (hidden, heads * latent.value_dim),
    }


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    into = {f"{prefix}.{name}.weight": (inner, hidden) for name in (*GATES, *UPS)}
    return into | {f"{prefix}.{name}.weight": (hidden, inner) for name in DOWNS}


def _sparse_mlp(moe: MoeConfig, hidden: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (moe.num_experts, hidden) for name in ROUTERS}
    for prefix in EXPERTS:
        shapes |= _mlp(prefix, hidden, moe.intermediate_size)
    for prefix in SHARED_EXPERTS:
        shapes |= _mlp(prefix, hidden, moe.shared_intermediate_size)
    return shapes


def _counted(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other tensors"


def _misfit(folder: str | Path, what: str) -> ConfigError:
    return ConfigError(f"{folder}: the checkpoint does not fit its config.json: it {what}. Download it again, or correct config.json.")
