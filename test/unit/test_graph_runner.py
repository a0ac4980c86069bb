"""The graph runner and its inputs, with a function whose results show every input it read."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.graph_capture import CallPool, GraphKey, GraphPool, Replay
from runtime.model_executor.graph_runner import MIB, GraphOptions, GraphRunner, Outputs, RunMode, RunnerSpec, capture_all
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.output_arena import OutputArena
from runtime.model_executor.staging import HostCopy, StagingRing
from runtime.model_executor.window import fill_window
from runtime.worker_info import RunnerRuns
from unit.driver import poison

CPU = torch.device("cpu")
WIDTH, LARGEST = 3, 8
SPEC = RunnerSpec(
    name="probe",
    mode=ForwardMode.TARGET_VERIFY,
    width=WIDTH,
    outputs=(BufferSpec("sums", "token", torch.int64), BufferSpec("rows", "req", torch.float32, (2,))),
    inputs=(BufferSpec("bias", "req", torch.int64, pad=5),),
    num_passes=2,
    variants=("", "twice"),
)


class Recorder:
    """An attention backend that records its plans, and whether garbage collection was on."""

    def __init__(self) -> None:
        self.plans: list[tuple[int, int, list[int]]] = []
        self.bounds: list[list[int]] = []
        self.collecting: list[bool] = []
        self.planned = 0

    def warmup_runs(self, sizes: Sequence[int], width: int, tree: bool) -> list[Callable[[], object]]:
        return []

    def prepare(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        assert len(self.plans) == self.planned, "a pass is prepared, then planned"
        self.plans.append((batch.batch_size, num_passes, batch.seq_lens.tolist()))
        self.bounds.append(batch.seq_len_bounds.tolist())
        self.collecting.append(gc.isenabled())

    def plan_on_device(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        self.planned = len(self.plans)


def probe(batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
    factor = 2 if variant else 1
    outputs["sums"].copy_(factor * (batch.input_ids + 10 * batch.positions + 1000 * batch.out_cache_loc))
    outputs["rows"][:, 0] = batch.req_pool_indices.float()
    outputs["rows"][:, 1] = batch.seq_lens.float()


def buffers() -> InputBuffers:
    return InputBuffers(LARGEST, max_tokens=LARGEST * WIDTH, device=CPU)


def on_cpu(sizes: list[int], padding: bool = True, **more: Any) -> GraphOptions:
    return GraphOptions(sizes, padding, cuda=False, node_bytes=H200.graph_node_bytes, **more)


def make(sizes: list[int], padding: bool = True) -> tuple[GraphRunner, InputBuffers, Recorder]:
    inputs, backend = buffers(), Recorder()
    runner = GraphRunner(SPEC, probe, inputs, [backend], on_cpu(sizes, padding))  # type: ignore[list-item]
    capture_all([runner])
    backend.plans.clear()
    backend.planned = 0
    return runner, inputs, backend


def load(runner: GraphRunner, inputs: InputBuffers, table: PageTable, rows: list[int], tokens: torch.Tensor) -> ForwardBatch:
    """Fill a batch as the workers do: rows padded with 0, then the window from their lengths."""
    size = runner.size_for(len(rows))
    batch = runner.batch(size)
    padded = torch.tensor(rows + [0] * (size - len(rows)))
    batch.set_rows(padded)
    lens = inputs.kv_lens(size)
    lens.copy_(torch.where(padded > 0, 4 * padded, 0).to(torch.int32))
    window = torch.zeros(size, WIDTH, dtype=torch.int64)
    window[: len(rows)] = tokens
    fill_window(batch, table, lens, window)
    return batch


@pytest.fixture
def table() -> PageTable:
    made = PageTable(LARGEST + 1, 64, 4, CPU)
    made.pages[1:] = torch.arange(1, 1 + LARGEST * made.max_pages).view(LARGEST, -1)
    return made


def test_padding_does_not_change_live_rows(table: PageTable) -> None:
    padded, inputs, _ = make([2, 4, 8])
    bare, own, _ = make([])
    rng = np.random.default_rng(0)
    for _ in range(40):
        live = int(rng.integers(1, LARGEST + 1))
        rows, tokens = (rng.permutation(LARGEST)[:live] + 1).tolist(), torch.from_numpy(rng.integers(0, 50, (live, WIDTH)))
        variant = str(rng.choice(["", "twice"]))
        poison(inputs.tensors)
        for buffer in padded.buffers.values():
            buffer.fill_(-1)
        got, replayed = padded.run(load(padded, inputs, table, rows, tokens), variant)
        expected, eager = bare.run(load(bare, own, table, rows, tokens), variant)
        assert (replayed, eager) == (True, False)
        assert torch.equal(got["sums"][: live * WIDTH], expected["sums"])
        assert torch.equal(got["rows"][:live], expected["rows"])
        assert torch.equal(got["rows"][live:, 0], torch.zeros(len(got["rows"]) - live)), "padding is row 0"
        assert torch.equal(got["rows"][live:, 1], torch.full((len(got["rows"]) - live,), float(WIDTH))), "its length is the width"


def test_padding_rows_write_only_slots_of_page_0(table: PageTable) -> None:
    runner, inputs, _ = make([8])
    batch = load(runner, inputs, table, [3, 1], torch.zeros(2, WIDTH, dtype=torch.int64))
    assert batch.out_cache_loc[2 * WIDTH :].tolist() == list(range(WIDTH)) * 6
    assert batch.out_cache_loc[: 2 * WIDTH].min() >= table.page_size


@pytest.mark.parametrize("mode", list(RunMode))
def test_every_run_is_planned_once_by_the_same_call(table: PageTable, mode: RunMode) -> None:
    runner, inputs, backend = make([4])
    runner.mode = mode
    batch = load(runner, inputs, table, [1, 2, 5], torch.ones(3, WIDTH, dtype=torch.int64))
    _, replayed = runner.run(batch)
    lens = [4 + WIDTH, 8 + WIDTH, 20 + WIDTH] + ([WIDTH] if mode is not RunMode.EAGER else [])
    assert backend.plans == [(len(lens), SPEC.num_passes, lens)]
    assert replayed == (mode is RunMode.REPLAY)


def test_capture_plans_padding_rows_largest_size_first() -> None:
    inputs, backend = buffers(), Recorder()
    runner = GraphRunner(SPEC, probe, inputs, [backend], on_cpu([2, 8, 4]))  # type: ignore[list-item]
    for size in (2, 8, 4):
        runner.batch(size).seq_len_bounds[:] = 1 << 20  # what the last step left
    poison(inputs.tensors)
    capture_all([runner])
    sizes = [size for size in (8, 4, 2) for _ in SPEC.variants]
    assert backend.plans == [(size, SPEC.num_passes, [WIDTH] * size) for size in sizes]
    assert backend.bounds == [[WIDTH] * size for size in sizes]


def test_no_garbage_is_collected_while_graphs_are_captured() -> None:
    backend = Recorder()
    runner = GraphRunner(SPEC, probe, buffers(), [backend], on_cpu([2, 4]))  # type: ignore[list-item]
    assert gc.isenabled()
    capture_all([runner])
    assert backend.collecting == [False] * 4
    assert gc.isenabled()


def test_a_function_warms_up_twice_before_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes record the calls: streams that are waited for or entered, and a graph that is recorded."""
    calls: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Named) -> None:
            calls.append(f"{self.name} waits for {other.name}")

        def replay(self) -> None:
            calls.append("replayed")

    @contextmanager
    def within(name: str) -> Iterator[None]:
        calls.append(f"enter {name}")
        yield
        calls.append(f"leave {name}")

    one = Named("current")
    fakes: dict[str, Any] = {
        "graph_pool_handle": lambda: "the pool",
        "Stream": lambda: Named("own"),
        "current_stream": lambda: one,
        "stream": lambda stream: within(stream.name),
        "CUDAGraph": lambda: Named("graph"),
        "graph": lambda graph, pool, stream: within(f"{graph.name} in {pool} on {stream.name}"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    GraphPool().capture((1, 1, ""), lambda: calls.append("run"))()
    warm = ["own waits for current", "enter own", "run", "leave own", "current waits for own"]
    assert calls == [*warm, "enter graph in the pool on own", "run", "leave graph in the pool on own", "replayed"]


def test_sizes_are_rounded_up_to_a_captured_one() -> None:
    runner = make([2, 4])[0]
    assert [runner.size_for(n) for n in (1, 2, 3, 4, 5)] == [2, 2, 4, 4, 5]
    exact = make([2, 4], padding=False)[0]
    assert [exact.size_for(n) for n in (1, 2, 3)] == [1, 2, 3]
    exact.mode = RunMode.EAGER
    assert exact.size_for(2) == 2
    runner.mode = RunMode.EAGER
    assert [runner.size_for(n) for n in (1, 3)] == [1, 3]


def test_batches_above_the_largest_size_run_eagerly(table: PageTable) -> None:
    runner, inputs, _ = make([2])
    batch = load(runner, inputs, table, [1, 2, 3], torch.ones(3, WIDTH, dtype=torch.int64))
    assert not runner.run(batch)[1]
    assert runner.runs() == RunnerRuns("probe", replayed=0, eager=1)


def test_a_replay_does_not_see_what_was_rebound_later(table: PageTable) -> None:
    """Like a captured graph, which holds addresses: only writes in place reach it."""
    runner, inputs, _ = make([2])
    batch = load(runner, inputs, table, [1, 2], torch.ones(2, WIDTH, dtype=torch.int64))
    sound = runner.run(batch)[0]["sums"].clone()
    old, batch.input_ids = batch.input_ids, batch.input_ids + 5
    assert torch.equal(runner.run(batch)[0]["sums"], sound), "the new tensor was never written into the inputs"
    batch.input_ids = old
    batch.input_ids.add_(5)
    assert torch.equal(runner.run(batch)[0]["sums"], sound + 5)


def test_results_stay_until_the_same_runner_runs_again(table: PageTable) -> None:
    inputs = buffers()
    runners = [GraphRunner(SPEC, probe, inputs, [], on_cpu([2])) for _ in range(2)]
    capture_all(runners)
    first, _ = runners[0].run(load(runners[0], inputs, table, [1, 2], torch.ones(2, WIDTH, dtype=torch.int64)))
    kept = {name: t.clone() for name, t in first.items()}
    runners[1].run(load(runners[1], inputs, table, [5, 6], 9 * torch.ones(2, WIDTH, dtype=torch.int64)))
    poison(inputs.tensors)
    assert all(torch.equal(first[name], t) for name, t in kept.items())


def test_each_shape_has_one_view() -> None:
    inputs = InputBuffers(4, max_tokens=24, device=CPU)
    a = inputs.view(ForwardMode.DECODE, 2, 6)
    assert inputs.view(ForwardMode.DECODE, 2, 6) is a
    wide = inputs.view(ForwardMode.DECODE, 2, 12)
    assert wide.input_ids.shape == (12,)
    assert wide.qo_indptr.tolist() == [0, 6, 12]
    assert a.tree_mask is None
    masked = inputs.view(ForwardMode.DECODE, 2, 6, 5)
    assert masked.tree_mask is not None
    assert masked.tree_tail == 5
    assert wide.input_ids.data_ptr() == a.input_ids.data_ptr(), "there is one set of inputs"


def test_padding_rows_hold_valid_values() -> None:
    inputs = InputBuffers(4, max_tokens=24, device=CPU)
    inputs.declare((BufferSpec("noise", "token", torch.float32, (2,), 3),), 4, 24)
    poison(inputs.tensors)
    assert all(bool((t.isnan() if t.is_floating_point() else t == -1).all()) for t in inputs.tensors.values())
    inputs.reset(6)
    pads = {"seq_lens": 6, "tree_mask": 1, "noise": 3}
    assert all(bool((t == pads.get(name, 0)).all()) for name, t in inputs.tensors.items())


def test_declared_inputs_grow_until_a_graph_is_captured() -> None:
    inputs = buffers()
    few, many = (replace(SPEC, name=name, width=width) for name, width in (("few", 1), ("many", 3)))
    runners = [GraphRunner(spec, probe, inputs, [], on_cpu([2], max_size=size)) for spec, size in ((few, 2), (many, 8))]
    assert [len(runner.inputs(2)["bias"]) for runner in runners] == [2, 2]
    assert len(inputs.tensors["bias"]) == 8
    other = replace(SPEC, inputs=(BufferSpec("bias", "req", torch.float32, pad=5),))
    with pytest.raises(AssertionError, match="declared twice"):
        GraphRunner(other, probe, inputs, [], on_cpu([2]))
    capture_all(runners)
    with pytest.raises(AssertionError, match="holds the address"):
        inputs.declare((BufferSpec("more", "req", torch.int64),), 1, 1)


def test_runners_share_an_arena_sized_for_the_largest() -> None:
    inputs, arena = buffers(), OutputArena(CPU)
    small = GraphRunner(replace(SPEC, name="small", width=1), probe, inputs, [], on_cpu([2], arena=arena))
    first = small.outputs(2)["sums"]
    large = GraphRunner(SPEC, probe, inputs, [], on_cpu([2], arena=arena))
    assert arena.storage.numel() == 512 + 512, "24 sums of 8 bytes and 8 rows of 8, each aligned"
    assert small.output_bytes + large.output_bytes == arena.storage.numel()
    assert small.outputs(2)["sums"].data_ptr() == large.outputs(2)["sums"].data_ptr() == arena.storage.data_ptr()
    assert first.data_ptr() != arena.storage.data_ptr() or first.untyped_storage().nbytes() == arena.storage.numel()
    assert [t.shape for t in large.outputs(2).values()] == [(6,), (2, 2)]
    capture_all([small, large])
    with pytest.raises(AssertionError, match="holds the address"):
        arena.reserve((BufferSpec("huge", "req", torch.int64, (1 << 10,)),), 8, 8)


def test_a_size_of_a_one_request_runner_counts_its_tokens() -> None:
    inputs, backend = InputBuffers(1, max_tokens=16, device=CPU), Recorder()
    runner = GraphRunner(replace(SPEC, mode=ForwardMode.EXTEND, width=0), probe, inputs, [backend], on_cpu([4, 16]))  # type: ignore[list-item]
    capture_all([runner])
    batch = runner.batch(runner.size_for(3))
    assert (batch.batch_size, batch.num_tokens, batch.tokens_per_req) == (1, 4, 4)
    outputs, replayed = runner.run(batch)
    assert (replayed, outputs["sums"].shape, outputs["rows"].shape) == (True, (4,), (1, 2))
    assert runner.run(batch, eager=True)[1] is False


def test_a_size_that_fails_to_capture_runs_eagerly(table: PageTable, caplog: pytest.LogCaptureFixture) -> None:
    class SmallPool(CallPool):
        def capture(self, key: GraphKey, function: Replay) -> Replay:
            if key == (8, 24, "twice"):
                raise torch.OutOfMemoryError("no memory")
            return super().capture(key, function)

    inputs = buffers()
    runner = GraphRunner(SPEC, probe, inputs, [], on_cpu([2, 8]))
    with caplog.at_level(logging.WARNING):
        assert runner.capture(SmallPool()) == [2]
    assert runner.sizes == runner.report().sizes == [2]
    assert "[8]" in caplog.text
    assert "--cuda-graph-max-bs to 2" in caplog.text
    assert not runner.run(load(runner, inputs, table, [1, 2, 3], torch.ones(3, WIDTH, dtype=torch.int64)))[1]
    runner.keep([])
    assert not runner.run(load(runner, inputs, table, [1, 2], torch.ones(2, WIDTH, dtype=torch.int64)))[1]
    assert "--disable-cuda-graph" in caplog.text


def test_reservations_cover_the_pool_and_graph_nodes() -> None:
    spec = replace(SPEC, launches=10)
    runner = GraphRunner(spec, probe, buffers(), [], GraphOptions([2, 4, 8], node_bytes=5800))
    runner.pool_peak = 5000
    nodes = 3 * len(SPEC.variants) * 10 * 5800
    for pooled, lacking in ((0, 5000), (3000, 2000), (9000, 0)):
        assert runner.reserve(pooled) == lacking + nodes
        assert runner.reserved_bytes == lacking + nodes + runner.output_bytes
        assert runner.report().reserved_mib == round(runner.reserved_bytes / MIB, 1) > 0
    for options in (on_cpu([2, 4, 8]), GraphOptions([], node_bytes=H200.graph_node_bytes)):
        assert GraphRunner(spec, probe, buffers(), [], options).reserve(0) == 0


# ---- the window


@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_window_stands_after_each_requests_kv(page: int) -> None:
    table = PageTable(4, 64, page, CPU)
    table.pages[1:] = torch.randperm(3 * table.max_pages, generator=torch.Generator().manual_seed(0)).view(3, -1) + 1
    batch = InputBuffers(3, max_tokens=12, device=CPU).view(ForwardMode.TARGET_VERIFY, 3, 12)
    batch.set_rows(torch.tensor([2, 0, 3]))
    lens, tokens = torch.tensor([13, 0, 30], dtype=torch.int32), torch.arange(12).view(3, 4)
    depths = torch.tensor([[0, 1, 1, 2]] * 3)
    for given in (None, depths):
        fill_window(batch, table, lens, tokens, given)
        for i, row in enumerate((2, 0, 3)):
            for j in range(4):
                at = int(lens[i]) + j
                token = i * 4 + j
                assert batch.input_ids[token] == token
                assert batch.positions[token] == int(lens[i]) + (j if given is None else int(depths[i, j]))
                assert batch.out_cache_loc[token] == int(table.pages[row, at // page]) * page + at % page
        assert batch.seq_lens.tolist() == [17, 4, 34]


# ---- staging


def test_staged_arrays_are_copies() -> None:
    ring = StagingRing(64, CPU)
    a, b = np.arange(5, dtype=np.int32), np.array([7, 1 << 40])
    on_device = ring.upload(a, b, a[:0])
    a[:] = b[:] = -1
    assert [t.tolist() for t in on_device] == [[0, 1, 2, 3, 4], [7, 1 << 40], []]
    assert [t.dtype for t in on_device] == [torch.int32, torch.int64, torch.int32]


def test_host_copies_are_not_changed_by_the_next_step() -> None:
    tokens, lens = torch.arange(4), torch.ones(2)
    copy = HostCopy(tokens, lens)
    tokens.zero_()
    lens.zero_()
    got = copy.wait()
    assert got[0].tolist() == [0, 1, 2, 3]
    assert got[1].tolist() == [1.0, 1.0]
    assert HostCopy().wait() == []
