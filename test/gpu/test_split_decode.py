"""Split attention compared with the definition, on a GPU or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gpu.attention_definition import assert_close, definition
from gpu.split_cases import CLUSTER, DEVICE, DTYPE, KERNELS, MARKS, NEEDS_HOPPER, SCHEDULED, SMALL, WHOLE, make_case
from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import SplitConfig
from runtime.layers.attention.kernels import cluster_decode
from runtime.layers.attention.kernels.split_decode import SplitWorkspace, warm_up
from runtime.layers.attention.kernels.split_schedule import COMPARED_AT_ONCE, WorkSchedule, order_requests, schedule_shares
from runtime.layers.attention.kernels.split_shape import SplitShape, one_of_each_kernel, supports

pytestmark = MARKS


@pytest.mark.parametrize("config", KERNELS)
@pytest.mark.parametrize(
    ("page_size", "width", "window"),
    [(1, 1, -1), (4, 4, -1), (16, 3, 20), (64, 1, 5), (1, 8, 0), (16, 8, -1), (64, 4, 60)],
)
def test_every_length_from_the_shortest_to_many_tiles_a_split(page_size: int, width: int, window: int, config: SplitConfig) -> None:
    case = make_case([width, width + 1, 15 + width, 33, 160, 347], width, page_size, config=config)
    assert case.shape.splits > 1, "several programs share a request"
    assert_close(case.run(window=window), definition(case, True, window)[0])


@pytest.mark.parametrize("config", KERNELS)
@pytest.mark.parametrize(("page_size", "width", "window"), [(1, 16, -1), (16, 5, 40), (64, 16, 20)])
def test_blocks_see_all_their_keys_and_a_window_before_them(page_size: int, width: int, window: int, config: SplitConfig) -> None:
    case = make_case([width, 33, 160, 347], width, page_size, config=config)
    assert_close(case.run(causal=False, window=window), definition(case, False, window)[0])


def in_clusters(heads: tuple[int, int, int], width: int) -> bool:
    """Whether the cluster kernel supports such passes."""
    H, G, D = heads
    return D in cluster_decode.HEAD_DIMS and width * H // G <= cluster_decode.MAX_ROWS


GROUPS = (
    ((8, 1, 128), 8), ((6, 2, 64), 2), ((2, 2, 256), 1), ((12, 2, 64), 5), ((3, 3, 64), 8), ((4, 2, 128), 3), ((3, 1, 256), 7),
    ((8, 2, 256), 4), ((10, 2, 128), 4), ((5, 1, 256), 8), ((14, 2, 64), 1), ((7, 1, 128), 8), ((16, 2, 64), 1),
    ((8, 1, 512), 1), ((8, 1, 512), 16), ((3, 1, 512), 5), ((8, 2, 64), 16), ((8, 1, 128), 16), ((6, 1, 64), 16),
)  # fmt: skip
"""Heads H, G, D and queries per request."""


@pytest.mark.parametrize(("heads", "width"), GROUPS)
def test_groups_of_any_size_and_every_head_dimension(heads: tuple[int, int, int], width: int) -> None:
    case = make_case([width, 70, 201], width, 16, heads)
    assert_close(case.run(), definition(case, True, -1)[0])


@NEEDS_HOPPER
@pytest.mark.parametrize(("heads", "width"), [(heads, width) for heads, width in GROUPS if in_clusters(heads, width)])
def test_groups_of_any_size_in_clusters(heads: tuple[int, int, int], width: int) -> None:
    case = make_case([width, 70, 201], width, 16, heads, config=CLUSTER)
    assert_close(case.run(), definition(case, True, -1)[0])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("batch", "window"), [(1, -1), (4, 0), (8, -1), (16, 130), (26, -1), (40, 90), (64, -1)])
def test_every_default_cut_holds_at_its_widest(head_dim: int, batch: int, window: int) -> None:
    """The most rows per program, and so the most shared memory, at the largest batch of each config of Triton's kernels."""
    lens = np.random.default_rng(batch * head_dim).integers(8, 400 if batch < 16 else 200, batch).tolist()
    case = make_case(lens, 8, 16, (8, 1, head_dim), sms=132, config=replace(H200.split_config(head_dim, batch), cluster=None))
    assert case.shape.rows == 64
    assert_close(case.run(window=window), definition(case, True, window)[0])


@pytest.mark.parametrize("config", [*KERNELS, pytest.param(SCHEDULED, id="scheduled"), pytest.param(WHOLE, id="whole")])
@pytest.mark.parametrize(("width", "window"), [(1, -1), (1, 20), (4, -1), (4, 127), (8, 0)])
@pytest.mark.parametrize("sms", [1, 40])
def test_a_sink_counts_once_in_every_query(sms: int, width: int, window: int, config: SplitConfig) -> None:
    case = make_case([width, width + 20, 160, 347], width, 16, (16, 2, 64), sms, config)
    sinks = (torch.arange(16) / 4 - 1).to(DEVICE, case.q.dtype)
    assert_close(case.run(window=window, sinks=sinks), definition(case, True, window, sinks)[0])


@pytest.mark.parametrize("config", [SMALL, SCHEDULED, WHOLE], ids=["static", "scheduled", "whole"])
@pytest.mark.parametrize(
    ("heads", "width", "window"), [((4, 2, 64), 1, -1), ((8, 2, 128), 4, 20), ((8, 1, 128), 16, -1), ((3, 1, 256), 4, -1)]
)
def test_keys_and_values_in_8_bits_are_multiplied_by_their_scales(
    heads: tuple[int, int, int], width: int, window: int, config: SplitConfig
) -> None:
    case = make_case([width, width + 20, 160, 347], width, 16, heads, config=config).in_8_bits()
    assert case.k.dtype is torch.float8_e4m3fn
    want = definition(case, True, window)[0]
    error = (case.run(window=window).cpu().double() - want).abs().max() / want.abs().max()
    assert error < 4e-3, f"off by {error:.1e}"


def test_one_program_a_head_when_the_batch_fills_the_device() -> None:
    case = make_case([1, 40, 130], 1, 16, sms=1)
    assert case.shape.splits == 1
    assert_close(case.run(), definition(case, True, -1)[0])


@pytest.mark.parametrize("length", [1, 16, 32])
def test_few_keys_are_one_programs_and_leave_no_shares(length: int) -> None:
    case = make_case([length], 1, 16)
    case.workspace.out.fill_(float("nan"))
    assert_close(case.run(), definition(case, True, -1)[0])
    assert case.workspace.out.isnan().all(), f"{SMALL.alone} tiles are one program's"


def test_passes_that_share_a_workspace_never_see_each_other() -> None:
    wide, narrow = make_case([300, 40, 180], 4, 16), make_case([90, 347], 1, 16)
    wide.workspace = narrow.workspace = SplitWorkspace([narrow.shape, wide.shape], DEVICE)
    want = [definition(case, True, -1)[0] for case in (wide, narrow)]
    outs = [case.run() for case in (wide, narrow, wide, narrow)]
    for out, expected in zip(outs, want * 2, strict=True):
        assert_close(out, expected)


@pytest.mark.parametrize("config", KERNELS)
@pytest.mark.parametrize("sms", [1, 40], ids=["alone", "merged"])
def test_a_prefix_pass_sees_all_keys_and_says_their_sum(sms: int, config: SplitConfig) -> None:
    """With either config, Triton's kernel computes the log-sum-exp."""
    case = make_case([5, 90, 1, 260], 4, 16, sms=sms, config=config)
    lse = torch.full(case.q.shape[:2], float("nan"), dtype=torch.float32, device=DEVICE)
    out, want = case.run(causal=False, lse=lse), definition(case, False, -1)
    assert_close(out, want[0])
    assert_close(lse, want[1])


@pytest.mark.parametrize("config", KERNELS)
def test_a_request_is_blind_to_its_neighbours(config: SplitConfig) -> None:
    case = make_case([100, 333, 7, 64], 2, 16, config=config)
    alone = case.run()
    case.keys.seq_lens[torch.tensor([0, 2, 3])] = torch.tensor([31, 2, 2], dtype=torch.int32, device=DEVICE)
    case.q[:2] = 1.0
    assert torch.equal(case.run()[2:4], alone[2:4]), "request 1 is the same bit for bit"


LENGTHS = {
    "alike": [200] * 6,
    "one long": [16, 900, 20, 1, 33, 5],
    "rising": [10, 60, 110, 160, 210, 260],
    "short": [1, 1, 2, 16, 17, 1],
}


@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_a_schedule_has_every_share_once_and_balances_lengths(lens: list[int], splits: int) -> None:
    schedule = WorkSchedule.empty(len(lens), 2, splits, DEVICE)
    schedule.items.fill_(77)
    schedule_shares(torch.tensor(lens, dtype=torch.int32, device=DEVICE), splits, 16, schedule)
    items, tiles = schedule.items.tolist(), [-(-n // 16) for n in lens]
    given = [item for item in items if item >= 0]
    assert items == given + [-1] * (len(items) - len(given)), "those without work come last"
    shares = {item & 1023: item >> 20 for item in given}
    assert sorted(given) == sorted(b + (s << 10) + (shares[b] << 20) for b in range(len(lens)) for s in range(shares[b]))
    for at, item in enumerate(given):
        assert at == 0 or (item >> 10) & 1023 == 0 or items[at - 1] == item - (1 << 10), "shares of a request follow each other"
    long = [-(-tiles[item & 1023] // shares[item & 1023]) for item in given]
    assert long == sorted(long, reverse=True), "long shares begin first"
    assert max(long) <= -(-sum(tiles) * (4 * splits + 1) // (4 * splits**2 * len(lens))), "none is much longer than the mean"
    if len(set(lens)) == 1:
        assert set(shares.values()) == {splits}


@pytest.mark.parametrize("lens", [[w + 4 for w in lens] for lens in LENGTHS.values()], ids=LENGTHS.keys())
@pytest.mark.parametrize(("sms", "width", "window"), [(1, 1, -1), (24, 4, -1), (7, 3, 20)])
def test_scheduled_passes_follow_the_definition(lens: list[int], sms: int, width: int, window: int) -> None:
    case = make_case(lens, width, 16, sms=sms, config=SCHEDULED)
    want = definition(case, True, window)[0]
    for _ in range(2):  # the counters of one pass are reset before the next
        assert_close(case.run(window=window), want)
    assert case.keys.schedule is not None
    assert not case.keys.schedule.arrived.any()


@pytest.mark.parametrize("config", [SCHEDULED, WHOLE], ids=["scheduled", "whole"])
def test_an_ordered_prefix_pass_returns_the_log_sum_exp(config: SplitConfig) -> None:
    case = make_case([5, 90, 1, 260], 4, 16, sms=2, config=config)
    lse = torch.full(case.q.shape[:2], float("nan"), dtype=torch.float32, device=DEVICE)
    out, want = case.run(causal=False, lse=lse), definition(case, False, -1)
    assert_close(out, want[0])
    assert_close(lse, want[1])


def test_a_schedule_of_earlier_lengths_serves_later_passes() -> None:
    case = make_case([17, 300, 64, 5], 1, 16, sms=1, config=SCHEDULED)
    assert case.keys.schedule is not None
    case.shape.fill_schedule(torch.tensor([9, 20, 64, 400], dtype=torch.int32, device=DEVICE), case.keys.schedule)
    assert_close(case.run(), definition(case, True, -1)[0])


@pytest.mark.parametrize("lens", [[w + 4 for w in lens] for lens in LENGTHS.values()], ids=LENGTHS.keys())
@pytest.mark.parametrize(("width", "window"), [(1, -1), (4, -1), (3, 20)])
def test_whole_requests_follow_the_definition(lens: list[int], width: int, window: int) -> None:
    case = make_case(lens, width, 16, config=WHOLE)
    assert case.shape.partial_rows == 0
    assert_close(case.run(window=window), definition(case, True, window)[0])


def test_whole_requests_have_the_same_bits_in_any_order() -> None:
    case = make_case([17, 300, 64, 5, 120], 2, 16, config=WHOLE)
    first = case.run()
    case.shape.fill_schedule(torch.tensor([9, 20, 64, 400, 1], dtype=torch.int32, device=DEVICE), case.keys.schedule)
    assert torch.equal(case.run(), first)


@pytest.mark.parametrize("count", [1, 5, 16, 17, COMPARED_AT_ONCE, COMPARED_AT_ONCE + 3])
def test_requests_with_more_tiles_come_first(count: int) -> None:
    lens = np.random.default_rng(count).integers(1, 160, count)  # 10 tiles, so that many requests have equal ones
    order = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)
    order_requests(torch.from_numpy(lens).to(DEVICE, torch.int32), 16, order)
    assert order.tolist() == sorted(range(count), key=lambda b: (-(int(lens[b]) + 15 >> 4), b))


def test_the_most_scheduled_requests_may_all_differ_in_length() -> None:
    schedule, lens = WorkSchedule.empty(128, 2, 1, DEVICE), torch.arange(1, 8 * 128, 8, dtype=torch.int32, device=DEVICE)
    schedule_shares(lens, 1, 16, schedule)
    assert sorted({item & 1023 for item in schedule.items.tolist() if item >= 0}) == list(range(128))


@pytest.mark.parametrize("batch", [1, 2, 8, 32, 48, 64])
def test_workspace_made_for_several_passes_has_room_for_each(batch: int) -> None:
    shapes = [SplitShape(batch, width, 32, 8, 128, 132, H200.split_config(128, batch)) for width in (1, 2, 4, 8)]
    workspace = SplitWorkspace(shapes, torch.device("cpu"))
    for shape in shapes:
        assert shape.splits * shape.rows <= max(shape.config.max_partial_rows, shape.rows)
        most = len(shape.empty_schedule(torch.device("cpu")).items) if shape.config.scheduled else batch * shape.splits
        assert shape.partial_rows == 0 or workspace.top.numel() >= most * 8 * shape.rows
        assert workspace.out.numel() == workspace.top.numel() * 128


def test_passes_too_wide_for_the_tile_are_refused() -> None:
    assert supports(16, 32, 8)
    assert supports(1, 128, 1)
    assert not supports(17, 32, 8)
    assert not supports(16, 64, 4)
    assert not supports(0, 32, 8)


@pytest.mark.parametrize(("tree", "sinks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("width", [1, 4])
def test_warm_up_of_each_kind_compiles_all_batch_sizes(monkeypatch: pytest.MonkeyPatch, width: int, tree: bool, sinks: bool) -> None:
    import triton

    shapes = [SplitShape(size, width, 32, 8, 128, 132, H200.split_config(128, size)) for size in range(1, 81)]

    def run(shape: SplitShape) -> None:
        warm_up(shape, 64, DTYPE, DEVICE, tree=tree, window=-1, sinks=sinks, pdl=False)

    for shape in one_of_each_kernel(shapes):
        run(shape)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **info: compiled.append(info["repr"]))
    for shape in shapes:
        run(shape)
    assert not compiled
