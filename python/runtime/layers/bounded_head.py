"""An LM head with a copy in int8 that bounds every logit, so that most tokens are ruled out before the 16-bit weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from runtime.config.kernel_configs import TritonConfig
from runtime.layers.candidate_head import ROWS_AT_ONCE, CandidateHead, stride_of
from runtime.layers.linear import Linear

LEVELS = 127
"""The largest entry of a row of weights, or of the high half of a row of states, in int8."""
HALVES = 254
"""Steps of the low half in one of the high half, so that the low half is at most `LEVELS`."""
ROUNDING = 2.0**-17
"""A bound for the relative error of a float32 dot product, in units of the product of both norms: 128 roundings of 2 ** -24."""
NORM_ROUNDING, TINY = 1.001, 1e-16
"""Computed norms become bounds by this factor and this addend; squares of numbers below 1e-19 are zero in float32."""
BOUNDED_ROWS = 32
"""Maximum rows of a head with bounds: with more, it is likely that one of them has no proof, and all tokens are scored."""


class BoundedHead:
    """An LM head for greedy decoding: weights and states in int8 give an upper bound for every logit, and the head's own weights score the
    tokens of the largest bounds. The best of these is the argmax if its logit exceeds the bounds of all others; otherwise all tokens are
    scored. So unlike the drafts of a `CandidateHead`, every token is proved to be the argmax.

    With a row of weights w = scale * q + r, where q is in int8, and a row of states x, the Cauchy-Schwarz inequality gives
    w x <= scale * (q x) + |r| |x|. The row x is the sum of two halves in int8, so that q x is a sum of integers; what remains of x is at
    most 1 / 64,000 of its largest entry, and is bounded in the same way.

    As in a `CandidateHead`, row i of the copy is token `i * stride % V`, so that neighbouring tokens lie in different tiles.

    Attributes:
        own: the LM head [V, hidden] in bfloat16, or this rank's rows of it.
        stride: coprime to V.
        narrow: int8 [V, hidden]; None if it is faster for no number of rows.
        scale, slack: float32 [V]: `scale` and |r| of each row of `narrow`.
        largest: the largest norm of a row of `own`.
        choices: the tiling for each m bucket for which it is faster, by the trial at start-up.
        op, name, dtype, most_rows, gemm_rows: as in `CandidateHead`; each row of states is two rows of the GEMM.
    """

    op: Literal["bounds"] = "bounds"
    name, dtype, most_rows, gemm_rows = "int8 head", torch.int8, BOUNDED_ROWS, 2

    def __init__(self, own: Linear) -> None:
        self.own, self.stride = own, stride_of(own.out_features)
        weight = own.weight
        tokens = torch.arange(len(weight), device=weight.device) * self.stride % len(weight)
        narrow = torch.empty_like(weight, dtype=torch.int8)
        self.narrow: torch.Tensor | None = narrow
        self.scale, self.slack = (torch.empty(len(weight), device=weight.device) for _ in range(2))
        norms = torch.empty_like(self.scale)
        pieces = zip(*(part.split(ROWS_AT_ONCE) for part in (tokens, narrow, self.scale, self.slack, norms)), strict=True)
        for rows, values, scale, slack, norm in pieces:
            w = weight[rows].float()
            scale.copy_(w.abs().amax(1).clamp_(min=1e-30) / LEVELS)
            values.copy_((w / scale[:, None]).round_().clamp_(-LEVELS, LEVELS))
            slack.copy_(_bound(w - values * scale[:, None]))
            norm.copy_(_bound(w))
        self.largest = float(norms.amax())
        self.choices: dict[int, TritonConfig] = {}


def _bound(rows: torch.Tensor) -> torch.Tensor:
    """A bound for the norm of each row."""
    return torch.linalg.vector_norm(rows, dim=1).mul_(NORM_ROUNDING).add_(TINY)


HeadWithCopy = CandidateHead | BoundedHead
"""An LM head with a copy in 8 bits."""


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows of states in int8.

    Attributes:
        halves: int8 [2 * M, K]: row m is approximately `step[m] * (HALVES * halves[2 * m] + halves[2 * m + 1])`.
        step: float32 [M].
        norm: float32 [M], a bound for the norm of each row.
        error: float32 [M], a bound for what all other roundings may change of any logit.
    """

    halves: torch.Tensor
    step: torch.Tensor
    norm: torch.Tensor
    error: torch.Tensor


def split_rows(x: torch.Tensor, largest: float) -> SplitRows:
    """The halves of rows [M, K] and their bounds, for a head whose rows have norms of at most `largest`."""
    wide = x.float()
    step = wide.abs().amax(1).clamp_(min=1e-30) / (LEVELS * HALVES)
    units = wide / step[:, None]
    high = (units / HALVES).round_()
    low = (units - HALVES * high).round_().clamp_(-LEVELS, LEVELS)
    rest = wide - step[:, None] * (HALVES * high + low)
    norm, left = _bound(wide), _bound(rest)
    halves = torch.stack([high, low], 1).flatten(0, 1).to(torch.int8)
    return SplitRows(halves, step, norm, largest * (left + ROUNDING * norm))


def upper_bounds(rows: SplitRows, head: BoundedHead) -> torch.Tensor:
    """float32 [M, V]: for each row of `head.narrow` a number that is at most `rows.error` below the logit of its token, or above it."""
    assert head.narrow is not None, "the head has lost its copy"
    sums = (rows.halves.double() @ head.narrow.double().T).unflatten(0, (-1, 2))
    scores = (HALVES * sums[:, 0] + sums[:, 1]) * (rows.step[:, None].double() * head.scale)
    return (scores + rows.norm[:, None].double() * head.slack).float()
