"""Split-KV attention for few requests in CUDA C++: one launch, in which the blocks of a cluster merge their splits (`cluster_decode.cu`).

The same launch can norm, rotate and store the heads of the pass's own tokens (`new_heads.cu`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.config.kernel_configs import ClusterConfig
from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.cuda_program import program
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import RotaryHeads

if TYPE_CHECKING:  # both import Triton
    from runtime.layers.attention.kernels.paged_keys import PagedKeys
    from runtime.layers.attention.kernels.split_shape import SplitShape

HEAD_DIMS = (64, 128)
MAX_ROWS = 64
"""Maximum of queries times query heads per KV head."""
TILE_ROWS, MAX_ROW_TILES = 16, 2
"""Rows of a tensor-core instruction, and maximum number of such tiles per cluster."""
TILE_KEYS = 16
"""Keys per warp and step."""
MOST_BLOCKS = 16
"""Maximum blocks of a cluster on Hopper."""
MOST_NEW = 8
"""Maximum queries per request whose heads the kernel rotates."""
CHUNK = 8
"""Adjacent columns of a head per lane."""
LOG2_E = 1.4426950408889634
FILES = ("cluster_parts.cu", "new_heads.cu", "cluster_decode.cu")


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a pass, whose heads are not normed, rotated or stored yet.

    Attributes:
        heads: how their rows become heads.
        positions, slots: int64 [B * W], their positions and cache slots.
    """

    heads: RotaryHeads
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Variant:
    """The compile-time parameters of a program."""

    head_dim: int
    row_tiles: int
    warps: int
    stages: int
    early: bool
    rotates: bool


class _Pass(ctypes.Structure):
    """`Pass` in the CUDA source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "pages", "rows", "lens", "sinks")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "cos_sin", "q_gain", "k_gain")),
        *((name, ctypes.c_float) for name in ("scale", "q_eps", "k_eps")),
        *((name, ctypes.c_int) for name in ("kv_heads", "group", "inverse", "row_blocks")),
        *((name, ctypes.c_int) for name in ("width", "window", "causal", "page_shift", "pages_stride", "float_sinks", "rotated_pairs")),
    )


def supports(shape: SplitShape, page_size: int, q: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    """Whether the kernel supports passes of this shape, without a log-sum-exp, over this cache on its device."""
    return (
        shape.config.cluster is not None
        and q.is_cuda
        and q.dtype is torch.bfloat16
        and cache.dtype is torch.bfloat16
        and not shape.config.scheduled
        and shape.head_dim in HEAD_DIMS
        and shape.width * (shape.num_q_heads // shape.num_kv_heads) <= MAX_ROWS
        and page_size & (page_size - 1) == 0
        and (sinks is None or sinks.dtype in (torch.bfloat16, torch.float32))
        and cuda_driver.on_hopper(q)
    )


def takes_rows(
    heads: RotaryHeads, shape: SplitShape, page_size: int, qkv: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None
) -> bool:
    """Whether the kernel supports `NewTokens` with these heads in passes that it `supports`."""
    return (
        shape.width <= MOST_NEW
        and heads.v_norm is None
        and not heads.shared_kv
        and heads.kv_scales is None
        and not heads.rope.interleaved
        and heads.rope.dim % (2 * CHUNK) == 0
        and all(norm is None or norm.weight.dtype is torch.bfloat16 for norm in (heads.q_norm, heads.k_norm))
        and supports(shape, page_size, qkv, cache, sinks)
    )


def cluster_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    keys: PagedKeys,
    shape: SplitShape,
    scale: float,
    *,
    causal: bool = True,
    window: int = -1,
    sinks: torch.Tensor | None = None,
    new: NewTokens | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`split_attention` for passes that the kernel `supports`; the bits of a result depend only on its own request and on `shape`.

    With `new`, `q` has the rows [B * W, (H + 2 G) * D] of the qkv projection, contiguous, and the kernel first does the work of
    `rope_and_cache`: it writes keys and values of these tokens to the caches. Each block rotates its own queries and the keys and values
    that it reads, so no block waits for another. The slots must be those of the last W keys of each request in `keys`; only a token that no
    needed query sees may have another slot.
    With `pdl`, positions, slots and all keys except the last W of a request are read before the wait. A kernel that waits before it
    triggers the next launch, such as the embedding kernel, must therefore run between the kernels that write them and this one.
    """
    config, D, H, G = shape.config.cluster, shape.head_dim, shape.num_q_heads, shape.num_kv_heads
    assert config is not None, "the shape has no cluster config"
    assert q.is_contiguous(), "queries must be contiguous"
    group = H // G
    variant, row_blocks = _variant(config, D, shape.width * group, pdl, new is not None)
    clusters = shape.batch * G * row_blocks
    kernel, size = _kernel(_kernels(variant, config.largest), clusters)
    out = torch.empty((shape.batch * shape.width, H, D), dtype=q.dtype, device=q.device)
    positions, slots, heads = (None, None, None) if new is None else (new.positions, new.slots, new.heads)
    rope, norms = (None, (None, None)) if heads is None else (heads.rope, (heads.q_norm, heads.k_norm))
    pointers = (
        q, k_cache, v_cache, out, keys.pages, keys.rows, keys.seq_lens, sinks,
        positions, slots, rope and rope.cos_sin, *(norm and norm.weight for norm in norms),
    )  # fmt: skip
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in pointers)
    float_sinks = sinks is not None and sinks.dtype is torch.float32
    arguments = _Pass(
        *addresses, scale * LOG2_E, *map(_eps, norms), G, group, inverse(group), row_blocks, shape.width, window, int(causal),
        keys.page_size.bit_length() - 1, keys.pages.stride(0), int(float_sinks), 0 if rope is None else rope.dim // (2 * CHUNK),
    )  # fmt: skip
    kernel(clusters * size, (arguments,), pdl)
    return out


def inverse(group: int) -> int:
    """A factor that replaces division by `group` of numbers up to `MAX_ROWS`: the quotient is their product, shifted by 16 bits."""
    return (1 << 16) // group + 1


def _eps(norm: RMSNorm | None) -> float:
    return 0.0 if norm is None else norm.eps


def _variant(config: ClusterConfig, head_dim: int, rows: int, early: bool, rotates: bool = False) -> tuple[_Variant, int]:
    """The program for this many rows, and the number of clusters that share them."""
    tiles = -(-rows // TILE_ROWS)
    stages = config.stages * HEAD_DIMS[-1] // head_dim
    return _Variant(head_dim, min(tiles, MAX_ROW_TILES), config.warps, stages, early, rotates), -(-tiles // MAX_ROW_TILES)


def _kernel(kernels: tuple[tuple[cuda_driver.Kernel, int], ...], clusters: int) -> tuple[cuda_driver.Kernel, int]:
    """The kernel with the largest clusters that all run at once, and its blocks per cluster."""
    return next(((kernel, size) for kernel, size in kernels if kernel.clusters_at_once >= clusters), kernels[-1])


@cache
def _kernels(variant: _Variant, largest: int) -> tuple[tuple[cuda_driver.Kernel, int], ...]:
    """One kernel per cluster size, with the number of blocks, largest first. All are loaded now, so no batch size loads one while
    serving.
    """
    program, threads = source(variant), 32 * variant.warps
    return tuple(
        (
            cuda_driver.compile_kernel(
                program, "cluster_attention", threads=threads, cluster=size, shared_bytes=shared_bytes(variant, size)
            ),
            size,
        )
        for size in range(largest, 0, -1)
    )


def shared_bytes(variant: _Variant, size: int) -> int:
    """Bytes of shared memory of a block in a cluster of `size`, in the order of the CUDA source."""
    v, columns = variant, variant.head_dim >> (size.bit_length() - 1)
    rows, ring = TILE_ROWS * v.row_tiles, v.stages * v.warps * TILE_KEYS * 2 * v.head_dim
    weights, queries, numbers = v.warps * v.row_tiles * 512, rows * 2 * v.head_dim, 3 * v.warps + 1 + 2 * MOST_BLOCKS + size * columns
    return 2 * ring + weights + max(weights, queries) + 4 * rows * numbers


def source(variant: _Variant) -> str:
    """The CUDA program of one variant."""
    v = variant
    constants = dict(
        D=v.head_dim, ROW_TILES=v.row_tiles, WARPS=v.warps, STAGES=v.stages, MOST_BLOCKS=MOST_BLOCKS, MOST_NEW=MOST_NEW, EARLY=v.early,
        ROTATES=v.rotates,
    )  # fmt: skip
    return program(constants, *map(Path(__file__).with_name, FILES))
