"""The split attention kernel that merges within clusters: clusters of every size against the definition, early start, and exact repeats."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from gpu.attention_definition import assert_close, definition
from gpu.split_cases import BF16, CLUSTER, DEVICE, MARKS, NEEDS_HOPPER, SMALL, Case, make_case
from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import ClusterConfig
from runtime.layers.attention.kernels.split_decode import warm_up
from runtime.layers.attention.kernels.split_shape import SplitShape, one_of_each_kernel
from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.rope_and_cache import rope_and_cache
from runtime.layers.rope import Rope, RotaryHeads

pytestmark = [*MARKS, NEEDS_HOPPER]
LENGTHS = (1, 2, 15, 16, 17, 63, 127, 128, 129, 255, 257, 511, 777, 1023, 1025, 1999, 2047, 2049, 3001, 3999, 4000)
SIZES = (1, 2, 3, 4, 6, 7, 8, 13, 16)
"""Most blocks of a cluster; not every device supports the last one."""


def clusters(largest: int, warps: int = 8, stages: int = 2) -> ClusterConfig:
    return ClusterConfig(warps, stages, largest)


@pytest.mark.parametrize("largest", SIZES)
@pytest.mark.parametrize(
    ("heads", "width"), [((4, 1, 128), 1), ((4, 1, 128), 4), ((8, 1, 128), 4), ((8, 1, 64), 1), ((8, 1, 64), 6), ((5, 1, 64), 2)]
)
def test_all_lengths_in_clusters_of_every_size(largest: int, heads: tuple[int, int, int], width: int) -> None:
    config = replace(SMALL, cluster=clusters(largest))
    for lens in ([n for n in LENGTHS if n >= width][:10], [n for n in LENGTHS if n >= width][10:]):
        case = make_case(lens, width, 16, heads, config=config)
        assert_close(case.run(), definition(case, True, -1)[0])


@pytest.mark.parametrize("largest", SIZES)
@pytest.mark.parametrize(("warps", "stages"), [(8, 2), (4, 2), (4, 3), (4, 4)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_cut_follows_the_definition(largest: int, warps: int, stages: int, head_dim: int) -> None:
    case = make_case([1500, 40, 4, 333], 4, 64, (8, 2, head_dim), config=replace(SMALL, cluster=clusters(largest, warps, stages)))
    sinks = torch.randn(8, device=DEVICE)
    assert_close(case.run(sinks=sinks), definition(case, True, -1, sinks)[0])
    assert_close(case.run(window=100), definition(case, True, 100)[0])


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("width", [1, 2, 4, 6])
@pytest.mark.parametrize(("heads", "page_size"), [((32, 8, 128), 64), ((8, 8, 64), 1), ((32, 4, 128), 128), ((64, 8, 64), 16)])
def test_batches_of_real_models(heads: tuple[int, int, int], page_size: int, width: int, batch: int) -> None:
    lens = [(97 * i * i + 131 * i + width) % 900 + width for i in range(batch)]
    case = make_case(lens, width, page_size, heads, sms=132, config=CLUSTER)
    assert_close(case.run(), definition(case, True, -1)[0])


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize(("width", "with_sinks"), [(1, True), (4, False), (4, True)])
def test_windows_longer_and_shorter_than_requests(page_size: int, width: int, with_sinks: bool) -> None:
    case = make_case([4, 100, 128, 131, 132, 500, 1203], width, page_size, (16, 2, 64), config=CLUSTER)
    sinks = torch.randn(16, device=DEVICE).to(BF16) if with_sinks else None
    for window in (0, 127, 128, 2000):
        assert_close(case.run(window=window, sinks=sinks), definition(case, True, window, sinks)[0])


def test_requests_without_keys_are_not_written() -> None:
    case = make_case([1, 90, 4], 4, 16, (8, 2, 128), config=CLUSTER)
    case.keys.seq_lens[0] = 0
    out = case.run(causal=False)
    assert_close(out[4:], definition(case, False, -1)[0][4:])


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_a_request_has_the_same_bits_beside_any_others(batch: int) -> None:
    """A request has the same bits at the same and at other positions of a batch of one size; only its own cluster reads it."""
    case = make_case([700 - 60 * b for b in range(batch)], 4, 16, (32, 8, 128), sms=132, config=CLUSTER)
    outs = case.run().view(batch, -1)
    for shift in range(1, batch):
        turned = torch.arange(batch, device=DEVICE).roll(shift)
        keys = replace(case.keys, rows=case.keys.rows[turned], seq_lens=case.keys.seq_lens[turned])
        q = case.q.view(batch, -1)[turned].view(case.q.shape)
        assert torch.equal(replace(case, keys=keys, q=q).run().view(batch, -1), outs[turned])
    case.keys.seq_lens[1:] = 4
    assert torch.equal(case.run().view(batch, -1)[0], outs[0])


def passes(case: Case, new: list[torch.Tensor], heads: RotaryHeads, apart: bool) -> list[torch.Tensor]:
    """Consecutive passes over growing requests: the rotary kernel stores the last keys, then attention reads all keys. With `apart`, each
    kernel starts after the previous one has ended.
    """
    B, W, page = case.shape.batch, case.shape.width, case.keys.page_size
    table, rows, start = case.keys.pages.long(), case.keys.rows.long(), case.keys.seq_lens.clone()
    caches, outs = (case.k.flatten(0, 1), case.v.flatten(0, 1)), list[torch.Tensor]()
    for step, qkv in enumerate(new):
        lens = (start + step * W).int()  # these kernels start late, so no pass begins before the previous one has ended
        positions = (lens[:, None] - W + torch.arange(W, device=DEVICE)).long()
        slots = table[rows[:, None], positions // page] * page + positions % page
        q = rope_and_cache(qkv, heads, positions.flatten(), slots.flatten(), caches, pdl=True)
        if apart:
            torch.cuda.synchronize()
        outs.append(replace(case, q=q.view(B * W, -1, case.shape.head_dim), keys=replace(case.keys, seq_lens=lens)).attend(pdl=True))
    return outs


@pytest.mark.parametrize(("batch", "length"), [(1, 40), (1, 1000), (2, 3000), (8, 700)])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("heads", [(32, 8, 128), (64, 8, 64)])
def test_early_start_changes_no_bit(batch: int, length: int, width: int, heads: tuple[int, int, int]) -> None:
    (H, G, D), count = heads, 12
    case = make_case([length + 31 * b + count * width for b in range(batch)], width, 16, heads, sms=132, config=CLUSTER)
    case.keys.seq_lens.sub_(count * width)
    new = [torch.randn((batch * width, (H + 2 * G) * D), device=DEVICE).to(BF16) for _ in range(count)]
    rotary = RotaryHeads(H, G, D, Rope(torch.rand((8192, D), device=DEVICE)))
    want = passes(case, new, rotary, apart=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = passes(case, new, rotary, apart=False)
    for replay in range(5):
        for b, cache in product(range(batch), (case.k, case.v)):  # keys that a pass must not read before they are stored
            positions = torch.arange(int(case.keys.seq_lens[b]) - width, int(case.keys.seq_lens[b]) + (count - 1) * width)
            cache[case.keys.pages.cpu()[b + 1, positions // 16].long(), positions % 16] = float("nan")
        torch.cuda.synchronize()
        graph.replay()
        for step, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), f"replay {replay}, pass {step}"


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("sinks", [False, True])
def test_one_warm_up_loads_the_kernels_of_all_batch_sizes(monkeypatch: pytest.MonkeyPatch, width: int, sinks: bool) -> None:
    shapes = [SplitShape(size, width, 32, 8, 128, 132, H200.split_config(128, size)) for size in range(1, 9)]

    def run(shape: SplitShape) -> None:
        warm_up(shape, 64, BF16, DEVICE, tree=False, window=-1, sinks=sinks, pdl=True)

    for shape in one_of_each_kernel(shapes):
        run(shape)
    monkeypatch.setattr(cuda_driver, "compile_kernel", lambda *_, **__: pytest.fail("a CUDA kernel is compiled"))
    for shape in shapes:
        run(shape)
