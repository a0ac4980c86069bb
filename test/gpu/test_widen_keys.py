"""Conversion of 8-bit keys to 16 bits compared with the definition, on a GPU or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from runtime.layers.attention.kernels.paged_keys import PagedKeys
from runtime.layers.attention.kernels.widen_keys import widen_keys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim", "page_size"), [(2, 64, 1), (8, 128, 16), (5, 80, 64)])
def test_pages_with_keys_are_converted_and_no_others(heads: int, dim: int, page_size: int, dtype: torch.dtype) -> None:
    lens, columns = [1, 3 * page_size, 2 * page_size + 1], 4
    torch.manual_seed(heads)
    table = (torch.randperm(len(lens) * 6) + 1).view(-1, 6).int()
    scales = torch.tensor([0.5, 3.0], device=DEVICE)
    stored = [(4 * torch.randn(len(lens) * 6 + 1, page_size, heads, dim)).to(torch.float8_e4m3fn) for _ in range(2)]
    rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    out = torch.full((2, len(lens) * columns + 1, page_size, heads, dim), 7.0, dtype=dtype, device=DEVICE)
    widen_keys(*(cache.to(DEVICE) for cache in stored), PagedKeys(table.to(DEVICE), rows, seq_lens, page_size), scales, columns, out)
    for cache, scale, wide in zip(stored, (0.5, 3.0), out.cpu(), strict=True):
        for request, (row, length) in enumerate(zip((2, 0, 1), lens, strict=True)):
            for column in range(columns):
                written = column * page_size < length
                want = (cache[int(table[row, column])].float() * scale).to(dtype) if written else torch.full_like(wide[0], 7.0)
                assert torch.equal(wide[request * columns + column], want), (request, column)
        assert (wide[len(lens) * columns :] == 7.0).all()
