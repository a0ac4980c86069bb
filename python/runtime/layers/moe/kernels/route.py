"""Routing as one kernel: the router's GEMM, scores, the choice of experts and their weights."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.config.expert_tuning import MID_ROUTER_ROWS
from runtime.layers.gemm.deferred_norm import RowScale
from runtime.layers.kernels.pdl import launch_options, pdl_sync
from runtime.layers.moe.kernels.route_few import SCORINGS, route_few, supports
from runtime.layers.moe.router import Router, Routing, RoutingRule

SOFTMAX, SIGMOID, TOPK_SOFTMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Places in `SCORINGS`."""
FEW_ROWS = 64
"""Up to this many tokens, several programs split the GEMM of 8 tokens; above, `MID_ROUTER_ROWS` applies."""
COLUMNS = 128
LEAST = tl.constexpr(-3e38)
"""Minimum score of an expert, which also replaces NaN."""
MAX_BLOCKS = 4096
"""Maximum blocks of tokens per call."""


def new_tickets(device: torch.device) -> torch.Tensor:
    """Counters for `route`, which are zero between calls; calls on one stream may share them."""
    return torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)


def route(
    x: torch.Tensor,
    router: Router,
    tickets: torch.Tensor,
    *,
    norm: RowScale | None = None,
    normed: torch.Tensor | None = None,
    pdl: bool = False,
) -> Routing:
    """Choose experts for each row of x: by `route_few` if that supports it, otherwise in Triton.

    Args:
        x: [T, K] contiguous, K a multiple of 16.
        router: its weight [E, K] is contiguous, in the dtype of x. Logits are summed and kept in float32.
        tickets: counters from `new_tickets`, by which the last Triton program of a block of tokens makes the choice.
        norm: factors by which x must still be multiplied; `normed` [T, K] receives the product.
        pdl: as in `triton_gemm`.
    """
    (T, K), E, scoring = x.shape, router.num_experts, router.rule
    padded, few = max(triton.next_power_of_2(E), 16), T <= FEW_ROWS
    _check(K, router.weight, scoring)
    rows, experts, splits = _tiling(T, K, padded)
    blocks, words = triton.cdiv(T, rows), triton.cdiv(E + scoring.shared, 32)
    assert blocks <= MAX_BLOCKS, f"expected at most {MAX_BLOCKS * rows} tokens; got {T}"
    routed = _new_routing(T, scoring.chosen, words, x.device, router.kept_masks(T))
    if T == 0:
        return routed
    if supports(x, router):
        return route_few(x, router, routed, norm=norm, normed=normed, pdl=pdl)
    logits = torch.empty((splits, T, padded), dtype=torch.float32, device=x.device)
    _route_kernel[(padded // experts, splits, blocks)](
        x, router.weight, router.bias, router.correction_bias, logits, tickets, routed.ids, routed.weights, routed.masks,
        None if norm is None else norm.squares, normed, 0 if norm is None else norm.squares.shape[1], 0.0 if norm is None else norm.eps,
        T, K, E, triton.cdiv(triton.cdiv(K, splits), COLUMNS) * COLUMNS, words, scoring.scaling,
        TOP_K=scoring.top_k, SHARED=scoring.shared, TOP_PAD=triton.next_power_of_2(scoring.chosen), WORDS=triton.next_power_of_2(words),
        BLOCK_M=rows, BLOCK_E=experts, BLOCK_K=COLUMNS if few else COLUMNS // 2, E_PAD=padded, SPLITS=splits,
        SCORING=SCORINGS.index(scoring.scoring), RENORMALIZE=scoring.renormalize,
        GROUPS=scoring.num_groups, TOP_GROUPS=scoring.top_groups, GROUP_SIZE=E // scoring.num_groups, GROUP_BEST=scoring.group_best,
        SIZE_PAD=padded if scoring.num_groups == 1 else triton.next_power_of_2(E // scoring.num_groups),
        GROUPS_PAD=triton.next_power_of_2(scoring.num_groups), BIAS=router.bias is not None,
        CORRECTION=router.correction_bias is not None, NORM=norm is not None, PDL=pdl,
        num_warps=4 if few or experts <= 128 else 8, num_stages=4, **launch_options(pdl),
    )  # fmt: skip
    return routed


def _check(columns: int, weight: torch.Tensor, scoring: RoutingRule) -> None:
    """Assert that the kernel supports a router of these columns and experts."""
    E, K = weight.shape
    assert columns == K, f"expected a router of {columns} columns; got {K}"
    assert K % 16 == 0, f"expected a multiple of 16 columns; got {K}"
    assert scoring.top_k <= E, f"expected at least {scoring.top_k} experts; got {E}"
    assert E % scoring.num_groups == 0, f"expected a multiple of {scoring.num_groups} experts; got {E}"


def _tiling(tokens: int, columns: int, experts: int) -> tuple[int, int, int]:
    """Tokens and experts per program, and the number of parts into which the columns are split."""
    if tokens <= FEW_ROWS:
        rows, own, most_splits = 8, 16, 4
    elif tokens <= MID_ROUTER_ROWS:
        rows, own, most_splits = 16, min(experts, 64), 8
    else:
        rows, own, most_splits = 32, min(experts, 256), 1
    return rows, own, max(1, min(most_splits, columns // 512))


def _new_routing(tokens: int, chosen: int, words: int, device: torch.device, masks: torch.Tensor | None) -> Routing:
    """An uninitialised routing of `chosen` experts per token and masks of `words` words, in the buffer `masks` if given."""
    return Routing(
        torch.empty((tokens, chosen), dtype=torch.int32, device=device),
        torch.empty((tokens, chosen), dtype=torch.float32, device=device),
        torch.empty((tokens, words), dtype=torch.int32, device=device) if masks is None else masks,
    )


@triton.jit(do_not_specialize=["T", "parts"])
def _route_kernel(
    x_ptr, w_ptr, bias_ptr, correction_ptr, logits_ptr, tickets_ptr, ids_ptr, weights_ptr, masks_ptr,
    squares_ptr, normed_ptr, parts, eps, T, K, E, columns, words, scaling,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, TOP_PAD: tl.constexpr, WORDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, E_PAD: tl.constexpr, SPLITS: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_BEST: tl.constexpr, SIZE_PAD: tl.constexpr,
    GROUPS_PAD: tl.constexpr, BIAS: tl.constexpr, CORRECTION: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program sums `columns` columns of the logits of `BLOCK_E` experts for `BLOCK_M` tokens; the last one of a block of tokens
    chooses.
    """
    pdl_sync(PDL)
    block, split = tl.program_id(2), tl.program_id(1)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * K
    w_rows = w_ptr + tl.minimum(e, E - 1)[:, None] * K
    acc = tl.zeros((BLOCK_E, BLOCK_M), dtype=tl.float32)
    row_scale = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if NORM:
        squares = tl.zeros((BLOCK_M, 64), dtype=tl.float32)
        for first in range(0, parts, 64):
            p = first + tl.arange(0, 64)[None, :]
            squares += tl.load(squares_ptr + m[:, None] * parts + p, mask=(m < T)[:, None] & (p < parts), other=0.0)
        row_scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)
    for start in range(split * columns, tl.minimum(split * columns + columns, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_rows + k, mask=(m < T)[:, None] & (k < K), other=0.0)
        if NORM:
            x = (x.to(tl.float32) * row_scale[:, None]).to(x.dtype)
            tl.store(normed_ptr + m[:, None] * K + k, x, mask=(m < T)[:, None] & (k < K) & (tl.program_id(0) == 0))
        w = tl.load(w_rows + k, mask=k < K, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    at = logits_ptr + (split * T + m).to(tl.int64) * E_PAD
    tl.store(at[None, :] + e[:, None], acc, mask=(m < T)[None, :])
    tl.debug_barrier()  # all stores of this program must precede its ticket
    programs = tl.num_programs(0) * tl.num_programs(1)
    last = True
    if programs > 1:
        last = tl.atomic_add(tickets_ptr + block, 1, sem="acq_rel") == programs - 1
    if last:
        if programs > 1:
            tl.store(tickets_ptr + block, 0)
        _choose(
            bias_ptr, correction_ptr, logits_ptr, ids_ptr, weights_ptr, masks_ptr, m, T, E, words, scaling, TOP_K, SHARED, TOP_PAD,
            WORDS, E_PAD, SPLITS, SCORING, RENORMALIZE, GROUPS, TOP_GROUPS, GROUP_SIZE, GROUP_BEST, SIZE_PAD, GROUPS_PAD, BIAS, CORRECTION,
        )  # fmt: skip


@triton.jit
def _choose(
    bias_ptr, correction_ptr, logits_ptr, ids_ptr, weights_ptr, masks_ptr, m, T, E, words, scaling,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, TOP_PAD: tl.constexpr, WORDS: tl.constexpr, E_PAD: tl.constexpr, SPLITS: tl.constexpr,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    GROUP_BEST: tl.constexpr, SIZE_PAD: tl.constexpr, GROUPS_PAD: tl.constexpr, BIAS: tl.constexpr, CORRECTION: tl.constexpr,
):  # fmt: skip
    """Choose the experts of tokens m from the logits. Each group of experts is padded to a power of two columns."""
    BLOCK_M: tl.constexpr = m.shape[0]
    column = tl.arange(0, GROUPS_PAD * SIZE_PAD)
    e = column // SIZE_PAD * GROUP_SIZE + column % SIZE_PAD
    real = (column % SIZE_PAD < GROUP_SIZE) & (column < GROUPS * SIZE_PAD)
    inside = (m < T)[:, None] & real[None, :]
    scores = tl.zeros((BLOCK_M, GROUPS_PAD * SIZE_PAD), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = logits_ptr + (split * T + m).to(tl.int64)[:, None] * E_PAD + e[None, :]
        scores += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    if BIAS:
        scores += tl.load(bias_ptr + e, mask=real, other=0.0).to(tl.float32)[None, :]
    scores = tl.where(real[None, :], scores, float("-inf"))
    if SCORING == SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, 1)[:, None])
        scores /= tl.sum(scores, 1)[:, None]
    elif SCORING == SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if CORRECTION:
        choice += tl.load(correction_ptr + e, mask=real, other=0.0)[None, :]
    if GROUPS > 1:
        choice = tl.where(real[None, :], choice, float("-inf"))
        choice = _within_best_groups(choice, GROUPS_PAD, TOP_GROUPS, GROUP_BEST)
    # Minus infinity marks experts already chosen. Scores are raised above it, so a token's experts differ even if scores are NaN or -inf.
    choice = tl.where(choice > LEAST, choice, LEAST)
    choice = tl.where(real[None, :], choice, float("-inf"))
    j, word = tl.arange(0, TOP_PAD), tl.arange(0, WORDS)
    ids = tl.zeros((BLOCK_M, TOP_PAD), dtype=tl.int32)
    weights = tl.zeros((BLOCK_M, TOP_PAD), dtype=tl.float32)
    masks = tl.zeros((BLOCK_M, WORDS), dtype=tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.max(choice, 1)
        expert = tl.min(tl.where(choice == best[:, None], e[None, :], E_PAD), 1)
        chosen = (e[None, :] == expert[:, None]) & real[None, :]
        weight = tl.sum(tl.where(chosen, scores, 0.0), 1)
        choice = tl.where(chosen, float("-inf"), choice)
        ids = tl.where((j == place)[None, :], expert[:, None], ids)
        weights = tl.where((j == place)[None, :], weight[:, None], weights)
        masks |= tl.where((expert // 32)[:, None] == word[None, :], 1 << (expert % 32)[:, None], 0)
    if SCORING == TOPK_SOFTMAX:
        weights = tl.where((j < TOP_K)[None, :], weights, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, 1)[:, None])
        weights /= tl.sum(weights, 1)[:, None]
    elif RENORMALIZE:
        weights /= tl.sum(weights, 1)[:, None] + 1e-20
    weights *= scaling
    if SHARED:
        ids = tl.where((j == TOP_K)[None, :], E, ids)
        weights = tl.where((j == TOP_K)[None, :], 1.0, weights)
        masks |= tl.where((word == E // 32)[None, :], 1 << (E % 32), 0)
    at = m.to(tl.int64)[:, None] * (TOP_K + SHARED) + j[None, :]
    out_mask = (m < T)[:, None] & (j < TOP_K + SHARED)[None, :]
    tl.store(ids_ptr + at, ids, mask=out_mask)
    tl.store(weights_ptr + at, weights, mask=out_mask)
    tl.store(masks_ptr + m[:, None] * words + word[None, :], masks, mask=(m < T)[:, None] & (word < words)[None, :])


@triton.jit
def _within_best_groups(choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr):
    """`choice` [M, columns], -inf outside the `TOP_GROUPS` groups with the largest sum of their `GROUP_BEST` best entries, 1 or 2."""
    BLOCK_M: tl.constexpr = choice.shape[0]
    SIZE: tl.constexpr = choice.shape[1] // GROUPS
    grouped = choice.reshape(BLOCK_M, GROUPS, SIZE)
    score = tl.max(grouped, 2)
    if GROUP_BEST > 1 and SIZE > 1:
        place = tl.arange(0, SIZE)[None, None, :]
        first = tl.min(tl.where(grouped == score[:, :, None], place, SIZE), 2)
        score += tl.max(tl.where(place == first[:, :, None], float("-inf"), grouped), 2)
    group = tl.arange(0, GROUPS)[None, :]
    kept = tl.zeros((BLOCK_M, GROUPS), dtype=tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.min(tl.where(score == tl.max(score, 1)[:, None], group, GROUPS), 1)
        kept = tl.where(group == best[:, None], 1, kept)
        score = tl.where(group == best[:, None], float("-inf"), score)
    return tl.where((kept > 0)[:, :, None], grouped, float("-inf")).reshape(BLOCK_M, GROUPS * SIZE)
