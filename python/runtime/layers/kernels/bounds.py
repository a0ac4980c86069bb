"""The argmax of each row among the tokens of the largest bounds, or among all tokens where bounds do not prove it; Triton kernels.

Every logit is the same function of its row and token, `_exact_score`, so that a token's bits do not depend on how it was found.
"""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.argmax_reduce import LEAST_KEY, NO_COLUMN, order_key
from runtime.layers.kernels.pdl import launch_options, pdl_sync

SLICE = 4096
"""Columns of a row that are multiplied at once."""
TILES = tl.constexpr(32)
"""Maximum tiles of a group."""
BEST = tl.constexpr(8)
"""Tokens of a group that are scored."""
SCANS = 512
"""Programs that score all tokens, where that is necessary."""


def proved_argmax(
    bounds: torch.Tensor,
    columns: torch.Tensor,
    rest: torch.Tensor,
    error: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: int,
    out: torch.Tensor,
    pdl: bool,
    logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """For each row the token with the largest `x @ weight.T`, the lowest of equal ones: int64 [M] in `out`.

    Args:
        bounds, columns: float32 and int32 [M, tiles, kept] contiguous, the largest bounds of each tile and their columns.
        rest: float32 [M, tiles] contiguous, the largest other bound of each tile.
        error: float32 [M]: bounds may be too small by this.
        x, weight: bfloat16 [M, K] and [V, K], contiguous; M <= 64.
        stride: column i is token `i * stride % V`.
        pdl: as in `triton_gemm`.
        logits: float32 [M, V] contiguous; receives the logit of each row's token, and nothing else.
    """
    (M, tiles, kept), (V, K) = bounds.shape, weight.shape
    for name, tensor in (("bounds", bounds), ("columns", columns), ("rest", rest), ("rows", x), ("weights", weight)):
        assert tensor.is_contiguous(), f"expected contiguous {name}"
    assert logits is None or logits.is_contiguous(), "expected contiguous logits"
    groups = triton.cdiv(tiles, TILES.value)
    entries = groups * BEST.value
    device, options = x.device, launch_options(pdl)
    found = torch.empty((M, entries), dtype=torch.int32, device=device)
    left = torch.empty((M, groups), dtype=torch.float32, device=device)
    scores, tokens = (torch.empty((M, entries), dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    scanned = torch.empty((2, M, SCANS), dtype=torch.int32, device=device)
    slices = dict(K=K, SLICE=min(triton.next_power_of_2(K), SLICE), PDL=pdl, num_warps=4)
    proof = (scores, tokens, left, error)
    block_m = 1 if M == 1 else max(triton.next_power_of_2(M), 4)  # one kernel for each m bucket
    sizes = dict(ENTRIES=triton.next_power_of_2(entries), GROUPS=triton.next_power_of_2(groups))
    _search_kernel[(groups, M)](bounds, columns, rest, found, left, tiles, KEPT=kept, PDL=pdl, num_warps=1, **options)
    _score_kernel[(entries, M)](found, x, weight, scores, tokens, V, stride, **slices, **options)
    _scan_kernel[(SCANS,)](*proof, x, weight, scanned, M, V, entries, groups, BLOCK_M=block_m, **sizes, **slices, **options)
    _choose_kernel[(M,)](*proof, scanned, out, logits, V, entries, groups, **sizes, SCANS=SCANS, PDL=pdl, num_warps=4, **options)
    return out


@triton.jit
def _search_kernel(
    bounds_ptr, columns_ptr, rest_ptr, found_ptr, left_ptr, tiles, KEPT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program: the largest bounds of every `groups`-th tile of one row, and the largest that is left."""
    pdl_sync(PDL)
    group, row, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    entry = tl.arange(0, TILES * KEPT)
    tile = entry // KEPT * groups + group
    inside, at = tile < tiles, (row * tiles + tile) * KEPT + entry % KEPT
    bound = tl.load(bounds_ptr + at, mask=inside, other=float("-inf"))
    column = tl.load(columns_ptr + at, mask=inside, other=NO_COLUMN)
    slot = (row * groups + group) * BEST
    for i in tl.static_range(BEST):
        largest = tl.max(bound, 0)
        first = tl.min(tl.where(bound == largest, entry, TILES * KEPT), 0)
        chosen = tl.min(tl.where(entry == first, column, NO_COLUMN), 0)
        tl.store(found_ptr + slot + i, tl.where(largest == float("-inf"), NO_COLUMN, chosen))
        bound = tl.where(entry == first, float("-inf"), bound)
    own = tl.arange(0, TILES) * groups + group
    rest = tl.load(rest_ptr + row * tiles + own, mask=own < tiles, other=float("-inf"))
    tl.store(left_ptr + row * groups + group, tl.maximum(tl.max(bound, 0), tl.max(rest, 0)))


@triton.jit
def _exact_score(x_ptr, weight_ptr, row, token, K: tl.constexpr, SLICE: tl.constexpr):
    """The logit of a token for a row."""
    total = tl.zeros((SLICE,), dtype=tl.float32)
    for start in range(0, K, SLICE):
        k = start + tl.arange(0, SLICE)
        w = tl.load(weight_ptr + tl.cast(token, tl.int64) * K + k, mask=k < K, other=0.0).to(tl.float32)
        total += w * tl.load(x_ptr + tl.cast(row, tl.int64) * K + k, mask=k < K, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _score_kernel(found_ptr, x_ptr, weight_ptr, scores_ptr, tokens_ptr, V, stride, K: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr):
    """One program: the logit of one found column of one row."""
    pdl_sync(PDL)
    entry, row, entries = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    at = row * entries + entry
    column = tl.load(found_ptr + at)
    if column == NO_COLUMN:
        tl.store(scores_ptr + at, float("-inf"))
        tl.store(tokens_ptr + at, NO_COLUMN)
    else:
        token = (column.to(tl.int64) * stride % V).to(tl.int32)
        tl.store(scores_ptr + at, _exact_score(x_ptr, weight_ptr, row, token, K, SLICE))
        tl.store(tokens_ptr + at, token)


@triton.jit(do_not_specialize=["M"])
def _scan_kernel(
    scores_ptr, tokens_ptr, left_ptr, error_ptr, x_ptr, weight_ptr, scanned_ptr, M, V, entries, groups,
    BLOCK_M: tl.constexpr, ENTRIES: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the best of its share of all tokens, for the rows without a proof."""
    pdl_sync(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    m, entry, group = tl.arange(0, BLOCK_M), tl.arange(0, ENTRIES), tl.arange(0, GROUPS)
    inside = (m < M)[:, None]
    scores = tl.load(scores_ptr + m[:, None] * entries + entry[None, :], mask=inside & (entry < entries)[None, :], other=float("-inf"))
    left = tl.load(left_ptr + m[:, None] * groups + group[None, :], mask=inside & (group < groups)[None, :], other=float("-inf"))
    error = tl.load(error_ptr + m, mask=m < M, other=0.0)
    proved = tl.max(left, 1) + error < tl.max(scores, 1)
    unproved = tl.where(m < M, 1 - proved.to(tl.int32), 0)
    if tl.sum(unproved, 0) > 0:
        for row in range(0, M):
            if tl.sum(tl.where(m == row, unproved, 0), 0) > 0:
                best, chosen = tl.full((), LEAST_KEY, tl.int32), tl.full((), NO_COLUMN, tl.int32)
                for token in range(program, V, programs):
                    key = order_key(_exact_score(x_ptr, weight_ptr, row, token, K, SLICE))
                    chosen = tl.where(key > best, token, chosen)
                    best = tl.maximum(key, best)
                at = scanned_ptr + row * programs + program
                tl.store(at, best)
                tl.store(at + M * programs, chosen)


@triton.jit
def _choose_kernel(
    scores_ptr, tokens_ptr, left_ptr, error_ptr, scanned_ptr, out_ptr, logits_ptr, V, entries, groups,
    ENTRIES: tl.constexpr, GROUPS: tl.constexpr, SCANS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the token of one row."""
    pdl_sync(PDL)
    row, rows = tl.program_id(0), tl.num_programs(0)
    entry, group = tl.arange(0, ENTRIES), tl.arange(0, GROUPS)
    scores = tl.load(scores_ptr + row * entries + entry, mask=entry < entries, other=float("-inf"))
    left = tl.load(left_ptr + row * groups + group, mask=group < groups, other=float("-inf"))
    largest = tl.max(scores, 0)
    if tl.max(left, 0) + tl.load(error_ptr + row) < largest:
        scored = tl.load(tokens_ptr + row * entries + entry, mask=entry < entries, other=NO_COLUMN)
        token = tl.min(tl.where(scores == largest, scored, NO_COLUMN), 0)
        score = largest
    else:
        scan = tl.arange(0, SCANS)
        key = tl.load(scanned_ptr + row * SCANS + scan)
        scanned = tl.load(scanned_ptr + (rows + row) * SCANS + scan)
        best = tl.max(key, 0)
        token = tl.min(tl.where(key == best, scanned, NO_COLUMN), 0)
        score = tl.where(best == 0x7FFFFFFF, float("nan"), tl.where(best < 0, best ^ 0x7FFFFFFF, best).to(tl.float32, bitcast=True))
    tl.store(out_ptr + row, token.to(tl.int64))
    if logits_ptr is not None:
        tl.store(logits_ptr + row.to(tl.int64) * V + token, score)
