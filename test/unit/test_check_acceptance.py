"""The parity proof: it says yes where graphs are sound, and no where one of them is broken on purpose."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from runtime import check_acceptance
from runtime.config.device_tuning import H200
from runtime.config.runtime_config import RuntimeConfig
from runtime.errors import BAD_USE, ConfigError
from runtime.layers.attention.torch_native import TorchNativeAttention
from runtime.model_executor import build as worker_build
from runtime.model_executor import verification
from runtime.model_executor.graph_runner import GraphOptions, GraphRunner, RunMode, capture_all, eagerly
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.parity import check_parity, run_scratch
from runtime.model_executor.short_prompts import PromptCost, ShortPrompts, prompt_forward, prompt_spec
from runtime.worker_info import RunnerRuns
from unit.predicting import calm, draft_folder, speculating, teach, use_head_bounds
from unit.small_tokenizer import write_small_tokenizer
from unit.storm import runners

VOCAB = 800


def change_builds(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> None:
    """From now on every worker is changed so when it is built."""
    build = worker_build.build_worker

    def changed(*args: Any, **more: Any) -> Any:
        worker: Any = build(*args, **more)
        change(worker)
        return worker

    monkeypatch.setattr(worker_build, "build_worker", changed)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a small target and a head that knows it; both come without weights, which are set by hand after they are built."""
    target, head = tmp_path / "target", tmp_path / "head"
    draft_folder(target, "STANDALONE", vocab_size=VOCAB)
    write_small_tokenizer(target)
    draft_folder(head, "EAGLE", vocab_size=VOCAB)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Tell me a tale."}\nplain words\n{"prompt": "one, two, three"}\n')

    def tune(worker: Any) -> None:
        target = worker.parts.target.runner.model
        calm(target, 1.0)
        teach(worker.parts.drafter.model, target.lm_head.weight)

    change_builds(monkeypatch, tune)
    flags = [
        "--model-path", str(target), "--load-format", "dummy", "--device", "cpu", "--random-seed", "0", "--cpu-threads", "1",
        "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "24", "--speculative-num-steps", "3",
    ]  # fmt: skip
    return [*flags, "--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(head)]


def test_sound_graphs_pass_and_the_table_shows_both_runs(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert check_acceptance.main(command) == 0
    out = capsys.readouterr().out
    assert "position" in out
    assert "eager" in out
    assert "differs" not in out
    assert "draft extend" in out
    assert "the same" in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] == ["1"]]
    assert rows[0][1] == rows[0][3]
    assert int(rows[0][1].split("/")[0]) > 0, "nothing was accepted, so nothing was compared"


def test_the_result_alone_is_on_stdout_in_the_form_of_the_log(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert check_acceptance.main([*command, "--num-prompts", "1", "--log-format", "json"]) == 0
    out, err = capfd.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["logger"] for line in lines} == {check_acceptance.__name__}
    assert lines[-1]["message"] == "acceptance and text are the same, eager and through graphs"
    assert '"logger": "runtime.config.device"' in err


def test_positions_that_no_window_reached_are_named(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert check_acceptance.main([*command, "--speculative-synthetic-accept-length", "1,0,1"]) == 0
    assert "not compared: draft positions 3, which no window reached" in capsys.readouterr().out
    assert check_acceptance.main(command) == 0
    assert "not compared" not in capsys.readouterr().out


def test_trees_pass_too(command: list[str]) -> None:
    tree = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"]
    assert check_acceptance.main([*command, *tree, "--num-prompts", "2"]) == 0


def test_where_drafting_pauses_graphs_with_drafts_and_without_are_compared(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text("\n".join(f"number {i} of them" for i in range(7)))
    assert check_acceptance.main([*command, "--speculative-disable-by-batch-size", "2", "--enable-iteration-graph"]) == 0
    out = capsys.readouterr().out
    runs = {name: int(count) for name, count in re.findall(r"^([a-zK=03 ]+): (\d+) replays$", out, re.MULTILINE)}
    assert list(runs) == [
        *("verify", "draft decode", "draft extend", "target decode", "draft extend K=0"),
        *("iteration K=3", "iteration K=0"),
    ]
    assert runs.pop("draft extend K=0") > 1, "once for eight steps"
    assert min(runs.values()) > 3


def test_every_depth_that_a_controller_may_choose_is_compared(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert check_acceptance.main([*command, "--speculative-num-steps", "auto", "--speculative-disable-by-batch-size", "2"]) == 0
    runs = {name: int(count) for name, count in re.findall(r"^([a-z0-9K= ]+): (\d+) replays$", capsys.readouterr().out, re.MULTILINE)}
    verify = ["verify", "verify K=5", "verify K=3", "verify K=2", "verify K=1", "target decode"]
    assert {name: count > 0 for name, count in runs.items() if name in verify} == dict.fromkeys(verify, True)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_prompts_too_few_for_a_pause_run_more_than_once(command: list[str], count: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speculative-disable-by-batch-size", "2", "--enable-iteration-graph", "--num-prompts", str(count)]
    assert check_acceptance.main([*command, *flags]) == 0
    runs = [int(count) for count in re.findall(r": (\d+) replays$", capsys.readouterr().out, re.MULTILINE)]
    assert len(runs) == 7
    assert runs.pop(4) > 1, "once for eight steps"
    assert min(runs) > 3


def test_no_prompt_is_turned_away_for_want_of_a_place_to_wait(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert check_acceptance.main([*command, "--max-queued-requests", "1", "--max-running-requests", "1"]) == 0
    assert "the same" in capsys.readouterr().out


def test_a_prompt_is_a_line_whatever_unicode_holds_it(tmp_path: Path) -> None:
    deep = "[" * 100_000
    written = ["a\u2028b\u2029c", "d\x85e\x0bf\x0cg", "h\x1ci"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in written]
    (tmp_path / "prompts").write_bytes(("\ufeff" + "\r\n".join([*lines, deep, "plain\u2028words"])).encode())
    options, _ = check_acceptance.read_options(["--prompts", str(tmp_path / "prompts")])
    assert check_acceptance.read_prompts(options.prompts) == [*written, deep, "plain\u2028words"]


@pytest.mark.parametrize(("text", "chat", "why"), [('{"prompt": "\\ud800"}', True, "surrogate"), ('{"prompt": ""}', False, "empty")])
def test_a_prompt_that_is_no_text_is_named_and_is_no_difference(
    command: list[str], tmp_path: Path, text: str, chat: bool, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(f"words\n{text}\n")
    if not chat:
        (tmp_path / "target" / "chat_template.jinja").unlink()
    assert check_acceptance.main(command) == BAD_USE
    assert re.search(f"--prompts: prompt 2.*{why}", capsys.readouterr().err)


def test_a_stale_input_of_one_graph_fails(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    change_builds(monkeypatch, lambda worker: make_stale(runners(worker)["draft_extend"], "accept_lens"))
    assert check_acceptance.main(command) == check_acceptance.DIFFERENT
    out = capsys.readouterr().out
    assert "<- differs" in out
    assert "acceptance differs" in out
    assert "text of" not in out, "verification is lossless: only this check notices"


def test_padding_that_writes_where_somebody_reads_fails(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference of a CPU is without padding: else what padding does, it does on both sides."""

    def break_padding(worker: Any) -> None:
        verify = runners(worker)["verify"]
        run = verify.run

        def careless(batch: Any, *more: Any) -> Any:
            padding = (batch.req_pool_indices == 0).repeat_interleave(batch.tokens_per_req)
            batch.out_cache_loc[padding] = batch.out_cache_loc[0]
            return run(batch, *more)

        monkeypatch.setattr(verify, "run", lambda batch, variant="", eager=False: careless(batch, variant, eager))

    change_builds(monkeypatch, break_padding)
    assert check_acceptance.main(command) == check_acceptance.DIFFERENT
    assert "prompts differs, first of prompt 1" in capsys.readouterr().out


def accept_one_more(worker: Any) -> None:
    """Every window commits one draft more than the target accepts."""
    decide = worker.parts.accepter.decide

    def too_many(iteration: Any, draft: Any, verified: Any) -> Any:
        result = decide(iteration, draft, verified)
        lens = (result.accept_lens + 1).clamp(max=draft.width)
        tokens = torch.where(torch.arange(draft.width) < lens[:, None] - 1, draft.tokens.roll(-1, 1), result.tokens)
        return replace(result, accept_lens=lens, tokens=tokens)

    worker.parts.accepter.decide = too_many


def heed_context(model: Any) -> None:
    """Make text depend more on what attention reads."""
    for layer in model.layers:
        layer.attention.o_proj.weight.mul_(4.0)


TREE = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"]
SABOTAGES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "one draft too many": (accept_one_more, []),
    "tree KV never moved": (lambda worker: setattr(worker.parts.target.runner.kv_pool, "move", lambda *args, **more: None), TREE),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_text_that_is_not_plain_decodings_fails(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Graphs and eager passes agree here: both are wrong."""
    sabotage, flags = SABOTAGES[name]
    flags = [*flags, "--max-new-tokens", "56"]
    change_builds(monkeypatch, lambda worker: heed_context(worker.parts.target.runner.model))
    assert check_acceptance.main([*command, *flags]) == 0
    assert "the text is that of plain decoding for 3 of 3 prompts" in capsys.readouterr().out
    change_builds(monkeypatch, sabotage)
    assert check_acceptance.main([*command, *flags]) == check_acceptance.DIFFERENT
    out = capsys.readouterr().out
    assert "prompts is not that of plain decoding, first of prompt" in out
    assert "acceptance and text are the same, eager and through graphs" in out


def test_a_runner_that_replayed_nothing_was_not_compared(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change_builds(monkeypatch, lambda worker: runners(worker)["draft_decode"]._replays.clear())
    assert check_acceptance.main(command) == check_acceptance.DIFFERENT
    out = capsys.readouterr().out
    assert "not compared: draft decode replayed nothing; raise --max-new-tokens or --cuda-graph-max-bs" in out
    assert "the same" not in out


@pytest.mark.parametrize("broken", ["", "verify", "verify greedy"])
def test_runs_with_and_without_logits_are_compared(
    command: list[str], broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_bounds(config: RuntimeConfig, most: int) -> RuntimeConfig:
        config = usual(config, most)
        return structs.replace(config, graphs=structs.replace(config.graphs, head_bounds=True, iteration_graph=False))

    usual = check_acceptance._for_check
    monkeypatch.setattr(check_acceptance, "_for_check", with_bounds)
    use_head_bounds(monkeypatch)
    change_builds(monkeypatch, lambda worker: _repeat_a_token(worker, broken))
    assert check_acceptance.main(command) == (check_acceptance.DIFFERENT if broken else 0)
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name}: [1-9]\d* replays", out, re.M) for name in ("verify", "verify greedy"))


@pytest.mark.parametrize("broken", ["", "verify W=2", "verify W=3", "verify shared"])
def test_passes_over_windows_of_different_widths_and_a_shared_prefix_are_compared(
    command: list[str], broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("MIN_REQUESTS", 2), ("SHARED_FROM", 2), ("SHARED_SAVES", 1), ("SHARED_PADDING", 2)):
        monkeypatch.setattr(verification, name, value)
    monkeypatch.setattr(TorchNativeAttention, "caps", replace(TorchNativeAttention.caps, shared_prefix=True))
    monkeypatch.setattr(check_acceptance, "PREFIX_TOKENS", 70)
    change_builds(monkeypatch, lambda worker: _repeat_a_token(worker, broken))
    assert check_acceptance.main([*command, "--page-size", "16"]) == (check_acceptance.DIFFERENT if broken else 0)
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name}: [1-9]\d* replays", out, re.M) for name in ("verify W=2", "verify W=3", "verify shared"))
    assert "prompts 4 to 6 are the given ones after a common prefix of 70 tokens" in out


def test_prompts_share_a_prefix_only_if_there_is_room() -> None:
    prompts, prefix = [[1, 2, 3], [4]], [*[1, 2, 3, 4] * 256]
    assert check_acceptance.with_prefix(prompts, 1027) == [[*prefix, 1, 2, 3], [*prefix, 4]]
    assert check_acceptance.with_prefix(prompts, 1026) == []


def test_what_cannot_be_compared_is_refused(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_acceptance.main([*command, "--max-new-tokens", "1"]) == BAD_USE
    assert check_acceptance.main([*command, "--prompts", str(tmp_path / "none")]) == BAD_USE
    assert check_acceptance.main([*command, "--no-such-flag"]) == BAD_USE
    assert check_acceptance.main([*command, "--check"]) == BAD_USE
    assert check_acceptance.main([*command, "--dump-config"]) == BAD_USE
    assert check_acceptance.main([*command[: command.index("--speculative-algorithm")]]) == BAD_USE
    assert "--speculative-algorithm" in capsys.readouterr().err


def test_the_embedded_prompts_are_the_default() -> None:
    options, rest = check_acceptance.read_options(["--page-size", "16"])
    assert rest == ["--page-size", "16"]
    assert len(check_acceptance.read_prompts(options.prompts)) >= 64


def make_stale(runner: Any, name: str) -> None:
    """What every replay of `runner` reads as `name` is what the first one read."""
    for key, replay in list(runner._replays.items()):
        buffer = {**runner.buffers, **runner.inputs(runner.sizes[-1])}[name]
        first: list[Any] = []

        def stale(replay: Any = replay, buffer: Any = buffer, first: list[Any] = first) -> None:
            if not first:
                first.append(buffer.clone())
            buffer.copy_(first[0])
            replay()

        runner._replays[key] = stale


# ---- the short one at start


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"topk": 3, "num_draft_tokens": 7},
        {"num_steps": 1},
        {"algorithm": "NGRAM"},
        {"algorithm": "STANDALONE"},
        {"num_steps": 7, "depths": (0, 1, 2, 3, 5, 7)},
    ],
)
def test_sound_workers_start_and_nothing_of_the_check_is_left(tmp_path: Path, spec: dict[str, Any]) -> None:
    worker = speculating(tmp_path, replay="eager", sizes=[1, 2, 4, 8], **spec)
    check_parity(worker)
    acceptance: Any = worker.info().acceptance
    assert [ran.iterations for ran in (acceptance.graph, acceptance.eager_sample, acceptance.eager)] == [0, 0, 0]
    assert worker.parts.monitor.counted().iterations == 0
    assert worker.parts.target.rows.kv_lens.sum() == 0
    assert worker.parts.target.page_table.pages.sum() == 0
    assert all(runner.mode is RunMode.REPLAY for runner in worker.runners)


def test_positions_that_no_window_of_the_check_reached_are_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_parity(speculating(tmp_path, replay="eager", sizes=[4], synthetic_accept=(1.0, 1.0, 1.0)))
    assert "not compared" not in caplog.text
    check_parity(speculating(tmp_path, replay="eager", sizes=[4], synthetic_accept=(0.0, 1.0, 1.0)))
    assert "not compared: draft positions 2, 3, which no window reached" in caplog.text


def test_the_check_drafts_well_enough_to_see_something(tmp_path: Path) -> None:
    for spec in ({}, {"algorithm": "NGRAM"}):
        assert run_scratch(speculating(tmp_path, replay="eager", sizes=[4], **spec)).counters.mean_accept_len > 1.1


@pytest.mark.parametrize("name", ["verify", "draft_decode", "draft_extend"])
def test_the_runner_at_fault_is_named(tmp_path: Path, name: str) -> None:
    worker = speculating(tmp_path, replay="eager", sizes=[4])
    runner = runners(worker)[name]
    make_stale(runner, {"verify": "features", "draft_decode": "tokens", "draft_extend": "accept_lens"}[name])
    if name != "draft_extend":
        _lose_results(runner)
    with pytest.raises(ConfigError, match=f"Graphs of {runner.spec.name} and"):
        check_parity(worker)


@pytest.mark.parametrize("name", ["verify", "verify greedy"])
def test_passes_with_and_without_logits_are_compared(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_head_bounds(monkeypatch)
    worker = speculating(tmp_path, replay="eager", sizes=[4], runtime={"head_bounds": True})
    check_parity(worker)
    runner = next(runner for runner in worker.all_runners if runner.spec.name == name)
    assert runner.replayed > 0
    assert runner.ran_eagerly > 0
    _repeat_a_token(worker, name)
    with pytest.raises(ConfigError, match=f"Graphs of {name} and"):
        check_parity(worker)


@pytest.mark.parametrize("fault", ["features", "nothing"])
def test_graphs_of_short_prompts_are_compared_too(tmp_path: Path, fault: str) -> None:
    """What a draft is fed of a prompt costs acceptance alone when it is wrong."""
    worker = speculating(tmp_path, algorithm="EAGLE3", replay="eager", sizes=[4])
    target, layers = worker.parts.target, worker.parts.drafter.model.aux_layers
    hidden = target.runner.config.hidden_size
    spec = prompt_spec(hidden, len(layers) * hidden, torch.float32, 0)
    inputs = InputBuffers(1, max_tokens=32, device=torch.device("cpu"))
    prompts = GraphRunner(
        spec,
        prompt_forward(target.runner.model, layers),
        inputs,
        [target.runner.backend],
        GraphOptions([32], cuda=False, node_bytes=H200.graph_node_bytes),
    )
    with torch.inference_mode():
        capture_all([prompts])
    target.short_prompts = ShortPrompts(prompts, target.page_table, PromptCost(1 << 20, 128))
    if fault == "nothing":
        check_parity(worker)
        assert prompts.replayed == prompts.ran_eagerly == 4
        assert [run.runner for run in worker.info().graph_runs][-1] == "short prompts"
        return
    replay = prompts._replays[1, 32, ""]

    def blurred() -> None:
        replay()
        prompts.buffers["aux"].normal_(0.0, 30.0, generator=torch.Generator().manual_seed(0))

    prompts._replays[1, 32, ""] = blurred
    with pytest.raises(ConfigError, match="Graphs of short prompts and"):
        check_parity(worker)


def test_text_that_differs_fails_where_acceptance_does_not(tmp_path: Path) -> None:
    worker = speculating(tmp_path, replay="eager", sizes=[4], synthetic_accept=(1.0, 1.0, 0.0))
    _lose_results(runners(worker)["draft_decode"])
    with pytest.raises(ConfigError, match="Graphs of draft decode and"):
        check_parity(worker)


def _lose_results(runner: Any) -> None:
    """Replays compute, and their results never reach the buffers."""
    for key, replay in list(runner._replays.items()):

        def lost(replay: Any = replay) -> None:
            before = {n: b.clone() for n, b in runner.buffers.items()}
            replay()
            for n, b in runner.buffers.items():
                b.copy_(before[n])

        runner._replays[key] = lost


def _repeat_a_token(worker: Any, name: str) -> None:
    """Replays of the runner of this name, if there is one, find the same token everywhere."""
    for runner in (runner for runner in worker.all_runners if runner.spec.name == name):
        for key, replay in list(runner._replays.items()):

            def repeated(runner: Any = runner, replay: Any = replay) -> None:
                replay()
                runner.buffers["tokens"].fill_(5)

            runner._replays[key] = repeated


def test_without_graphs_the_check_says_so_and_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        check_parity(speculating(tmp_path))
    assert "nothing to compare" in caplog.text


def test_the_flag_runs_it_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(worker_build, "check_parity", seen.append)
    worker = speculating(tmp_path, replay="eager", sizes=[4], check_parity=True)
    assert seen == [worker]
    speculating(tmp_path, replay="eager", sizes=[4])
    assert len(seen) == 1


def test_a_reference_runs_eagerly_and_ends(tmp_path: Path) -> None:
    worker = speculating(tmp_path, replay="eager", sizes=[8])
    with eagerly(worker.runners):
        run_scratch(worker)
    assert not any(r.replayed for r in worker.runners)
    assert all(r.size_for(3) == 8 for r in worker.runners)
    with eagerly(worker.runners, RunMode.EAGER):
        assert all(r.size_for(3) == 3 for r in worker.runners)
    run_scratch(worker)
    assert all(r.replayed > 0 for r in worker.runners)
    assert worker.info().graph_runs[0] == RunnerRuns("verify", replayed=11, eager=11)
