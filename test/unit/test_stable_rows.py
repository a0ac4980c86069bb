"""In bfloat16 on a CPU, a row of a dense layer has the same bits in passes of any size."""

from __future__ import annotations

import pytest
import torch

from runtime.layers.linear import Linear
from runtime.layers.moe.definition import run_expert
from runtime.layers.moe.experts import Experts
from runtime.layers.quantization import stable_rows
from runtime.layers.quantization.scheme import Storage

ROWS = [requests * window for window in (1, 4) for requests in range(1, 49)]
SHAPES = [(576, 1536), (5632, 2048), (2048, 5632), (512, 2048), (4096, 64)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def rows_differ(layer: Linear, x: torch.Tensor) -> list[int]:
    """The sizes of passes in which some row of `x` has other bits than alone."""
    alone = torch.cat([layer(row[None]) for row in x])
    return [rows for rows in dict.fromkeys(ROWS) if not torch.equal(layer(x[:rows]), alone[:rows])]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_pass(shape: tuple[int, int], biased: bool) -> None:
    layer = Linear.dense(random(*shape), random(shape[0]) if biased else None)
    assert rows_differ(layer, random(max(ROWS), shape[1])) == []


def test_rows_of_experts_have_the_same_bits() -> None:
    gate_up, down = (Storage(random(1, *shape)) for shape in ((4096, 1024), (1024, 2048)))
    experts = Experts(gate_up=gate_up, down=down, count=1, total=1, size=(1024, 2048))
    x = random(16, 1024)
    whole = run_expert(x, experts, 0)
    assert all(torch.equal(run_expert(x[i : i + 1], experts, 0), whole[i : i + 1]) for i in range(len(x)))


def test_rows_are_not_padded_if_no_number_is_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.full((len(x), len(weight)), float(len(x)))

    monkeypatch.setattr(stable_rows.F, "linear", by_rows)
    assert stable_rows.row_counts.__wrapped__(32, 16) == stable_rows.RowCounts(1)
