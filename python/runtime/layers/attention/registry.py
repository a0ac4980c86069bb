"""Attention backends by the name of their flag value."""

from __future__ import annotations

import importlib
from dataclasses import replace

from runtime.config.attention_caps import ATTENTION_CAPS, AttentionCaps
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
    """The class for a name.

    Raises:
        ConfigError: the name is unknown, or a package that the backend needs is not installed.
    """
    if name not in BACKENDS:
        raise ConfigError(f"--attention-backend {name!r} is unknown; it must be one of {', '.join(BACKENDS)}")
    return _load(name, BACKENDS[name])


def _load(name: str, path: str) -> type[AttentionBackend]:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(
            f"--attention-backend {name} is not available: {error}; install the 'cuda' extra, or use --attention-backend torch_native"
        ) from error


def build_backend(name: str, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> AttentionBackend:
    """A backend over `kv_pool` and `page_table`, prepared for passes up to `shape`.

    Raises:
        ConfigError: the name is unknown, a package is missing, or the model is not supported.
    """
    backend = backend_class(name)
    if limit := unsupported(backend.caps, shape):
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


def unsupported(caps: AttentionCaps, shape: AttentionShape) -> str:
    """What a model needs that a backend cannot do; an empty text when it supports all of it."""
    first = shape.layers[0]
    for layer in shape.layers:
        if limit := _unsupported_layer(caps, layer):
            return limit
        if not caps.mixed_heads and _heads(layer) != _heads(first):
            return "layers that differ in heads, head dimension or scale"
    return ""


def _unsupported_layer(caps: AttentionCaps, layer: AttentionSpec) -> str:
    kv, dtype = layer.kv, str(layer.kv.dtype).removeprefix("torch.")
    if kv.kind not in caps.kv_kinds:
        return f"{kv.kind} KV caches"
    if kv.kind == "mla":
        if caps.latent_dims is not None and ((kv.key_dim, kv.value_dim) not in caps.latent_dims or layer.window >= 0):
            return f"latent KV of {kv.value_dim} + {kv.key_dim - kv.value_dim} columns, only of 512 + 64 without a window"
    elif caps.head_dims is not None and not {kv.key_dim, kv.value_dim} <= caps.head_dims:
        return f"head dimension {kv.key_dim}, only {_numbers(caps.head_dims)}"
    if caps.dtypes is not None and dtype not in caps.dtypes and not kv.scaled:
        return f"{dtype}, only {' and '.join(sorted(caps.dtypes))}"
    if kv.scaled and not caps.scaled_kv:
        return "scaled KV caches"
    if layer.sinks is not None and not caps.sinks:
        return "attention sinks"
    return "" if layer.causal or caps.non_causal else "attention to later tokens"


def _numbers(values: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(values)))
