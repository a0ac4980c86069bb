"""Tuning of speculation: the search against the full grid, the trial, the file, and what the server makes of it."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime import tune
from runtime.config.resolve import resolve
from runtime.config.runtime_config import SpeculativeConfig
from runtime.config.server_args import ServerArgs
from runtime.config.speculative_tuning import (
    BatchDepth,
    MadeFor,
    Measurement,
    SpeculativeTuning,
    StepTime,
    fitting,
    read_tuning,
    write_tuning,
)
from runtime.config.synthetic_acceptance import synthetic_acceptance
from runtime.errors import BAD_USE, FAILED, INTERRUPTED, ConfigError, ServingError, report
from runtime.launch_server import main as launch_server
from runtime.model_executor.acceptance_averages import AcceptanceAverages
from runtime.model_executor.depth_controller import DecodeRows, DepthController, Observed
from runtime.model_executor.depth_costs import start_controller
from runtime.model_executor.depth_trial import BLOCK, DepthTrial
from runtime.model_executor.iteration_cost import CostPoint, IterationCost
from runtime.model_files.fingerprint import fingerprint
from runtime.speculative.shape_search import best_plan, chain_plan, tree_plan
from unit.predicting import draft_folder, speculating
from unit.small_tokenizer import write_small_tokenizer
from unit.test_depth_controller import CPU as SLOW
from unit.test_depth_controller import GPU as FAST
from unit.test_depth_controller import Table
from unit.test_server_args import CPU, DRAFT, LLAMA

DEPTHS = (0, 1, 2, 3, 5, 7)
HERE = MadeFor(
    model="m", model_files="1", algorithm="EAGLE", draft="d", draft_files="2", weights="bfloat16", device="CPU, 2 threads", ranks=1
)
CHAIN = SpeculativeTuning(
    made_for=HERE,
    measurement=Measurement(version="1", at="2026-01-01T00:00+00:00", prompts="own", temperature=0.0, seconds=40.0),
    num_steps=5,
    topk=1,
    num_draft_tokens=6,
    depths=(0, 2, 5),
    table=(BatchDepth(1, 5), BatchDepth(5, 2), BatchDepth(9, 0)),
    acceptance=(0.7, 0.6, 0.5, 0.5, 0.4, 0.4, 0.3),
    steps=(StepTime(1, 0, 0.01), StepTime(1, 5, 0.02)),
)
TREE: dict[str, Any] = dict(
    num_steps=3, topk=4, num_draft_tokens=8, depths=(), acceptance=(), steps=(), table=(BatchDepth(1, 3), BatchDepth(5, 0))
)


# ---- the search


def simulated(table: Table, sizes: list[int], acceptance: tuple[float, ...], rounds: int) -> tune.Chains:
    """A trial of a server with the times of `table`, 3 % of noise in each."""
    rng, trial = np.random.default_rng(7), DepthTrial(DEPTHS)
    for size in sizes:
        trial.begin(size)
        rows = DecodeRows(np.full(size, 99), np.ones(size, dtype=np.bool_), 300 * size)
        while trial.rounds < rounds:
            depth = trial.choose(rows, dict.fromkeys(DEPTHS, size)).depth
            lens = 1 + (rng.random((size, depth)) < np.array(acceptance[:depth])).cumprod(axis=1).sum(axis=1)
            seconds = 1e-3 * table.milliseconds(size, depth) * (1 + 0.03 * rng.standard_normal())
            trial.observe(Observed(depth, lens, rows.caps, rows.greedy, size, rows.kv_tokens, seconds))
    return tune.Chains(trial, dict.fromkeys(DEPTHS, 1 << 10))


@pytest.mark.parametrize("accept_length", ["1.2", "1.6", "2.5", "3.5"])
@pytest.mark.parametrize(("table", "sizes"), [(FAST, [1, 2, 4, 8, 16, 32, 64, 128, 256]), (SLOW, [1, 2, 4, 8, 16])])
def test_the_choice_is_within_three_percent_of_the_full_grid(table: Table, sizes: list[int], accept_length: str) -> None:
    acceptance = synthetic_acceptance(accept_length, max(DEPTHS), 3)
    chains = simulated(table, sizes, acceptance, tune.SWEEPS * tune.MAX_ROUNDS)
    plan = chain_plan(chains.rates())
    tokens = {depth: 1 + np.cumprod(acceptance[:depth]).sum() for depth in range(max(DEPTHS) + 1)}
    for size in sizes:
        rates = {depth: size * tokens[depth] / table.milliseconds(size, depth) for depth in tokens}
        assert rates[plan.depths[size]] >= 0.97 * max(rates.values()), (size, plan.depths[size], rates)


@pytest.mark.parametrize("seed", range(5))
def test_other_load_on_the_machine_changes_the_choice_by_three_percent_at_most(seed: int) -> None:
    """Rounds are up to four times slower, single iterations up to nine times."""
    rng, acceptance, sizes = np.random.default_rng(seed), synthetic_acceptance("2.5", max(DEPTHS), 3), [1, 2, 4, 8, 16]
    trial = DepthTrial(DEPTHS)
    for size in sizes * tune.SWEEPS:
        trial.begin(size)
        rows = DecodeRows(np.full(size, 99), np.ones(size, dtype=np.bool_), 300 * size)
        slow = 1.0 + 3.0 * rng.random(tune.MAX_ROUNDS)
        while (at := trial.rounds) < tune.MAX_ROUNDS:
            depth = trial.choose(rows, dict.fromkeys(DEPTHS, size)).depth
            lens = 1 + (rng.random((size, depth)) < np.array(acceptance[:depth])).cumprod(axis=1).sum(axis=1)
            once = 1.0 + 8.0 * rng.random() * (rng.random() < 0.1)
            seconds = 1e-3 * SLOW.milliseconds(size, depth) * slow[at] * once * (1 + 0.03 * rng.random())
            trial.observe(Observed(depth, lens, rows.caps, rows.greedy, size, rows.kv_tokens, seconds))
    plan = chain_plan(tune.Chains(trial, dict.fromkeys(DEPTHS, 1 << 10)).rates())
    tokens = {depth: 1 + np.cumprod(acceptance[:depth]).sum() for depth in DEPTHS}
    for size in sizes:
        rates = {depth: size * tokens[depth] / SLOW.milliseconds(size, depth) for depth in tokens}
        assert rates[plan.depths[size]] >= 0.97 * max(rates.values()), (size, plan.depths[size], rates)


def test_few_depths_stand_for_many_that_are_equally_good() -> None:
    rates = {
        1: {0: 50.0, 2: 99.5, 3: 100.0},
        2: {0: 90.0, 2: 100.0, 3: 99.0},
        3: {0: 99.9, 2: 99.6, 3: 80.0},
        4: {0: 100.0, 2: 80.0, 3: 60.0},
    }
    plan = chain_plan(rates)
    assert plan.depths == {1: 2, 2: 2, 3: 2, 4: 0}
    assert plan.table == (BatchDepth(1, 2), BatchDepth(4, 0))
    assert plan.shape == (2, 1, 3)
    assert chain_plan({1: {0: 2.0, 1: 1.0}}).shape == (1, 1, 2), "drafts that never pay can still be probed"


def test_a_tree_is_chosen_only_where_it_is_clearly_faster() -> None:
    rates = {1: {0: 50.0, 3: 100.0}, 2: {0: 90.0, 3: 110.0}, 4: {0: 150.0, 3: 140.0}}
    chain = chain_plan(rates)
    slow = tree_plan((3, 2, 6), {1: 101.0, 2: 110.0}, rates)
    assert slow.depths == {1: 3, 2: 3, 4: 0}
    assert best_plan(chain, [slow], [1, 2, 4]) is chain
    fast = tree_plan((3, 4, 8), {1: 130.0, 2: 80.0}, rates)
    assert fast.table == (BatchDepth(1, 3), BatchDepth(2, 0))
    assert best_plan(chain, [slow, tree_plan((3, 4, 8), {1: 130.0, 2: 112.0}, rates)], [1, 2, 4]).shape == (3, 4, 8)


# ---- the trial


def test_depths_take_turns_in_blocks_and_the_first_step_is_not_timed() -> None:
    trial, rows = DepthTrial((0, 3)), DecodeRows(np.full(2, 9), np.ones(2, dtype=np.bool_), 0)
    trial.begin(2)
    chosen = []
    for seconds in itertools.islice(itertools.count(1), 2 * BLOCK):
        chosen.append(trial.choose(rows, {0: 2, 3: 2}).depth)
        trial.observe(Observed(chosen[-1], np.array([1, 1 + chosen[-1]]), rows.caps, rows.greedy, 2, 0, float(seconds)))
    assert chosen == [0] * BLOCK + [3] * BLOCK
    assert trial.rounds == 1
    assert trial.cells[2, 0].times == [2.0, 3.0, 4.0]
    assert trial.cells[2, 3].times == [6.0, 7.0, 8.0]
    assert trial.tokens(3) == pytest.approx(2.5)
    few = DecodeRows(np.full(1, 9), np.ones(1, dtype=np.bool_), 0)
    trial.observe(Observed(0, np.array([1]), few.caps, few.greedy, 1, 0, 1.0))
    assert (1, 0) not in trial.cells, "a batch of another size is not timed"


def test_slow_depths_leave_later_rounds() -> None:
    acceptance = synthetic_acceptance("1.2", 7, 3)
    trial = simulated(FAST, [64], acceptance, 6).trial
    assert len(trial.cells[64, 0].times) > 3 * len(trial.cells[64, 7].times) > 0


def test_load_that_slows_whole_rounds_does_not_change_the_times_of_depths() -> None:
    """Depths of one round are slowed alike; the median over rounds leaves out what slows one of them."""
    rng, trial = np.random.default_rng(3), DepthTrial((0, 3))
    trial.begin(4)
    rows, lens = DecodeRows(np.full(4, 9), np.ones(4, dtype=np.bool_), 0), {0: np.ones(4, dtype=np.int64), 3: np.full(4, 2)}
    while trial.rounds < 8:
        slow = 1.0 if trial.rounds < 3 else 2.0 + trial.rounds
        depth = trial.choose(rows, {0: 4, 3: 4}).depth
        once = 9.0 if rng.random() < 0.1 else 1.0
        trial.observe(Observed(depth, lens[depth], rows.caps, rows.greedy, 4, 0, 1e-3 * slow * once * (2 if depth else 1)))
    assert trial.seconds(4, 3) / trial.seconds(4, 0) == pytest.approx(2.0, rel=0.05)


# ---- the file


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_tuning(CHAIN, tmp_path / "t.json")
    assert read_tuning(str(tmp_path / "t.json")) == CHAIN
    assert CHAIN.lines() == "1-4 requests K=5, 5-8 requests K=2, 9 and more requests K=0"
    assert CHAIN.max_batch_with_drafts == 8


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"}, {"depths": (0, 2)}, {"num_draft_tokens": 5}, {"table": ()}, {"acceptance": (0.5,)}, {"depths": (2, 5)},
        {"table": (BatchDepth(2, 5),)}, {"topk": 2}, {"table": (BatchDepth(1, 3),)}, {"steps": (StepTime(1, 3, 0.1),)},
        {"acceptance": (2.0,) * 7}, {"steps": (StepTime(1, 0, 0.0),)}, {"unknown": 1},
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "t.json").write_bytes(msgspec.json.encode(msgspec.to_builtins(CHAIN) | change))
    with pytest.raises(ConfigError, match=r"--speculative-tuning .*t\.json is not a file of this version"):
        read_tuning(str(tmp_path / "t.json"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: no such file"):
        read_tuning(str(tmp_path / "none.json"))


def test_a_tuning_that_cannot_be_written_is_in_the_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "t.json", Path("/dev/full")):
        with pytest.raises(ServingError, match=r"cannot be written: no s.*\. Save these lines in a file instead:") as raised:
            write_tuning(CHAIN, path)
        assert report(raised.value) == FAILED
        (tmp_path / "t.json").write_text(str(raised.value).partition("\n")[2])
        assert read_tuning(str(tmp_path / "t.json")) == CHAIN


@pytest.mark.parametrize(("what", "change"), [("model", "model_files"), ("draft", "draft_files"), ("algorithm", "algorithm")])
def test_a_file_for_another_model_or_draft_is_refused(what: str, change: str) -> None:
    with pytest.raises(ConfigError, match=f"made for the {what}"):
        fitting(CHAIN, msgspec.structs.replace(HERE, **{change: "other"}))


@pytest.mark.parametrize("change", [{"device": "H200"}, {"weights": "int8"}, {"ranks": 2}])
def test_another_device_keeps_the_depths_without_the_times(caplog: pytest.LogCaptureFixture, change: dict[str, Any]) -> None:
    found = fitting(CHAIN, msgspec.structs.replace(HERE, **change))
    assert found == msgspec.structs.replace(CHAIN, steps=())
    assert "its times are not used" in caplog.text
    caplog.clear()
    assert fitting(CHAIN, msgspec.structs.replace(HERE, model="renamed")) == CHAIN
    assert not caplog.text


def test_a_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    empty = fingerprint(str(tmp_path))
    (tmp_path / "model.safetensors").write_text("weights")
    assert len({"", fingerprint(None)}) == 1
    assert len({"", empty, fingerprint(str(tmp_path))}) == 3


# ---- the server


def resolved(tuning: SpeculativeTuning, **given: Any) -> SpeculativeConfig:
    args = ServerArgs(speculative_algorithm="EAGLE", speculative_draft_model_path="/models/eagle", speculative_tuning="t.json", **given)
    found = resolve(args, CPU, LLAMA, DRAFT, tuning).speculative
    assert found is not None
    return found


def test_the_file_sets_the_depths_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = resolved(CHAIN)
    assert (found.num_steps, found.topk, found.num_draft_tokens, found.depths) == (5, 1, 6, (0, 2, 5))
    assert found.tuning == CHAIN
    assert "5/1/6 (steps, topk, draft tokens)" in caplog.text
    assert "1-4 requests K=5, 5-8 requests K=2, 9 and more requests K=0" in caplog.text


def test_the_file_sets_a_tree_and_when_it_pauses() -> None:
    tree = msgspec.structs.replace(CHAIN, **TREE)
    found = resolved(tree)
    assert (found.num_steps, found.topk, found.num_draft_tokens, found.depths, found.disable_by_batch_size) == (3, 4, 8, (), 4)
    assert resolved(tree, speculative_disable_by_batch_size=2).disable_by_batch_size == 2


@pytest.mark.parametrize("given", [{"speculative_num_steps": 2}, {"speculative_num_draft_tokens": 3}, {"speculative_eagle_topk": 2}])
def test_flags_win_over_the_file_and_the_log_says_so(caplog: pytest.LogCaptureFixture, given: dict[str, Any]) -> None:
    found = resolved(CHAIN, **given)
    assert found.tuning is None
    assert found.num_steps == (3 if "speculative_eagle_topk" in given else 2)
    assert "overrides the file's depths" in caplog.text


def test_attention_groups_and_a_server_without_drafts_refuse_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--enable-dp-attention"):
        resolved(CHAIN, enable_dp_attention=True, dp_size=2, tp_size=2, device="cpu")
    draft_folder(tmp_path, "STANDALONE")
    flags = ["--model-path", str(tmp_path), "--load-format", "dummy", "--speculative-tuning", "t.json"]
    assert launch_server(flags) == 2
    assert "--speculative-tuning has no effect without --speculative-algorithm" in capsys.readouterr().err


@pytest.mark.usefixtures("full_measurement")
def test_the_controller_starts_from_the_file(tmp_path: Path) -> None:
    worker = speculating(tmp_path, num_steps=5, num_draft_tokens=6, depths=(0, 2, 5))
    try:
        start_controller(worker, CHAIN)
        info = worker.info().depth
        assert info is not None
        assert info.greedy.rates == pytest.approx([0.7, 0.6, 0.5, 0.5, 0.4], abs=0.05)
        assert info.milliseconds["1"]["0"] == pytest.approx(10.0)
        assert info.milliseconds["1"]["5"] == pytest.approx(20.0)
        start_controller(worker, msgspec.structs.replace(CHAIN, steps=()))
        assert len(worker.info().depth.milliseconds) > 1, "without times in the file it measures"
    finally:
        worker.close()


def test_measured_acceptance_gives_way_to_what_is_seen() -> None:
    averages = AcceptanceAverages(3, (0.9, 0.8))
    assert averages.rates() == pytest.approx([0.9, 0.8, 0.8], abs=0.03)
    for _ in range(300):
        averages.add([0, 1, 0, 0, 0], 3)
    assert averages.rates()[0] < 0.1
    cost = IterationCost([CostPoint(1, depth, 0.01) for depth in (0, 3)])
    assert DepthController((0, 3), cost, (0.9, 0.8, 0.7)).info().sampled.tokens[3] > 3.0


# ---- the command


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """Flags of a small target and its head, both with random weights."""
    target, head = tmp_path / "target", tmp_path / "head"
    draft_folder(target, "STANDALONE", vocab_size=800)
    write_small_tokenizer(target)
    draft_folder(head, "EAGLE", vocab_size=800)
    (tmp_path / "prompts.txt").write_text("Tell me a tale.\none, two, three\n")
    common = ["--model-path", str(target), "--load-format", "dummy", "--device", "cpu", "--random-seed", "0", "--cpu-threads", "1"]
    drafts = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(head), "--max-running-requests", "4"]
    own = ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "24", "--output", str(tmp_path / "t.json"), "--seconds", "30"]
    return lambda *more: [*common, *drafts, *own, *more]


def test_the_command_measures_and_its_file_starts_a_server(
    command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(command()) == 0
    out = capsys.readouterr().out
    assert "tokens/s of chains" in out
    assert "tree 2/2/4: 1 requests" in out
    assert "chosen: " in out
    found = read_tuning(str(tmp_path / "t.json"))
    assert found.measurement.prompts == "prompts.txt"
    server = command()[:-8]  # without our own four flags
    assert launch_server([*server, "--speculative-tuning", str(tmp_path / "t.json"), "--check"]) == 0
    (tmp_path / "head" / "config.json").write_text((tmp_path / "head" / "config.json").read_text() + "\n")
    assert launch_server([*server, "--speculative-tuning", str(tmp_path / "t.json"), "--check"]) == 2
    assert "made for the draft head" in capsys.readouterr().err


def test_synthetic_acceptance_is_found_again(command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(command("--speculative-synthetic-accept-length", "2.5", "--batch-sizes", "4")) == 0
    assert "tree" not in capsys.readouterr().out
    found = read_tuning(str(tmp_path / "t.json"))
    wanted = synthetic_acceptance("2.5", 7, 3)[0]
    assert found.acceptance[0] == pytest.approx(wanted, abs=0.12)
    assert {step.size for step in found.steps} == {4}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--speculative-num-steps", "3"], "--speculative-num-steps has no effect"),
        (["--batch-sizes", "9"], "--batch-sizes must be at most 4"),
        (["--batch-sizes", "0"], "--batch-sizes and --max-new-tokens must be at least 1"),
        (["--speculative-algorithm", "none"], "--speculative-draft-model-path has no effect"),
        (["--output", "/nowhere/else/t.json"], "--output /nowhere/else/t.json cannot be written"),
        (["--output", "x" * 256], "cannot be written: file name too long"),
        (["--seconds", "nan"], "--seconds above 0"),
        (["--seconds", "1e-9"], "--seconds is too short"),
        (["--max-new-tokens", "1", "--seconds", "2"], "--max-new-tokens too small"),
        (["--check"], "--check and --dump-config belong to runtime.launch_server"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    command: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], more: list[str], why: str
) -> None:
    assert tune.main(command(*more)) == BAD_USE
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--speculative-algorithm", "none"]])
def test_a_server_without_drafts_has_nothing_to_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    draft_folder(tmp_path, "STANDALONE")
    assert tune.main(["--model-path", str(tmp_path), "--load-format", "dummy", "--device", "cpu", *flags]) == BAD_USE
    assert "There are no drafts to tune. Give --speculative-algorithm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "why"), [(["--prompts", "/nowhere"], "cannot be read"), (["--max-new-tokens", "99999"], "leaves no room")]
)
def test_prompts_are_checked_before_the_model_is_loaded(
    command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], why: str
) -> None:
    monkeypatch.delattr(tune, "open_worker")
    assert tune.main(command(*more)) == BAD_USE
    assert why in capsys.readouterr().err


def test_lines_are_json_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object) -> None:
        tune.log.warning("stopped")
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", stop)
    assert tune.main(["--output", str(tmp_path / "tuning.json"), "--log-format", "json"]) == INTERRUPTED
    assert json.loads(capsys.readouterr().err)["message"] == "stopped"


def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(
    command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(command("--output", str(tmp_path))) == BAD_USE
    shown = capsys.readouterr()
    assert f"--output {tmp_path} cannot be written" in shown.err
    assert "tokens/s" not in shown.out
