"""Attention backends by the name of their flag."""

from __future__ import annotations

import importlib

from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend, AttentionShape
from runtime.mem_cache.kv_pool import KVPool, PageTable

BACKENDS = {
    "torch_native": "runtime.layers.attention.torch_native:TorchNativeAttention",
    "fa3": "runtime.layers.attention.flash_attention:FlashAttention",
    "flashinfer": "runtime.layers.attention.flashinfer:FlashInferAttention",
}
"""Module and class of each backend; a module is imported only when its backend is asked for."""


def backend_class(name: str) -> type:
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
    """A backend over `kv_pool` and `page_table`, prepared for passes up to `shape`."""
    return backend_class(name)(shape, kv_pool, page_table)
