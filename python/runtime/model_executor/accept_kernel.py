"""Greedy and synthetic acceptance of a chain and its commit, as one kernel.

The plain form, `Accepter.decide` and its commit, needs about forty launches, which take longer than the draft's layer.
"""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.kernels.pdl import launch_options, pdl_wait_first, starts_early
from runtime.layers.kernels.sampling import hashed_uniform
from runtime.layers.random_streams import POSITION_STEP, STREAM_STEP, RandomStream, signed
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.request_rows import RequestRows


@triton.jit(do_not_specialize=["live"])
def _accept(
    draft, draft_stride, target, kv_lens, rows, accept_lens, tokens, emitted, row_lens, row_tokens, live, vocab_size, K,
    probabilities, seeds, stream_key, position_step, SYNTHETIC: tl.constexpr, EMITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait_first(PDL)
    request = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    row = tl.load(rows + request)
    length = tl.load(kv_lens + request)
    drafted = tl.load(draft + request * draft_stride + 1 + j, mask=j < K, other=-1)
    chosen = tl.load(target + request * (K + 1) + j, mask=j <= K, other=0)
    if SYNTHETIC:
        # of each draft's own position
        uniform = hashed_uniform(tl.load(seeds + row), length.to(tl.int64) + 1 + j, stream_key, position_step)
        hit = (uniform < tl.load(probabilities + j, mask=j < K, other=0.0)) & (j < K)
    else:
        hit = (drafted == chosen) & (j < K)
    accepted = tl.min(tl.where(hit, BLOCK, j), 0)
    if SYNTHETIC:
        chosen = tl.where(j < accepted, tl.minimum(tl.maximum(drafted, 0), vocab_size - 1), chosen)
    tl.store(tokens + request * (K + 1) + j, chosen, mask=j <= K)
    tl.store(accept_lens + request, accepted + 1)
    if EMITS:
        values = tl.where(j > K, accepted + 1, chosen)
        tl.store(emitted + request * (K + 2) + j, values, mask=j <= K + 1)
    if (request < live) & (row != 0):  # the length of the padding row stays 0
        tl.store(row_lens + row, length + accepted + 1)
        tl.store(row_tokens + row, tl.sum(tl.where(j == accepted, chosen, 0), 0))


def accept_chain(
    draft: torch.Tensor,
    target: torch.Tensor,
    iteration: Iteration,
    state: RequestRows,
    vocab_size: int,
    probabilities: torch.Tensor | None,
    emitted: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts, and commit lengths and tokens to the rows of an iteration's live requests, except the padding row.

    Args:
        draft: int64 [B, D], rows may be strided; column 0 is the last committed token.
        target: int64 [B, D] contiguous: the target's choice after each column.
        iteration: its rows, and KV lengths before it.
        state: KV lengths and last tokens by row are written.
        probabilities: float32 [K], synthetic acceptance regardless of the tokens; None for greedy acceptance.
        emitted: contiguous, written if given: `AcceptResult.emitted`.

    Returns:
        accept_lens int32 [B] and tokens int64 [B, D]: up to the accept length those of `accept_chain_greedy` or
        `accept_chain_synthetic`.
    """
    B, D = draft.shape
    accept_lens = torch.empty(B, dtype=torch.int32, device=draft.device)
    tokens = torch.empty((B, D), dtype=torch.int64, device=draft.device) if emitted is None or D > 1 else emitted
    emits, pdl = emitted is not None and D > 1, starts_early(draft.device)
    _accept[(B,)](
        draft, draft.stride(0), target, iteration.kv_lens, iteration.rows, accept_lens, tokens, emitted if emits else tokens,
        state.kv_lens, state.last_tokens,
        iteration.live, vocab_size, D - 1, target if probabilities is None else probabilities, state.tables.seeds,
        signed(STREAM_STEP * (RandomStream.SYNTHETIC + 1)), signed(POSITION_STEP),
        SYNTHETIC=probabilities is not None, EMITS=emits, BLOCK=max(triton.next_power_of_2(D + emits), 2), PDL=pdl, num_warps=1,
        **launch_options(pdl),
    )  # fmt: skip
    return accept_lens, tokens
