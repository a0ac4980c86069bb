"""Split-KV attention over latent rows for few queries: each tile of rows is read once, as keys and as values.

The split is that of flash-decoding (Dao et al. 2023), the merge that of split softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867). All heads share one KV row per token, so the queries of all heads are the rows of one GEMM.
"""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.config.kernel_configs import LatentConfig
from runtime.layers.attention.kernels.paged_keys import PagedKeys
from runtime.layers.attention.kernels.split_decode import LN_2
from runtime.layers.attention.kernels.tile_slots import tile_slots
from runtime.layers.kernels.pdl import launch_options

MAX_SPLITS = 64
"""Maximum splits of one request."""
FEW_SPLITS = 16
MERGED_COLUMNS = 128
"""Columns per program when more than `FEW_SPLITS` parts are merged: there are few rows then, each with many parts to read."""
MAX_PARTIAL_ROWS = 2048
"""Maximum rows of partial results of one request: splits times queries times heads."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """A kind of pass: everything except its lengths.

    Attributes:
        batch, width: requests, including padding, and queries per request.
        num_heads: H.
        rank, rope: columns of the latent, which are also the values, and of the rotated key; powers of two.
        num_sms: SMs of the device.
        config: how the work is split.
    """

    batch: int
    width: int
    num_heads: int
    rank: int
    rope: int
    num_sms: int
    config: LatentConfig

    @property
    def rows(self) -> int:
        """Queries times heads of one request."""
        return self.width * self.num_heads

    @property
    def block_m(self) -> int:
        """Rows of one program."""
        return min(max(triton.next_power_of_2(self.rows), 16), self.config.block_m)

    @property
    def blocks(self) -> int:
        """Programs over which the rows of a request are split."""
        return triton.cdiv(self.rows, self.block_m)

    @property
    def splits(self) -> int:
        """Programs over which the keys of a request are split. Independent of lengths, so a captured grid is valid for all."""
        wanted = self.config.programs_per_sm * self.num_sms // (self.batch * self.blocks)
        return max(min(wanted, MAX_SPLITS, MAX_PARTIAL_ROWS // self.rows), 1)

    @property
    def partial_rows(self) -> int:
        """Rows of all partial results of a pass; 0 if one program processes all keys."""
        return self.batch * self.splits * self.rows if self.splits > 1 else 0


class LatentWorkspace:
    """Partial results, shared by all passes of one stream. Owned by the backend.

    Attributes:
        out: float32, by request, part, row and column: weighted sums of values, not yet normalised.
        top, total: float32, by request, part and row: the largest score (base 2), and the sum of weights.
    """

    def __init__(self, shapes: list[LatentShape], device: torch.device) -> None:
        """Space for any of `shapes`."""
        rows = max(shape.partial_rows for shape in shapes)
        self.out, self.top, self.total = (
            torch.empty(count, dtype=torch.float32, device=device) for count in (rows * shapes[0].rank, rows, rows)
        )


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    keys: PagedKeys,
    shape: LatentShape,
    workspace: LatentWorkspace,
    scale: float,
    *,
    tree_mask: torch.Tensor | None = None,
    tail: int = 0,
    pdl: bool = False,
) -> torch.Tensor:
    """Attend. The bits of a result depend only on the request's own data and on `shape`.

    Args:
        q: [B * W, H, rank + rope] contiguous, W queries per request, bfloat16 or float16.
        cache: [num_pages, page_size, 1, rank + rope] contiguous.
        keys: location of the rows, at least W per request; a page has a power of two of slots.
        shape: the kind of pass.
        workspace: built for shapes that include `shape`.
        scale: factor of the scores.
        tree_mask: int64 [B * W]; bit t: whether the query sees the t-th of the last `tail` rows; it sees all earlier rows. None: query i
            sees all except the last W - 1 - i rows.
        tail: 1..64 with a mask.
        pdl: start before the previous kernel has ended (programmatic dependent launch, Hopper). Row numbers, lengths and the page table are
            read before the wait. A kernel that waits before it triggers the next launch, such as the embedding kernel, must therefore run
            between the kernels that write them and this one.

    Returns:
        [B * W, H, rank], the dtype of q.
    """
    assert q.shape == (shape.batch * shape.width, shape.num_heads, shape.rank + shape.rope), "another pass was prepared"
    assert q.is_contiguous(), "queries must be contiguous"
    assert shape.partial_rows <= workspace.top.numel(), "the workspace was made for smaller passes"
    assert (tree_mask is None) == (tail == 0), "a tree has a mask and a tail"
    config, splits = shape.config, shape.splits
    out = torch.empty((*q.shape[:2], shape.rank), dtype=q.dtype, device=q.device)
    shared = dict(RANK=shape.rank, TILE=config.tile, PDL=pdl, **launch_options(pdl))
    _latent_kernel[(shape.blocks, splits, shape.batch)](
        q, cache, keys.pages, keys.rows, keys.seq_lens, tree_mask, out, workspace.out, workspace.top, workspace.total, scale / LN_2,
        splits, tail, shape.width, shape.rows, keys.pages.stride(0), HEADS=shape.num_heads, ROPE=shape.rope, PAGE=keys.page_size,
        BLOCK_M=shape.block_m, TREE=tree_mask is not None, **shared, num_warps=config.num_warps, num_stages=config.stages,
    )  # fmt: skip
    if splits > 1:
        few = splits <= FEW_SPLITS
        padded = FEW_SPLITS if few else MAX_SPLITS  # two kernels instead of one per power of two
        columns = shape.rank if few else min(shape.rank, MERGED_COLUMNS)
        _merge_kernel[(shape.rows, shape.batch, shape.rank // columns)](
            keys.seq_lens, out, workspace.out, workspace.top, workspace.total, splits, shape.rows, **shared, SPLITS=padded,
            COLUMNS=columns, num_warps=min(max(padded * columns // 2048, 2), 8),
        )  # fmt: skip
    return out


def trial_inputs(
    shape: LatentShape, page_size: int, dtype: torch.dtype, device: torch.device, length: int
) -> tuple[torch.Tensor, torch.Tensor, PagedKeys]:
    """Zero queries, a zero cache and the location of `length` rows per request of `shape`, to compile and time kernels."""
    columns, pages_each = shape.rank + shape.rope, triton.cdiv(length, page_size)
    q = torch.zeros((shape.batch * shape.width, shape.num_heads, columns), dtype=dtype, device=device)
    cache = torch.zeros((shape.batch * pages_each, page_size, 1, columns), dtype=dtype, device=device)
    pages = torch.arange(shape.batch * pages_each, dtype=torch.int32, device=device).view(shape.batch, pages_each)
    rows = torch.arange(shape.batch, dtype=torch.int32, device=device)
    return q, cache, PagedKeys(pages, rows, torch.full((shape.batch,), length, dtype=torch.int32, device=device), page_size)


def latent_trial(
    shape: LatentShape, page_size: int, dtype: torch.dtype, device: torch.device, length: int, *, tree: bool = False, pdl: bool
) -> Callable[[], torch.Tensor]:
    """A function that attends to `length` zero rows per request, with its own buffers."""
    q, cache, keys = trial_inputs(shape, page_size, dtype, device, length)
    workspace = LatentWorkspace([shape], device)
    mask = torch.ones(shape.batch * shape.width, dtype=torch.int64, device=device) if tree else None
    return lambda: latent_attention(q, cache, keys, shape, workspace, 1.0, tree_mask=mask, tail=shape.width if tree else 0, pdl=pdl)


@triton.jit
def _cut(length, splits, TILE: tl.constexpr):
    """Tiles of a request, tiles per program, and number of programs that have tiles."""
    tiles = tl.cdiv(length, TILE)
    each = tl.maximum(tl.cdiv(tiles, splits), 1)
    return tiles, each, tl.cdiv(tiles, each)


@triton.jit(do_not_specialize=["splits", "tail", "width", "rows"], do_not_specialize_on_alignment=["lens_ptr"])
def _latent_kernel(
    q_ptr, cache_ptr, pages_ptr, rows_ptr, lens_ptr, mask_ptr, out_ptr, part_ptr, top_ptr, total_ptr, scale, splits, tail, width, rows,
    pages_stride, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, TREE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some rows (queries and heads) of one request against one part of its keys."""
    split = tl.program_id(1)
    b = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    length = tl.load(lens_ptr + b)
    pages = pages_ptr + tl.load(rows_ptr + b).to(tl.int64) * pages_stride
    tiles, each, used = _cut(length, splits, TILE)
    first = split * each
    last = tl.minimum(first + each, tiles)
    slots = tile_slots(pages, first, length, TILE, PAGE)
    # Wait even without work: the next kernel waits only for this one, and through it for the previous kernel.

    if PDL:
        gdc_wait()
    if split < used:
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        m_in = m < rows
        d = tl.arange(0, RANK)
        r = tl.arange(0, ROPE)
        query = q_ptr + (b * rows + m)[:, None] * (RANK + ROPE)
        q_latent = tl.load(query + d[None, :], mask=m_in[:, None], other=0.0)
        q_rope = tl.load(query + RANK + r[None, :], mask=m_in[:, None], other=0.0)
        position = length - width + m // HEADS
        bits = tl.zeros((BLOCK_M,), dtype=tl.int64)
        if TREE:
            bits = tl.load(mask_ptr + b * width + m // HEADS, mask=m_in, other=0)
        top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, RANK), dtype=tl.float32)
        for tile in range(first, last):
            n = tile * TILE + tl.arange(0, TILE)
            n_in = n < length
            row = cache_ptr + slots[:, None] * (RANK + ROPE)
            slots = tile_slots(pages, tile + 1, length, TILE, PAGE)  # one step early, so that copies do not wait for page numbers
            latent = tl.load(row + d[None, :], mask=n_in[:, None], other=0.0)
            key = tl.load(row + RANK + r[None, :], mask=n_in[:, None], other=0.0)
            scores = tl.dot(q_rope, tl.trans(key), tl.dot(q_latent, tl.trans(latent))) * scale
            if TREE:
                bit = n - (length - tail)
                in_tail = (bits[:, None] >> tl.maximum(bit, 0)[None, :].to(tl.int64)) & 1
                visible = n_in[None, :] & ((bit < 0)[None, :] | (in_tail == 1))
            else:
                visible = n[None, :] <= tl.minimum(position, length - 1)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see no key of this program
            weights = tl.exp2(scores - safe[:, None])
            shrink = tl.exp2(top - safe)
            total = total * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None])
            top = higher
        if used == 1:
            done = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            target = out_ptr + (b * rows + m)[:, None] * RANK + d[None, :]
            tl.store(target, done.to(out_ptr.dtype.element_ty), mask=m_in[:, None])
        else:
            part = (b * splits + split) * rows + m
            tl.store(part_ptr + part[:, None] * RANK + d[None, :], acc, mask=m_in[:, None])
            tl.store(top_ptr + part, top, mask=m_in)
            tl.store(total_ptr + part, total, mask=m_in)


@triton.jit(do_not_specialize=["splits", "rows"], do_not_specialize_on_alignment=["lens_ptr"])
def _merge_kernel(
    lens_ptr, out_ptr, part_ptr, top_ptr, total_ptr, splits, rows,
    RANK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program merges the parts of some columns of one row, in an order that depends only on the number of splits."""
    m = tl.program_id(0)
    b = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    _, _, used = _cut(tl.load(lens_ptr + b), splits, TILE)
    if PDL:
        gdc_wait()
    if used > 1:
        d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        split = tl.arange(0, SPLITS)
        inside = split < used
        part = (b * splits + split) * rows + m
        # Read once: bypass L1.
        sums = tl.load(part_ptr + part[:, None] * RANK + d[None, :], mask=inside[:, None], other=0.0, cache_modifier=".cg")
        top = tl.load(top_ptr + part, mask=inside, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(total_ptr + part, mask=inside, other=0.0, cache_modifier=".cg")
        highest = tl.max(top, 0)
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(top - safe)
        whole = tl.sum(total * weight, 0)
        done = tl.sum(sums * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
        tl.store(out_ptr + (b * rows + m) * RANK + d, done.to(out_ptr.dtype.element_ty))
