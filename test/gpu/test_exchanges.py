"""Our exchange kernels: sums over the ranks, compared with sums in float64, and gathered rows, in one and in several kernels."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from runtime.config.device_tuning import H200
from runtime.distributed.rendezvous import Rendezvous
from runtime.distributed.torch_group import TorchGroup
from runtime.layers.bounded_head import BOUNDED_ROWS, BoundedHead
from runtime.layers.candidate_head import CandidateHead
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.linear import Linear
from runtime.layers.lm_head import greedy_by_copy

if TYPE_CHECKING:
    from runtime.layers.cuda_group import CudaGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SIZES = [(1, 8), (1, 4096), (3, 200), (5, 2880), (64, 8192), (257, 5120), (1100, 8192)]
"""Rows and columns."""
BITS = {torch.bfloat16: 8, torch.float16: 11}
"""Bits of a number's significand."""
REPEATS = 20


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchanges_compute_what_torch_does(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    spawn(check_rank, args=(ranks, str(tmp_path)), nprocs=ranks)


def check_rank(rank: int, ranks: int, folder: str) -> None:
    """One rank of the test."""
    from runtime.layers.cuda_group import CudaGroup

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = CudaGroup(TorchGroup.join(Rendezvous.in_folder(folder), rank, ranks, 60.0), device, own_kernels=True, timeout=60.0)
    check_sums(group, device)
    check_rows(group, device)
    check_drafts(group, device)
    for part in group.split(2):
        if isinstance(part, CudaGroup):
            check_rows(part, device)


def check_drafts(group: CudaGroup, device: torch.device) -> None:
    """Drafts from the candidates of all ranks, by our own exchange and by an all-reduce."""
    from runtime.layers.cuda_ops import CudaOps

    random = torch.Generator(device).manual_seed(0)
    weight = (torch.randn((128 << 10, 1024), generator=random, device=device) / 32).to(torch.bfloat16)
    ops, fused = CudaOps(GemmTimings(H200)), group.fused
    head = CandidateHead(Linear.sharded(weight, group))
    for rows, own_exchange in itertools.product((1, 16, 100), (True, False)):
        head.choices = dict.fromkeys((1, 16, 128), H200.candidate_configs(rows)[0])
        x = torch.randn((rows, 1024), generator=random, device=device).to(torch.bfloat16)
        group.fused = fused if own_exchange else None
        drafts, wanted = greedy_by_copy(ops, x, head), (x.float() @ weight.float().T).argmax(1)
        assert int((drafts != wanted).sum()) <= rows // 50
        assert len(set(map(tuple, group.gather(drafts.tolist())))) == 1, "all ranks draft the same"
        bounded = BoundedHead(head.own)
        if rows <= BOUNDED_ROWS:
            bounded.choices = dict.fromkeys((1, 16), H200.candidate_configs(2 * rows)[0])
            tokens = torch.empty(rows, dtype=torch.int64, device=device)
            assert torch.equal(greedy_by_copy(ops, x, bounded, tokens), (x.double() @ weight.double().T).argmax(1))
            assert len(set(map(tuple, group.gather(tokens.tolist())))) == 1, "all ranks find the same tokens"
    group.fused = fused


def check_rows(group: CudaGroup, device: torch.device) -> None:
    """Gathered rows, and sums of which each rank gets its rows."""
    fused = group.fused
    assert fused is not None, "the exchange kernels work on this machine"
    fused.limit = sys.maxsize
    random = torch.Generator(device).manual_seed(group.rank)
    for dtype, (rows, columns) in itertools.product(BITS, SIZES):
        x = torch.randn((rows, columns), generator=random, device=device).to(dtype)
        every = group.gather_rows(x)
        for rank, values in enumerate(group.gather(x.cpu())):
            assert torch.equal(every[rank * rows :][:rows].cpu(), values)
        for columns_of in (x, x.float()):
            whole = group.gather_columns(columns_of, group.size * columns)
            assert torch.equal(whole, group.gather_rows(columns_of).unflatten(0, (group.size, rows)).transpose(0, 1).flatten(1))
        parts = torch.randn((group.size * rows, columns), generator=random, device=device).to(dtype)
        total = group.all_reduce(parts.double())[group.rank * rows :][:rows]
        error = (group.scatter_sum(parts).double() - total).abs()
        assert bool((error <= 2.0 ** -BITS[dtype] * total.abs() + 1e-5).all()), (dtype, rows, columns, error.max())
        live = max(rows - group.rank, 1)
        h, gain = torch.ones((live, columns), device=device), torch.randn(columns, device=device).to(torch.bfloat16)
        scaled, squares = (
            torch.zeros((live, columns), dtype=gain.dtype, device=device),
            torch.zeros((live, fused.parts(columns)), device=device),
        )
        deferred = (gain, scaled, squares) if dtype is torch.bfloat16 else ()
        fused.add(parts, h, *deferred, scattered=True)
        torch.testing.assert_close(h, (1 + total[:live]).float(), rtol=1e-5, atol=1e-5)
        if deferred:
            torch.testing.assert_close(scaled, (h * gain.float()).to(dtype))
            torch.testing.assert_close(squares.sum(1), h.square().sum(1))


def check_sums(group: CudaGroup, device: torch.device) -> None:
    """Sums that are added to the stream."""
    fused, rank, ranks = group.fused, group.rank, group.size
    assert fused is not None, "the exchange kernels work on this machine"
    fused.limit = sys.maxsize
    random = torch.Generator(device).manual_seed(rank)
    for dtype, (rows, columns), one_shot_limit in itertools.product(BITS, SIZES, (sys.maxsize, 0)):
        fused.one_shot_limit = one_shot_limit
        x = torch.randn((rows, columns), generator=random, device=device).to(dtype)
        x[torch.rand((rows, columns), generator=random, device=device) < 0.2] = -0.0
        assert fused.fits(x)
        total = group.all_reduce(x.double())
        h = torch.ones((rows, columns), device=device)
        fused.add(x, h)
        error = (h.double() - 1 - total).abs()
        rounding = 2.0 ** -BITS[dtype] * total.abs() if one_shot_limit == 0 and ranks > 2 else 0.0
        assert bool((error <= rounding + 1e-5).all()), (dtype, rows, columns, one_shot_limit, error.max())
        assert len(set(group.gather(int(h.view(torch.int32).sum())))) == 1, "all ranks have the same bits"
        again = torch.ones_like(h)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fused.add(x, again)
        for _ in range(REPEATS):
            again.fill_(1.0)
            graph.replay()
            assert torch.equal(again, h)
        if dtype is torch.bfloat16:
            gain, stream = torch.randn(columns, device=device).to(dtype), torch.ones_like(h)
            scaled, squares = torch.empty_like(x), torch.empty((rows, fused.parts(columns)), device=device)
            fused.add(x, stream, gain, scaled, squares)
            assert torch.equal(stream, h)
            torch.testing.assert_close(scaled, (h * gain.float()).to(dtype))
            torch.testing.assert_close(squares.sum(1), h.square().sum(1))
