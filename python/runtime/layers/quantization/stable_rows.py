"""Numbers of rows with which torch's bfloat16 GEMMs on a CPU give a row the same bits in every pass, found by trial."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from torch.nn import functional as F

PADDED = (1, 2, 3, 4)
"""Numbers of rows to which a smaller pass may be padded: they take about as long as one, because reading the weight takes longest."""
TESTED = (8, 16, 32, 48, 64)
"""Larger numbers of rows to test."""
WHOLE = TESTED[-1]
MAX_OUTPUTS = 1 << 14
"""Outputs of a trial's weight, so that the trial for an LM head needs little memory."""
COMPARED = 1 << 17
"""Values to compare: rounding hides most differences, and about one value in 5,000 shows them."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Numbers of rows whose GEMMs sum alike.

    With AMX, GEMMs of up to 32 rows sum a row from its first column to its last. Larger ones sum blocks of columns separately, and the
    number of rows, the shape of the weight and the number of threads determine the blocks.

    Attributes:
        least: the number to which smaller passes are padded, from 1 to 4.
        most: the size of the blocks into which larger passes are split. None if any number from `least` on sums alike, or if no number
            does.
    """

    least: int
    most: int | None = None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, in_prompt: bool = False) -> torch.Tensor:
    """`F.linear` of `x` [T, in].

    In bfloat16 on a CPU a row has the same bits for any number of other rows, if `row_counts` finds a way. If passes are split, prompts
    have blocks of another size, because large blocks are faster: a row then has other bits in prompts than in other passes.
    """
    if x.device.type != "cpu" or x.dtype is not torch.bfloat16:
        return F.linear(x, weight, bias)
    counts = row_counts(*weight.shape)
    if in_prompt and counts.most is not None:
        return in_blocks(x, weight, bias, prompt_rows(), prompt_rows())
    return in_blocks(x, weight, bias, counts.least, counts.most or len(x))


def in_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, least: int, most: int) -> torch.Tensor:
    """`F.linear` of blocks of `most` rows; the last may be smaller, and is padded with zeros to `least` rows."""
    if least <= len(x) <= most or not len(x):
        return F.linear(x, weight, bias)
    last = len(x) % most
    out = x.new_empty(len(x) + (max(0, least - last) if last else 0), len(weight))
    for rows, block in zip(x.split(most), out.split(most), strict=True):
        padded = F.pad(rows, (0, 0, 0, len(block) - len(rows))) if len(rows) < len(block) else rows
        if bias is None:
            torch.mm(padded, weight.T, out=block)
        else:
            torch.addmm(bias, padded, weight.T, out=block)
    return out[: len(x)]


@functools.cache
def row_counts(out_features: int, in_features: int) -> RowCounts:
    """The numbers for a shape of weights: the largest `most` that the trial shows, and the least `least`. Takes about 0.1 s."""
    noise, outputs = torch.Generator().manual_seed(0), min(out_features, MAX_OUTPUTS)
    count = max(1, COMPARED // (outputs * WHOLE)) * WHOLE
    weight, x = (torch.empty(n, in_features, dtype=torch.bfloat16).uniform_(-1, 1, generator=noise) for n in (outputs, count))
    tried = min(count, max(1, COMPARED // outputs))

    def multiply(rows: int) -> torch.Tensor:
        starts = range(0, min(tried, count - rows + 1), rows)
        return torch.cat([F.linear(x[i : i + rows], weight) for i in starts])

    results = {rows: multiply(rows) for rows in (*PADDED, *TESTED)}

    def alike(rows: int, most: int) -> bool:
        both = min(len(results[rows]), len(results[most]))
        return torch.equal(results[rows][:both], results[most][:both])

    for most in reversed(TESTED):
        least = min(takewhile(lambda rows: alike(rows, most), reversed(PADDED)), default=None)
        if least is not None and all(alike(rows, most) for rows in TESTED if rows < most):
            return RowCounts(least, None if most == WHOLE else most)
    return RowCounts(1)


@functools.cache
def prompt_rows() -> int:
    """Rows of the GEMMs into which a prompt is split: more if AMX makes padding rows nearly free."""
    cpu = Path("/proc/cpuinfo")
    return 128 if cpu.is_file() and "amx_bf16" in cpu.read_text() else 32
