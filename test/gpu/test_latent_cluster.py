"""Attention over latent rows of 576 columns, by two kernels and by the cluster kernel: definition, early start, bitwise repeatability."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from gpu.split_cases import BF16, NEEDS_HOPPER
from runtime.config.device_tuning import H200
from runtime.layers.attention.kernels import latent_cluster
from runtime.layers.attention.kernels.latent_cluster import CUTS, RANK, ROPE, ClusterCut, latent_cluster_attention
from runtime.layers.attention.kernels.latent_decode import LatentShape, LatentWorkspace, latent_attention
from runtime.layers.attention.kernels.paged_keys import PagedKeys
from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.latent_rows import write_latent
from runtime.layers.latent_heads import LatentHeads
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope

pytestmark = [pytest.mark.gpu, NEEDS_HOPPER]
SCALE = 0.07
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 1023, 1024, 1025, 1999, 2048, 2049, 4097, 5000)
STEP = 64
"""Keys per step of a block; a block has the keys of two steps in memory."""
MOST_ROWS = 320
"""Queries times heads of all requests that every Hopper GPU can run in clusters."""


@dataclass(frozen=True)
class Case:
    """Requests over a paged cache."""

    shape: LatentShape
    q: torch.Tensor
    cache: torch.Tensor
    keys: PagedKeys

    def run(self, kernel: str = "cluster", pdl: bool = False) -> torch.Tensor:
        if kernel == "split":
            workspace = LatentWorkspace([self.shape], self.q.device)
            return latent_attention(self.q, self.cache, self.keys, self.shape, workspace, SCALE, pdl=pdl)
        assert self.supported
        return latent_cluster_attention(self.q, self.cache, self.keys, self.shape, SCALE, pdl=pdl)

    @property
    def supported(self) -> bool:
        return latent_cluster.supports(self.shape, self.keys.page_size, self.cache, pdl=False)

    def definition(self) -> torch.Tensor:
        """The definition in float32: [B * W, H, RANK]."""
        rows, outs, W, page = self.cache.flatten(0, 1)[:, 0], [], self.shape.width, self.keys.page_size
        for b, length in enumerate(self.keys.seq_lens.tolist()):
            at = torch.arange(length, device=self.q.device)
            own = rows[self.keys.pages[self.keys.rows[b].long(), at // page].long() * page + at % page].double()
            query = self.q[b * W : (b + 1) * W].double()
            hidden = at[None, None] > length - W + torch.arange(W, device=self.q.device)[:, None, None]
            outs.append((query @ own.T * SCALE).masked_fill(hidden, -torch.inf).softmax(-1) @ own[:, :RANK])
        return torch.cat(outs).float()


def make_case(lens: list[int], width: int, heads: int, page_size: int) -> Case:
    torch.manual_seed(sum(lens) + width)
    batch, device = len(lens), torch.device("cuda")
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    shape = LatentShape(batch, width, heads, RANK, ROPE, num_sms, H200.latent_config(width * heads))
    columns = -(-max(lens) // page_size)
    pages = torch.randperm((batch + 1) * columns, device=device).int().view(-1, columns)
    cache = torch.randn((pages.numel(), page_size, 1, RANK + ROPE), device=device).to(BF16)
    q = torch.randn((batch * width, heads, RANK + ROPE), device=device).to(BF16)
    rows = torch.arange(1, batch + 1, dtype=torch.int32, device=device)
    return Case(shape, q, cache, PagedKeys(pages, rows, torch.tensor(lens, dtype=torch.int32, device=device), page_size))


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), want, rtol=1.6e-2, atol=8e-3)
    assert float(((got.float() - want).norm(dim=2) / want.norm(dim=2)).max()) < 6e-3


@pytest.mark.parametrize("kernel", ["split", "cluster"])
@pytest.mark.parametrize(("heads", "page_size"), [(20, 64), (16, 16), (24, 1), (20, 1), (5, 128)])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_kernels_follow_the_definition(kernel: str, width: int, heads: int, page_size: int) -> None:
    lengths = [length for length in LENGTHS if length >= width]
    for first, batch in ((0, 1), (1, 2), (3, 3), (6, 4), (10, 2), (len(lengths) - 2, 1), (len(lengths) - 1, 1)):
        case = make_case(lengths[first : first + batch], width, heads, page_size)
        if batch * width * heads <= MOST_ROWS or kernel == "split" or case.supported:
            assert_close(case.run(kernel), case.definition())


@pytest.mark.parametrize("kernel", ["split", "cluster"])
@pytest.mark.parametrize(("heads", "width", "batch"), [(64, 1, 1), (64, 4, 1), (64, 1, 4), (128, 1, 1), (128, 2, 1)])
def test_many_heads_follow_the_definition(kernel: str, heads: int, width: int, batch: int) -> None:
    case = make_case([1500 - 311 * b for b in range(batch)], width, heads, 64)
    assert_close(case.run(kernel), case.definition())


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(8, 1), (20, 1), (5, 8)])
def test_all_lengths_by_every_cut(monkeypatch: pytest.MonkeyPatch, cut: ClusterCut, heads: int, width: int) -> None:
    """Lengths around those at which a block gets another tile, step or round of its slots, with the pass's keys on both sides."""
    assert make_case([100], 1, 20, 16).supported, "all kernels are loaded"
    monkeypatch.setattr(latent_cluster, "CUTS", (cut,))
    for steps in (1, 2, 3, 5):
        full = steps * STEP * cut.blocks
        for length in (full - 1, full, full + 1, full + 5, full + STEP + 3):
            case = make_case([length], width, heads, 16)
            if not case.supported:
                pytest.skip("the device does not run these clusters at once")
            assert_close(case.run(), case.definition())


@pytest.mark.parametrize("batch", [2, 4])
def test_a_request_has_the_same_bits_beside_any_others(batch: int) -> None:
    case = make_case([1700 - 330 * b for b in range(batch)], 4, 20, 16)
    outs = case.run().view(batch, -1)
    for shift in range(1, batch):
        turned = torch.arange(batch, device="cuda").roll(shift)
        keys = replace(case.keys, rows=case.keys.rows[turned], seq_lens=case.keys.seq_lens[turned])
        q = case.q.view(batch, -1)[turned].view(case.q.shape)
        assert torch.equal(replace(case, keys=keys, q=q).run().view(batch, -1), outs[turned])


def test_what_lies_beyond_a_request_has_no_effect() -> None:
    case = make_case([1003, 77, 64], 4, 20, 16)
    want, at = case.run(), torch.arange(1008, device="cuda")
    for b, length in enumerate(case.keys.seq_lens.tolist()):
        beyond = at[length : -(-length // 16) * 16]
        case.cache[case.keys.pages[b + 1, beyond // 16].long(), beyond % 16] = torch.nan
    assert torch.equal(case.run(), want)


def passes(case: Case, new: list[torch.Tensor], heads: LatentHeads, apart: bool) -> list[torch.Tensor]:
    """Consecutive passes over growing requests: one kernel stores the last keys, then attention reads all keys. With `apart`, each kernel
    starts after the previous one has ended.
    """
    B, W, H, page = case.shape.batch, case.shape.width, case.shape.num_heads, case.keys.page_size
    table, rows, start, outs = case.keys.pages.long(), case.keys.rows.long(), case.keys.seq_lens.clone(), list[torch.Tensor]()
    for step, qkv in enumerate(new):
        lens = (start + step * W).int()  # these kernels start late, so no pass begins before the previous one has ended
        positions = (lens[:, None] - W + torch.arange(W, device="cuda")).long()
        slots = table[rows[:, None], positions // page] * page + positions % page
        q, _ = write_latent(qkv, heads, positions.flatten(), slots.flatten(), case.cache.flatten(0, 1), pdl=True)
        if apart:
            torch.cuda.synchronize()
        outs.append(replace(case, q=q.view(B * W, H, -1), keys=replace(case.keys, seq_lens=lens)).run(pdl=True))
    return outs


@pytest.mark.parametrize(("batch", "length"), [(1, 40), (1, 1000), (1, 3500), (2, 1000), (4, 700)])
@pytest.mark.parametrize("width", [1, 4])
def test_early_start_changes_no_bit(batch: int, length: int, width: int) -> None:
    count, heads, row = 12, 5, RANK + ROPE
    case = make_case([length + 31 * b + count * width for b in range(batch)], width, heads, 16)
    case.keys.seq_lens.sub_(count * width)
    gain = torch.ones(RANK, device="cuda")
    queries = RMSNorm(torch.ones(heads * row, device="cuda").to(BF16), 1e-6)  # the norm writes the queries to a separate tensor
    latent = LatentHeads(heads, RANK, RANK, RMSNorm(gain.to(BF16), 1e-6), Rope(torch.rand((8192, ROPE), device="cuda"), True), queries)
    new = [torch.randn((batch * width, heads * row + row), device="cuda").to(BF16) for _ in range(count)]
    want = passes(case, new, latent, apart=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = passes(case, new, latent, apart=False)
    for replay in range(5):
        for b in range(batch):  # keys that a pass must not read before they are stored
            first = int(case.keys.seq_lens[b]) - width
            positions = torch.arange(first, first + count * width, device="cuda")
            case.cache[case.keys.pages[b + 1, positions // 16].long(), positions % 16] = torch.nan
        torch.cuda.synchronize()
        graph.replay()
        for step, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), f"replay {replay}, pass {step}"


def test_one_question_loads_the_kernels_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([100], 1, 20, 16)
    assert latent_cluster.supports(case.shape, 16, case.cache, pdl=True)
    monkeypatch.setattr(cuda_driver, "compile_kernel", lambda *_, **__: pytest.fail("a CUDA kernel is compiled"))
    for batch in (1, 2, 3, 4):
        make_case([100] * batch, 4, 20, 16).run(pdl=True)


def test_other_passes_are_left_to_other_kernels() -> None:
    case = make_case([100], 1, 20, 16)

    def supported(page_size: int = 16, cache: torch.Tensor = case.cache, **changes: int) -> bool:
        return latent_cluster.supports(replace(case.shape, **changes), page_size, cache, pdl=False)

    assert supported()
    assert not supported(page_size=48)
    assert not supported(cache=case.cache.half())
    assert not supported(width=9)
    assert not supported(rank=256)
    assert not supported(batch=64, width=4)
