"""Split-KV attention for few queries over long caches: the keys of each request are split over the device, then merged.

The split is that of flash-decoding (Dao et al. 2023), the merge that of split softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867).
"""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.layers.attention.kernels import cluster_decode
from runtime.layers.attention.kernels.paged_keys import PagedKeys
from runtime.layers.attention.kernels.split_schedule import unpack
from runtime.layers.attention.kernels.split_shape import SplitShape
from runtime.layers.attention.kernels.tile_slots import tile_slots
from runtime.layers.kernels.pdl import launch_options
from runtime.layers.rope import RotaryHeads

MERGED_AT_ONCE = 2
"""Shares that the last program of a scheduled request merges per step."""
PREFETCH_TILES = 2
"""Tiles that each program prefetches into L2 while the previous kernel is still running."""
LN_2 = 0.6931471805599453


class SplitWorkspace:
    """Partial results, shared by all passes of one stream. Owned by the backend.

    A pass writes here only after all earlier kernels have ended, even if it started early, so results of two layers never mix.

    Attributes:
        out: float32, by program, row and column: weighted sums of values, not yet normalised.
        top, total: float32, by program and row: the largest score (base 2), and the sum of weights.
    """

    def __init__(self, shapes: list[SplitShape], device: torch.device) -> None:
        """Space for any of `shapes`."""

        def floats(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.float32, device=device)

        rows = max(shape.partial_rows for shape in shapes)
        self.out, self.top, self.total = floats(rows * shapes[0].head_dim), floats(rows), floats(rows)


def split_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    keys: PagedKeys,
    shape: SplitShape,
    workspace: SplitWorkspace,
    scale: float,
    *,
    causal: bool = True,
    window: int = -1,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Attend: [B * W, H, D], the dtype of q. The bits of a result depend only on the request's own data, on `shape` and on the schedule.

    The cluster kernel runs the passes that it supports if the config has a tiling for it; two Triton kernels run the others.

    Args:
        q: [B * W, H, D] contiguous, W queries per request, bfloat16 or float16.
        k_cache, v_cache: [num_pages, page_size, G, D] contiguous.
        keys: location of the keys. With `causal` at least W per request; otherwise results of requests without keys are not written.
        shape: the kind of pass; `supports` must hold for its width.
        workspace: built for shapes that include `shape`.
        scale: factor of the scores.
        causal: query i sees all except the last W - 1 - i keys; otherwise all.
        window: number of keys before its own that a query sees; -1 for all. With `lse` it requires `causal`.
        sinks: [H], a score per head that is part of the softmax and has no value. Requires `causal`.
        lse: float32 [B * W, H] contiguous; receives the base-2 log-sum-exp.
        kv_scales: float32 [2], factors of stored keys and values; the caches are then e4m3 and converted in registers.
        pdl: start before the previous kernel has ended and prefetch keys (programmatic dependent launch, Hopper). Row numbers, lengths, the
            page table and keys of earlier passes are read before the wait. A kernel that waits before it triggers the next launch, such as
            the embedding kernel, must therefore run between the kernels that write them and this one.
    """
    _check(q, keys, shape, workspace)
    assert causal or sinks is None, "sinks require a causal pass"
    assert causal or window < 0 or lse is None, "a window requires a causal pass"
    if lse is None and cluster_decode.supports(shape, keys.page_size, q, k_cache, sinks):
        return cluster_decode.cluster_attention(q, k_cache, v_cache, keys, shape, scale, causal=causal, window=window, sinks=sinks, pdl=pdl)
    config, schedule, splits, out = shape.config, keys.schedule, shape.splits, torch.empty_like(q)
    items, arrived = (None, None) if schedule is None else (schedule.items, schedule.arrived)
    outputs = out, lse, workspace.out, workspace.top, workspace.total
    group = shape.num_q_heads // shape.num_kv_heads
    shared = dict(
        WIDTH=shape.width, GROUP=group, NUM_KV=shape.num_kv_heads, D=shape.head_dim, TILE=config.tile, ALONE=config.alone, ROWS=shape.rows,
        WINDOW=window >= 0, LSE=lse is not None, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip
    _split_kernel[(shape.parts, 1, len(schedule.items)) if schedule is not None else (shape.parts, splits, shape.batch)](
        q, k_cache, v_cache, kv_scales, sinks, keys.pages, keys.rows, keys.seq_lens, items, arrived, *outputs, scale / LN_2, splits, window,
        keys.pages.stride(0), **shared, BLOCK_M=shape.block_rows, PAGE=keys.page_size, CAUSAL=causal, PREFETCH=PREFETCH_TILES,
        SCHEDULED=config.scheduled, WHOLE=config.whole, SINKS=sinks is not None, SCALED=kv_scales is not None, AT_ONCE=MERGED_AT_ONCE,
        num_warps=config.num_warps, num_stages=config.stages,
    )  # fmt: skip
    if splits > 1 and not config.scheduled:
        padded = triton.next_power_of_2(splits)
        _merge_kernel[(shape.num_kv_heads, shape.width * group, shape.batch)](
            keys.seq_lens, *outputs, splits, window, **shared,
            SPLITS=padded, num_warps=min(max(padded * shape.head_dim // 1024, 1), 8),  # 32 values per thread
        )  # fmt: skip
    return out


def _check(q: torch.Tensor, keys: PagedKeys, shape: SplitShape, workspace: SplitWorkspace) -> None:
    """Assert that the pass was prepared."""
    assert shape.batch * shape.width == len(q), f"{len(q)} queries, but {shape.batch} requests of {shape.width} were prepared"
    assert shape.partial_rows <= workspace.top.numel(), "the workspace was made for smaller passes"
    assert q.is_contiguous(), "queries must be contiguous"
    assert (keys.schedule is not None) == shape.config.ordered, "a schedule must be given exactly if the config is ordered"


def warm_up(
    shape: SplitShape,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tree: bool,
    window: int,
    sinks: bool,
    causal: bool = True,
    scaled: bool = False,
    heads: RotaryHeads | None = None,
    shared: bool = False,
    pdl: bool,
) -> None:
    """Run a pass of `shape` over zeros, to compile its kernels.

    Args:
        tree: whether it is a pass over the keys before a tree's.
        shared: whether it is a pass over the keys after a shared prefix.
        scaled: whether the cache is e4m3.
        heads: the heads of a layer that passes rows of its qkv projection to kernels that support this.
    """
    q = torch.zeros((shape.batch * shape.width, shape.num_q_heads, shape.head_dim), dtype=dtype, device=device)
    stored = torch.float8_e4m3fn if scaled else dtype
    cache = torch.zeros((1, page_size, shape.num_kv_heads, shape.head_dim), dtype=stored, device=device)
    pages = torch.zeros((1, shape.width), dtype=torch.int32, device=device)
    rows = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    lens = torch.full((shape.batch,), shape.width, dtype=torch.int32, device=device)
    schedule = shape.empty_schedule(device)
    shape.fill_schedule(lens, schedule)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=device) if tree or shared else None
    keys, sink = PagedKeys(pages, rows, lens, page_size, schedule), q.new_zeros(shape.num_q_heads) if sinks and not tree else None
    if heads is not None and lse is None and shape.rotates and cluster_decode.takes_rows(heads, shape, page_size, q, cache, sink):
        qkv = q.new_zeros((len(q), (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim))
        zeros = torch.zeros(len(q), dtype=torch.int64, device=device)
        new = cluster_decode.NewTokens(heads, zeros, zeros)
        cluster_decode.cluster_attention(qkv, cache, cache, keys, shape, 1.0, causal=causal, window=window, sinks=sink, new=new, pdl=pdl)
        return
    split_attention(
        q, cache, cache, keys, shape, SplitWorkspace([shape], device), 1.0, causal=causal and not tree, window=window, sinks=sink, lse=lse,
        kv_scales=torch.ones(2, device=device) if scaled else None, pdl=pdl,
    )  # fmt: skip


@triton.jit
def _cut(length, splits, window, WIDTH: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr, WINDOW: tl.constexpr):
    """First tile of a request, end tile, tiles per program, and number of programs that have tiles."""
    low = 0
    if WINDOW:
        low = tl.maximum(length - WIDTH - window, 0) // TILE
    end = tl.cdiv(length, TILE)
    tiles = end - low
    each = tl.maximum(tl.cdiv(tiles, splits), 1)
    if tiles <= ALONE:
        each = tl.maximum(tiles, 1)
    return low, end, each, tl.cdiv(tiles, each)


@triton.jit
def _prefetch(rows_ptr, D: tl.constexpr):
    """Prefetch rows of D 16-bit values into L2, 128 bytes at a time. Later writes to them stay visible."""
    lines = rows_ptr[:, None] + (tl.arange(0, D // 64) * 64)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_share(
    k_ptr, v_ptr, pages_ptr, g, length, first, last,
    NUM_KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Prefetch the first tiles of a share into L2."""
    for tile in range(first, tl.minimum(first + PREFETCH, last)):
        kv_row = (tile_slots(pages_ptr, tile, length, TILE, PAGE) * NUM_KV + g) * D
        _prefetch(k_ptr + kv_row, D)
        _prefetch(v_ptr + kv_row, D)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, scales_ptr, sinks_ptr, pages_ptr, b, g, m, length, split, first, last, scale, window,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rows `m` of request `b` against tiles `first` to `last` of head `g`: sums of values, largest scores, sums of weights.

    Only share 0 includes the sink.
    """
    d = tl.arange(0, D)
    head = (b * WIDTH + m // GROUP) * (NUM_KV * GROUP) + g * GROUP + m % GROUP
    q = tl.load(q_ptr + head[:, None] * D + d[None, :], mask=(m < WIDTH * GROUP)[:, None], other=0.0)
    position = length - WIDTH + m // GROUP
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + g * GROUP + m % GROUP).to(tl.float32) * 1.4426950408889634  # scores are base-2 logarithms
        top = tl.where(split == 0, sink, top)
        total += tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    if SCALED:
        scale *= tl.load(scales_ptr)
    slots = tile_slots(pages_ptr, first, length, TILE, PAGE)
    for tile in range(first, last):
        n = tile * TILE + tl.arange(0, TILE)
        n_in = n < length
        kv_at = (slots * NUM_KV + g)[:, None] * D + d[None, :]
        slots = tile_slots(pages_ptr, tile + 1, length, TILE, PAGE)  # one step early, so that copies do not wait for page numbers
        k = tl.load(k_ptr + kv_at, mask=n_in[:, None], other=0.0)
        v = tl.load(v_ptr + kv_at, mask=n_in[:, None], other=0.0)
        if SCALED:
            k, v = k.to(q.dtype), v.to(q.dtype)
        visible = n_in[None, :]
        if CAUSAL:
            visible = n[None, :] <= tl.minimum(position, length - 1)[:, None]
        if WINDOW:
            visible = visible & (n[None, :] >= (position - window)[:, None])
        scores = tl.where(visible, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see no key of this program
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        top = higher
    if SCALED:
        acc *= tl.load(scales_ptr + 1)
    return acc, top, total


@triton.jit
def _finish(
    out_ptr, lse_ptr, b, g, m, acc, top, total,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write the result of rows of a request and head after all of its keys."""
    m_in = m < WIDTH * GROUP
    head = (b * WIDTH + m // GROUP) * (NUM_KV * GROUP) + g * GROUP + m % GROUP
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + head[:, None] * D + tl.arange(0, D)[None, :], out.to(out_ptr.dtype.element_ty), mask=m_in[:, None])
    if LSE:
        tl.store(lse_ptr + head, top + tl.log2(total), mask=m_in)


@triton.jit
def _gather(
    part_ptr, top_ptr, total_ptr, first, used, g, m,
    NUM_KV: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the `used` shares of rows `m` from item `first` on, in order."""
    d = tl.arange(0, D)
    highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    whole = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(0, used, AT_ONCE):
        share = start + tl.arange(0, AT_ONCE)
        inside = (share < used)[:, None] & (m < ROWS)[None, :]
        row = ((first + share) * NUM_KV + g)[:, None] * ROWS + m[None, :]
        # Bypass L1, because other SMs wrote these.
        part = tl.load(part_ptr + row[:, :, None] * D + d[None, None, :], mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
        top = tl.load(top_ptr + row, mask=inside, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(total_ptr + row, mask=inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(highest, tl.max(top, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight, shrink = tl.exp2(top - safe[None, :]), tl.exp2(highest - safe)
        whole = whole * shrink + tl.sum(total * weight, 0)
        out = out * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        highest = higher
    return out, highest, whole


@triton.jit(
    do_not_specialize=["splits", "window", "pages_stride"],
    # the lengths of draft passes have any alignment
    do_not_specialize_on_alignment=["scales_ptr", "sinks_ptr", "pages_ptr", "rows_ptr", "lens_ptr", "items_ptr", "arrived_ptr", "lse_ptr"],
)
def _split_kernel(
    q_ptr, k_ptr, v_ptr, scales_ptr, sinks_ptr, pages_ptr, rows_ptr, lens_ptr, items_ptr, arrived_ptr, out_ptr, lse_ptr,
    part_ptr, top_ptr, total_ptr, scale, splits, window, pages_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, PREFETCH: tl.constexpr, SCHEDULED: tl.constexpr, WHOLE: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program processes all queries of one request, or some rows of them, against one KV head's share of the keys.

    With a schedule, the last program of a request to finish merges its shares.
    """
    BLOCKS: tl.constexpr = max(ROWS // BLOCK_M, 1)
    g = tl.program_id(0) // BLOCKS
    m = tl.program_id(0) % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    if PDL:
        gdc_launch_dependents()
    # Lengths, schedule and tables are read before the wait, while earlier kernels that also started early may still run. All of these were
    # launched after the last kernel that waited first (the embedding), or after the start of the graph, when plan and page table were
    # written. Keys may not be written yet; a prefetch is only a hint.
    split, b = tl.program_id(1), tl.program_id(2)
    item = b * tl.num_programs(1) + split
    pieces = splits
    if WHOLE:
        b = tl.load(items_ptr + item)
    elif SCHEDULED:
        b, split, pieces = unpack(tl.load(items_ptr + item))
    length = tl.load(lens_ptr + b)
    pages = pages_ptr + tl.load(rows_ptr + b).to(tl.int64) * pages_stride
    low, end, each, used = _cut(length, pieces, window, WIDTH, TILE, ALONE, WINDOW)
    first = low + split * each
    last = tl.minimum(first + each, end)
    if PDL:
        if split < used:
            _prefetch_share(k_ptr, v_ptr, pages, g, length, first, last, NUM_KV, D, TILE, PAGE, PREFETCH)
        gdc_wait()
    if split < used:
        acc, top, total = _attend(
            q_ptr, k_ptr, v_ptr, scales_ptr, sinks_ptr, pages, b, g, m, length, split, first, last, scale, window,
            WIDTH, GROUP, NUM_KV, D, TILE, WINDOW, BLOCK_M, PAGE, CAUSAL, SINKS, SCALED,
        )  # fmt: skip
        if True if WHOLE else used == 1:  # a constant if WHOLE, so that the other branch is not compiled
            _finish(out_ptr, lse_ptr, b, g, m, acc, top, total, WIDTH, GROUP, NUM_KV, D, LSE)
        else:
            row = (item * NUM_KV + g) * ROWS + m
            tl.store(part_ptr + row[:, None] * D + tl.arange(0, D)[None, :], acc, mask=(m < ROWS)[:, None])
            tl.store(top_ptr + row, top, mask=m < ROWS)
            tl.store(total_ptr + row, total, mask=m < ROWS)
            if SCHEDULED:
                tl.debug_barrier()  # all threads must have stored before one thread signals it
                arrived = arrived_ptr + b * tl.num_programs(0) + tl.program_id(0)
                if tl.atomic_add(arrived, 1, sem="acq_rel") == used - 1:
                    tl.store(arrived, 0)
                    acc, top, total = _gather(
                        part_ptr, top_ptr, total_ptr, item - split, used, g, m, NUM_KV, D, ROWS, BLOCK_M, AT_ONCE
                    )  # fmt: skip
                    _finish(out_ptr, lse_ptr, b, g, m, acc, top, total, WIDTH, GROUP, NUM_KV, D, LSE)


@triton.jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=["lens_ptr", "lse_ptr"])
def _merge_kernel(
    lens_ptr, out_ptr, lse_ptr, part_ptr, top_ptr, total_ptr, splits, window,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program merges the shares of one query and head, in an order that depends only on the number of splits."""
    g = tl.program_id(0)
    m = tl.program_id(1)
    b = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    _, _, _, used = _cut(tl.load(lens_ptr + b), splits, window, WIDTH, TILE, ALONE, WINDOW)
    # Wait even without work: the next kernel waits only for this one, and through it for the previous kernel.
    if PDL:
        gdc_wait()
    if used > 1:
        d = tl.arange(0, D)
        split = tl.arange(0, SPLITS)
        inside = split < used
        row = ((b * splits + split) * NUM_KV + g) * ROWS + m
        # Read once: bypass L1.
        part = tl.load(part_ptr + row[:, None] * D + d[None, :], mask=inside[:, None], other=0.0, cache_modifier=".cg")
        top = tl.load(top_ptr + row, mask=inside, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(total_ptr + row, mask=inside, other=0.0, cache_modifier=".cg")
        highest = tl.max(top, 0)
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(top - safe)
        whole = tl.sum(total * weight, 0)
        out = tl.sum(part * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
        head = (b * WIDTH + m // GROUP) * (NUM_KV * GROUP) + g * GROUP + m % GROUP
        tl.store(out_ptr + head * D + d, out.to(out_ptr.dtype.element_ty))
        if LSE:
            tl.store(lse_ptr + head, safe + tl.log2(whole))
