"""The kernel that trims a FlashInfer plan, against a definition in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def chunks_of(length: int, chunk: int, tile: int, window: int) -> int:
    """The number of key chunks of a request."""
    seen = max(length, 1) if window < 0 else min(max(length, 1), window + tile)
    return -(-seen // chunk)


@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("requests", "width", "chunk", "tile"), [(1, 1, 128, 16), (3, 4, 64, 16), (17, 4, 128, 64), (40, 8, 256, 64)])
def test_one_plan_is_trimmed_to_any_lengths(requests: int, width: int, chunk: int, tile: int, page_size: int, window: int) -> None:
    from runtime.layers.attention.kernels.flashinfer_plan import PageLists, WorkItems, gather_pages, trim_plan

    rng = np.random.default_rng(requests)

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device="cuda")

    pages = rng.integers(1, 9999, (requests + 5, 1400))
    rows = rng.permutation(requests + 4)[:requests] + 1
    bounds = rng.integers(0, 1300, requests)
    items = [
        (b, c) for b in range(requests) for _ in range(-(-width * 4 // tile)) for c in range(chunks_of(int(bounds[b]), chunk, tile, window))
    ]
    count = len(items) + 200  # a graph's plan has capacity for more items
    valid = torch.zeros(count, dtype=torch.uint8, device="cuda")
    valid[: len(items)] = 1
    padded = ints(items + [(0, 0)] * 200)
    plan = WorkItems(
        requests=padded[:, 0].contiguous(),
        chunks=padded[:, 1].contiguous(),
        merge_indptr=ints([-5] * (requests * width + 1)),
        out_indptr=ints([-5] * (requests + 1)),
        chunk_size=ints([chunk]),
        valid=valid,
        count=count,
        planned=len(items),
        tile=tile,
    )
    for part in (1.0, 0.5, 1.0, 0.0, 0.9):
        lens = (bounds * part * (1 if part == 1 else rng.random(requests))).astype(np.int64)
        most = -(-int(bounds.max()) // page_size)
        held = -(-lens // page_size)
        found, alone = (PageLists(ints([-5] * (requests + 1)), ints([-5] * (int(held.sum()) + 9)), ints([-5] * requests)) for _ in range(2))
        trim_plan(ints(rows), ints(lens), ints(pages), page_size, most, found, plan, width, window)
        gather_pages(ints(rows), ints(lens), ints(pages), page_size, most, alone)
        listed = [page for b in range(requests) for page in pages[rows[b], : held[b]].tolist()]
        for lists in (found, alone):
            assert lists.indptr.tolist() == [0, *np.cumsum(held).tolist()]
            assert lists.indices.tolist() == listed + [-5] * 9, "nothing is written behind the last page"
            assert lists.last_page_len.tolist() == [(n - 1) % page_size + 1 if n else 0 for n in lens.tolist()]
        true = [chunks_of(int(n), chunk, tile, window) for n in lens]
        starts = np.concatenate(([0], np.cumsum(np.repeat(true, width)))).tolist()
        assert plan.merge_indptr.tolist() == starts
        assert plan.out_indptr.tolist() == starts[::width]
        run = [int(c < true[b]) for b, c in items]
        assert plan.valid.tolist() == run + [0] * 200, "an item switched off for shorter lengths is on again"
