"""What each attention backend can do. No torch: flag checks and backends read the same table."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TREE_BITS = 64
"""Most nodes of a draft tree: one row of the tree mask is a 64-bit word."""


@dataclass(frozen=True, slots=True)
class AttentionCaps:
    """What a backend can do. A model or a flag that needs more is refused at start-up.

    Attributes:
        dtypes: names of the KV dtypes it takes; None for any.
        head_dims: head dimensions it takes; None for any.
        kv_kinds: values of `KVSpec.kind` it takes.
        latent_dims: key and value dimensions of "mla" caches that it takes; None for any.
        tree_mask: whether passes with a tree mask work when every layer has full attention.
        cuda_graph: whether `forward` may be captured.
        sinks: whether layers with attention sinks work.
        non_causal: whether layers work whose queries see the keys behind them too.
        mixed_heads: whether layers may differ in heads, head dimension or scale.
        plan_on_device: whether `plan_on_device` does all planning, so that it can be captured with the pass.
        scaled_kv: whether KV caches in 8 bits with a scale for each layer work.
        ragged_windows: whether a pass over windows of different widths may be captured.
        self_check: whether a small pass is compared with torch_native at start-up; for backends that depend on
            private parts of a package.
    """

    dtypes: frozenset[str] | None = None
    head_dims: frozenset[int] | None = None
    kv_kinds: frozenset[str] = frozenset({"gqa"})
    latent_dims: frozenset[tuple[int, int]] | None = None
    tree_mask: bool = True
    cuda_graph: bool = True
    sinks: bool = False
    non_causal: bool = False
    mixed_heads: bool = False
    plan_on_device: bool = True
    scaled_kv: bool = False
    ragged_windows: bool = False
    self_check: bool = False


_HALF = frozenset({"bfloat16", "float16"})
_BOTH = frozenset({"gqa", "mla"})
_LATENT = frozenset({(576, 512)})
ATTENTION_CAPS = {
    "torch_native": AttentionCaps(
        kv_kinds=_BOTH,
        cuda_graph=False,
        sinks=True,
        non_causal=True,
        mixed_heads=True,
        plan_on_device=False,
        scaled_kv=True,
        ragged_windows=True,
    ),
    "fa3": AttentionCaps(
        dtypes=_HALF,
        head_dims=frozenset({64, 128, 256, 512}),
        kv_kinds=_BOTH,
        latent_dims=_LATENT,
        sinks=True,
        non_causal=True,
        mixed_heads=True,
        scaled_kv=True,
    ),
    "flashinfer": AttentionCaps(
        dtypes=_HALF, head_dims=frozenset({64, 128, 256}), kv_kinds=_BOTH, latent_dims=_LATENT, plan_on_device=False, self_check=True
    ),
}
"""Capabilities by the name of the backend's flag value."""
