"""Sorts (token, expert) pairs by expert into whole tiles on the device, stably: in CUDA C++ on Hopper (`align.cu`), otherwise in Triton."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl

from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.cuda_program import program
from runtime.layers.kernels.pdl import launch_options, pdl_sync

FEW_PAIRS, SHORT, LONG = 4096, 128, 512
"""Up to `FEW_PAIRS` pairs, chunks have `SHORT` pairs, otherwise `LONG`, because every program reads the counts of all chunks."""
CHUNKS_PER_LOAD = 16
COMPARED = 64
"""Number of pairs with which all pairs of a chunk are compared at once; a whole chunk would need a thousand registers per thread."""
BLOCKS, WARPS = 8, 32
"""The CUDA kernel's blocks per cluster, which every device supports, and warps per block."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """P pairs sorted by expert; each expert's pairs begin at a tile of `rows` and are padded to whole tiles.

    Attributes:
        pairs: int32 [tiles * rows]: indices of pairs, P for padding; undefined from tile `used` on.
        experts: int32 [tiles]: the expert of each tile; undefined from tile `used` on.
        places: int32 [tiles, 2]: for each tile the number of preceding tiles of its expert, and the number of its expert's pairs from this
            tile on; undefined from tile `used` on.
        used: int32 [1]: number of tiles with pairs.
        rows: rows per tile.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    places: torch.Tensor
    used: torch.Tensor
    rows: int

    @property
    def tiles(self) -> int:
        """The maximum number of tiles for any routing of this many pairs."""
        return self.experts.shape[0]

    @property
    def argument(self) -> AlignedArgument:
        """The parameter of the CUDA kernels."""
        return AlignedArgument(*(tensor.data_ptr() for tensor in (self.pairs, self.experts, self.places, self.used)))


class AlignedArgument(ctypes.Structure):
    """`Sorted` in `align.cu`, `Tiles` in `grouped_parts.cu`."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("pairs", "experts", "places", "used"))


def align(ids: torch.Tensor, first: int, experts: int, rows: int, *, pdl: bool = False) -> Aligned:
    """Sort the pairs of `ids`, int32 [T, k], whose expert is one of `first` to `first + experts - 1`; other pairs are skipped."""
    in_cuda = experts <= 32 * WARPS and cuda_driver.on_hopper(ids)
    return (align_in_cuda if in_cuda else align_in_triton)(ids, first, experts, rows, pdl=pdl)


def align_in_cuda(ids: torch.Tensor, first: int, experts: int, rows: int, *, pdl: bool = False) -> Aligned:
    """Like `align`, in one launch."""
    assert ids.dtype is torch.int32, f"expected int32 ids; got {ids.dtype}"
    found = _empty(ids, experts, rows)
    _kernel(experts, pdl)(BLOCKS, (ids, found.argument, ids.numel(), first, rows), pdl)
    return found


def _empty(ids: torch.Tensor, experts: int, rows: int) -> Aligned:
    """Uninitialised results."""
    count = ids.numel()
    tiles = min(count, triton.cdiv(count + experts * (rows - 1), rows))
    sizes = (tiles * rows, tiles, (tiles, 2), 1)
    pairs, owners, places, used = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes)
    return Aligned(pairs, owners, places, used, rows)


@cache
def _kernel(experts: int, early: bool) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(
        source(experts, early), "align_pairs", threads=32 * WARPS, cluster=BLOCKS, shared_bytes=4 * WARPS * experts
    )


def source(experts: int, early: bool) -> str:
    """The CUDA program for this many experts."""
    constants = dict(EXPERTS=experts, BLOCKS=BLOCKS, WARPS=WARPS, EARLY=early)
    return program(constants, Path(__file__).with_suffix(".cu"))


def align_in_triton(ids: torch.Tensor, first: int, experts: int, rows: int, *, pdl: bool = False) -> Aligned:
    """Like `align`, in two launches."""
    count, found = ids.numel(), _empty(ids, experts, rows)
    chunk = min(SHORT if count <= FEW_PAIRS else LONG, max(16, triton.next_power_of_2(count)))
    chunks, padded = triton.cdiv(count, chunk), triton.next_power_of_2(experts)
    counts = torch.empty((chunks, padded), dtype=torch.int32, device=ids.device)
    common = dict(E_PAD=padded, PDL=pdl, num_warps=8, **launch_options(pdl))
    _count_kernel[(chunks,)](ids, counts, count, first, experts, CHUNK=chunk, **common)
    _place_kernel[(chunks + experts,)](
        ids, counts, found.pairs, found.experts, found.places, found.used, count, first, experts, chunks,
        ROWS=rows, PADDING=triton.next_power_of_2(rows), CHUNK=chunk,
        LOAD=min(CHUNKS_PER_LOAD, triton.next_power_of_2(chunks)), COMPARED=min(COMPARED, chunk), **common,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["count", "first"])
def _count_kernel(ids_ptr, counts_ptr, count, first, experts, CHUNK: tl.constexpr, E_PAD: tl.constexpr, PDL: tl.constexpr):
    """One program counts the pairs of each expert in one chunk."""
    pdl_sync(PDL)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    own = tl.load(ids_ptr + i, mask=i < count, other=-1) - first
    held = (i < count) & (own >= 0) & (own < experts)
    e = tl.arange(0, E_PAD)
    tl.store(counts_ptr + tl.program_id(0) * E_PAD + e, tl.histogram(tl.where(held, own, 0), E_PAD, mask=held))


@triton.jit(do_not_specialize=["count", "first", "chunks"])
def _place_kernel(
    ids_ptr, counts_ptr, pairs_ptr, experts_ptr, places_ptr, used_ptr, count, first, experts, chunks,
    ROWS: tl.constexpr, PADDING: tl.constexpr, CHUNK: tl.constexpr, LOAD: tl.constexpr, COMPARED: tl.constexpr, E_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program writes the places of one chunk of pairs, or, after the chunks, the padding of one expert and the experts of its tiles."""
    pdl_sync(PDL)
    program = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    total = tl.zeros((E_PAD,), dtype=tl.int32)
    before = tl.zeros((E_PAD,), dtype=tl.int32)
    for start in range(0, chunks, LOAD):
        chunk = start + tl.arange(0, LOAD)
        counts = tl.load(counts_ptr + chunk[:, None] * E_PAD + e[None, :], mask=(chunk < chunks)[:, None], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((chunk < program)[:, None], counts, 0), 0)
    padded = (total + ROWS - 1) // ROWS * ROWS
    ends = tl.cumsum(padded, 0)
    begin = ends - padded
    if program < chunks:
        i = program * CHUNK + tl.arange(0, CHUNK)
        own = tl.load(ids_ptr + i, mask=i < count, other=-1) - first
        held = (i < count) & (own >= 0) & (own < experts)
        own = tl.where(held, own, -1)
        place = tl.sum(tl.where(own[:, None] == e[None, :], (begin + before)[None, :], 0), 1)
        for offset in range(0, CHUNK, COMPARED):
            at = offset + tl.arange(0, COMPARED)
            other = tl.load(ids_ptr + program * CHUNK + at, mask=program * CHUNK + at < count, other=-1) - first
            earlier = at[None, :] < tl.arange(0, CHUNK)[:, None]
            place += tl.sum(((own[:, None] == other[None, :]) & earlier).to(tl.int32), 1)
        tl.store(pairs_ptr + place, i, mask=held)
    else:
        expert = program - chunks
        mine = e == expert
        here, size, used = tl.sum(tl.where(mine, begin, 0), 0), tl.sum(tl.where(mine, total, 0), 0), tl.sum(tl.where(mine, padded, 0), 0)
        r = tl.arange(0, PADDING)
        tl.store(pairs_ptr + here + size + r, count, mask=size + r < used)
        for tile in range(here // ROWS, (here + used) // ROWS):
            tl.store(experts_ptr + tile, expert)
            tl.store(places_ptr + 2 * tile, tile - here // ROWS)
            tl.store(places_ptr + 2 * tile + 1, here + size - tile * ROWS)
        if expert == 0:
            tl.store(used_ptr, tl.max(ends, 0) // ROWS)
