"""Attention of few queries over long caches: the keys of each request are split over the device, then the shares are merged.

The split and the merge are those of flash-decoding (Dao et al. 2023) and of split softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
"""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_WIDTH = 8
"""Queries of a request."""
MAX_ROWS = 64
"""Queries times query heads of a KV head."""
MAX_SPLITS = 32
DEALT_SHARES = 4
"""Shares that are merged at once where requests are dealt; few have more."""
MAX_DEALT = 128
"""Requests that one program compares with each other."""
PREFETCH_TILES = 2
"""Tiles that each program asks into L2 while the kernel before still runs."""
LN_2 = 0.6931471805599453


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How the work is cut.

    Attributes:
        tile: keys of one step; a power of two.
        num_warps: warps of a program.
        stages: tiles in flight.
        programs_per_sm: programs that the split aims at for each multiprocessor.
        max_partial_rows: splits times rows that a request and KV head may have to merge; wide passes get fewer splits.
        alone: tiles up to which one program takes all of them, and nothing is merged.
    """

    tile: int
    num_warps: int
    stages: int
    programs_per_sm: int
    max_partial_rows: int = 512
    alone: int = 4


def default_config(head_dim: int, batch: int) -> SplitConfig:
    """The cut for a head dimension and a number of requests, the fastest of several on an H200.

    A tile of 64 keys and values is 32 KiB at most, so two programs share the memory of a multiprocessor. One program with tiles twice as
    long leaves less to merge, where it finds work enough.
    """
    wide = 2 if batch <= 4 or 8 < batch <= 16 else 1
    tile = (64 if head_dim <= 128 else 32) * wide
    return SplitConfig(tile=tile, num_warps=4, stages=5 - wide, programs_per_sm=3 - wide, alone=4 // wide)


def takes(width: int, num_q_heads: int, num_kv_heads: int) -> bool:
    """Whether the kernel takes passes of `width` queries a request."""
    return 0 < width <= MAX_WIDTH and width * (num_q_heads // num_kv_heads) <= MAX_ROWS


@dataclass(frozen=True, slots=True)
class Deal:
    """Which program takes what, by the lengths of a pass.

    Attributes:
        items: int32 [programs]: request + share * 2**10 + shares * 2**20, the longest shares first; -1 for nothing.
        places: int32 [B]: index of a request's first item + shares * 2**20.
    """

    items: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class SplitShape:
    """One kind of pass: what is known before its lengths are.

    Attributes:
        batch, width: requests, padding included, and queries of each.
        num_q_heads, num_kv_heads, head_dim: H, G, D; D is 64, 128 or 256.
        num_sms: multiprocessors of the device.
        config: the cut.
    """

    batch: int
    width: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_sms: int
    config: SplitConfig

    @property
    def rows(self) -> int:
        """Rows that partial results are stored with: queries times heads of a group, as a power of two."""
        return triton.next_power_of_2(self.width * (self.num_q_heads // self.num_kv_heads))

    @property
    def splits(self) -> int:
        """Programs of each request and KV head. From static numbers only, so that a captured grid holds for all lengths."""
        wanted = self.config.programs_per_sm * self.num_sms // (self.batch * self.num_kv_heads)
        return max(min(wanted, MAX_SPLITS, self.config.max_partial_rows // self.rows), 1)

    @property
    def dealt(self) -> bool:
        """Whether requests get programs by their length (`deal`): where few programs a request leave a long one behind the others."""
        return self.splits <= 2

    @property
    def programs(self) -> int:
        """Programs of each KV head, those without work included."""
        return self.batch * (self.splits + self.dealt)

    @property
    def partial_rows(self) -> int:
        """Rows of partial results of a pass; none where one program takes all keys."""
        return self.programs * self.num_kv_heads * self.rows if self.splits > 1 or self.dealt else 0

    def empty_deal(self, device: torch.device) -> Deal | None:
        """What `deal` writes to; None where every request gets `splits` programs."""
        if not self.dealt:
            return None
        ints = torch.zeros(self.programs + self.batch, dtype=torch.int32, device=device)
        return Deal(ints[: self.programs], ints[self.programs :])


class SplitWorkspace:
    """Partial results. Written and read by one pass after another of one stream; kept alive by the backend.

    A pass writes here only after all work before it has ended, early start or not, so that one layer's shares never meet another's.

    Attributes:
        out: float32, by program, row and column: sums of values, not divided yet.
        top, total: float32, by program and row: the largest score (base 2), the sum of weights.
    """

    def __init__(self, shapes: list[SplitShape], device: torch.device) -> None:
        """Room for any of `shapes`."""

        def floats(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.float32, device=device)

        rows = max(shape.partial_rows for shape in shapes)
        self.out, self.top, self.total = floats(rows * shapes[0].head_dim), floats(rows), floats(rows)


@dataclass(frozen=True, slots=True)
class SplitKeys:
    """Where the keys of each request are. All on the device.

    Attributes:
        pages: int32 [rows, max_pages], the page table.
        rows: int32 [B], which of its rows.
        seq_lens: int32 [B], keys of each request.
        page_size: slots of a page.
        deal: which program takes what, for shapes that are `dealt`.
    """

    pages: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int
    deal: Deal | None = None


def deal(lens: torch.Tensor, shape: SplitShape, out: Deal) -> None:
    """Cut requests of lens int32 [B] into shares that are at most a little longer than the mean request's. On the device, once a pass.

    With `s` splits a share has at most (1 + 1 / 4s) / s of the mean length, so that alike requests get `s` shares each; all together get
    less than (s + 1) B, whatever the lengths. Long shares begin first (Graham 1969, longest processing time first).
    """
    assert shape.batch <= MAX_DEALT, f"at most {MAX_DEALT} requests are dealt out, not {shape.batch}"
    block, most = triton.next_power_of_2(shape.batch), triton.next_power_of_2(shape.programs)
    _deal_kernel[(1,)](
        lens, out.items, out.places, shape.batch, shape.programs, shape.splits,
        TILE=shape.config.tile, MOST=MAX_SPLITS, BLOCK=block, PROGRAMS=most, num_warps=max(min(block * block // 1024, 8), 1),
    )  # fmt: skip


def split_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    keys: SplitKeys,
    shape: SplitShape,
    workspace: SplitWorkspace,
    scale: float,
    *,
    causal: bool = True,
    window: int = -1,
    lse: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Attend. A request's result depends on its own data and on `shape` only, bit for bit; where the shape is dealt, on the deal too.

    Args:
        q: [B * W, H, D] contiguous, W queries a request, bfloat16 or float16.
        k_cache, v_cache: [num_pages, page_size, G, D] contiguous.
        keys: where the keys are. With `causal` at least W each; otherwise requests without any are left unwritten.
        shape: the kind of pass; its width must be one that `takes` takes.
        workspace: made for `shape` among others.
        scale: what scores are multiplied with.
        causal: query i sees all but the last W - 1 - i keys; otherwise all.
        window: keys that a query sees before itself; -1 for all. Needs `causal`.
        lse: float32 [B * W, H] contiguous; gets the base-2 logarithms of the sums of exponentials.
        pdl: start before the kernel ahead has ended and prefetch keys (programmatic dependent launch, Hopper). Row numbers, lengths and
            the page table are read before the wait: a kernel without early start must lie between the ones that wrote them and this.

    Returns:
        [B * W, H, D], the dtype of q.
    """
    (T, H, D), G, config = q.shape, k_cache.shape[2], shape.config
    assert shape.batch * shape.width == T, f"{T} queries where {shape.batch} requests of {shape.width} were prepared"
    assert shape.partial_rows <= workspace.top.numel(), "the workspace was made for smaller passes"
    assert q.is_contiguous(), "queries of a split pass are contiguous"
    assert causal or window < 0, "a window belongs to a causal pass"
    assert (keys.deal is not None) == shape.dealt, "a shape that is dealt comes with a deal, another without"
    out, splits, rows, group = torch.empty_like(q), shape.splits, shape.rows, H // G
    launch = {"launch_pdl": True} if pdl else {}
    items, places = (keys.deal.items, keys.deal.places) if keys.deal is not None else (None, None)
    shared = {
        "WIDTH": shape.width, "GROUP": group, "NUM_KV": G, "D": D, "TILE": config.tile, "ALONE": config.alone, "ROWS": rows,
        "WINDOW": window >= 0, "LSE": lse is not None, "PDL": pdl, "DEALT": shape.dealt,
    }  # fmt: skip
    grid = (G, 1, shape.programs) if shape.dealt else (G, splits, shape.batch)
    _split_kernel[grid](
        q, k_cache, v_cache, keys.pages, keys.rows, keys.seq_lens, items, out, lse, workspace.out, workspace.top, workspace.total,
        scale / LN_2, splits, window, keys.pages.stride(0), **shared,
        BLOCK_M=max(rows, 16), PAGE=keys.page_size, CAUSAL=causal, PREFETCH=PREFETCH_TILES,
        num_warps=config.num_warps, num_stages=config.stages, **launch,
    )  # fmt: skip
    if shape.partial_rows:
        # Few shares of all rows together, or many of one row: most requests of a deal have none to merge, and few programs find out sooner.
        each = min(rows, 16) if shape.dealt else 1
        at_once = DEALT_SHARES if shape.dealt else triton.next_power_of_2(splits)
        _merge_kernel[(G, triton.cdiv(shape.width * group, each), shape.batch)](
            keys.seq_lens, places, out, lse, workspace.out, workspace.top, workspace.total, splits, window, **shared,
            EACH=each, SPLITS=at_once, num_warps=min(max(at_once * each * D // 1024, 1), 8), **launch,  # 32 values a thread
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count", "programs", "splits"], do_not_specialize_on_alignment=["lens_ptr", "items_ptr", "places_ptr"])
def _deal_kernel(
    lens_ptr, items_ptr, places_ptr, count, programs, splits,
    TILE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """One program: shares of each request, and where its items begin among those of all, the longest shares first."""
    i = tl.arange(0, BLOCK)
    inside = i < count
    tiles = tl.where(inside, tl.cdiv(tl.load(lens_ptr + i, mask=inside, other=0), TILE), 0)
    cap = tl.maximum(tl.cdiv(tl.sum(tiles, 0) * (4 * splits + 1), 4 * splits * splits * count), 1)
    shares = tl.where(inside, tl.minimum(tl.maximum(tl.cdiv(tiles, cap), 1), MOST), 0)
    # by falling length of a share, then by number: one key that all can be compared by
    key = tl.cdiv(tiles, tl.maximum(shares, 1)) * BLOCK + (BLOCK - 1 - i)
    before = key[None, :] > key[:, None]
    first = tl.sum(tl.where(before, shares[None, :] + tl.zeros_like(before).to(tl.int32), 0), 1)
    tl.store(places_ptr + i, first + (shares << 20), mask=inside)
    for share in range(0, tl.max(shares, 0)):
        tl.store(items_ptr + first + share, i + (share << 10) + (shares << 20), mask=inside & (share < shares))
    item = tl.arange(0, PROGRAMS)
    tl.store(items_ptr + item, -1, mask=(item >= tl.sum(shares, 0)) & (item < programs))


@triton.jit
def _cut(length, splits, window, WIDTH: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile of a request, the one past the last, how many each program takes, and the number of programs that have any."""
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
def _slots(pages_ptr, tile, length, TILE: tl.constexpr, PAGE: tl.constexpr):
    """The slots of one tile of keys, int64 [TILE]; those past the end are of no meaning, but exist."""
    position = tile * TILE + tl.arange(0, TILE)
    if PAGE % TILE == 0:
        page = tl.load(pages_ptr + tile * TILE // PAGE, mask=tile * TILE < length, other=0)
        return page.to(tl.int64) * PAGE + position % PAGE
    else:
        page = tl.load(pages_ptr + position // PAGE, mask=position < length, other=0)
        return page.to(tl.int64) * PAGE + position % PAGE


@triton.jit
def _prefetch(rows_ptr, D: tl.constexpr):
    """Ask rows of D 16-bit values into L2, 128 bytes at a time. A hint: what is written to them afterwards is seen all the same."""
    lines = rows_ptr[:, None] + (tl.arange(0, D // 64) * 64)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(
    do_not_specialize=["splits", "window", "pages_stride"],
    # a draft's passes have their lengths anywhere
    do_not_specialize_on_alignment=["pages_ptr", "rows_ptr", "lens_ptr", "items_ptr", "lse_ptr"],
)
def _split_kernel(
    q_ptr, k_ptr, v_ptr, pages_ptr, rows_ptr, lens_ptr, items_ptr, out_ptr, lse_ptr, part_ptr, top_ptr, total_ptr,
    scale, splits, window, pages_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr, DEALT: tl.constexpr,
    BLOCK_M: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One program: all queries of one request against one KV head's share of the keys; one that takes all of them writes the result."""
    g = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    item = b * splits + split
    if DEALT:
        item = b
        mine = tl.load(items_ptr + item)
        b = tl.maximum(mine, 0) & 1023
        split = (mine >> 10) & 1023  # without work: beyond all shares
        splits = tl.maximum(mine, 1 << 20) >> 20
    # Lengths, deal and tables are read before the wait, when any number of kernels ahead may still run that started early themselves. But
    # these are younger than the last one that did not, the embedding of the pass or the head of its graph, and that began when all work
    # before it had ended: so had plan and page table, which are written outside of passes. Keys may be missing, but a prefetch is a hint.
    length = tl.load(lens_ptr + b)
    pages_ptr += tl.load(rows_ptr + b).to(tl.int64) * pages_stride
    low, end, each, used = _cut(length, splits, window, WIDTH, TILE, ALONE, WINDOW)
    first = low + split * each
    last = tl.minimum(first + each, end)
    d = tl.arange(0, D)
    slots = _slots(pages_ptr, first, length, TILE, PAGE)
    if PDL:
        if split < used:
            _prefetch(k_ptr + (slots * NUM_KV + g) * D, D)
            _prefetch(v_ptr + (slots * NUM_KV + g) * D, D)
            for tile in range(first + 1, tl.minimum(first + PREFETCH, last)):
                kv_row = (_slots(pages_ptr, tile, length, TILE, PAGE) * NUM_KV + g) * D
                _prefetch(k_ptr + kv_row, D)
                _prefetch(v_ptr + kv_row, D)
        gdc_wait()

    if split < used:
        m = tl.arange(0, BLOCK_M)
        m_in = m < WIDTH * GROUP
        head = (b * WIDTH + m // GROUP) * (NUM_KV * GROUP) + g * GROUP + m % GROUP
        q = tl.load(q_ptr + head[:, None] * D + d[None, :], mask=m_in[:, None], other=0.0)
        position = length - WIDTH + m // GROUP
        top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
        for tile in range(first, last):
            n = tile * TILE + tl.arange(0, TILE)
            n_in = n < length
            kv_at = (slots * NUM_KV + g)[:, None] * D + d[None, :]
            slots = _slots(pages_ptr, tile + 1, length, TILE, PAGE)  # a step ahead, so that no copy waits for a page number
            k = tl.load(k_ptr + kv_at, mask=n_in[:, None], other=0.0)
            v = tl.load(v_ptr + kv_at, mask=n_in[:, None], other=0.0)
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

        if used == 1:
            out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_ptr + head[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=m_in[:, None])
            if LSE:
                tl.store(lse_ptr + head, top + tl.log2(total), mask=m_in)
        else:
            row = (item * NUM_KV + g) * ROWS + m
            tl.store(part_ptr + row[:, None] * D + d[None, :], acc, mask=(m < ROWS)[:, None])
            tl.store(top_ptr + row, top, mask=m < ROWS)
            tl.store(total_ptr + row, total, mask=m < ROWS)


@triton.jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=["lens_ptr", "places_ptr", "lse_ptr"])
def _merge_kernel(
    lens_ptr, places_ptr, out_ptr, lse_ptr, part_ptr, top_ptr, total_ptr, splits, window,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr, DEALT: tl.constexpr,
    EACH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: the shares of some queries and heads of one request, in an order that depends on the number of splits only."""
    g = tl.program_id(0)
    b = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    first = b * splits
    if DEALT:
        place = tl.load(places_ptr + b)
        first = place & ((1 << 20) - 1)
        splits = place >> 20
    _, _, _, used = _cut(tl.load(lens_ptr + b), splits, window, WIDTH, TILE, ALONE, WINDOW)
    # Also where nothing is left to do: this kernel must not end before the one ahead, for whose end the next waits through this one.
    if PDL:
        gdc_wait()
    if used > 1:
        d = tl.arange(0, D)
        m = tl.program_id(1) * EACH + tl.arange(0, EACH)
        highest = tl.full((EACH,), float("-inf"), dtype=tl.float32)
        whole = tl.zeros((EACH,), dtype=tl.float32)
        out = tl.zeros((EACH, D), dtype=tl.float32)
        for start in range(0, used, SPLITS):
            split = start + tl.arange(0, SPLITS)
            inside = (split < used)[:, None] & (m < ROWS)[None, :]
            row = ((first + split) * NUM_KV + g)[:, None] * ROWS + m[None, :]
            # Read once, so past L1.
            part = tl.load(part_ptr + row[:, :, None] * D + d[None, None, :], mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
            top = tl.load(top_ptr + row, mask=inside, other=float("-inf"), cache_modifier=".cg")
            total = tl.load(total_ptr + row, mask=inside, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(highest, tl.max(top, 0))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weight, shrink = tl.exp2(top - safe[None, :]), tl.exp2(highest - safe)
            whole = whole * shrink + tl.sum(total * weight, 0)
            out = out * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
            highest = higher
        out /= tl.where(whole == 0.0, 1.0, whole)[:, None]
        head = (b * WIDTH + m // GROUP) * (NUM_KV * GROUP) + g * GROUP + m % GROUP
        m_in = m < WIDTH * GROUP
        tl.store(out_ptr + head[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=m_in[:, None])
        if LSE:
            tl.store(lse_ptr + head, highest + tl.log2(whole), mask=m_in)
