"""MLA attention for few queries in CUDA C++: one launch, in which clusters of blocks merge their splits (`latent_cluster.cu`)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.cuda_program import program

if TYPE_CHECKING:  # it imports Triton
    from runtime.layers.attention.kernels.latent_decode import LatentShape
    from runtime.layers.attention.kernels.paged_keys import PagedKeys

RANK, ROPE = 512, 64
MOST_WIDTH = 8
"""Maximum queries per request, because each warp copies one of the pass's own keys."""
TILE_ROWS, MOST_TILES = 8, 3
"""Rows (queries times heads) of a tensor-core instruction, and the maximum number of these tiles per cluster."""
SIZES = (16, 8, 4)
"""Blocks per cluster, largest first; a device may not support more than 8."""
THREADS = 256
KEY_BYTES, SLOTS = 16 * (2 * (RANK + ROPE) + 16), 8
"""Bytes of a tile of keys in shared memory, and number of such tiles."""
STEP_KEYS, HALVES, SCORE_PITCH = 64, 2, 68
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class ClusterCut:
    """How the rows of a pass are split into clusters.

    Attributes:
        blocks: blocks per cluster; they split the keys of a request.
        tiles: row tiles per cluster.
    """

    blocks: int
    tiles: int

    def row_blocks(self, rows: int) -> int:
        """Number of clusters for `rows` rows of a request."""
        return -(-rows // (TILE_ROWS * self.tiles))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in the order of the CUDA source."""
        rows = TILE_ROWS * self.tiles
        return SLOTS * KEY_BYTES + rows * (4 * HALVES * SCORE_PITCH + 2 * STEP_KEYS + 4 + 8 * SIZES[0])


CUTS = tuple(ClusterCut(blocks, tiles) for blocks in SIZES for tiles in range(1, MOST_TILES + 1))
"""All cuts, in order of increasing work per block."""


class _Pass(ctypes.Structure):
    """`Pass` in the CUDA source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "cache", "out", "pages", "rows", "lens")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("heads", "width", "row_blocks", "page_shift", "pages_stride")),
    )


def cut_of(at_once: Mapping[ClusterCut, int], batch: int, rows: int) -> ClusterCut | None:
    """The first of `CUTS` whose clusters for `batch` requests of `rows` rows all run at once; None if there is none.

    Args:
        at_once: clusters of each cut that the device runs concurrently.
        batch: requests.
        rows: queries times heads of a request.
    """
    return next((cut for cut in CUTS if batch * cut.row_blocks(rows) <= at_once[cut]), None)


def supports(shape: LatentShape, page_size: int, cache: torch.Tensor, *, pdl: bool) -> bool:
    """Whether the kernel supports causal passes of this shape over this cache on its device."""
    return (
        (shape.rank, shape.rope) == (RANK, ROPE)
        and cache.dtype is torch.bfloat16
        and shape.width <= MOST_WIDTH
        and page_size & (page_size - 1) == 0
        and cuda_driver.on_hopper(cache)
        and cut_of(_clusters_at_once(pdl), shape.batch, shape.rows) is not None
    )


def latent_cluster_attention(
    q: torch.Tensor, cache: torch.Tensor, keys: PagedKeys, shape: LatentShape, scale: float, *, pdl: bool = False
) -> torch.Tensor:
    """`latent_attention` for causal passes that the kernel `supports`; the bits of a result depend only on its own request and on `shape`.

    With `pdl`, all keys except the last W of a request are read before the wait. A kernel that waits before it triggers the next launch,
    such as the embedding kernel, must therefore run between the kernels that write them and this one.
    """
    assert q.shape == (shape.batch * shape.width, shape.num_heads, RANK + ROPE), "another pass was prepared"
    assert q.is_contiguous(), "queries must be contiguous"
    assert cache.is_contiguous(), "the cache must be contiguous"
    assert q.dtype is cache.dtype, f"expected queries in {cache.dtype}; got {q.dtype}"
    assert not cache.data_ptr() % 16, "the cache must be aligned to 16 bytes"
    assert keys.pages.stride(1) == 1, "rows of the page table must be contiguous"
    cut = cut_of(_clusters_at_once(pdl), shape.batch, shape.rows)
    assert cut is not None, "the kernel does not support this shape"
    out = torch.empty((*q.shape[:2], RANK), dtype=q.dtype, device=q.device)
    row_blocks = cut.row_blocks(shape.rows)
    pointers = (tensor.data_ptr() for tensor in (q, cache, out, keys.pages, keys.rows, keys.seq_lens))
    arguments = _Pass(
        *pointers, scale * LOG2_E, shape.num_heads, shape.width, row_blocks, keys.page_size.bit_length() - 1, keys.pages.stride(0)
    )
    _kernel(cut, pdl)(shape.batch * row_blocks * cut.blocks, (arguments,), pdl)
    return out


@cache
def _clusters_at_once(early: bool) -> dict[ClusterCut, int]:
    """Number of clusters that run concurrently, by cut. Loads all kernels, so no batch size loads one while serving."""
    return {cut: _kernel(cut, early).clusters_at_once for cut in CUTS}


@cache
def _kernel(cut: ClusterCut, early: bool) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(
        source(cut.tiles, early), "latent_attention", threads=THREADS, cluster=cut.blocks, shared_bytes=cut.shared_bytes
    )


@cache
def source(tiles: int, early: bool) -> str:
    """The CUDA program for clusters with this cut."""
    return program({"TILES": tiles, "MOST_BLOCKS": SIZES[0], "EARLY": early}, Path(__file__).with_name("latent_cluster.cu"))
