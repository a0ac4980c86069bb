"""Kernels that norm whole query and key rows, compared with their definition."""

from __future__ import annotations

import os

import pytest
import torch

from runtime.layers.row_norms import RowNorms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, DTYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]


class TwoRanks:
    """A group in which another rank has the same squares."""

    size, rank, fused = 2, 0, None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize(("q", "k", "v"), [(3072, 512, 512), (96, 32, 64), (384, 384, 384)])
def test_rows_are_normed_as_defined(q: int, k: int, v: int, rows: int) -> None:
    from runtime.layers.kernels.row_norms import norm_rows

    torch.manual_seed(q)
    weights = [torch.rand(size, device=DEVICE).to(DTYPE) + 0.5 for size in (q, k)]
    for norms in (
        RowNorms(weights[0], weights[1], 1e-6, (q, k)),
        RowNorms(weights[0], weights[1], 1e-6, (2 * q, 2 * k), TwoRanks()),  # type: ignore[arg-type]
    ):
        qkv = torch.randn((rows, q + k + v), device=DEVICE).to(DTYPE)
        want = norms(qkv.clone())
        for pdl in (False,) if INTERPRETED else (False, True):
            got = norm_rows(qkv.clone(), norms, pdl=pdl)
            torch.testing.assert_close(got, want)
            assert torch.equal(got[:, q + k :], qkv[:, q + k :])
