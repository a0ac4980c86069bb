"""What each attention backend needs and can do. No torch: flag checks and backends read the same table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

AttentionName = Literal["torch_native", "fa3", "flashinfer"]

MAX_TREE_BITS = 64
"""Most nodes of a draft tree: one row of the tree mask is a 64-bit word."""


@dataclass(frozen=True, slots=True)
class AttentionCaps:
    """What a backend can do. A model or a flag that needs more is refused at start-up.

    Attributes:
        package: the package of its kernels, which run on CUDA only; None for a backend that needs neither.
        major: the only major compute capability of a GPU that the kernels run on; None for any.
        page_size: slots of a KV page, unless a flag asks for others.
        block_keys: keys of a block of the prompt kernel for heads of 128 columns; a page of long contexts has as many slots. None where
            that is of no use.
        unmixable: why a pass cannot hold prompts and decoding requests; an empty text where it can.
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

    package: str | None = None
    major: int | None = None
    page_size: int = 16
    block_keys: int | None = None
    unmixable: str = ""
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
ATTENTION_CAPS: dict[AttentionName, AttentionCaps] = {
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
        package="sgl_kernel",
        major=9,
        page_size=64,
        block_keys=128,
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
        package="flashinfer",
        unmixable="flashinfer plans a prompt pass from exact lengths, which the host does not know for decoding requests",
        dtypes=_HALF,
        head_dims=frozenset({64, 128, 256}),
        kv_kinds=_BOTH,
        latent_dims=_LATENT,
        plan_on_device=False,
        self_check=True,
    ),
}
"""Capabilities by the name of the backend's flag value. The default on a GPU is the first with kernels for it."""
assert get_args(AttentionName) == tuple(ATTENTION_CAPS), "every backend has a row, and the reverse"


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a layer asks of its backend; the defaults ask for nothing.

    Attributes:
        dtype: name of the KV dtype.
        kind: `KVSpec.kind`.
        key_dim, value_dim: columns of a stored key and value; 0 if they are not known yet.
        window: whether it has a sliding window.
        scaled: whether its KV is in 8 bits with scales.
        sinks: whether it has attention sinks.
        causal: whether queries see no keys after their own.
    """

    dtype: str
    kind: str = "gqa"
    key_dim: int = 0
    value_dim: int = 0
    window: bool = False
    scaled: bool = False
    sinks: bool = False
    causal: bool = True


def unsupported(caps: AttentionCaps, needs: AttentionNeeds) -> str:
    """What a layer needs that a backend cannot do; an empty text where it can do all of it."""
    if needs.kind not in caps.kv_kinds:
        return f"{needs.kind} KV caches"
    if needs.kind == "mla":
        if caps.latent_dims is not None and ((needs.key_dim, needs.value_dim) not in caps.latent_dims or needs.window):
            return f"latent KV of {needs.value_dim} + {needs.key_dim - needs.value_dim} columns, only of 512 + 64 without a window"
    elif caps.head_dims is not None and not {needs.key_dim, needs.value_dim} - {0} <= caps.head_dims:
        return f"head dimension {needs.key_dim}, only {', '.join(map(str, sorted(caps.head_dims)))}"
    if caps.dtypes is not None and needs.dtype not in caps.dtypes and not needs.scaled:
        return f"{needs.dtype}, only {' and '.join(sorted(caps.dtypes))}"
    if needs.scaled and not caps.scaled_kv:
        return "scaled KV caches"
    if needs.sinks and not caps.sinks:
        return "attention sinks"
    return "" if needs.causal or caps.non_causal else "attention to later tokens"
