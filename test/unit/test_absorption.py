"""Absorbed latent attention: its two GEMMs per head, and what a model compiles of them at start-up."""

from __future__ import annotations

import pytest
import torch

from runtime.layers.absorption import ROW_TILES
from runtime.layers.latent_heads import LatentHeads
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope
from runtime.layers.torch_ops import TorchOps, rotate
from runtime.models.registry import build_model
from unit.latent import latent_model

CPU = torch.device("cpu")


class RecordingOps(TorchOps):
    """Counts the rows of each pass of absorption."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int]] = []

    def absorb(self, q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.rows.append(("absorb", len(q)))
        return super().absorb(q, heads, key, positions)

    def project_values(self, attended: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.rows.append(("project", len(attended)))
        return super().project_values(attended, value)


def test_heads_are_multiplied_one_by_one() -> None:
    heads = LatentHeads(3, 6, 5, RMSNorm(torch.ones(16), 1e-6), Rope(torch.randn(8, 4), interleaved=True))
    weight, positions = torch.randn(3, 11, 16), torch.tensor([2, 7])
    key, value = weight[:, :6], weight[:, 6:]
    q = torch.randn(2, 3 * heads.query_dim + 8)[:, :30].view(2, 3, 10)
    query = TorchOps().absorb(q, heads, key, positions)
    want = torch.cat((torch.einsum("thd,hdr->thr", q[..., :6], key), rotate(q[..., 6:], heads.rope, positions)), 2)
    torch.testing.assert_close(query, want)
    attended = query[..., :16].contiguous()
    torch.testing.assert_close(TorchOps().project_values(attended, value), torch.einsum("thr,hvr->thv", attended, value))


@pytest.mark.parametrize("q_rank", [24, None])
def test_start_up_compiles_absorption_for_any_number_of_rows(q_rank: int | None) -> None:
    ops = RecordingOps()
    model = build_model(latent_model(q_rank), ops, torch.float32, CPU)
    with torch.inference_mode():
        for run in model.warmup_runs([1]):
            run()
    assert ops.rows == [(name, rows) for rows in ROW_TILES for name in ("absorb", "project")]
