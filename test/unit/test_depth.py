"""Draft depth is a number: the table of depths, the chooser, and workers that change depth at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.batch import BatchResult, RowInit, ScheduleBatch, SpeculationChange, no_ints
from runtime.errors import RequestError
from runtime.layers.linear import Linear
from runtime.managers.messages import GenerateReq
from runtime.model_executor import build
from runtime.model_executor.depth import DepthBatches, DepthControl, depths_to_drop, split_batch_sizes, split_by_depth
from runtime.model_executor.depth_controller import DecodeRows, DepthController, Observed, Windows
from runtime.model_executor.depth_option import Option
from runtime.model_executor.device_queue import DeviceQueue
from runtime.model_executor.iteration_cost import CostPoint, IterationCost
from runtime.model_executor.scratch_prompts import scratch_prompts
from runtime.sampling_params import SamplingParams
from unit.driver import GREEDY, Driver, EveryNth, planned
from unit.predicting import VOCAB, exact_product, plain, speculating
from unit.storm import SIZES as STORM_SIZES
from unit.storm import Storm, same_life
from unit.test_eagle_worker import MIXED
from unit.test_served_speculation import CONTEXT, prompts, serve

PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + 3 * r).tolist() for r in (1, 2, 3)}


def test_the_deepest_depth_that_serves_the_batch_is_chosen() -> None:
    control = DepthControl({7: 2, 3: 8, 1: 32, 0: 256}, 257, Captured())
    assert [planned(control, size) for size in (0, 1, 2, 3, 8, 9, 32, 33, 256)] == [0, 7, 7, 3, 3, 1, 1, 0, 0]


def test_a_fixed_depth_and_depth_0_serve_all_batches() -> None:
    both = DepthBatches(8, 8, [1, 2, 4], [1, 2, 4])
    assert split_batch_sizes(3, None, 8, [1, 2, 4], True) == {3: both, 0: both}
    table = split_batch_sizes(3, None, 256, [*range(1, 257)], True)
    assert (table[3].captured, table[3].running, table[0].running) == ([*range(1, 257)], 256, 256)
    assert table[0].captured == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256], "few sizes, because batches without drafts are rare"
    assert split_batch_sizes(0, None, 8, [], True) == {0: DepthBatches(8, 8, [], [1, 8])}


def test_larger_batches_run_at_depth_0() -> None:
    table = split_batch_sizes(3, 4, 16, [1, 2, 8, 16], True)
    assert table == {3: DepthBatches(4, 8, [1, 2, 8], [1, 2, 8]), 0: DepthBatches(16, 16, [1, 2, 8, 16], [1, 2, 8, 16])}


def test_a_forced_depth_ends_with_its_context() -> None:
    control = DepthControl({3: 4, 0: 16}, 17, Captured())
    with control.forced(0):
        assert planned(control, 1) == 0
    assert (planned(control, 1), planned(control, 5), control.deepest) == (3, 0, 3)
    with pytest.raises(AssertionError, match="is not in the table"), control.forced(2):
        pass


def test_one_depth_is_chosen_from_the_requests_of_all_attention_groups() -> None:
    control = DepthControl(dict.fromkeys(DEPTHS, 8), 9, Captured(), groups=3)
    chosen, read = list[tuple[DecodeRows, dict[int, int]]](), list[Windows]()

    class Recorder:
        def choose(self, rows: DecodeRows, sizes: dict[int, int], *_: Any) -> Option:
            chosen.append((rows, sizes))
            return Option(2, 0.0, 0.0)

        def observe_windows(self, windows: Windows) -> None:
            read.append(windows)

    control.controller = Recorder()  # type: ignore[assignment]

    def section(kv: list[int], limit: int, temperature: float) -> ScheduleBatch:
        rows = np.arange(1, len(kv) + 1, dtype=np.int32)
        sampling = SamplingParams(temperature=temperature, max_new_tokens=100, speculative_num_steps=limit)
        new = [RowInit(row, 10, sampling, 0, no_ints()) for row in rows.tolist()]
        return ScheduleBatch(1, rows, np.array(kv, dtype=np.int32), np.full(len(kv), -1, dtype=np.int32), new_rows=new)

    batch = ScheduleBatch.of_groups([section([20], 7, 0.0), section([30, 40], 1, 1.0), section([], 7, 0.0)])
    control.choose(batch)
    assert batch.depth == 2
    ((rows, sizes),) = chosen
    assert (rows.caps.tolist(), rows.greedy.tolist(), rows.left.tolist()) == ([7, 1, 1], [True, False, False], [90, 80, 70])
    assert rows.kv_tokens == 70, "of the group with the most"
    assert set(sizes.values()) == {2}, "that of the largest group"
    observe = control.observer_of_groups(batch)
    for each in batch.sections:
        each.depth = batch.depth
    none = no_ints()
    observe([BatchResult(np.array([5, 6, 7], dtype=np.int32), np.array([2, 1], dtype=np.int32)), BatchResult(none, none)])
    (windows,) = read
    assert (windows.accept_lens.tolist(), windows.drafted.tolist(), windows.greedy.tolist()) == ([2, 1], [1, 1], [False, False])


def test_every_attention_group_knows_which_of_its_requests_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window counts in the class of the step that planned it, even if its request copies by the time it is read."""
    control = DepthControl(dict.fromkeys(DEPTHS, 8), 9, Captured(), groups=2)
    control.controller = DepthController(DEPTHS, IterationCost([CostPoint(1, 0, 1e-3)]))
    chosen, read = list[list[bool]](), list[list[bool]]()
    choose = control.controller.choose
    monkeypatch.setattr(control.controller, "choose", lambda rows, *rest: chosen.append(rows.copied.tolist()) or choose(rows, *rest))
    monkeypatch.setattr(control.controller, "observe_windows", lambda windows: read.append(windows.copied.tolist()))
    text = np.random.default_rng(0).integers(0, 1 << 17, 26).astype(np.int32)
    prompt, copying, other = text[:20], text[2:8], text[20:]

    def planned(step: int, new: bool) -> tuple[ScheduleBatch, Callable[[Sequence[BatchResult]], None]]:
        sections = []
        for size in (1, 2):
            rows = np.arange(1, size + 1, dtype=np.int32)
            inits = [RowInit(row, 20, SamplingParams(), 0, no_ints(), tokens=prompt) for row in rows.tolist()] if new else []
            sections.append(ScheduleBatch(step, rows, rows + 40, rows * 0 - 1, new_rows=inits))
        batch = ScheduleBatch.of_groups(sections)
        control.choose(batch)
        for section in sections:
            section.depth = 5
        return batch, control.observer_of_groups(batch)

    first, observe_first = planned(1, new=True)
    second, observe_second = planned(2, new=False)  # submitted before the first is read
    lens = np.full(2, 6, dtype=np.int32)
    for batch, observe in ((first, observe_first), (second, observe_second)):
        control.read(batch.sections[0], BatchResult(other, lens[:1]))
        observe([BatchResult(np.concatenate([other, copying]), lens)])
    third, observe_third = planned(3, new=False)
    observe_third([BatchResult(np.concatenate([other, other]), lens)])
    assert chosen == [[False] * 3, [False] * 3, [False, False, True]]
    assert read == [[False, False], [False, False], [False, True]]
    planned(4, new=False)
    assert chosen[-1] == [False] * 3
    assert [section.copied.tolist() for section in third.sections] == [[False], [False, True]]


def test_without_a_controller_no_prompt_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    control = DepthControl({3: 8, 0: 8}, 9, Captured())
    for name in ("admit", "read", "copied"):
        monkeypatch.setattr(control.copied[0], name, None)
    rows, prompt = np.array([1], dtype=np.int32), np.arange(20, dtype=np.int32)
    batch = ScheduleBatch(1, rows, rows + 20, rows - 2, new_rows=[RowInit(1, 20, SamplingParams(), 0, no_ints(), tokens=prompt)])
    control.choose(batch)
    assert control.read(batch, BatchResult(rows, rows)).tolist() == [True]


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
@pytest.mark.parametrize("replay", [None, "eager"])
def test_text_does_not_depend_on_the_depth_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, replay: str | None
) -> None:
    """A table of more depths is the only change: drafter, verification and acceptance take any of them."""
    samplings = {1: SamplingParams(temperature=0.0), 2: SamplingParams(temperature=0.0, repetition_penalty=1.3), 3: SamplingParams()}
    expected = Driver(plain()).generate(PROMPTS, 24, sampling=samplings)
    sizes = [2, 4] if replay else []
    table = {depth: DepthBatches(40, 40, sizes, sizes) for depth in (5, 3, 2, 1, 0)}
    monkeypatch.setattr(build, "make_depths", lambda *args: table)
    worker: Any = speculating(tmp_path, algorithm, replay, sizes, num_steps=5)
    assert planned(worker.parts.depths, 3) == 5
    driver, used = Driver(worker), set[int]()
    driver.prefill(PROMPTS, sampling=samplings, room=160)
    for step in range(24):
        depth = (5, 0, 2, 1, 3)[step % 5]
        with worker.parts.depths.forced(depth):
            result = driver.decode(list(PROMPTS))
        assert result.stats.draft_tokens == depth
        used.update(result.accept_lens[:2].tolist())
    assert all(driver.out[row][:24] == expected[row] for row in (1, 2))
    assert max(used) > 1
    if replay:
        assert all(runner.replayed for runner in worker.runners)
    assert worker.parts.monitor.counted().drafted[0] == 24 // 5 * 4 * 3 + 3 * 3


# ---- several depths, and a controller that chooses


DEPTHS = (0, 1, 2, 3, 5, 7)
AUTO: dict[str, Any] = {"num_steps": max(DEPTHS), "depths": DEPTHS}
SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]


def test_usual_depths_have_all_batch_sizes_and_others_few() -> None:
    table = split_by_depth(DEPTHS, None, 40, SIZES, True)
    assert list(table) == [7, 5, 3, 2, 1, 0]
    assert {depth: batches.running for depth, batches in table.items()} == {7: 32, 5: 40, 3: 40, 2: 40, 1: 40, 0: 40}
    assert table[3] == table[0] == DepthBatches(40, 40, SIZES, SIZES)
    assert table[7].captured == [1, 2, 4, 8, 16, 32]
    assert table[1].captured == [1, 2, 4, 8, 16, 32, 40]
    assert split_by_depth((0, 1, 2), None, 40, SIZES, True)[2].captured == SIZES, "few depths have all"


def test_common_sizes_run_without_padding_and_gaps_are_narrow() -> None:
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, *range(32, 257, 8)]
    table = split_by_depth(DEPTHS, None, 256, sizes, True)
    assert table[2].captured == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]
    assert table[1].captured == [1, 2, 4, 8, 16, 32, 48, 64, *range(72, 257, 8)], "large batches often run at depth 1"
    assert split_by_depth(DEPTHS, None, 13, [1, 5, 9, 13], True)[2].captured == [1, 5, 9, 13]


def test_above_the_batch_limit_no_depth_drafts() -> None:
    table = split_by_depth(DEPTHS, 5, 40, SIZES, True)
    assert {batches.running for depth, batches in table.items() if depth} == {5}
    assert table[3].captured == [1, 2, 3, 4, 6], "batches of five are padded to six"
    assert split_by_depth(DEPTHS, 5, 40, SIZES, False)[3].captured == [1, 2, 3, 4]


def test_the_deepest_graphs_are_left_out_where_memory_is_short() -> None:
    sizes = {0: 10, 1: 10, 2: 10, 3: 40, 5: 10, 7: 20}
    assert [depths_to_drop(sizes, most) for most in (100, 85, 75, 10)] == [[], [7], [7, 5], [7, 5, 2, 1]]


class Captured:
    """Graphs of all batch sizes, over full windows."""

    ragged_depth = 3

    def padded_size(self, depth: int, live: int) -> int:
        return live

    def has_graph(self, depth: int, size: int) -> bool:
        return True

    def ragged_passes(self, live: int) -> list[tuple[int, int]]:
        return []

    def shared_size(self, depth: int, live: int, shared_tokens: int) -> int:
        return live + 2 if depth in (1, 3) else 0


def test_a_depth_without_a_graph_is_not_chosen_beside_others() -> None:
    class FewGraphs(Captured):
        def padded_size(self, depth: int, live: int) -> int:
            return live if depth == 7 else live + 1

        def has_graph(self, depth: int, size: int) -> bool:
            return depth in (0, 3)

    control = DepthControl(dict.fromkeys(DEPTHS, 8), 9, FewGraphs())
    seen: list[dict[int, int]] = []

    class Recorder:
        def choose(self, rows: DecodeRows, sizes: dict[int, int], *_: Any) -> Option:
            seen.append(sizes)
            return Option(3, 0.0, 0.0)

    control.controller = Recorder()  # type: ignore[assignment]
    assert planned(control, 2) == 3
    assert seen == [{0: 3, 3: 3}]


def test_the_controller_sees_how_much_each_request_may_still_write() -> None:
    control = DepthControl(dict.fromkeys(DEPTHS, 8), 9, Captured())
    seen: list[list[int]] = []

    class Recorder:
        def choose(self, rows: DecodeRows, sizes: dict[int, int], *_: Any) -> Option:
            seen.append(rows.left.tolist())
            return Option(3, 0.0, 0.0)

    control.controller = Recorder()  # type: ignore[assignment]
    new = [RowInit(row, 10 * row, SamplingParams(max_new_tokens=50), 0, no_ints()) for row in (1, 2)]
    rows, kv_lens = np.array([1, 2], dtype=np.int32), np.array([20, 75], dtype=np.int32)
    control.choose(ScheduleBatch(1, rows, kv_lens, rows, new_rows=new))
    assert seen == [[40, 1]]


def test_the_controller_sees_which_depths_read_a_shared_prefix_once() -> None:
    control = DepthControl({0: 8, 1: 8, 3: 8, 5: 8}, 9, Captured())
    seen: list[tuple[list[int], dict[int, int]]] = []

    class Recorder:
        def choose(self, rows: DecodeRows, sizes: dict[int, int], *_: Any) -> Option:
            seen.append(([rows.context(depth) for depth in (0, 1, 3, 5)], sizes))
            return Option(3, 0.0, 0.0)

    control.controller = Recorder()  # type: ignore[assignment]
    rows, kv_lens = np.array([1, 2, 3], dtype=np.int32), np.array([120, 175, 105], dtype=np.int32)
    control.choose(ScheduleBatch(1, rows, kv_lens, rows, shared_tokens=100))
    control.choose(ScheduleBatch(2, rows, kv_lens, rows))
    assert seen == [([400, 300, 300, 400], {0: 3, 1: 5, 3: 5, 5: 3}), ([400] * 4, {0: 3, 1: 3, 3: 3, 5: 3})]


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
@pytest.mark.parametrize("replay", [None, "eager"])
def test_text_survives_a_change_of_depth_at_every_step(tmp_path: Path, algorithm: str, replay: str | None) -> None:
    """Every ordered pair of depths follows each other; the last row draws by the strict rule where there is no draft model."""
    warm = SamplingParams(temperature=0.8, top_k=20, seed=5)
    samplings = {1: SamplingParams(temperature=0.0), 2: SamplingParams(temperature=0.0, frequency_penalty=0.4), 3: warm}
    expected = Driver(plain()).generate(PROMPTS, 36, sampling=samplings)
    pairs = [depth for gap in range(1, len(DEPTHS)) for i in range(len(DEPTHS)) for depth in (DEPTHS[i], DEPTHS[(i + gap) % len(DEPTHS)])]
    worker: Any = speculating(tmp_path, algorithm, replay, [2, 4] if replay else [], **AUTO)
    driver = Driver(worker)
    driver.prefill(PROMPTS, sampling=samplings, room=180)
    used = set[int]()
    for depth in pairs:
        rows = [row for row in PROMPTS if len(driver.out[row]) < 36]
        if rows:
            with worker.parts.depths.forced(depth):
                result = driver.decode(rows)
            assert result.stats.depth == result.stats.draft_tokens == depth
            used.add(depth)
    assert used == set(DEPTHS)
    same = PROMPTS if algorithm == "NGRAM" else (1, 2)
    assert {row: driver.out[row][:36] for row in same} == {row: expected[row] for row in same}
    if replay:
        assert all(runner.replayed for runner in worker.runners)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
def test_a_life_of_batches_at_all_depths_in_turn_is_the_same_through_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.setattr(Linear, "__call__", exact_product)

    def life(replay: str | None) -> Storm:
        worker: Any = speculating(tmp_path, algorithm, replay, STORM_SIZES if replay else None, runtime={"page_size": 16}, **AUTO)
        with worker.parts.depths.in_turn():
            return Storm(worker, 7, MIXED, poison=replay is not None).run(6)

    same_life(life(None), life("eager"))


@pytest.mark.parametrize("depth", [1, 5])
def test_a_stale_graph_of_any_depth_raises_the_drift_alarm(tmp_path: Path, depth: int) -> None:
    """Samples of the draft alone find it."""
    worker: Any = speculating(tmp_path, "EAGLE", "eager", STORM_SIZES, **AUTO)
    monitor, state = worker.parts.monitor, worker.parts.drafter.state
    monitor.schedule = EveryNth(5, verify=False)
    extend = worker.parts.drafter.extend[depth]
    extend._replays = {key: (lambda replay=replay: (replay(), state.guesses.zero_())) for key, replay in extend._replays.items()}
    prompts = {r: np.random.default_rng(r).integers(0, VOCAB, 6).tolist() for r in range(1, 9)}
    found = list[bool]()
    for sound in (True, False):
        with worker.parts.depths.forced(3 if sound else depth):
            for _ in range(2):
                Driver(worker).generate(prompts, 40)
        found.append(bool(monitor.alarm.check()))
    assert found == [False, True]


@pytest.mark.usefixtures("full_measurement")
def test_the_controller_chooses_and_learns(tmp_path: Path) -> None:
    worker: Any = speculating(tmp_path, "EAGLE", **AUTO)
    measured = worker.info().depth
    assert set(measured.milliseconds["1"]) == {str(depth) for depth in DEPTHS}
    assert worker.info().startup_seconds["measure_depths"] > 0
    driver = Driver(worker)
    sampling = {1: SamplingParams(temperature=0.0), 2: SamplingParams(temperature=0.0), 3: SamplingParams()}
    expected = Driver(plain()).generate(PROMPTS, 40, sampling=sampling)
    got = driver.generate(PROMPTS, 40, sampling=sampling, room=160)
    assert {row: got[row] for row in (1, 2)} == {row: expected[row] for row in (1, 2)}
    learnt = worker.info().depth
    assert sum(learnt.chosen.values()) == len(driver.results)
    assert learnt.milliseconds != measured.milliseconds
    if any(result.stats.depth for result in driver.results):
        assert learnt.greedy.rates != measured.greedy.rates


def test_an_iteration_takes_the_time_between_two_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the part of it in which the host counts what the iteration before accepted. Steps are launched before others are read."""
    worker: Any = speculating(tmp_path, "EAGLE", **AUTO)
    worker._queue.close()
    worker._queue = DeviceQueue(worker._step, torch.device("cuda"))
    clock, seconds = [100.0], list[float | None]()

    class Recorder:
        def observe(self, read: Observed) -> None:
            seconds.append(read.seconds)
            clock[0] += 1.0

    rows, last = np.array([1], dtype=np.int32), np.array([-1], dtype=np.int32)
    worker.submit(scratch_prompts(rows, np.full((1, 4), 7, dtype=np.int32), 40)).wait()
    monkeypatch.setattr("runtime.model_executor.worker.time.perf_counter", lambda: clock[0])
    worker.parts.depths.controller = Recorder()
    with worker.parts.depths.forced(1):
        pending = [worker.submit(ScheduleBatch(step, rows, np.array([2 + 2 * step], dtype=np.int32), last)) for step in (1, 2, 3, 4)]
        for one in pending:
            one.wait()
    assert seconds[1:] == [1.0, 1.0, 1.0]


def test_times_that_a_sample_changes_are_not_learned(tmp_path: Path) -> None:
    """It is launched before the previous iteration is read, whose time it adds to, and then runs before the next one."""
    worker: Any = speculating(tmp_path, "EAGLE", replay="eager", sizes=[1], **AUTO)
    worker._queue.close()
    worker._queue = DeviceQueue(worker._step, torch.device("cuda"))
    known = list[bool]()

    class Recorder:
        def observe(self, read: Observed) -> None:
            known.append(read.seconds is not None)

    rows, last, pending = np.array([1], dtype=np.int32), np.array([-1], dtype=np.int32), list[Any]()
    worker.submit(scratch_prompts(rows, np.full((1, 4), 7, dtype=np.int32), 40)).wait()
    worker.parts.depths.controller = Recorder()
    worker.parts.monitor.schedule = EveryNth(5, verify=False)
    with worker.parts.depths.forced(1):
        for step in range(1, 10):
            pending.append(worker.submit(ScheduleBatch(step, rows, np.array([2 + 2 * step], dtype=np.int32), last)))
            if step > 1:
                pending.pop(0).wait()
        pending.pop(0).wait()
    assert known[1:] == [True, True, False, False, False, True, True, True]


@pytest.mark.usefixtures("full_measurement")
def test_the_measurement_replays_graphs_and_leaves_nothing(tmp_path: Path) -> None:
    worker: Any = speculating(tmp_path, "EAGLE", "eager", [1, 4, 16, 40], **AUTO)
    assert all(runner.ran_eagerly == 0 for runner in worker.parts.verifier.runners.values()), "no eager sample, and padded to graphs"
    assert worker.parts.verifier.runners[0].replayed > 0
    assert worker.parts.monitor.counted().iterations == 0
    assert worker.parts.target.rows.kv_lens.sum() == worker.parts.target.page_table.pages.sum() == 0


def test_runners_that_are_left_out_capture_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "depths_to_drop", lambda graph_bytes, most: [7])
    worker: Any = speculating(tmp_path, "EAGLE", "eager", [1, 2, 4, 40], **AUTO)
    assert "no graphs for depth 7" in caplog.text
    assert [runner.sizes for runner in (worker.parts.verifier.runners[7], *worker.parts.drafter.runners(7))] == [[], [], []]
    driver = Driver(worker)
    driver.generate(PROMPTS, 24, room=160)
    assert worker.info().depth.chosen["7"] == 0, "other depths have graphs"


def test_ranks_drop_the_depths_that_do_not_fit_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = list[int]()

    def all_runners(depth: int) -> list[Any]:
        return [SimpleNamespace(spec=SimpleNamespace(name=f"verify K={depth}"), leave_out=lambda: dropped.append(depth))]

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 << 30, 4 << 30))
    parts: Any = SimpleNamespace(
        all_runners=all_runners,
        depths=SimpleNamespace(limits=dict.fromkeys((7, 1, 0))),
        target=SimpleNamespace(device=torch.device("cuda")),
    )
    graph_bytes = {f"verify K={depth}": int(0.3 * build.MAX_GRAPH_SHARE * (2 << 30)) for depth in (7, 1, 0)}
    for others, want in (([], []), ([1 << 20], [7, 1]), ([1 << 40], [])):
        dropped.clear()
        context: Any = SimpleNamespace(group=SimpleNamespace(gather=lambda most, others=others: [most, *others]))
        build._drop_depths(context, parts, graph_bytes)
        assert dropped == want


def test_depth_and_acceptance_change_while_running(tmp_path: Path) -> None:
    worker: Any = speculating(tmp_path, "EAGLE", "eager", [1, 2, 4], **AUTO, synthetic_accept=(0.0,) * 7)
    driver = Driver(worker)
    driver.prefill(PROMPTS, sampling={**dict.fromkeys(PROMPTS, GREEDY), 2: SamplingParams(speculative_num_steps=2)}, room=160)
    rows = list(PROMPTS)
    for depth, runs_at in ((3, 3), (0, 0), (7, 7)):
        worker.change_speculation(SpeculationChange(depth=depth))
        results = [driver.decode(rows) for _ in range(3)]
        assert {result.stats.depth for result in results} == {runs_at}
        assert {int(n) for result in results for n in result.accept_lens} == {1}
    assert driver.decode([2]).stats.depth == 2, "the request's own limit holds"
    worker.change_speculation(SpeculationChange(acceptance=(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))
    assert driver.decode(rows).accept_lens.tolist() == [3, 3, 3]
    worker.change_speculation(SpeculationChange(depth=-1))
    assert sum(driver.decode(rows).stats.depth != 7 for _ in range(20)) > 0, "the controller chooses again"
    with pytest.raises(RequestError, match="must be auto, or one of 0, 1, 2, 3, 5, 7; got 4"):
        worker.change_speculation(SpeculationChange(depth=4))
    real: Any = speculating(tmp_path, "EAGLE")
    with pytest.raises(RequestError, match="--speculative-synthetic-accept-length"):
        real.change_speculation(SpeculationChange(acceptance=(0.5, 0.5, 0.5)))


# ---- requests that take fewer drafts


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
@pytest.mark.parametrize("warm", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}, {"temperature": 0.7, "presence_penalty": 0.5}])
def test_a_capped_request_gets_the_text_of_that_depth(tmp_path: Path, algorithm: str, warm: dict[str, float]) -> None:
    """Beside a request that takes every draft, and with a seed: an opted-out request gets the text of plain decoding."""

    def asks(*caps: int | None) -> dict[int, SamplingParams]:
        return {row: SamplingParams(**warm, seed=row, speculative_num_steps=cap) for row, cap in enumerate(caps, 1)}

    worker: Any = speculating(tmp_path, algorithm, num_steps=3)
    driver = Driver(worker)
    got = driver.generate(PROMPTS, 24, sampling=asks(0, 1, None), room=160)
    by_row = [[lens.tolist()[i] for lens in driver.accepts if len(lens) == 3] for i in range(3)]
    assert max(by_row[0]) == 1
    assert max(by_row[1]) <= 2
    assert got[1] == Driver(plain()).generate(PROMPTS, 24, sampling=asks(None, None, None))[1]
    shallow: Any = speculating(tmp_path, algorithm, num_steps=1)
    assert got[2] == Driver(shallow).generate(PROMPTS, 24, sampling=asks(None, None, None), room=160)[2]


def test_a_capped_request_takes_fewer_levels_of_a_tree(tmp_path: Path) -> None:
    sampling = {1: SamplingParams(seed=1, speculative_num_steps=0), 2: SamplingParams(seed=2, speculative_num_steps=1), 3: GREEDY}
    driver = Driver(speculating(tmp_path, num_steps=3, topk=3, num_draft_tokens=7))
    got = driver.generate(PROMPTS, 24, sampling=sampling, room=160)
    assert max(int(lens[0]) for lens in driver.accepts if len(lens) == 3) == 1
    assert max(int(lens[1]) for lens in driver.accepts if len(lens) == 3) == 2
    assert got == Driver(plain()).generate(PROMPTS, 24, sampling=sampling), "the strict rule draws what plain decoding draws"


def test_a_batch_runs_at_the_largest_cap_of_its_requests(tmp_path: Path) -> None:
    worker: Any = speculating(tmp_path, "EAGLE", **AUTO)
    worker.parts.depths.controller = None  # then the deepest depth that serves the batch
    driver = Driver(worker)
    driver.prefill(
        PROMPTS, sampling={r: SamplingParams(temperature=0.0, speculative_num_steps=c) for r, c in ((1, 0), (2, 2), (3, 5))}, room=160
    )
    depths = [driver.decode(rows).stats.depth for rows in ([1], [1, 2], [2], [1, 2, 3], [3, 1], [1])]
    assert depths == [0, 2, 2, 5, 5, 0]


@pytest.mark.parametrize(("caps", "depth"), [((0, 0), 0), ((1, 0), 3), ((2, 2), 3), ((3, 0), 3), ((9, 1), 3)])
def test_a_cap_below_the_only_depth_does_not_disable_drafts(caps: tuple[int, int], depth: int) -> None:
    """Larger batches run at depth 0. The same holds while the depth of a controller is fixed."""
    chosen = DepthControl({3: 4, 0: 16}, 3, Captured())
    chosen.controller = DepthController((0, 3), IterationCost([CostPoint(1, 0, 1e-3)]))
    chosen.fix(3)
    for control in (DepthControl({3: 4, 0: 16}, 3, Captured()), chosen):
        new = [RowInit(row, 4, SamplingParams(speculative_num_steps=cap), 0, no_ints()) for row, cap in enumerate(caps, 1)]
        assert planned(control, 2, new) == depth
        control.fix(0)
        assert planned(control, 2) == 0


def test_caps_are_not_counted_as_rejections(tmp_path: Path) -> None:
    worker: Any = speculating(tmp_path, "STANDALONE", num_steps=3)
    driver = Driver(worker)
    driver.prefill(
        PROMPTS, sampling={row: SamplingParams(temperature=0.0, speculative_num_steps=0 if row < 3 else None) for row in PROMPTS}
    )
    for _ in range(5):
        driver.decode([1, 2, 3])
    assert worker.parts.monitor.counted().iterations == 5, "those of the request that takes all drafts"


@pytest.mark.parametrize("algorithm", ["EAGLE", "NGRAM"])
def test_served_text_is_that_of_plain_decoding_at_any_depth(tmp_path: Path, algorithm: str) -> None:
    roomy = {"context_length": CONTEXT, "max_running_requests": 8}
    ids = prompts()
    asks = [
        GenerateReq(
            rid=str(i), input_ids=ids[i], sampling=SamplingParams(temperature=0.0, max_new_tokens=40, speculative_num_steps=cap), seed=i
        )
        for i, cap in enumerate((None, 0, None, 2))
    ]
    expected, _ = serve(plain(**roomy), asks, {}, radix_cache=False)
    got, scheduler = serve(speculating(tmp_path, algorithm, runtime=roomy, **AUTO), asks, {}, overlap=algorithm != "NGRAM")
    assert got == expected
    stats = scheduler.stats
    assert sum(stats.spec_depth_steps_total.values()) >= stats.decode.steps > 0
    assert stats.spec_depth_steps_total.get("0", 0) == stats.spec_paused_steps_total
    assert stats.spec.accepted_tokens == sum(stats.spec.accepted_by_position)
    assert stats.num_failed_steps_total == 0
