"""Attention backends by the name of their flag."""

from __future__ import annotations

import importlib

from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend, AttentionCaps, AttentionShape
from runtime.mem_cache.kv_pool import KVPool, PageTable

BACKENDS = {
    "torch_native": "runtime.layers.attention.torch_native:TorchNativeAttention",
    "fa3": "runtime.layers.attention.fa3:FlashAttention",
    "flashinfer": "runtime.layers.attention.flashinfer:FlashInferAttention",
}
"""Module and class of each backend; a module is imported only when its backend is asked for."""


def backend_class(name: str) -> type[AttentionBackend]:
    """The class behind a name.

    Raises:
        ConfigError: the name is unknown, or what the backend needs is not installed.
    """
    if name not in BACKENDS:
        raise ConfigError(f"--attention-backend {name!r} is unknown; it must be one of {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(
            f"--attention-backend {name} cannot be used here: {error}; install the 'cuda' extra, or use --attention-backend torch_native"
        ) from error


def build_backend(name: str, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> AttentionBackend:
    """A backend over `kv_pool` and `page_table`, prepared for passes up to `shape`.

    Raises:
        ConfigError: the name is unknown, something is not installed, or the backend cannot serve this model or page size.
    """
    backend = backend_class(name)
    if limit := limit_passed(backend.caps, shape, page_table.page_size):
        raise ConfigError(
            f"attention backend {name} takes {limit}; use torch_native, with --attention-backend, or for a draft model with "
            "--speculative-draft-attention-backend"
        )
    return backend(shape, kv_pool, page_table)


def limit_passed(caps: AttentionCaps, shape: AttentionShape, page_size: int) -> str:
    """What a backend takes where the model or the page size is another, as "this, not that"; an empty text where it takes both."""
    for what, taken, asked in (("head dimensions", caps.head_dims, shape.head_dim), ("page sizes", caps.page_sizes, page_size)):
        if taken is not None and asked not in taken:
            return f"{what} {', '.join(map(str, sorted(taken)))}, not {asked}"
    if not caps.sliding_window and max(shape.window) >= 0:
        return f"layers with full attention, not a sliding window of {max(shape.window) + 1}"
    return ""
