"""One graph per iteration computes what three graphs compute, bit for bit, and leaves to them what it does not cover."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.batch import PAD_ROW
from runtime.config.device_tuning import H200
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.errors import ConfigError, RanksDiffer
from runtime.model_executor import build as worker_build
from runtime.model_executor import iteration_graph
from runtime.model_executor.depth import DepthBatches
from runtime.model_executor.followers import Followers
from runtime.model_executor.graph_runner import GraphOptions, RunMode, eagerly
from runtime.model_executor.iteration import DraftCaps, Iteration
from runtime.model_executor.iteration_graph import IterationGraphs, iteration_graph_depths
from runtime.model_executor.parity import check_parity
from runtime.sampling_params import SamplingParams
from unit.driver import Driver, EveryNth
from unit.predicting import VOCAB, plain, speculating
from unit.ranks import ranks
from unit.storm import SIZES, Storm, drafting, same_life, same_past
from unit.test_eagle_worker import MIXED
from unit.test_invariants import NoHostCalls, NoHostReads, unwatched_plan
from unit.test_sparse_workers import family
from unit.tiny import tiny_runtime, tiny_speculative

PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + 3 * r).tolist() for r in (1, 2, 3)}
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.9)
FILTERED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)


class NoHostTensors(TorchDispatchMode):
    """Fails where a tensor is made of a Python value, as `tensor[0] = 0` does: a capture cannot copy it to a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "lift_fresh" not in str(func), "a tensor of the host"
        return func(*args, **(kwargs or {}))


def build(
    tmp_path: Path,
    algorithm: str | None = "EAGLE",
    whole: bool = True,
    sizes: Sequence[int] = (1, 2, 4),
    group: ParallelGroup = ALONE,
    followers: Followers | None = None,
    **spec: Any,
) -> Any:
    """A worker whose iterations are one graph each, or three; None: without drafts."""
    runtime = {"iteration_graph": whole, "tp_size": group.size}
    rank = {"group": group, "followers": followers}
    if algorithm is None:
        return plain("eager", list(sizes), **runtime, **rank, **spec)
    return speculating(tmp_path / str(group.rank), algorithm, "eager", list(sizes), runtime=runtime, **rank, **spec)


@contextmanager
def two_ranks(tmp_path: Path, *args: Any, **spec: Any) -> Iterator[list[Any]]:
    """The workers of two ranks, as by `build`; rank 0 is the first."""
    workers: dict[int, Any] = {}

    def rank(group: ParallelGroup, followers: Followers | None = None) -> Any:
        workers[group.rank] = build(tmp_path, *args, group=group, followers=followers, **spec)
        return workers[group.rank]

    with ranks(2, rank):
        yield [workers[0], workers[1]]


def replays(worker: Any) -> int:
    """Iterations that were one graph."""
    return sum(runner.replayed for runner in worker.iteration_runners)


@pytest.mark.parametrize(
    ("algorithm", "sampling"),
    [
        *(("EAGLE", sampling) for sampling in (GREEDY, WARM, FILTERED)),
        *((algorithm, FILTERED) for algorithm in (None, "EAGLE3", "STANDALONE", "DFLASH")),
    ],
)
def test_a_life_is_the_same_through_one_graph_and_three(tmp_path: Path, algorithm: str | None, sampling: SamplingParams) -> None:
    """Requests end, are aborted and are retracted, in padded batches of many sizes; stale inputs, outputs and rows are poisoned."""
    same_as_three_graphs(tmp_path, algorithm, (sampling,))


@pytest.mark.parametrize("algorithm", ["EAGLE", None])
@pytest.mark.parametrize("others", [(WARM,), (WARM, FILTERED)], ids=["warm", "warm and filtered"])
def test_greedy_and_sampled_requests_share_a_graph(tmp_path: Path, algorithm: str | None, others: tuple[SamplingParams, ...]) -> None:
    same_as_three_graphs(tmp_path, algorithm, (GREEDY, *others))


def same_as_three_graphs(tmp_path: Path, algorithm: str | None, samplings: tuple[SamplingParams, ...]) -> None:
    worker = build(tmp_path, algorithm, sizes=SIZES)
    life = Storm(worker, 3, samplings).run(3)
    same_life(Storm(build(tmp_path, algorithm, False, SIZES), 3, samplings).run(3), life)
    assert replays(worker) > 0
    assert not any(runner.replayed or runner.ran_eagerly for runner in worker.runners), "no iteration needs three graphs"
    assert worker.parts.target.rows.kv_lens[0] == 0, "the padding row stays empty"


@pytest.mark.parametrize(
    ("algorithm", "samplings", "spec"),
    [
        ("EAGLE", (GREEDY,), {}),
        ("EAGLE", (GREEDY, WARM, FILTERED), {}),
        ("EAGLE", MIXED, {}),  # batches with penalties need three graphs
        ("EAGLE", (WARM,), {"draft_tp_size": 1}),
        ("STANDALONE", (FILTERED,), {}),
        (None, (GREEDY, FILTERED), {}),
        (None, (GREEDY, FILTERED), {"model": family("qwen3-moe"), "ep_size": 2}),
    ],
)
def test_a_life_on_two_ranks_is_the_same_through_one_graph_and_three(
    tmp_path: Path, algorithm: str | None, samplings: tuple[SamplingParams, ...], spec: dict[str, Any]
) -> None:
    """With depths 0 and 3; requests end, are aborted and are retracted."""
    if algorithm is not None:
        spec = {"disable_by_batch_size": 8, **spec}
    with ExitStack() as stack:
        lives = []
        for whole in (False, True):
            workers = stack.enter_context(two_ranks(tmp_path / str(whole), algorithm, whole, SIZES, **spec))
            lives.append(Storm(workers[0], 3, samplings).run(6))
            counts = [{depth: runner.replayed for depth, runner in worker.parts.iterations.runners.items()} for worker in workers]
            assert counts[0] == counts[1]
            assert all(counts[0].values()) or samplings is MIXED
            assert set(counts[0]) == (set() if not whole else {0} if algorithm is None else {0, 3})
        same_past(*lives)
        assert not any(worker.parts.target.agreement.differs.item() for worker in workers)


def test_a_token_that_one_rank_changes_is_found_in_the_next_iteration_graph(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (worker, other):
        driver, calls, accept = Driver(worker), list[int](), other.parts.accepter.accept
        driver.prefill(PROMPTS)

        def changed(*args: Any) -> Any:
            result = accept(*args)
            calls.append(len(calls))
            if len(calls) == 2:
                result.tokens[0, 0] += 1
            return result

        other.parts.accepter.accept = changed
        driver.decode([1, 2, 3])
        driver.decode([1, 2, 3])
        with pytest.raises(RanksDiffer, match="different tokens in step 3, found in step 4"):
            driver.decode([1, 2, 3])
        assert replays(worker) == 3


def test_padding_of_an_iteration_graph_may_differ_between_ranks(tmp_path: Path) -> None:
    """Its state depends on the order in which padding is written."""
    with two_ranks(tmp_path) as (worker, other):
        driver = Driver(worker)
        driver.prefill(PROMPTS)
        for guess in range(5, 9):
            other.parts.target.rows.last_tokens[PAD_ROW] = guess
            other.parts.drafter.state.guesses[PAD_ROW] = guess
            driver.decode([1, 2, 3])
        assert not worker.parts.target.agreement.differs.item()
        assert replays(worker) == 4


def test_the_exchanges_of_all_passes_of_an_iteration_take_memory(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (worker, _):
        verify, decode, extend = (runner.nccl_bytes(4) for runner in worker.parts.iterations._stages.runners(3))
        runner = worker.parts.iterations.runners[3]
        assert min(verify, decode, extend) > 0
        assert decode == 2 * extend, "two passes"
        logits = extend // 2  # draft-extend sums twice, in one layer
        assert runner.nccl_bytes(4) == verify + decode + extend + logits


@pytest.mark.parametrize(("algorithm", "samplings"), [("EAGLE", (GREEDY,)), ("EAGLE", MIXED), ("STANDALONE", (WARM,))])
def test_changes_of_depth_and_of_the_number_of_graphs_keep_every_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, samplings: tuple[SamplingParams, ...]
) -> None:
    """Depth 1 has no iteration graphs, and neither have batches with penalties."""
    monkeypatch.setattr(iteration_graph, "TINY_MODEL", 0)
    monkeypatch.setattr(worker_build, "make_depths", lambda *args: {depth: DepthBatches(40, 40, SIZES, SIZES) for depth in (5, 3, 1, 0)})
    lives = []
    for whole in (False, True):
        worker = build(tmp_path, algorithm, whole, SIZES, num_steps=5)
        with worker.parts.depths.in_turn():
            lives.append(Storm(worker, 7, samplings).run(4))
    same_life(*lives)
    assert set(worker.parts.iterations.runners) == {0, 3, 5}
    assert len(samplings) > 1 or all(runner.replayed for runner in worker.iteration_runners)


def test_drafts_pause_above_a_batch_size_through_iteration_graphs(tmp_path: Path) -> None:
    texts = []
    for whole in (False, True):
        worker = build(tmp_path, whole=whole, disable_by_batch_size=2)
        driver = Driver(worker)
        driver.prefill(PROMPTS, sampling=WARM)
        for rows in ([1, 2], [1, 2, 3], [2, 3], [3, 2, 1], [1]):
            driver.decode(rows)
        texts.append(driver.out)
    assert texts[0] == texts[1]
    assert [(runner.spec.name, runner.replayed) for runner in worker.iteration_runners] == [("iteration K=3", 3), ("iteration K=0", 2)]


def test_hot_depths_are_those_with_graphs_of_all_sizes() -> None:
    large = iteration_graph.SMALL_MODEL + 1
    fixed = tiny_runtime(tiny_speculative("", num_steps=5), iteration_graph=True)
    assert iteration_graph_depths([5, 3, 1, 0], fixed, large) == [5, 3, 0]
    auto = tiny_speculative("", num_steps=7, depths=(0, 1, 3, 5, 7))
    assert iteration_graph_depths([7, 5, 3, 1, 0], tiny_runtime(auto, iteration_graph=True), large) == [3, 0]
    assert iteration_graph_depths([5], fixed, large) == [5]
    assert iteration_graph_depths([0], tiny_runtime(iteration_graph=True), large) == [0]
    sharded = tiny_runtime(iteration_graph=True, tp_size=2)
    groups = tiny_runtime(iteration_graph=True, tp_size=2, dp_size=2, enable_dp_attention=True)
    assert iteration_graph_depths([0], sharded, large) == [0]
    assert iteration_graph_depths([0], tiny_runtime(), large) == iteration_graph_depths([0], groups, large) == []


@pytest.mark.parametrize(
    ("parameters", "wanted", "tp_size", "want"),
    [
        (iteration_graph.TINY_MODEL, None, 1, [7, 5, 3, 1, 0]),
        (iteration_graph.TINY_MODEL, True, 1, [7, 5, 3, 1, 0]),
        (iteration_graph.TINY_MODEL, False, 1, []),
        (iteration_graph.TINY_MODEL, True, 2, [7, 5, 3, 1, 0]),
        (iteration_graph.TINY_MODEL, None, 2, []),
        (iteration_graph.SMALL_MODEL, None, 1, [3, 0]),
        (iteration_graph.SMALL_MODEL + 1, None, 1, []),
    ],
)
def test_iterations_of_small_models_are_one_graph_unless_unwanted(
    parameters: int, wanted: bool | None, tp_size: int, want: list[int]
) -> None:
    auto = tiny_speculative("", num_steps=7, depths=(0, 1, 3, 5, 7))
    assert iteration_graph_depths([7, 5, 3, 1, 0], tiny_runtime(auto, iteration_graph=wanted, tp_size=tp_size), parameters) == want


def test_log_probabilities_are_those_of_three_graphs(tmp_path: Path) -> None:
    drivers = []
    for whole in (False, True):
        driver = Driver(build(tmp_path, whole=whole))
        driver.generate(PROMPTS, 12, sampling=FILTERED, logprobs=3)
        drivers.append(driver)
    assert replays(drivers[1].worker) == len(drivers[1].results)
    for a, b in zip(*(driver.results for driver in drivers), strict=True):
        for name in ("chosen", "top_ids", "top"):
            np.testing.assert_array_equal(getattr(a.logprobs, name), getattr(b.logprobs, name))


@pytest.mark.parametrize("verify", [False, True])
def test_samples_change_no_token_of_drawn_text(tmp_path: Path, verify: bool) -> None:
    """Nor what is drafted: the accept lengths are the same."""
    drivers = []
    for n in (1 << 20, 2):
        worker = build(tmp_path)
        worker.parts.monitor.schedule = EveryNth(n, verify=verify)
        drivers.append(Driver(worker))
        drivers[-1].generate(PROMPTS, 40, sampling=WARM)
    assert drivers[0].out == drivers[1].out
    assert all((a == b).all() for a, b in zip(*(driver.accepts for driver in drivers), strict=True))
    assert drivers[1].worker.info().acceptance.eager_sample.iterations > 0


def test_eager_samples_are_compared_with_iteration_graphs(tmp_path: Path) -> None:
    expected = Driver(build(tmp_path, whole=False)).generate(PROMPTS, 40)
    worker = build(tmp_path)
    worker.parts.monitor.schedule = EveryNth(4)
    driver = Driver(worker)
    assert driver.generate(PROMPTS, 40) == expected
    stats: Any = worker.info().acceptance
    count = len(driver.results)
    assert replays(worker) == count, "a sample runs beside the graph"
    assert min(stats.eager_sample.iterations, stats.graph.iterations) > 0


def test_what_iteration_graphs_do_not_cover_runs_as_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = build(tmp_path)
    graphs, seen, serves = worker.parts.iterations, list[Iteration](), IterationGraphs.serves
    monkeypatch.setattr(IterationGraphs, "serves", lambda self, iteration: seen.append(iteration) or serves(self, iteration))
    Driver(worker).generate(PROMPTS, 4)
    one = seen[-1]
    assert serves(graphs, one)
    caps = DraftCaps(np.ones(3), torch.ones(4, dtype=torch.int64))
    changes: list[dict[str, Any]] = [
        *({"needs": replace(one.needs, **{name: [0]})} for name in ("penalised", "biased", "min_length", "constrained")),
        {"caps": caps}, {"grammar": object()},
        {"depth": 1}, {"bounds": np.zeros(3, dtype=np.int32)},
    ]  # fmt: skip
    assert [change for change in changes if serves(graphs, replace(one, **change))] == []
    for runner in drafting(worker.all_runners):
        with eagerly([runner]):
            assert not serves(graphs, one), "a part that is to run eagerly does"
    assert all(runner.mode is RunMode.REPLAY for runner in worker.all_runners), "capture leaves no mode behind"


def test_run_modes_are_those_that_were_set_during_an_iteration_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sends them to the other ranks with the next step, which it may submit meanwhile."""
    worker, seen = build(tmp_path), set[RunMode]()
    propose = worker.parts.drafter.propose

    def spy(iteration: Iteration) -> Any:
        seen.update(runner.mode for runner in worker.all_runners)
        return propose(iteration)

    monkeypatch.setattr(worker.parts.drafter, "propose", spy)
    Driver(worker).generate(PROMPTS, 4)
    assert seen == {RunMode.REPLAY}


def test_prompts_beside_decode_rows_run_as_three_graphs(tmp_path: Path) -> None:
    texts = []
    for whole in (False, True):
        worker = speculating(tmp_path, replay="eager", sizes=[1, 2, 4], runtime={"iteration_graph": whole, "mixed_chunk": True})
        driver = Driver(worker)
        driver.prefill({1: PROMPTS[1]})
        driver.decode([1])
        driver.prefill({2: PROMPTS[2]}, chunk=3, along=lambda: [1])
        driver.decode([1, 2])
        texts.append(driver.out)
    assert texts[0] == texts[1]
    assert replays(worker) == 2


@pytest.mark.parametrize(
    ("algorithm", "sampling"), [("EAGLE", GREEDY), ("EAGLE", WARM), ("EAGLE", FILTERED), ("DFLASH", WARM), (None, FILTERED)]
)
def test_an_iteration_graph_reads_nothing_from_the_device_and_brings_nothing_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str | None, sampling: SamplingParams
) -> None:
    worker = build(tmp_path, algorithm)
    driver = Driver(worker)
    driver.prefill(PROMPTS, sampling=sampling)
    unwatched_plan(monkeypatch)
    run, forward = IterationGraphs.run, IterationGraphs._forward

    def watched(self: IterationGraphs, iteration: Iteration) -> Any:
        with NoHostReads(), NoHostCalls():
            return run(self, iteration)

    def captured(self: IterationGraphs, *args: Any) -> Any:
        with NoHostTensors():
            return forward(self, *args)

    monkeypatch.setattr(IterationGraphs, "run", watched)
    monkeypatch.setattr(IterationGraphs, "_forward", captured)
    for rows in ([1, 2, 3], [2, 1], [3]):
        driver.decode(rows)
    assert replays(worker) == 3


def test_nothing_is_uploaded_while_the_same_requests_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = build(tmp_path)
    driver, staging, uploads = Driver(worker), worker.parts.target.staging, list[int]()
    driver.prefill(PROMPTS)
    upload = staging.upload
    monkeypatch.setattr(staging, "upload", lambda *arrays: uploads.append(sum(map(len, arrays))) or upload(*arrays))
    for rows, words in (([1, 2, 3], 4), ([1, 2, 3], 0), ([3, 1, 2], 4), ([3, 1, 2], 0), ([3], 1), ([1, 2, 3], 4)):
        uploads.clear()
        driver.decode(rows)
        assert sum(uploads) == words, rows
    assert replays(worker) == 6
    other = Driver(build(tmp_path, whole=False))
    other.prefill(PROMPTS)
    for rows in ([1, 2, 3], [1, 2, 3], [3, 1, 2], [3, 1, 2], [3], [1, 2, 3]):
        other.decode(rows)
    assert driver.out == other.out


def test_all_passes_of_an_iteration_must_have_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not build(tmp_path, whole=False).iteration_runners
    assert not build(tmp_path, draft_extend_graph=False).iteration_runners
    assert not build(tmp_path, topk=3, num_draft_tokens=7).iteration_runners, "a tree"
    assert not build(tmp_path, "NGRAM").iteration_runners, "drafts are looked up on the host"
    monkeypatch.setattr(iteration_graph, "MAX_REQUESTS", 2)
    worker = build(tmp_path)
    assert [runner.sizes for runner in worker.iteration_runners] == [[1, 2], [1, 2]]
    on_gpu = IterationGraphs(worker.parts.iterations._stages, [3], GraphOptions(cuda=True, node_bytes=H200.graph_node_bytes))
    assert not on_gpu.runners, "torch_native plans on the host"


def test_the_check_at_start_up_finds_a_faulty_iteration_graph(tmp_path: Path) -> None:
    worker = build(tmp_path)
    check_parity(worker)
    runner = worker.parts.iterations.runners[3]
    for key, replay in list(runner._replays.items()):

        def forgetful(replay: Any = replay) -> None:
            replay()
            worker.parts.drafter.state.guesses.zero_()

        runner._replays[key] = forgetful
    with pytest.raises(ConfigError, match="Graphs of whole iterations and"):
        check_parity(worker)
