"""The ten invariants of speculation that graphs like to break silently: each holds, and each check notices when it is broken on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.layers.attention.torch_native import TorchNativeAttention
from runtime.layers.linear import Linear
from runtime.model_executor.context import BuildOptions, make_context
from runtime.model_executor.graph_capture import CallPool
from runtime.model_executor.graph_runner import GraphRunner, RunMode, eagerly
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.staging import HostCopy
from runtime.sampling_params import SamplingParams
from runtime.speculative.catch_up import WIDTH
from unit.driver import Driver, EveryNth
from unit.predicting import VOCAB, exact_product, speculating, three_layers
from unit.storm import SIZES, Poison, Storm, drafting, pools, runners, same_life
from unit.tiny import tiny_runtime

TREE = {"topk": 3, "num_draft_tokens": 7}
PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 4 + 3 * r).tolist() for r in (1, 2, 5)}
Mutation = Callable[[Any], None]


def graphs(tmp_path: Path, **spec: Any) -> Any:
    return speculating(tmp_path, replay="eager", sizes=SIZES, **spec)


def storm(worker: Any, turns: int = 5) -> Storm:
    return Storm(worker, 3, poison=True).run(turns)


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Storm]:
    """The same life without padding or replay, to the bit."""
    monkeypatch.setattr(Linear, "__call__", exact_product)

    def run(**spec: Any) -> Storm:
        return Storm(speculating(tmp_path, **spec), 3, poison=False).run(5)

    return run


@contextmanager
def noticed() -> Iterator[None]:
    """The check inside has to fail: by a comparison, or because a pass met an impossible index."""
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        yield


# ---- 1. captured pointers never rebind


def in_graphs(worker: Any) -> dict[str, torch.Tensor]:
    """Everything that a captured graph may read or write; while the caller holds it, nothing new can lie at an old address."""
    rows, draft, inputs = worker.parts.target.rows, worker.parts.drafter.state, worker.parts.inputs
    named = {f"input {n}": t for n, t in inputs.tensors.items()}
    named |= {f"table {f.name}": getattr(rows.tables, f.name) for f in dataclasses.fields(rows.tables) if f.name != "ops"}
    named |= {"kv_lens": rows.kv_lens, "last_tokens": rows.last_tokens, "pages": worker.parts.target.page_table.pages}
    named |= {f"draft {n}": getattr(draft, n) for n in ("hidden", "guesses", "scores", "probs")}
    for runner in worker.runners:
        named |= {f"{runner.spec.name} {n}": t for n, t in runner.buffers.items()}
    for which, pool in enumerate(pools(worker)):
        named |= {f"pool {which} {i}": t for i, t in enumerate((*pool.k, *pool.v))}
    for key, batch in inputs._batches.items():
        for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "page_rows", "seq_lens", "qo_indptr", "tree_mask"):
            tensor = getattr(batch, name)
            if tensor is not None:
                named[f"{key} {name}"] = tensor
    return named


def moved(before: dict[str, torch.Tensor], worker: Any) -> list[str]:
    """What does not lie where it did."""
    after = in_graphs(worker)
    return [name for name, t in before.items() if after[name].data_ptr() != t.data_ptr()]


def test_1_nothing_that_graphs_hold_moves(tmp_path: Path) -> None:
    worker = graphs(tmp_path)
    storm(worker, 2)
    before = in_graphs(worker)
    storm_again = Storm(worker, 8).run(4)
    assert storm_again.trace
    assert not moved(before, worker)


def test_1_forgetting_every_request_moves_nothing(tmp_path: Path) -> None:
    """As the check at start does, after the capture."""
    worker = graphs(tmp_path)
    before = in_graphs(worker)
    storm(worker, 1)
    worker.reset()
    assert not moved(before, worker)


@pytest.mark.parametrize("owner", ["rows.kv_lens", "rows.tables.seeds", "draft.guesses", "inputs", "outputs"])
def test_1_a_rebound_tensor_is_noticed(tmp_path: Path, owner: str) -> None:
    worker = graphs(tmp_path)
    before = in_graphs(worker)
    rows, state = worker.parts.target.rows, worker.parts.drafter.state
    if owner == "rows.kv_lens":
        rows.kv_lens = rows.kv_lens.clone()
    elif owner == "rows.tables.seeds":
        rows.tables = dataclasses.replace(rows.tables, seeds=rows.tables.seeds.clone())
    elif owner == "draft.guesses":
        state.guesses = state.guesses.clone()
    elif owner == "inputs":
        worker.parts.inputs.tensors["kv_lens"] = worker.parts.inputs.tensors["kv_lens"].clone()
    else:
        buffers = runners(worker)["verify"].buffers
        buffers["tokens"] = buffers["tokens"].clone()
    assert moved(before, worker)


def test_1_an_input_written_out_of_place_changes_the_outcome(tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.model_executor import verification

    def rebinding(batch: Any, table: Any, kv_lens: torch.Tensor, tokens: torch.Tensor, depths: Any = None) -> None:
        batch.input_ids = tokens.flatten().clone()  # the graph still reads the old one
        batch.positions.copy_((kv_lens[:, None] + torch.arange(batch.tokens_per_req)).flatten())

    expected = reference()
    monkeypatch.setattr(verification, "fill_window", rebinding)
    with noticed():
        same_life(expected, storm(graphs(tmp_path)))


# ---- 2. what is read after a replay is an output, or a clone of one


def owned(runner: GraphRunner, outputs: dict[str, torch.Tensor]) -> bool:
    """Whether all results lie in buffers that the runner owns."""
    return all(t.untyped_storage().data_ptr() == runner.buffers[n].untyped_storage().data_ptr() for n, t in outputs.items())


def watch_outputs(worker: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    seen: list[bool] = []
    for runner in worker.runners:
        run = runner.run

        def watched(*args: Any, runner: Any = runner, run: Any = run, **more: Any) -> Any:
            outputs, replayed = run(*args, **more)
            seen.append(owned(runner, outputs))
            return outputs, replayed

        monkeypatch.setattr(runner, "run", watched)
    return seen


@pytest.mark.parametrize("spec", [{}, TREE])
def test_2_results_lie_inbuffers_of_their_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]) -> None:
    worker = graphs(tmp_path, **spec)
    seen = watch_outputs(worker, monkeypatch)
    storm(worker, 3)
    assert len(seen) > 6
    assert all(seen)


def test_2_a_result_from_the_pool_is_noticed(tmp_path: Path, reference: Any) -> None:
    """A function that hands out a tensor of its own: replayed, it computes into unused memory."""
    worker = graphs(tmp_path)
    runner = runners(worker)["draft_decode"]
    forward = runner._forward

    def from_the_pool(batch: Any, outputs: Any, variant: str) -> None:
        private = {name: t.clone() for name, t in outputs.items()}
        forward(batch, private, variant)
        outputs.update(private)

    runner._forward = from_the_pool
    runner.capture(CallPool())
    with noticed():
        same_life(reference(), storm(worker))


# ---- 3. padding reads and writes reserved slots only


@pytest.mark.parametrize("spec", [{}, TREE])
def test_3_padding_is_inert(tmp_path: Path, reference: Any, spec: dict[str, Any]) -> None:
    worker = graphs(tmp_path, **spec)
    same_life(reference(**spec), storm(worker))
    assert int(worker.parts.target.rows.kv_lens[0]) == 0
    assert not worker.parts.target.page_table.pages[0].any()


@pytest.mark.parametrize("row", ["a live one", "an idle one"])
def test_3_padding_in_another_row_is_noticed(tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    worker = graphs(tmp_path)
    stage = worker.parts.target.stage_rows

    def careless(batch: Any, size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        chunks, rows = stage(batch, size)
        lens = worker.parts.target.rows.kv_lens.tolist()
        alive = [r for r in range(1, 41) if 0 < lens[r] < 1 << 20]  # poison marks idle rows with more
        others = [r for r in range(1, 41) if r not in batch.rows and (r in alive) == (row == "a live one")]
        rows[batch.num_decodes :] = others[0] if others else 0
        return chunks, rows

    monkeypatch.setattr(worker.parts.target, "stage_rows", careless)
    with noticed():
        same_life(reference(), storm(worker))


def test_3_a_write_to_a_free_page_is_noticed(tmp_path: Path) -> None:
    worker = graphs(tmp_path)
    driver = Driver(worker)
    poison = Poison(worker)
    driver.prefill(PROMPTS)
    poison(driver)
    driver.decode(list(PROMPTS))
    poison(driver)
    pools(worker)[1].v[0][min(driver.free_pages)] += 1
    with noticed():
        poison(driver)


@pytest.mark.parametrize(
    "spec",
    [
        {"num_steps": 5},
        {"num_steps": 5, "topk": 4, "num_draft_tokens": 8},
        {"algorithm": "STANDALONE"},
        {"algorithm": "DFLASH"},
        {"algorithm": "NGRAM"},
    ],
)
def test_3_a_step_writes_no_further_than_the_limits_say(tmp_path: Path, spec: dict[str, Any]) -> None:
    """Beyond a row's pages the table still names those of the row's last owner."""
    worker = graphs(tmp_path, **spec)
    driver, poison = Driver(worker), Poison(worker)
    driver.prefill({1: list(range(60))})
    driver.release(1)
    driver.prefill({1: PROMPTS[1]}, room=worker.limits.tokens_per_step)
    poison(driver)
    driver.decode([1])
    poison(driver)


# ---- 4. the row width is part of a graph's key


def test_4_widths_do_not_share_a_graph(tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"topk": 3, "num_draft_tokens": 7}
    same_life(reference(**spec), storm(graphs(tmp_path, **spec)))
    view = InputBuffers.view

    def by_size_only(self: InputBuffers, mode: Any, size: int, tokens: int, *more: Any) -> Any:
        known = [b for b in self._batches.values() if b.batch_size == size]
        return known[0] if known else view(self, mode, size, tokens, *more)

    monkeypatch.setattr(InputBuffers, "view", by_size_only)
    with noticed():
        same_life(reference(**spec), storm(graphs(tmp_path, **spec)))


# ---- 5. draft KV is as long as target KV


def draft_rows_written(worker: Any, driver: Driver) -> bool:
    """Whether the draft's KV at every committed position of every request is there: no slot still holds what it was poisoned with."""
    pool = pools(worker)[1]
    for row, kv_len in driver.kv.items():
        slots = torch.from_numpy(driver.slots(row, kv_len))
        if any(bool((t.flatten(0, 1)[slots] == 977.0).flatten(1).all(1).any()) for t in (*pool.k, *pool.v)):
            return False
        if int(worker.parts.target.rows.kv_lens[row]) != kv_len:
            return False
    return True


def mark_draft_pool(worker: Any) -> None:
    pool = pools(worker)[1]
    for tensor in (*pool.k, *pool.v):
        tensor.fill_(977.0)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "DFLASH"])
@pytest.mark.parametrize("chunk", [3, 1 << 30])
def test_5_the_draft_has_kv_wherever_the_target_has(tmp_path: Path, algorithm: str, chunk: int) -> None:
    worker = graphs(tmp_path, algorithm=algorithm)
    mark_draft_pool(worker)
    driver = Driver(worker)
    driver.prefill(PROMPTS, chunk)
    assert draft_rows_written(worker, driver)
    for rows in ([1], [5, 2], [1, 2, 5], [2]):
        driver.decode(rows)
        assert draft_rows_written(worker, driver)


@pytest.mark.parametrize("phase", ["follow", "follow_prompt"])
def test_5_a_draft_that_lags_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    worker = graphs(tmp_path, algorithm="STANDALONE")
    mark_draft_pool(worker)
    monkeypatch.setattr(worker.parts.drafter, phase, lambda *args: None)
    driver = Driver(worker)
    driver.prefill(PROMPTS)
    for _ in range(6):
        driver.decode(list(PROMPTS))
    assert not draft_rows_written(worker, driver)


# ---- 6. eager and replay share one way of filling metadata


def test_6_eager_fallback_and_replay_fill_the_same_metadata(tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference()
    for how in (RunMode.EAGER_PADDED, RunMode.EAGER):
        worker = graphs(tmp_path)
        with eagerly(worker.runners, how):
            same_life(expected, storm(worker))
    plan = TorchNativeAttention.prepare
    for how in ("padded", "graphs"):
        worker = graphs(tmp_path)
        skipped: list[int] = []

        def forgetful(self: Any, batch: Any, num_passes: int = 1, worker: Any = worker, skipped: Any = skipped) -> None:
            decoding = batch.tokens_per_req > 0 and self is worker.parts.drafter.runner.backend
            if decoding and self._passes and len(skipped) % 2:  # what was planned last time will do
                skipped.append(1)
                return
            skipped.append(1)
            plan(self, batch, num_passes)

        with monkeypatch.context() as patch, noticed():
            patch.setattr(TorchNativeAttention, "prepare", forgetful)
            if how == "padded":
                with eagerly(worker.runners):
                    same_life(expected, storm(worker))
            else:
                same_life(expected, storm(worker))


@pytest.mark.parametrize("off", [None, "draft_decode_graph", "draft_extend_graph"])
@pytest.mark.parametrize("spec", [{}, TREE])
def test_6_eager_batches_and_runners_give_the_same_results(tmp_path: Path, reference: Any, spec: dict[str, Any], off: str | None) -> None:
    """Batches of 1 to 8 are replayed, 9 to 33 run eagerly between them."""
    spec = spec if off is None else {**spec, off: False}
    worker = speculating(tmp_path, replay="eager", sizes=[1, 2, 4, 8], **spec)
    same_life(reference(**spec), storm(worker))
    assert all(runner.ran_eagerly for runner in drafting(worker.runners)), "no batch was too large"
    unused = [] if off is None else [runners(worker)[off.removesuffix("_graph")]]
    assert [runner for runner in drafting(worker.runners) if not runner.replayed] == unused


@pytest.mark.parametrize("spec", [{}, TREE, {"algorithm": "STANDALONE"}])
def test_6_sampled_batches_are_replayed_too(tmp_path: Path, spec: dict[str, Any]) -> None:
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9)):
        worker = graphs(tmp_path, **spec)
        Driver(worker).generate(PROMPTS, 12, sampling=sampling)
        assert all(runner.replayed and not runner.ran_eagerly for runner in drafting(worker.runners))


def test_6_bounds_cover_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, widths = TorchNativeAttention.prepare, set[int]()

    def checked(self: Any, batch: Any, num_passes: int = 1) -> None:
        widths.add(batch.tokens_per_req)
        assert bool((torch.from_numpy(batch.seq_len_bounds) >= batch.seq_lens).all())
        plan(self, batch, num_passes)

    monkeypatch.setattr(TorchNativeAttention, "prepare", checked)
    for spec in ({}, TREE):
        storm(graphs(tmp_path, **spec))
    driver = Driver(graphs(tmp_path, runtime={"mixed_chunk": True}))
    driver.prefill(PROMPTS)
    driver.prefill({3: PROMPTS[5]}, chunk=5, along=lambda: [1, 2, 5])
    assert widths == {0, 1, 4, 3, 7, WIDTH}, "prompts, the passes of a chain and a tree, and catch-up, which runs before it is captured"


# ---- 7. one accept vector, decided once


def accept_vectors(worker: Any, driver: Driver, rows: list[int]) -> list[list[int]]:
    """The accept lengths of one step as the host, the rows and draft-extend saw them."""
    before = worker.parts.target.rows.kv_lens[rows].tolist()
    result = driver.decode(rows)
    after = worker.parts.target.rows.kv_lens[rows].tolist()
    held = runners(worker)["draft_extend"].inputs(len(rows))["accept_lens"].tolist()
    return [result.accept_lens.tolist(), [a - b for a, b in zip(after, before, strict=True)], held]


@pytest.mark.parametrize("spec", [{}, TREE])
def test_7_host_rows_and_draft_see_one_accept_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]) -> None:
    worker = graphs(tmp_path, **spec)
    decided: list[int] = []
    decide = worker.parts.accepter.decide
    monkeypatch.setattr(worker.parts.accepter, "decide", lambda *args: decided.append(1) or decide(*args))
    driver = Driver(worker)
    driver.prefill(PROMPTS)
    for _ in range(8):
        host, rows, extend = accept_vectors(worker, driver, [5, 1, 2])
        assert host == rows == extend
    assert len(decided) == 8


def test_7_a_second_opinion_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = graphs(tmp_path)
    follow = worker.parts.drafter.follow

    def decided_twice(iteration: Any, accepted: Any) -> None:
        result = dataclasses.replace(accepted.result, accept_lens=torch.ones_like(accepted.result.accept_lens))
        follow(iteration, dataclasses.replace(accepted, result=result))

    monkeypatch.setattr(worker.parts.drafter, "follow", decided_twice)
    driver = Driver(worker)
    driver.prefill(PROMPTS)
    seen = [accept_vectors(worker, driver, [5, 1, 2]) for _ in range(12)]
    assert any(host != extend for host, _, extend in seen)


# ---- 8. nothing waits for the device


HOST_READS = ("aten.item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "repeat_interleave.Tensor")


class NoHostReads(TorchDispatchMode):
    """Fails where a value would have to reach the host: `.item()`, `.tolist()`, `if tensor`, shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        by_mask = "aten.index" in name and len(args) > 1 and isinstance(args[1], (list, tuple))
        by_mask = by_mask and any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1])
        if by_mask or any(read in name for read in HOST_READS):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


TO_HOST = ("cpu", "numpy", "tolist", "item", "__array__", "__bool__", "__int__", "__float__", "__index__")


class NoHostCalls(TorchFunctionMode):
    """The same for calls that do nothing to a tensor of the CPU, and wait for one of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        to_cpu = name == "to" and any(str(a) == "cpu" for a in (*args[1:], *(kwargs or {}).values()))
        if name in TO_HOST or to_cpu:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def unwatched_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_native, which no graph captures, may look at pages."""
    plan = TorchNativeAttention.prepare

    def quietly(self: Any, batch: Any, num_passes: int = 1) -> None:
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            plan(self, batch, num_passes)

    monkeypatch.setattr(TorchNativeAttention, "prepare", quietly)


def iterate_watched(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unwatched_plan(monkeypatch)
    iterate = worker._iterate

    def watched(*args: Any) -> Any:
        with NoHostReads(), NoHostCalls():
            return iterate(*args)

    monkeypatch.setattr(worker, "_iterate", watched)


@pytest.mark.parametrize("spec", [{}, TREE, {"num_steps": 1}, {"algorithm": "EAGLE3"}, {"algorithm": "STANDALONE"}])
@pytest.mark.parametrize("sampled", [False, True])
def test_8_an_iteration_reads_nothing_from_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], sampled: bool
) -> None:
    mixed = spec.get("topk", 1) == 1
    worker = graphs(tmp_path, runtime={"mixed_chunk": mixed}, **spec)
    driver = Driver(worker)
    chosen = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, logit_bias={3: 1.0}, min_new_tokens=4)
    sampling = chosen if sampled else SamplingParams(temperature=0.0)
    driver.prefill(PROMPTS, sampling=sampling)
    iterate_watched(worker, monkeypatch)
    for rows in ([1, 2, 5], [5, 1], [2]):
        driver.decode(rows)
    if mixed:
        driver.prefill({3: PROMPTS[5]}, chunk=5, sampling=sampling, along=lambda: [5, 1])


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.any()),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: t.numpy(),
        lambda t: HostCopy(t).wait(),
    ],
)
def test_8_a_host_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    worker = graphs(tmp_path)
    driver = Driver(worker)
    driver.prefill(PROMPTS)
    follow = worker.parts.drafter.follow

    def peeking(iteration: Any, accepted: Any) -> None:
        read(accepted.result.accept_lens)
        follow(iteration, accepted)

    monkeypatch.setattr(worker.parts.drafter, "follow", peeking)
    iterate_watched(worker, monkeypatch)
    with pytest.raises(AssertionError, match="waits for the device"):
        driver.decode([1, 2, 5])


# ---- 9. graphs reach as far as admission, or it is said


@pytest.mark.parametrize(("running", "warned"), [(8, False), (9, True)])
def test_9_admission_beyond_the_largest_graph_is_reported(caplog: pytest.LogCaptureFixture, running: int, warned: bool) -> None:
    config = tiny_runtime(max_running_requests=running)
    with caplog.at_level("WARNING"):
        context = make_context(config, BuildOptions("cuda", [1, 2, 4, 8]))
    assert context.running == running, "never lowered in silence"
    assert ("--cuda-graph-max-bs" in caplog.text) == warned
    assert (str(running) in caplog.text) == warned


def test_9_without_a_limit_admission_is_what_the_graphs_hold() -> None:
    assert make_context(tiny_runtime(max_running_requests=None), BuildOptions("cuda", [1, 2, 24])).running == 24


# ---- 10. acceptance through graphs is acceptance without


@pytest.mark.parametrize("spec", [{}, TREE, {"algorithm": "EAGLE3"}, {"algorithm": "STANDALONE"}, {"algorithm": "NGRAM"}])
def test_10_acceptance_by_position_is_the_same(tmp_path: Path, spec: dict[str, Any]) -> None:
    found = []
    for worker in (graphs(tmp_path, **spec), speculating(tmp_path, **spec)):
        Driver(worker).generate({**PROMPTS, 7: [4, 5, 6] * 6}, 30)
        found.append(worker.parts.monitor.counted())
    assert found[0] == found[1]
    assert found[0].accepted.sum() > 0


@pytest.mark.parametrize("stale", ["features", "accept_lens"])
def test_10_stale_inputs_cost_acceptance_and_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: str) -> None:
    """The bug that lossless verification hides: the text stays right."""
    texts, found = [], []
    for broken in (False, True):
        worker = graphs(tmp_path)
        if broken:
            runner = runners(worker)["draft_extend"]
            run = runner.run

            def stale_run(batch: Any, variant: str = "", eager: bool = False, runner: Any = runner, run: Any = run) -> Any:
                runner.inputs(batch.batch_size)[stale].fill_(1)
                return run(batch, variant, eager)

            monkeypatch.setattr(runner, "run", stale_run)
        texts.append(Driver(worker).generate(PROMPTS, 30))
        found.append(worker.parts.monitor.counted())
    assert texts[0] == texts[1]
    assert found[0] != found[1]
    assert found[1].mean_accept_len < found[0].mean_accept_len


def lose_drafts(worker: Any, replay: Callable[[], None]) -> None:
    """Guesses do not arrive: the buffer keeps its padding."""
    replay()
    runners(worker)["draft_decode"].buffers["tokens"][:, 1:] = 0


def lose_first_guesses(worker: Any, replay: Callable[[], None]) -> None:
    """What the next drafts start from does not arrive: a first guess that is always the same."""
    replay()
    worker.parts.drafter.state.guesses.zero_()


def blur_features(worker: Any, replay: Callable[[], None]) -> None:
    """What the draft reads of the target arrives with noise; logits are right."""
    replay()
    features = runners(worker)["verify"].buffers["features"]
    features.normal_(0.0, 30.0, generator=torch.Generator().manual_seed(0))


FAULTS = [(None, None), ("draft_decode", lose_drafts), ("draft_extend", lose_first_guesses), ("verify", blur_features)]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("broken", "fault"), FAULTS)
def test_10_a_stale_graph_raises_the_drift_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str | None, fault: Any, verify: bool
) -> None:
    """Samples of the draft alone replay verification, so they see no fault there."""
    worker = graphs(tmp_path, model=three_layers())
    # The sample, what it starts from, what starts from it, and two through graphs alone.
    worker.parts.monitor.schedule = EveryNth(5, verify=verify)
    seen = broken is not None and (verify or broken != "verify")
    if broken is not None:
        runner = runners(worker)[broken]
        runner._replays = {key: (lambda replay=replay: fault(worker, replay)) for key, replay in runner._replays.items()}
    prompts = {r: np.random.default_rng(r).integers(0, VOCAB, 6).tolist() for r in range(1, 41)}
    with caplog.at_level("WARNING"):
        for _ in range(2):
            Driver(worker).generate(prompts, 48)
    info = worker.info().acceptance
    assert info.graph.iterations > 300
    assert info.eager_sample.iterations > 300
    assert bool(info.drift) == seen
    assert all(drift.graph < drift.eager for drift in info.drift)
    assert ("acceptance of draft" in caplog.text) == seen
    assert (runners(worker)["verify"].ran_eagerly > 0) == verify


def test_10_eager_iterations_are_not_counted_as_graph_traffic(tmp_path: Path) -> None:
    for replay, sizes, counted in (("none", [], (0, 0, 36)), ("eager", [2], (16, 4, 20))):
        worker = speculating(tmp_path / replay, replay=replay, sizes=sizes)
        worker.parts.monitor.schedule = EveryNth(2)
        driver = Driver(worker)
        driver.prefill({r: [r, 7, 9] for r in range(1, 6)})
        for rows in ([1, 2], [1, 2], [1, 2, 3, 4, 5]) * 4:
            driver.decode(rows)
        info = worker.info().acceptance
        # Of the six steps that are drafted again, two are followed by one that replays a graph.
        assert (info.graph.iterations, info.eager_sample.iterations, info.eager.iterations) == counted


def accept_by_load(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one request accept all of their drafts, steps of more none: not so for a graph, but for what is asked."""
    decide = worker.parts.accepter.decide

    def decided(iteration: Any, *more: Any) -> Any:
        lens = torch.full((iteration.size,), 4 if iteration.live == 1 else 1, dtype=torch.int32)
        return dataclasses.replace(decide(iteration, *more), accept_lens=lens)

    monkeypatch.setattr(worker.parts.accepter, "decide", decided)


@pytest.mark.parametrize("beside_prompts", [False, True])
def test_10_the_sample_is_of_the_traffic_that_graphs_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside_prompts: bool) -> None:
    """Steps that would run eagerly anyhow, for want of a graph or beside prompts, may be of other text, accepted otherwise."""
    worker = speculating(tmp_path, replay="eager", sizes=[1, 2, 4] if beside_prompts else [1], runtime={"mixed_chunk": True})
    worker.parts.monitor.schedule = EveryNth(5)
    accept_by_load(worker, monkeypatch)
    for _ in range(25):
        driver = Driver(worker)
        driver.prefill({r: [r, 7, 9] for r in range(1, 5)})
        for _ in range(5):
            driver.decode([1])
            if beside_prompts:
                driver.prefill({5: [3, 4, 5]}, along=lambda: [2, 3, 4])
                driver.release(5)
            else:
                driver.decode([2, 3, 4])
    info = worker.info().acceptance
    assert info.eager.rates[0] < 1
    assert info.graph.rates == [1.0, 1.0, 1.0]
    assert info.eager_sample.iterations == 25, "of the request that runs alone"
    assert info.drift == []
