"""The Triton kernel of `loss.compare`: both softmaxes, the loss and its gradient in one pass over a row of logits."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

WARPS = 8


@triton.jit
def _compare(scores, taught, best, losses, guesses, hard_share, width: tl.constexpr, block: tl.constexpr):
    """Process one row of logits per program."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, block)
    inside = cols < width
    mine = tl.load(scores + row * width + cols, mask=inside, other=-float("inf")).to(tl.float32)
    theirs = tl.load(taught + row * width + cols, mask=inside, other=-float("inf")).to(tl.float32)
    wanted_id = tl.load(best + row)
    counted = tl.where(wanted_id >= 0, 1.0, 0.0)

    most = tl.max(mine, 0)
    powers = tl.exp(mine - most)
    total = tl.sum(powers, 0)
    their_powers = tl.exp(theirs - tl.max(theirs, 0))
    wanted = their_powers / tl.sum(their_powers, 0) * (1.0 - hard_share) + tl.where(cols == wanted_id, hard_share, 0.0)
    log_probs = tl.where(inside, mine - most - tl.log(total), 0.0)

    tl.store(losses + row, -tl.sum(wanted * log_probs, 0) * counted)
    tl.store(guesses + row, tl.argmax(mine, 0).to(tl.int64))
    slope = (powers / total - wanted) * counted
    tl.store(scores + row * width + cols, slope.to(scores.dtype.element_ty), mask=inside)


def compare_rows(
    scores: torch.Tensor, taught: torch.Tensor, best: torch.Tensor, hard_share: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `loss.compare`; the gradient replaces `scores`."""
    rows, width = scores.shape
    assert scores.is_contiguous()
    assert taught.is_contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=scores.device)
    guesses = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        _compare[(rows,)](
            scores, taught, best.contiguous(), losses, guesses, hard_share, width, triton.next_power_of_2(width), num_warps=WARPS
        )
    return losses, guesses, scores
