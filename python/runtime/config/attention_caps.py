"""Requirements and capabilities of each attention backend. No torch: flag checks and backends read the same table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

AttentionName = Literal["torch_native", "fa3", "flashinfer"]

MAX_TREE_BITS = 64
"""Maximum nodes of a draft tree, because one row of the tree mask is a 64-bit word."""


@dataclass(frozen=True, slots=True)
class AttentionCaps:
    """The capabilities of a backend. A model or a flag that needs more is refused at start-up.

    Attributes:
        package: the package of its kernels, which run only on CUDA; None for a backend that needs neither.
        needs_nvcc: whether the kernels are compiled by CUDA's own compiler at the first start.
        major: the only supported major compute capability; None for any.
        page_size: default slots of a KV page.
        block_keys: keys per block of the prompt kernel for heads of 128 columns, which is the page size for long contexts; None if that
            brings no gain.
        unmixable: why a pass cannot have prompts and decoding requests; empty if it can.
        dtypes: names of the supported KV dtypes; None for any.
        head_dims: supported head dimensions; None for any.
        kv_kinds: supported values of `KVSpec.kind`.
        latent_dims: supported key and value dimensions of "mla" caches; None for any.
        tree_mask: whether tree masks are supported if every layer has full attention.
        cuda_graph: whether `forward` can be captured.
        sinks: whether attention sinks are supported.
        softcap: whether a soft cap of attention scores is supported.
        non_causal: whether layers are supported whose queries also see later keys.
        mixed_heads: whether layers may differ in heads, head dimension or scale.
        plan_on_device: whether `plan_on_device` does all planning, so that it can be captured with the pass.
        scaled_kv: whether 8-bit KV caches with a scale per layer are supported.
        ragged_windows: whether a pass over windows of different widths can be captured.
        shared_prefix: whether a fixed-width pass can attend once to keys that all its requests share (cascade attention).
        self_check: whether a small pass is compared with torch_native at start-up, for backends that depend on private parts of a package.
    """

    package: str | None = None
    needs_nvcc: bool = False
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
    softcap: bool = False
    non_causal: bool = False
    mixed_heads: bool = False
    plan_on_device: bool = True
    scaled_kv: bool = False
    ragged_windows: bool = False
    shared_prefix: bool = False
    self_check: bool = False


_HALF = frozenset({"bfloat16", "float16"})
_BOTH = frozenset({"gqa", "mla"})
_LATENT = frozenset({(576, 512)})
ATTENTION_CAPS: dict[AttentionName, AttentionCaps] = {
    "torch_native": AttentionCaps(
        kv_kinds=_BOTH,
        cuda_graph=False,
        sinks=True,
        softcap=True,
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
        needs_nvcc=True,
        unmixable="flashinfer plans a prompt pass from exact lengths, which the host does not know for decoding requests",
        dtypes=_HALF,
        head_dims=frozenset({64, 128, 256}),
        kv_kinds=_BOTH,
        latent_dims=_LATENT,
        softcap=True,
        plan_on_device=False,
        self_check=True,
    ),
}
"""Capabilities by the name of the backend's flag value. The default on a GPU is the first with kernels for it."""
assert get_args(AttentionName) == tuple(ATTENTION_CAPS), "every backend has a row, and the reverse"


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a layer needs from its backend; the defaults need nothing special.

    Attributes:
        dtype: name of the KV dtype.
        kind: `KVSpec.kind`.
        key_dim, value_dim: columns of a stored key and value; 0 if they are not known yet.
        window: whether it has a sliding window.
        scaled: whether its KV is in 8 bits with scales.
        sinks: whether it has attention sinks.
        softcap: whether its scores have a soft cap.
        causal: whether queries see no keys after their own.
    """

    dtype: str
    kind: str = "gqa"
    key_dim: int = 0
    value_dim: int = 0
    window: bool = False
    scaled: bool = False
    sinks: bool = False
    softcap: bool = False
    causal: bool = True


def unsupported(caps: AttentionCaps, needs: AttentionNeeds) -> str:
    """A need of the layer that the backend does not support; empty if it supports all."""
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
    if needs.softcap and not caps.softcap:
        return "a soft cap of attention scores"
    return "" if needs.causal or caps.non_causal else "attention to later tokens"
