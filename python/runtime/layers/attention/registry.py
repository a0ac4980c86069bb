"""Attention backends by the name of their flag value."""

from __future__ import annotations

import pkgutil
from dataclasses import replace

from runtime.config.attention_caps import ATTENTION_CAPS, AttentionCaps, AttentionNeeds, unsupported
from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend, AttentionShape, AttentionSpec
from runtime.layers.attention.mixed import MixedHeadsAttention
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.mem_cache.kv_spec import KVSpec

BACKENDS = {
    "torch_native": "runtime.layers.attention.torch_native:TorchNativeAttention",
    "fa3": "runtime.layers.attention.fa3:FlashAttention",
    "flashinfer": "runtime.layers.attention.flashinfer:FlashInferAttention",
}
"""Module and class of each backend. A module is imported only when its backend is used."""
LATENT_BACKENDS = {
    "fa3": "runtime.layers.attention.latent_fa3:LatentFlashAttention",
    "flashinfer": "runtime.layers.attention.latent_flashinfer:LatentFlashInfer",
}
"""Backends with a separate class for models with latent attention."""
WIDE_BACKENDS = {"fa3": "runtime.layers.attention.wide:WideAttention"}
"""Replacements for a backend in layers with heads wider than `WIDEST`, if it has no kernels for them."""
WIDEST = 256
APART = frozenset({"fa3"})
"""Backends that need one instance for each kind of heads."""
assert BACKENDS.keys() == ATTENTION_CAPS.keys(), "every backend has capabilities, and the reverse"


def backend_class(name: str) -> type[AttentionBackend]:
    """The class of a backend.

    Raises:
        ConfigError: a package that it needs is not installed.
    """
    return _load(name, BACKENDS[name])


def _load(name: str, path: str) -> type[AttentionBackend]:
    try:
        return pkgutil.resolve_name(path)
    except ImportError as error:
        raise ConfigError(
            f"--attention-backend {name} is not available: {error}; install the 'cuda' extra, or use --attention-backend torch_native"
        ) from error


def build_backend(name: str, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> AttentionBackend:
    """A backend over `kv_pool` and `page_table` with buffers for passes up to `shape`.

    Raises:
        ConfigError: a package is missing, or the model is not supported.
    """
    backend = backend_class(name)
    if limit := _limit(backend.caps, shape):
        raise ConfigError(
            f"Attention backend {name} does not support {limit}. Use torch_native with --attention-backend, or with "
            "--speculative-draft-attention-backend for a draft model."
        )
    kinds = list(dict.fromkeys(_heads(layer) for layer in shape.layers)) if name in APART else [_heads(shape.layers[0])]
    if len(kinds) == 1:
        return _class_for(name, shape)(shape, kv_pool, page_table)
    parts = [replace(shape, layers=tuple(layer for layer in shape.layers if _heads(layer) == kind)) for kind in kinds]
    backends = [_class_for(name, part)(part, kv_pool, page_table) for part in parts]
    return MixedHeadsAttention(backends, [kinds.index(_heads(layer)) for layer in shape.layers])


def _class_for(name: str, shape: AttentionShape) -> type[AttentionBackend]:
    """The class for layers of one kind of heads."""
    if shape.layers[0].kv.kind == "mla" and name in LATENT_BACKENDS:
        return _load(name, LATENT_BACKENDS[name])
    if shape.head_dim > WIDEST and name in WIDE_BACKENDS:
        return _load(name, WIDE_BACKENDS[name])
    return backend_class(name)


def _heads(layer: AttentionSpec) -> tuple[int, KVSpec, float]:
    return layer.num_q_heads, layer.kv, layer.scale


def _limit(caps: AttentionCaps, shape: AttentionShape) -> str:
    """A property of the model that the backend does not support; empty if it supports all."""
    if limit := next(filter(None, (unsupported(caps, _needs(layer)) for layer in shape.layers)), ""):
        return limit
    kinds = {_heads(layer) for layer in shape.layers}
    return "" if caps.mixed_heads or len(kinds) == 1 else "layers that differ in heads, head dimension or scale"


def _needs(layer: AttentionSpec) -> AttentionNeeds:
    kv = layer.kv
    return AttentionNeeds(
        str(kv.dtype).removeprefix("torch."), kv.kind, kv.key_dim, kv.value_dim, layer.window >= 0, kv.scaled, layer.sinks is not None,
        layer.softcap > 0, layer.causal,
    )  # fmt: skip
