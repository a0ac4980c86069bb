"""Split-KV attention of few requests in CUDA C++: one launch, in which the blocks of a cluster merge their shares (`cluster_decode.cu`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.config.kernel_configs import ClusterConfig
from runtime.layers.kernels import cuda_driver

if TYPE_CHECKING:  # both import Triton
    from runtime.layers.attention.kernels.split_decode import SplitKeys
    from runtime.layers.attention.kernels.split_shape import SplitShape

HEAD_DIMS = (64, 128)
MAX_ROWS = 64
"""Most queries times query heads per KV head."""
TILE_ROWS, MAX_ROW_TILES = 16, 2
"""Rows of a tensor core instruction, and most of these tiles that one cluster computes."""
TILE_KEYS = 16
"""Keys of a warp in one step."""
MOST_BLOCKS = 16
"""The largest cluster of Hopper."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Variant:
    """What a program is compiled for."""

    head_dim: int
    row_tiles: int
    warps: int
    stages: int
    early: bool


class _Pass(ctypes.Structure):
    """`Pass` in the CUDA source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "pages", "rows", "lens", "sinks")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("kv_heads", "group", "inverse", "row_blocks")),
        *((name, ctypes.c_int) for name in ("width", "window", "causal", "page_shift", "pages_stride", "float_sinks")),
    )


def supports(shape: SplitShape, page_size: int, q: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    """Whether the kernel takes passes of this shape, without a log-sum-exp, over this cache on its device."""
    return (
        q.is_cuda
        and q.dtype is torch.bfloat16
        and cache.dtype is torch.bfloat16
        and not shape.config.scheduled
        and shape.head_dim in HEAD_DIMS
        and shape.width * (shape.num_q_heads // shape.num_kv_heads) <= MAX_ROWS
        and page_size & (page_size - 1) == 0
        and (sinks is None or sinks.dtype in (torch.bfloat16, torch.float32))
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and cuda_driver.available()
    )


def cluster_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    keys: SplitKeys,
    shape: SplitShape,
    config: ClusterConfig,
    scale: float,
    *,
    causal: bool = True,
    window: int = -1,
    sinks: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`split_attention` for passes that the kernel `supports`; bit for bit, a result depends on its own request and on `shape`.

    With `pdl`, all keys but the last W of a request are read before the wait too: a kernel without early start must run
    between the pass that wrote them and this one. The embedding of each pass is one.
    """
    D, G = shape.head_dim, shape.num_kv_heads
    group = shape.num_q_heads // G
    variant, row_blocks = _variant(config, D, shape.width * group, pdl)
    clusters = shape.batch * G * row_blocks
    kernel, size = _kernel(_kernels(variant, config.largest), clusters)
    out = torch.empty_like(q)
    pointers = (q, k_cache, v_cache, out, keys.pages, keys.rows, keys.seq_lens, sinks)
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in pointers)
    float_sinks = sinks is not None and sinks.dtype is torch.float32
    arguments = _Pass(
        *addresses, scale * LOG2_E, G, group, inverse(group), row_blocks, shape.width, window, int(causal),
        keys.page_size.bit_length() - 1, keys.pages.stride(0), int(float_sinks),
    )  # fmt: skip
    kernel(clusters * size, (arguments,), pdl)
    return out


def inverse(group: int) -> int:
    """A factor for the division of up to `MAX_ROWS` rows by `group`: the quotient is their product, shifted by 16 bits."""
    return (1 << 16) // group + 1


def _variant(config: ClusterConfig, head_dim: int, rows: int, early: bool) -> tuple[_Variant, int]:
    """The program for so many rows, and the clusters that share them."""
    tiles = -(-rows // TILE_ROWS)
    stages = config.stages * HEAD_DIMS[-1] // head_dim
    return _Variant(head_dim, min(tiles, MAX_ROW_TILES), config.warps, stages, early), -(-tiles // MAX_ROW_TILES)


def _kernel(kernels: tuple[tuple[cuda_driver.Kernel, int], ...], clusters: int) -> tuple[cuda_driver.Kernel, int]:
    """The kernel with the largest clusters that still run at once, all of them, and its blocks per cluster."""
    return next(((kernel, size) for kernel, size in kernels if kernel.clusters_at_once >= clusters), kernels[-1])


@cache
def _kernels(variant: _Variant, largest: int) -> tuple[tuple[cuda_driver.Kernel, int], ...]:
    """One program for clusters of any size, with their blocks, the largest first: no batch size meets one that was not loaded."""
    sizes = [1 << power for power in reversed(range(largest.bit_length()))]
    program, threads, shared = source(variant), 32 * variant.warps, shared_bytes(variant)
    return tuple(
        (cuda_driver.compile_kernel(program, "cluster_attention", threads=threads, cluster=size, shared_bytes=shared), size)
        for size in sizes
    )


def shared_bytes(variant: _Variant) -> int:
    """Shared memory of a block, in the order of the CUDA source."""
    v = variant
    rows, ring = TILE_ROWS * v.row_tiles, v.stages * v.warps * TILE_KEYS * 2 * v.head_dim
    weights, numbers = 2 * v.warps * v.row_tiles * 512, 3 * v.warps + 1 + 2 * MOST_BLOCKS + v.head_dim
    return 2 * ring + weights + 4 * rows * numbers


def source(variant: _Variant) -> str:
    """The CUDA program of one variant."""
    v = variant
    constants = dict(
        D=v.head_dim, ROW_TILES=v.row_tiles, WARPS=v.warps, STAGES=v.stages, MOST_BLOCKS=MOST_BLOCKS, EARLY=int(v.early),
    )  # fmt: skip
    text = Path(__file__).with_name("cluster_decode.cu").read_text(encoding="utf-8")
    return "\n".join([*(f"#define {name} {value}" for name, value in constants.items()), text])
