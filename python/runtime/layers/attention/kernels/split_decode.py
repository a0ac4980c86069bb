"""Attention of few queries over long caches: the keys of each request are split over the device, then the shares are merged.

The split and the merge are those of flash-decoding (Dao et al. 2023) and of split softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
"""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime.layers.attention.kernels.split_schedule import MAX_SHARES, Deal, deal, unpack

MAX_WIDTH = 8
"""Queries of a request."""
MAX_ROWS = 64
"""Queries times query heads of a KV head."""
MAX_SPLITS = MAX_SHARES
MERGED_AT_ONCE = 2
"""Shares that the last of a dealt request's programs merges together."""
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
        dealt: whether programs go from share to share of a `Deal`, made of the lengths of the pass, and not each request has its own.
    """

    tile: int
    num_warps: int
    stages: int
    programs_per_sm: int
    max_partial_rows: int = 512
    alone: int = 4
    dealt: bool = False


def default_config(head_dim: int, batch: int) -> SplitConfig:
    """The cut for a head dimension and a number of requests, the fastest of several on an H200.

    A tile of 64 keys and values is 32 KiB at most, so two or three programs share the memory of a multiprocessor; few requests have less to
    merge with one, whose tiles may be twice as long. With many requests a program takes whole ones, and the longest of them would
    keep all others waiting if they were not dealt.
    """
    tile = 64 if head_dim <= 128 else 32
    if batch <= 4:
        return SplitConfig(2 * tile, num_warps=4, stages=3, programs_per_sm=1, alone=2)
    if batch <= 8:
        return SplitConfig(tile, num_warps=4, stages=4, programs_per_sm=2)
    return SplitConfig(tile, num_warps=4, stages=3, programs_per_sm=3, dealt=batch > 16)


def takes(width: int, num_q_heads: int, num_kv_heads: int) -> bool:
    """Whether the kernel takes passes of `width` queries a request."""
    return 0 < width <= MAX_WIDTH and width * (num_q_heads // num_kv_heads) <= MAX_ROWS


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
    def programs(self) -> int:
        """Programs of each KV head where requests are dealt: what the device holds at once."""
        return max(self.config.programs_per_sm * self.num_sms // self.num_kv_heads, 1)

    @property
    def partial_rows(self) -> int:
        """Rows of partial results of a pass; none where one program takes all keys."""
        shares = self.splits + 1 if self.config.dealt else self.splits
        return self.batch * self.num_kv_heads * shares * self.rows if shares > 1 else 0

    def empty_deal(self, device: torch.device) -> Deal | None:
        """What `deal` is to write to; None where every request gets `splits` programs."""
        return Deal.empty(self.batch, self.num_kv_heads, self.splits, device) if self.config.dealt else None


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
        deal: who takes what, where the cut is dealt.
    """

    pages: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int
    deal: Deal | None = None


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
    """Attend. A request's result depends on its own data and on `shape` only, bit for bit; where the cut is dealt, on the deal too.

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
    assert (keys.deal is not None) == config.dealt, "a cut that is dealt comes with a deal, another without"
    out, splits, rows, group = torch.empty_like(q), shape.splits, shape.rows, H // G
    launch = {"launch_pdl": True} if pdl else {}
    items, arrived, room = (keys.deal.items, keys.deal.arrived, len(keys.deal.items)) if keys.deal is not None else (None, None, 0)
    shared = {
        "WIDTH": shape.width, "GROUP": group, "NUM_KV": G, "D": D, "TILE": config.tile, "ALONE": config.alone, "ROWS": rows,
        "WINDOW": window >= 0, "LSE": lse is not None, "PDL": pdl,
    }  # fmt: skip
    _split_kernel[(G, shape.programs, 1) if config.dealt else (G, splits, shape.batch)](
        q, k_cache, v_cache, keys.pages, keys.rows, keys.seq_lens, items, arrived, out, lse, workspace.out, workspace.top, workspace.total,
        scale / LN_2, splits, window, keys.pages.stride(0), room, **shared,
        BLOCK_M=max(rows, 16), PAGE=keys.page_size, CAUSAL=causal, PREFETCH=PREFETCH_TILES, DEALT=config.dealt, AT_ONCE=MERGED_AT_ONCE,
        num_warps=config.num_warps, num_stages=config.stages, **launch,
    )  # fmt: skip
    if splits > 1 and not config.dealt:
        padded = triton.next_power_of_2(splits)
        _merge_kernel[(G, shape.width * group, shape.batch)](
            keys.seq_lens, out, lse, workspace.out, workspace.top, workspace.total, splits, window, **shared,
            SPLITS=padded, num_warps=min(max(padded * D // 1024, 1), 8), **launch,  # 32 values a thread
        )  # fmt: skip
    return out


def one_of_each_kernel(shapes: Iterable[SplitShape]) -> list[SplitShape]:
    """Those of `shapes` that need kernels of their own to be compiled."""
    return list({(shape.config, shape.width, triton.next_power_of_2(shape.splits)): shape for shape in shapes}.values())


def first_run(shape: SplitShape, page_size: int, dtype: torch.dtype, device: torch.device, *, tree: bool, window: int, pdl: bool) -> None:
    """Run a pass of `shape` over nothing, so that its kernels are compiled."""
    q = torch.zeros((shape.batch * shape.width, shape.num_q_heads, shape.head_dim), dtype=dtype, device=device)
    cache = torch.zeros((1, page_size, shape.num_kv_heads, shape.head_dim), dtype=dtype, device=device)
    pages = torch.zeros((1, shape.width), dtype=torch.int32, device=device)
    rows = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    lens = torch.full((shape.batch,), shape.width, dtype=torch.int32, device=device)
    items = shape.empty_deal(device)
    if items is not None:
        deal(lens, shape.splits, shape.config.tile, items)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=device) if tree else None
    split_attention(
        q, cache, cache, SplitKeys(pages, rows, lens, page_size, items), shape, SplitWorkspace([shape], device), 1.0,
        causal=not tree, window=window, lse=lse, pdl=pdl,
    )  # fmt: skip


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


@triton.jit
def _prefetch_share(
    k_ptr, v_ptr, pages_ptr, g, length, first, last,
    NUM_KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Ask the first tiles of a share into L2."""
    for tile in range(first, tl.minimum(first + PREFETCH, last)):
        kv_row = (_slots(pages_ptr, tile, length, TILE, PAGE) * NUM_KV + g) * D
        _prefetch(k_ptr + kv_row, D)
        _prefetch(v_ptr + kv_row, D)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, pages_ptr, b, g, length, first, last, scale, window,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """All queries of request `b` against tiles `first` to `last` of head `g`: sums of values, largest scores, sums of weights."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    head = (b * WIDTH + m // GROUP) * (NUM_KV * GROUP) + g * GROUP + m % GROUP
    q = tl.load(q_ptr + head[:, None] * D + d[None, :], mask=(m < WIDTH * GROUP)[:, None], other=0.0)
    position = length - WIDTH + m // GROUP
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    slots = _slots(pages_ptr, first, length, TILE, PAGE)
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
    return acc, top, total


@triton.jit
def _finish(
    out_ptr, lse_ptr, b, g, acc, top, total,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, LSE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write the result of a request and head whose keys have all been seen."""
    m = tl.arange(0, BLOCK_M)
    m_in = m < WIDTH * GROUP
    head = (b * WIDTH + m // GROUP) * (NUM_KV * GROUP) + g * GROUP + m % GROUP
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + head[:, None] * D + tl.arange(0, D)[None, :], out.to(out_ptr.dtype.element_ty), mask=m_in[:, None])
    if LSE:
        tl.store(lse_ptr + head, top + tl.log2(total), mask=m_in)


@triton.jit
def _gather(
    part_ptr, top_ptr, total_ptr, first, used, g,
    NUM_KV: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The `used` shares from item `first` on as one, in their order."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    whole = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for start in range(0, used, AT_ONCE):
        share = start + tl.arange(0, AT_ONCE)
        inside = (share < used)[:, None] & (m < ROWS)[None, :]
        row = ((first + share) * NUM_KV + g)[:, None] * ROWS + m[None, :]
        # Written by other multiprocessors, so past L1.
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
    do_not_specialize=["splits", "window", "pages_stride", "room"],
    # a draft's passes have their lengths anywhere
    do_not_specialize_on_alignment=["pages_ptr", "rows_ptr", "lens_ptr", "items_ptr", "arrived_ptr", "lse_ptr"],
)
def _split_kernel(
    q_ptr, k_ptr, v_ptr, pages_ptr, rows_ptr, lens_ptr, items_ptr, arrived_ptr, out_ptr, lse_ptr, part_ptr, top_ptr, total_ptr,
    scale, splits, window, pages_stride, room,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, PREFETCH: tl.constexpr, DEALT: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: all queries of one request against one KV head's share of the keys; one that takes all of them writes the result.

    Dealt, a program goes from share to share, up the items and down the next ones, and the last to finish of a request merges its shares.
    """
    g = tl.program_id(0)
    turns = 1
    if DEALT:
        turns = tl.cdiv(room, tl.num_programs(1))
    if PDL:
        gdc_launch_dependents()
    # Lengths, deal and tables are read before the wait, when any number of kernels ahead may still run that started early themselves. But
    # these are younger than the last one that did not, the embedding of the pass or the head of its graph, and that began when all work
    # before it had ended: so had plan and page table, which are written outside of passes. Keys may be missing, but a prefetch is a hint.
    for turn in range(0, turns):
        split, b = tl.program_id(1), tl.program_id(2)
        item = b * splits + split
        pieces = splits
        if DEALT:
            item = turn * tl.num_programs(1) + (tl.program_id(1) if turn % 2 == 0 else tl.num_programs(1) - 1 - tl.program_id(1))
            mine = tl.load(items_ptr + item, mask=item < room, other=-1)
            b, split, pieces = unpack(mine)
        length = tl.load(lens_ptr + b)
        pages = pages_ptr + tl.load(rows_ptr + b).to(tl.int64) * pages_stride
        low, end, each, used = _cut(length, pieces, window, WIDTH, TILE, ALONE, WINDOW)
        first = low + split * each
        last = tl.minimum(first + each, end)
        if PDL:  # noqa: SIM102 - the outer condition is known when compiling, the inner is not
            if turn == 0:
                if split < used:
                    _prefetch_share(k_ptr, v_ptr, pages, g, length, first, last, NUM_KV, D, TILE, PAGE, PREFETCH)
                gdc_wait()
        if split < used:
            acc, top, total = _attend(
                q_ptr, k_ptr, v_ptr, pages, b, g, length, first, last, scale, window,
                WIDTH, GROUP, NUM_KV, D, TILE, WINDOW, BLOCK_M, PAGE, CAUSAL,
            )  # fmt: skip
            if used == 1:
                _finish(out_ptr, lse_ptr, b, g, acc, top, total, WIDTH, GROUP, NUM_KV, D, LSE, BLOCK_M)
            else:
                m = tl.arange(0, BLOCK_M)
                row = (item * NUM_KV + g) * ROWS + m
                tl.store(part_ptr + row[:, None] * D + tl.arange(0, D)[None, :], acc, mask=(m < ROWS)[:, None])
                tl.store(top_ptr + row, top, mask=m < ROWS)
                tl.store(total_ptr + row, total, mask=m < ROWS)
                if DEALT:
                    tl.debug_barrier()  # all of this program has stored before one thread says so
                    if tl.atomic_add(arrived_ptr + b * NUM_KV + g, 1, sem="acq_rel") == used - 1:
                        tl.store(arrived_ptr + b * NUM_KV + g, 0)
                        acc, top, total = _gather(
                            part_ptr, top_ptr, total_ptr, item - split, used, g, NUM_KV, D, ROWS, BLOCK_M, AT_ONCE
                        )  # fmt: skip
                        _finish(out_ptr, lse_ptr, b, g, acc, top, total, WIDTH, GROUP, NUM_KV, D, LSE, BLOCK_M)


@triton.jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=["lens_ptr", "lse_ptr"])
def _merge_kernel(
    lens_ptr, out_ptr, lse_ptr, part_ptr, top_ptr, total_ptr, splits, window,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: the shares of one query and head of one request, in an order that depends on the number of splits only."""
    g = tl.program_id(0)
    m = tl.program_id(1)
    b = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    _, _, _, used = _cut(tl.load(lens_ptr + b), splits, window, WIDTH, TILE, ALONE, WINDOW)
    # Also where nothing is left to do: this kernel must not end before the one ahead, for whose end the next waits through this one.
    if PDL:
        gdc_wait()
    if used > 1:
        d = tl.arange(0, D)
        split = tl.arange(0, SPLITS)
        inside = split < used
        row = ((b * splits + split) * NUM_KV + g) * ROWS + m
        # Read once, so past L1.
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
