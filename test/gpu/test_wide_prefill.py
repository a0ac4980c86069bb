"""Prompt attention of wide heads compared with the definition, on a GPU or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from runtime.layers.attention.kernels.paged_keys import CausalQueries, PagedKeys
from runtime.layers.attention.kernels.wide_prefill import wide_prefill

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
DTYPE = torch.float16
"""A dtype that both the interpreter and a GPU support."""


@pytest.mark.parametrize(("heads", "dim"), [((8, 1), 512), ((6, 2), 512), ((4, 4), 128)])
@pytest.mark.parametrize(("page_size", "window"), [(1, -1), (16, 20), (64, -1), (64, 33)])
def test_ragged_prompts_attend_as_by_definition(heads: tuple[int, int], dim: int, page_size: int, window: int) -> None:
    """Requests have (cached, new) tokens. Slots after a request's end are NaN, so that reading them is detected."""
    requests, (H, G) = [(0, 1), (0, 37), (70, 9), (33, 1), (5, 90)], heads
    torch.manual_seed(dim + page_size)
    lens, widths = [sum(request) for request in requests], [new for _, new in requests]
    cols = -(-max(lens) // page_size)
    pages = (torch.randperm(len(lens) * cols) + 1).view(-1, cols).int()
    caches = [torch.full((len(lens) * cols + 1, page_size, G, dim), float("nan")) for _ in range(2)]
    kept = [[torch.randn(length, G, dim) for length in lens] for _ in caches]
    for cache, each in zip(caches, kept, strict=True):
        for b, rows in enumerate(each):
            at = torch.arange(len(rows))
            cache[pages[b, at // page_size].long(), at % page_size] = rows
    q = torch.randn(sum(widths), H, dim)
    indptr = torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    ints = {"dtype": torch.int32, "device": DEVICE}
    keys = PagedKeys(pages.to(DEVICE), torch.arange(len(lens), **ints), torch.tensor(lens, **ints), page_size)
    queries = CausalQueries(indptr, max(widths))
    got = wide_prefill(q.to(DEVICE, DTYPE), *(cache.to(DEVICE, DTYPE) for cache in caches), keys, queries, dim**-0.5, window)
    start = 0
    for b, (length, width) in enumerate(zip(lens, widths, strict=True)):
        k, v = (each[b].to(DTYPE).double().repeat_interleave(H // G, 1) for each in kept)
        scores = torch.einsum("qhd,khd->hqk", q[start : start + width].to(DTYPE).double(), k) * dim**-0.5
        distance = torch.arange(length - width, length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & ((distance <= window) | (window < 0))
        want = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        assert (got[start : start + width].cpu().double() - want).abs().max() < 4e-3
        start += width
