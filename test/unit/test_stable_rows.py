"""In bfloat16 on a CPU, a row of a dense layer has the same bits in passes of any size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional as F

from runtime.layers.linear import Linear
from runtime.layers.moe.definition import run_expert
from runtime.layers.moe.experts import Experts
from runtime.layers.quantization import stable_rows
from runtime.layers.quantization.scheme import Storage

ROWS = sorted({requests * window for window in (1, 4) for requests in range(1, 49)})
PROMPTS = [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 127, 128, 129, 192]
"""On both sides of every number of rows that is tried."""
SHAPES = [(576, 1536), (5632, 2048), (2048, 5632), (512, 2048), (4096, 64)]
LARGE = [shape for shape in SHAPES if shape[0] * shape[1] > 1 << 22]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def rows_differ(layer: Linear, x: torch.Tensor, sizes: Sequence[int], in_prompt: bool = False) -> list[int]:
    """The sizes of passes in which some row of `x` has other bits than alone."""
    alone = torch.cat([layer(row[None], in_prompt) for row in x])
    return [rows for rows in dict.fromkeys(sizes) if not torch.equal(layer(x[:rows], in_prompt), alone[:rows])]


def sizes_for(shape: tuple[int, int]) -> list[int]:
    """`ROWS`; of those above 33, which take long with large weights, every second with each of `LARGE`, and the largest."""
    first = LARGE.index(shape) if shape in LARGE else None
    several = [rows for rows in ROWS if rows > 33]
    return ROWS if first is None else [rows for rows in ROWS if rows <= 33] + several[first::2] + [max(ROWS)]


@pytest.mark.parametrize(("shape", "biased"), [(SHAPES[0], True), *((shape, i % 2 == 1) for i, shape in enumerate(SHAPES))])
def test_a_row_has_the_same_bits_in_any_pass(shape: tuple[int, int], biased: bool) -> None:
    layer = Linear.dense(random(*shape), random(shape[0]) if biased else None)
    assert rows_differ(layer, random(max(ROWS), shape[1]), sizes_for(shape)) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_prompt(shape: tuple[int, int]) -> None:
    layer, x = Linear.dense(random(*shape)), random(640, shape[1])
    assert rows_differ(layer, x[: max(PROMPTS)], PROMPTS, in_prompt=True) == []
    whole = layer(x, True)
    for chunk in (512, 300, 96):
        assert torch.equal(torch.cat([layer(rows, True) for rows in x.split(chunk)]), whole), chunk


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sizes", [range(2, 33), (64, 128, 256), (128,)])
def test_blocks_give_what_one_gemm_gives(sizes: Sequence[int], biased: bool) -> None:
    weight, bias = random(96, 64), random(96) if biased else None
    for rows in (0, 1, 2, 31, 33, 64, 65, 200, 700):
        x = random(rows, 64)
        torch.testing.assert_close(stable_rows.in_blocks(x, weight, bias, sizes), F.linear(x, weight, bias))


def test_rows_of_experts_have_the_same_bits() -> None:
    gate_up, down = (Storage(random(1, *shape)) for shape in ((4096, 1024), (1024, 2048)))
    experts = Experts(gate_up=gate_up, down=down, count=1, total=1, size=(1024, 2048))
    x = random(16, 1024)
    whole = run_expert(x, experts, 0)
    assert all(torch.equal(run_expert(x[i : i + 1], experts, 0), whole[i : i + 1]) for i in range(len(x)))


def test_passes_are_split_if_large_ones_sum_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with AMX, and a single row differs too."""

    def by_class(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.full((len(x), len(weight)), float(len(x) > 1) + float(len(x) > 32) + float(len(x) > 256))

    monkeypatch.setattr(stable_rows.F, "linear", by_class)
    assert stable_rows.row_sizes.__wrapped__(32, 16) == stable_rows.RowSizes(range(2, 33), (64, 128, 256))


def test_rows_are_not_padded_if_no_number_is_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.full((len(x), len(weight)), float(len(x)))

    monkeypatch.setattr(stable_rows.F, "linear", by_rows)
    assert stable_rows.row_sizes.__wrapped__(32, 16) == stable_rows.RowSizes()
