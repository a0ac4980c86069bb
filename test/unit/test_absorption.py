"""Absorbed latent attention's operations in plain torch, and what the layer warms up and autotunes around them."""

from __future__ import annotations

import pytest
import torch

from runtime.layers.absorption import TOKEN_TILES, absorb_by_bmm, project_by_bmm
from runtime.layers.latent_attention import LatentAttention
from runtime.layers.latent_heads import LatentHeads
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope
from runtime.layers.torch_ops import TorchOps, rotate
from runtime.models.registry import build_model
from unit.latent import latent_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, TOKEN_TILES[-1] + 1])
def test_scores_and_values_are_those_of_the_plain_form(tokens: int, interleaved: bool) -> None:
    torch.manual_seed(tokens)
    heads = LatentHeads(3, 10, 7, RMSNorm(torch.ones(12), 1e-6), Rope(torch.randn(64, 8), interleaved))
    wide, weight, positions = torch.randn(tokens, 3 * 18 + 5), torch.randn(3, 17, 12), torch.randint(0, 64, (tokens,))
    q, latent, key = wide[:, :54].view(tokens, 3, 18), torch.randn(9, 12), torch.randn(9, 8)
    ops = TorchOps()
    query = ops.absorb(q, heads, weight[:, :10], positions)
    turned = rotate(q[..., 10:], heads.rope, positions)
    keys = torch.einsum("hdr,sr->hsd", weight[:, :10], latent)
    want = torch.einsum("thd,hsd->ths", q[..., :10], keys) + torch.einsum("thd,sd->ths", turned, key)
    torch.testing.assert_close(torch.einsum("thr,sr->ths", query, torch.cat((latent, key), dim=1)), want, rtol=1e-4, atol=1e-4)
    weights = want.softmax(dim=2)
    values = torch.einsum("hvr,sr->hsv", weight[:, 10:], latent)
    got = ops.project_values(weights @ latent, weight[:, 10:])
    torch.testing.assert_close(got, torch.einsum("ths,hsv->thv", weights, values), rtol=1e-4, atol=1e-4)
    assert query.is_contiguous()
    assert got.is_contiguous()


@pytest.mark.parametrize("in_prompt", [False, True])
@pytest.mark.parametrize(("nope_dim", "value_dim", "kv_rank"), [(192, 256, 512), (128, 128, 512), (10, 7, 12)])
def test_a_row_does_not_depend_on_other_rows(nope_dim: int, value_dim: int, kv_rank: int, in_prompt: bool) -> None:
    noise = torch.Generator().manual_seed(0)
    heads = LatentHeads(3, nope_dim, value_dim, RMSNorm(torch.ones(kv_rank), 1e-6), Rope(torch.randn(64, 8, generator=noise)))
    weight = torch.randn(3, nope_dim + value_dim, kv_rank, generator=noise)
    q, attended = (torch.randn(200, 3, width, generator=noise) for width in (heads.query_dim, kv_rank))

    def both(rows: slice) -> torch.Tensor:
        query = absorb_by_bmm(q[rows], heads, weight[:, :nope_dim], in_prompt)[..., :kv_rank]
        return torch.cat((query, project_by_bmm(attended[rows], weight[:, nope_dim:], in_prompt)), dim=2)

    alone = torch.cat([both(slice(row, row + 1)) for row in range(200)])
    for rows in (2, 3, 4, 5, 9, 16, 33, 48, 128, 200):
        assert torch.equal(both(slice(0, rows)), alone[:rows]), rows


@pytest.mark.parametrize("q_rank", [24, None])
def test_absorption_is_compiled_before_serving(q_rank: int | None) -> None:
    tokens = list[int]()

    class Counted(TorchOps):
        def absorb(
            self, q: torch.Tensor, heads: LatentHeads, key: torch.Tensor, positions: torch.Tensor, in_prompt: bool = False
        ) -> torch.Tensor:
            tokens.append(len(q))
            return super().absorb(q, heads, key, positions, in_prompt)

    model = build_model(latent_model(q_rank=q_rank), Counted(), torch.float32, CPU)
    with torch.inference_mode():
        for run in model.warmup_runs([1, 4]):
            run()
    assert tokens == [*TOKEN_TILES, TOKEN_TILES[-1] + 1]


def test_the_output_projection_is_timed_behind_attention() -> None:
    model = build_model(latent_model(), TorchOps(), torch.float32, CPU)
    attention = model.layers[0].attention
    assert isinstance(attention, LatentAttention)
    after = [gemm.linear for gemm in attention.gemms(model.final_norm, model.final_norm) if gemm.after_attention]
    assert after == [attention.o_proj]
