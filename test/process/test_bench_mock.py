"""`bench_serving` as a user runs it, against a server whose timings are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mock_server import Script, mock_server

PYTHON = Path(__file__).resolve().parents[2] / "python"


def bench(port: int, tmp_path: Path, *flags: str, expect: int = 0) -> tuple[dict[str, Any], str]:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "runtime.bench_serving", "--port", str(port), "--output-file", str(out), "--disable-tqdm", *flags]
    environment = os.environ | {"PYTHONPATH": str(PYTHON)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path)
    assert done.returncode == expect, done.stdout + done.stderr
    return json.loads(out.read_text()) if out.exists() else {}, done.stdout + done.stderr


IDS = ("--dataset-name", "random-ids", "--random-input-len", "5", "--random-output-len", "11", "--random-range-ratio", "1")


def told_by_the_mock(script: Script) -> dict[str, float]:
    """The figures by definition, in ms, from the times at which the mock really wrote: a busy machine makes it late too."""
    ttfts = [times[1] - times[0] for times in script.sent_at]
    ends = [times[-1] - times[0] for times in script.sent_at]
    tpots = [(end - ttft) / (len(times) - 2) for end, ttft, times in zip(ends, ttfts, script.sent_at, strict=True)]
    means = {"ttft": ttfts, "tpot": tpots, "itl": tpots, "e2e_latency": ends}
    return {name: sum(values) / len(values) * 1000 for name, values in means.items()}


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_figures_are_those_of_the_mock_within_one_percent(backend: str, tmp_path: Path) -> None:
    script = Script(ttft=0.8, gap=0.08)
    dataset = IDS if "chat" not in backend else ("--dataset-name", "embedded", "--sharegpt-output-len", "11")
    with mock_server(script) as port:
        figures, text = bench(port, tmp_path, "--backend", backend, *dataset, "--num-prompts", "2", "--warmup-requests", "0")
    assert (figures["completed"], figures["failed"]) == (2, 0)
    for name, expected in told_by_the_mock(script).items():
        assert figures[f"mean_{name}_ms"] == pytest.approx(expected, rel=0.01), name
    assert figures["total_output_tokens"] == 22
    assert figures["total_input_tokens"] == 14, "the server's count of the prompt wins"
    assert figures["output_throughput"] * figures["duration"] == pytest.approx(22)
    assert figures["duration"] * 1000 == pytest.approx(figures["mean_e2e_latency_ms"], rel=0.01)
    assert "Mean TTFT (ms):" in text


def test_a_closed_loop_never_has_more_requests_under_way_than_asked(tmp_path: Path) -> None:
    script = Script(ttft=0.1, gap=0.02)
    with mock_server(script) as port:
        bench(port, tmp_path, *IDS, "--num-prompts", "6", "--max-concurrency", "2", "--warmup-requests", "0")
    spans = [(times[0], times[-1]) for times in script.sent_at]
    assert len(spans) == 6
    assert max(sum(start <= at < end for start, end in spans) for at, _ in spans) == 2


def test_failed_requests_are_counted_and_shown_never_dropped(tmp_path: Path) -> None:
    ways = {1: "status", 2: "cut", 3: "error"}
    script = Script(ttft=0.02, gap=0.01, fail=lambda number: ways.get(number, ""))
    with mock_server(script) as port:
        figures, text = bench(
            port, tmp_path, *IDS, "--num-prompts", "6", "--warmup-requests", "0", "--output-details", "--max-concurrency", "1"
        )
    assert (figures["completed"], figures["failed"]) == (3, 3)
    errors = figures["errors"]
    assert [bool(error) for error in errors] == [False, True, True, True, False, False]
    assert "500" in errors[1]
    assert "closed before" in errors[2]
    assert "gave up" in errors[3]
    assert "Failed requests:                         3" in text
    assert "the mock gave up" in text
    assert figures["total_output_tokens"] == 33, "tokens of failed requests are not throughput"


def test_a_run_in_which_all_requests_fail_exits_1(tmp_path: Path) -> None:
    script = Script(fail=lambda number: "status")
    with mock_server(script) as port:
        figures, _ = bench(port, tmp_path, *IDS, "--num-prompts", "2", "--warmup-requests", "0", expect=1)
    assert figures["failed"] == 2
    assert figures["mean_ttft_ms"] is None


def test_a_failed_warm_up_says_why(tmp_path: Path) -> None:
    with mock_server(Script(fail=lambda number: "status")) as port:
        figures, text = bench(port, tmp_path, *IDS, "--num-prompts", "2", expect=2)
    assert figures == {}
    assert "the mock refuses" in text


def test_no_server_is_one_line_and_exit_2(tmp_path: Path) -> None:
    _, text = bench(9, tmp_path, *IDS, "--ready-check-timeout-sec", "1", expect=2)
    assert "no server is ready" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:99999", "http://127.0.0.1:http", "http://[::1"])
def test_an_address_that_is_none_is_one_line_and_exit_2(url: str, tmp_path: Path) -> None:
    _, text = bench(9, tmp_path, *IDS, "--base-url", url, expect=2)
    assert f"the server's address {url!r} is" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", ["missing/out.jsonl", "."])
def test_figures_that_could_not_be_kept_are_refused_before_the_run(name: str, tmp_path: Path) -> None:
    script = Script()
    with mock_server(script) as port:
        _, text = bench(port, tmp_path, *IDS, "--num-prompts", "2", "--output-file", name, expect=2)
    assert f"--output-file {name}" in text
    assert "Traceback" not in text
    assert not script.sent_at, "nothing is measured for nothing"


def test_a_host_may_be_an_address_of_ipv6(tmp_path: Path) -> None:
    _, text = bench(9, tmp_path, *IDS, "--host", "::1", "--ready-check-timeout-sec", "1", expect=2)
    assert "no server is ready at ::1:9 " in text


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai"])
def test_chunks_of_several_tokens_count_each_token(backend: str, tmp_path: Path) -> None:
    script = Script(ttft=0.2, gap=0.15, per_chunk=3, spec=True)
    with mock_server(script) as port:
        flags = ("--dataset-name", "random-ids", "--random-input-len", "5", "--random-output-len", "12", "--random-range-ratio", "1")
        figures, _ = bench(port, tmp_path, "--backend", backend, *flags, "--num-prompts", "2")
    assert figures["total_output_tokens"] == 24
    assert figures["mean_tpot_ms"] == pytest.approx(450 / 11, rel=0.01)
    if backend == "sglang":
        assert figures["mean_itl_ms"] == pytest.approx(50, rel=0.01)
        assert figures["accept_length"] == pytest.approx(11 / 4), "of this run, from the answers"
        assert figures["per_position_acceptance"] == [1.0, 0.75]
    else:
        assert figures["accept_length"] == 9.0, "what the server says, where the answers do not"
    assert figures["graph_hit_rate"] == 0.5


def test_goodput_flush_and_extra_body_reach_where_they_should(tmp_path: Path) -> None:
    script = Script(ttft=0.05, gap=0.02)
    flags = ("--goodput", "ttft:1", "--flush-cache", "--extra-request-body", '{"priority": 3}', "--top-p", "0.9", "--plot-throughput")
    with mock_server(script) as port:
        figures, text = bench(port, tmp_path, *IDS, "--num-prompts", "2", *flags)
    assert figures["request_goodput"] == 0.0
    assert "/flush_cache" in script.calls
    assert all(body["priority"] == 3 and body["sampling_params"]["top_p"] == 0.9 for body in script.requests)
    assert (tmp_path / "out.png").exists()
    assert "Request goodput" in text


def test_whole_answers_have_no_time_per_token(tmp_path: Path) -> None:
    with mock_server(Script(ttft=0.05, gap=0.01)) as port:
        figures, _ = bench(port, tmp_path, *IDS, "--num-prompts", "2", "--disable-stream")
    assert figures["completed"] == 2
    assert figures["mean_tpot_ms"] is None
    assert figures["total_output_tokens"] == 22
