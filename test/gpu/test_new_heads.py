"""The cluster attention kernel that norms, rotates and stores new heads, compared with separate rotary and attention kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gpu.attention_definition import assert_close, definition
from gpu.split_cases import BF16, CLUSTER, DEVICE, MARKS, NEEDS_HOPPER, SMALL, Case, make_case
from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import ClusterConfig, SplitConfig
from runtime.layers.attention.base import AttentionBackend, AttentionShape, AttentionSpec, plan_pass
from runtime.layers.attention.kernels.cluster_decode import NewTokens, cluster_attention, takes_rows
from runtime.layers.attention.kernels.split_decode import warm_up
from runtime.layers.attention.kernels.split_shape import SplitShape, one_of_each_kernel
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.rms_norm import rms_norm_rows
from runtime.layers.kernels.rope_and_cache import rope_and_cache
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope, RotaryHeads
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.mem_cache.kv_spec import KVSpec

pytestmark = [*MARKS, NEEDS_HOPPER]
POSITIONS = 8192


def rotary(heads: tuple[int, int, int], norms: bool = False, rotated: int | None = None) -> RotaryHeads:
    """Heads H, G, D whose first `rotated` entries are rotated, by default all."""
    (H, G, D), R = heads, rotated or heads[2]
    angles = torch.arange(POSITIONS, device=DEVICE)[:, None] * 1e4 ** (-torch.arange(R // 2, device=DEVICE) / (R // 2))
    table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    q_norm, k_norm = (RMSNorm((1 + torch.randn(D, device=DEVICE) / 4).to(BF16), eps) if norms else None for eps in (1e-6, 1e-5))
    return RotaryHeads(H, G, D, Rope(table), q_norm, k_norm)


@dataclass(frozen=True)
class View:
    """Which keys queries see."""

    causal: bool = True
    window: int = -1
    sinks: torch.Tensor | None = None


ALL = View()


@dataclass
class Fresh:
    """A case in which the last `width` keys of each request are not stored yet; their slots are NaN."""

    case: Case
    qkv: torch.Tensor
    new: NewTokens

    @classmethod
    def of(cls, case: Case, heads: RotaryHeads) -> Fresh:
        shape, keys = case.shape, case.keys
        positions = (keys.seq_lens[:, None] - shape.width + torch.arange(shape.width, device=DEVICE)).long()
        slots = keys.pages.long()[keys.rows.long()[:, None], positions // keys.page_size] * keys.page_size + positions % keys.page_size
        for cache in (case.k, case.v):
            cache.flatten(0, 1)[slots.flatten()] = float("nan")
        columns = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
        qkv = torch.randn((positions.numel(), columns), device=DEVICE).to(BF16)
        return cls(case, qkv, NewTokens(heads, positions.flatten(), slots.flatten()))

    def apart(self, view: View = ALL) -> tuple[Case, torch.Tensor]:
        """Run two kernels; returns the case with their queries and caches, and the result."""
        k, v = self.case.k.clone(), self.case.v.clone()
        q = rope_and_cache(self.qkv, self.new.heads, self.new.positions, self.new.slots, (k.flatten(0, 1), v.flatten(0, 1)), pdl=False)
        case = replace(self.case, q=q, k=k, v=v)
        return case, case.run(causal=view.causal, window=view.window, sinks=view.sinks)

    def together(self, view: View = ALL) -> tuple[Case, torch.Tensor]:
        """Run one kernel; returns the case with its caches, and the result."""
        case = replace(self.case, k=self.case.k.clone(), v=self.case.v.clone())
        return case, self.attend(case, view)

    def attend(self, case: Case, view: View = ALL, pdl: bool = False) -> torch.Tensor:
        """Call the kernel with the keys and the caches of `case`."""
        assert takes_rows(self.new.heads, case.shape, case.keys.page_size, self.qkv, case.k, view.sinks)
        return cluster_attention(
            self.qkv, case.k, case.v, case.keys, case.shape, case.shape.head_dim**-0.5, causal=view.causal, window=view.window,
            sinks=view.sinks, new=self.new, pdl=pdl,
        )  # fmt: skip


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def check(fresh: Fresh, view: View = ALL) -> None:
    """Without norms the caches have the same bits. With norms, another summation order may round a key to the adjacent number."""
    (want_case, want), (got_case, got) = fresh.apart(view), fresh.together(view)
    assert same_bits(got_case.v, want_case.v)
    if fresh.new.heads.q_norm is None:
        assert same_bits(got_case.k, want_case.k)
    else:
        torch.testing.assert_close(got_case.k.float(), want_case.k.float(), rtol=2**-7, atol=1e-3, equal_nan=True)
    assert_close(got, want.cpu().double())


LENGTHS = (1, 2, 15, 16, 17, 18, 33, 129, 130, 131, 257, 260, 513, 514, 777, 1025, 1999, 2050, 3001)
"""Lengths at ends of tiles and of the blocks' shares. With 130 keys, 8 blocks have two tiles each, and new tokens are in two blocks."""


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("largest", [1, 2, 5, 8, 14])
@pytest.mark.parametrize(
    ("heads", "width"),
    [((4, 1, 128), 1), ((4, 1, 128), 4), ((8, 1, 128), 4), ((8, 1, 128), 8), ((8, 1, 64), 1), ((8, 1, 64), 6), ((5, 1, 64), 2),
     ((2, 2, 128), 3), ((3, 1, 64), 7), ((7, 1, 128), 5)],
)  # fmt: skip
def test_new_heads_at_all_places_of_tiles_and_shares(norms: bool, largest: int, heads: tuple[int, int, int], width: int) -> None:
    config = replace(SMALL, cluster=ClusterConfig(8, 2, largest))
    lens = [length for length in LENGTHS if length >= width]
    for some in (lens[:8], lens[8:]):
        check(Fresh.of(make_case(some, width, 16, heads, config=config), rotary(heads, norms)))


@pytest.mark.parametrize(("warps", "stages"), [(4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_every_cut_and_page_size(warps: int, stages: int, head_dim: int, page_size: int) -> None:
    config, heads = replace(SMALL, cluster=ClusterConfig(warps, stages, 4)), (8, 2, head_dim)
    for width in (1, 4, 8):
        check(Fresh.of(make_case([8, 66, 1500, 333], width, page_size, heads, config=config), rotary(heads, True)))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_and_sinks(width: int, with_sinks: bool) -> None:
    heads = (16, 2, 64)
    fresh = Fresh.of(make_case([4, 100, 128, 131, 132, 500, 1203], width, 16, heads, config=CLUSTER), rotary(heads))
    sinks = torch.randn(16, device=DEVICE).to(BF16) if with_sinks else None
    for window in (0, 127, 128, 2000):
        check(fresh, View(window=window, sinks=sinks))


@pytest.mark.parametrize("rotated", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("norms", [False, True])
def test_a_part_of_the_head_may_rotate(rotated: int, norms: bool) -> None:
    heads = (8, 2, 128)
    check(Fresh.of(make_case([4, 130, 1500], 4, 16, heads, config=CLUSTER), rotary(heads, norms, rotated)))


def test_blocks_of_drafts_see_each_other() -> None:
    heads = (8, 2, 128)
    check(Fresh.of(make_case([8, 130, 1500], 8, 16, heads, config=CLUSTER), rotary(heads, True)), View(causal=False))


@pytest.mark.parametrize(("heads", "norms"), [((32, 8, 128), False), ((32, 4, 128), True), ((64, 8, 64), False)])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [1, 4])
def test_batches_of_real_models_follow_the_definition(heads: tuple[int, int, int], norms: bool, batch: int, width: int) -> None:
    lens = [(97 * i * i + 131 * i + width) % 900 + width for i in range(batch)]
    fresh = Fresh.of(make_case(lens, width, 64, heads, sms=132, config=CLUSTER), rotary(heads, norms))
    check(fresh)
    (case, _), (_, got) = fresh.apart(), fresh.together()
    assert_close(got, definition(case, True, -1)[0])


@pytest.mark.parametrize("length", [40, 1999])
def test_caches_hold_zeros_for_what_is_no_number(length: int) -> None:
    heads, H = (4, 1, 128), 4
    fresh = Fresh.of(make_case([length], 2, 16, heads, config=replace(SMALL, cluster=ClusterConfig(8, 2, 1))), rotary(heads))
    fresh.qkv[1, H * 128 + 3], fresh.qkv[0, (H + 1) * 128 + 5] = float("inf"), float("nan")
    check(fresh)


def passes(fresh: Fresh, streams: list[torch.Tensor], apart: bool) -> list[torch.Tensor]:
    """Consecutive passes over growing requests, in the caches of the case: a norm writes the rows, then they attend. With `apart`, each
    kernel starts after the previous one has ended.
    """
    norm = RMSNorm(torch.ones(fresh.qkv.shape[1], dtype=BF16, device=DEVICE), 1e-6)
    case, outs = fresh.case, list[torch.Tensor]()
    table, width, page, start = case.keys.pages.long(), case.shape.width, case.keys.page_size, case.keys.seq_lens.clone()
    for step, stream in enumerate(streams):
        lens = (start + step * width).int()  # these kernels start late, so no pass begins before the previous one has ended
        positions = (lens[:, None] - width + torch.arange(width, device=DEVICE)).long()
        slots = table[case.keys.rows.long()[:, None], positions // page] * page + positions % page
        new = replace(fresh.new, positions=positions.flatten(), slots=slots.flatten())
        qkv = rms_norm_rows(stream, norm, BF16, pdl=True)
        if apart:
            torch.cuda.synchronize()
        one = replace(case, keys=replace(case.keys, seq_lens=lens))
        outs.append(replace(fresh, qkv=qkv, new=new).attend(one, pdl=True))
    return outs


@pytest.mark.parametrize(("batch", "length"), [(1, 40), (1, 1000), (2, 3000), (8, 700)])
@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("heads", [(32, 8, 128), (64, 8, 64)])
def test_early_start_changes_no_bit(batch: int, length: int, width: int, heads: tuple[int, int, int]) -> None:
    count = 12
    case = make_case([length + 31 * b + count * width for b in range(batch)], width, 16, heads, sms=132, config=CLUSTER)
    case.keys.seq_lens.sub_((count - 1) * width)
    fresh = Fresh.of(case, rotary(heads, True))
    streams = [torch.randn(fresh.qkv.shape, device=DEVICE) for _ in range(count)]
    want = passes(fresh, streams, apart=True)
    stored = case.k.clone(), case.v.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = passes(fresh, streams, apart=False)
    for replay in range(5):
        for b in range(batch):  # keys that a pass must not read before they are stored
            positions = torch.arange(int(case.keys.seq_lens[b]) - width, int(case.keys.seq_lens[b]) + (count - 1) * width)
            for cache in (case.k, case.v):
                cache[case.keys.pages.cpu()[b + 1, positions // 16].long(), positions % 16] = float("nan")
        torch.cuda.synchronize()
        graph.replay()
        for step, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), f"replay {replay}, pass {step}"
        assert same_bits(case.k, stored[0]), f"replay {replay}"
        assert same_bits(case.v, stored[1]), f"replay {replay}"


def test_a_request_has_the_same_bits_beside_any_others() -> None:
    heads, batch = (32, 8, 128), 4
    fresh = Fresh.of(make_case([700 - 60 * b for b in range(batch)], 4, 16, heads, sms=132, config=CLUSTER), rotary(heads, True))
    case, outs = fresh.together()
    for shift in range(1, batch):
        turned = torch.arange(batch, device=DEVICE).roll(shift)

        def by_request(x: torch.Tensor, turned: torch.Tensor = turned) -> torch.Tensor:
            return x.view(batch, -1)[turned].view(x.shape)

        keys = replace(case.keys, rows=case.keys.rows[turned], seq_lens=case.keys.seq_lens[turned])
        new = replace(fresh.new, positions=by_request(fresh.new.positions), slots=by_request(fresh.new.slots))
        other, out = Fresh(replace(fresh.case, keys=keys), by_request(fresh.qkv), new).together()
        assert torch.equal(out, by_request(outs))
        assert same_bits(other.k, case.k)


def test_one_warm_up_loads_the_kernels_of_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [SplitShape(size, 2, 32, 8, 128, 132, H200.split_config(128, size)) for size in range(1, 9)]
    assert all(shape.rotates for shape in shapes)
    heads = rotary((32, 8, 128))

    def run(shape: SplitShape) -> None:
        warm_up(shape, 64, BF16, DEVICE, tree=False, window=-1, sinks=False, heads=heads, pdl=False)

    for shape in one_of_each_kernel(shapes):
        run(shape)
    cases = [Fresh.of(make_case([70] * shape.batch, 2, 64, (32, 8, 128), sms=132, config=shape.config), heads) for shape in shapes]
    for case in cases:  # the reference is another program
        case.apart()
    monkeypatch.setattr(cuda_driver, "compile_kernel", lambda *_, **__: pytest.fail("a CUDA kernel is compiled"))
    for shape, case in zip(shapes, cases, strict=True):
        run(shape)
        check(case)


# ---- the backend

Backends = Callable[[RotaryHeads], tuple[PageTable, KVPool, AttentionSpec, AttentionBackend]]


def batch_of(table: PageTable, lens: list[int], width: int) -> ForwardBatch:
    """A fixed-width pass of requests in rows 1, 2, ..."""
    size, ints = len(lens), {"dtype": torch.int64, "device": DEVICE}
    rows, ends = torch.arange(1, size + 1, **ints), torch.tensor(lens, **ints)
    positions = ends[:, None] - width + torch.arange(width, **ints)
    return ForwardBatch(
        mode=ForwardMode.TARGET_VERIFY,
        batch_size=size,
        tokens_per_req=width,
        input_ids=torch.zeros(size * width, **ints),
        positions=positions.flatten(),
        out_cache_loc=table.slots(rows[:, None], positions).flatten(),
        req_pool_indices=rows,
        seq_lens=ends.int(),
        qo_indptr=torch.arange(size + 1, dtype=torch.int32, device=DEVICE) * width,
        seq_len_bounds=np.array(lens, dtype=np.int32),
    )


@pytest.fixture
def backend() -> Backends:
    """Returns a function that creates an FA3 backend over a pool of random keys for one layer."""
    pytest.importorskip("sgl_kernel")
    from runtime.layers.attention.fa3 import FlashAttention

    def make(heads: RotaryHeads) -> tuple[PageTable, KVPool, AttentionSpec, AttentionBackend]:
        table = PageTable(17, 1024, 16, DEVICE)
        table.pages[1:] = (torch.randperm(16 * 64, device=DEVICE) + 1).view(16, 64).int()
        kv = KVSpec("gqa", heads.num_kv_heads, heads.head_dim, heads.head_dim, BF16)
        pool = KVPool([kv], 16 * 64, 16, DEVICE)
        for cache in (*pool.k, *pool.v):
            cache.normal_()
        layer = AttentionSpec(0, heads.num_q_heads, kv, heads.head_dim**-0.5, heads=heads)
        return table, pool, layer, FlashAttention(AttentionShape((layer,), 16, 4, 1024, tuning=H200), pool, table)

    return make


@pytest.mark.parametrize("width", [1, 4])
def test_backend_runs_few_requests_in_one_kernel(backend: Backends, width: int) -> None:
    heads = rotary((32, 8, 128), True)
    table, pool, layer, fast = backend(heads)
    batch = batch_of(table, [700, 130, 5], width)
    qkv = torch.randn((batch.num_tokens, 48 * 128), device=DEVICE).to(BF16)
    plan_pass(fast, batch)
    got = fast.forward_rows(qkv, layer, batch)
    keys = pool.k[0].clone()
    want = fast.forward(rope_and_cache(qkv, heads, batch.positions, batch.out_cache_loc, pool.flat(0), pdl=True), layer, batch)
    assert got is not None
    assert_close(got, want.cpu().double())
    torch.testing.assert_close(keys.float(), pool.k[0].float(), rtol=2**-7, atol=1e-3)


def test_backend_leaves_other_passes_alone(backend: Backends) -> None:
    """Many requests, trees, and heads that the kernel does not support."""
    heads = rotary((32, 8, 128))
    table, pool, layer, fast = backend(heads)
    before, few = pool.k[0].clone(), batch_of(table, [700, 130, 5], 4)
    tree = replace(few, tree_mask=torch.ones_like(few.positions), tree_tail=4)
    turned = replace(heads, rope=replace(heads.rope, interleaved=True))
    for batch, kind in ((batch_of(table, [40] * 16, 4), heads), (tree, heads), (few, turned)):
        plan_pass(fast, batch)
        qkv = torch.randn((batch.num_tokens, 48 * 128), device=DEVICE).to(BF16)
        assert fast.forward_rows(qkv, replace(layer, heads=kind), batch) is None
    assert same_bits(pool.k[0], before)


def test_shapes_that_the_kernel_does_not_take() -> None:
    case = make_case([40], 4, 16, (4, 1, 128), config=CLUSTER)
    heads, norm = rotary((4, 1, 128)), RMSNorm(torch.ones(128, device=DEVICE, dtype=BF16), 1e-5)

    def takes(kind: RotaryHeads, config: SplitConfig = CLUSTER, width: int = 4) -> bool:
        return takes_rows(kind, replace(case.shape, config=config, width=width), 16, case.q, case.k, None)

    assert takes(heads)
    assert not takes(heads, SMALL)
    assert not takes(heads, width=9)
    for kind in (
        replace(heads, v_norm=norm),
        replace(heads, shared_kv=True),
        replace(heads, kv_scales=torch.ones(2)),
        rotary((4, 1, 128), rotated=24),
    ):
        assert not takes(kind)


def test_many_new_keys_are_rotated_by_a_kernel_before_attention() -> None:
    shapes = [SplitShape(size, 3, 32, 8, 128, 132, H200.split_config(128, size)) for size in (5, 6)]
    assert [shape.rotates for shape in shapes] == [True, False]
    assert len(one_of_each_kernel(shapes)) == 2, "each has a program of its own"
