"""`bench_serving` as a user runs it, against a mock server that records its own timestamps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def figures_of(figures: dict[str, Any]) -> dict[str, float]:
    """Mean latencies in ms by their definitions, from the per-request times of `--output-details`."""
    ends = [ttft + sum(gaps) for ttft, gaps in zip(figures["ttfts"], figures["itls"], strict=True)]
    tpots = [sum(gaps) / (n - 1) for gaps, n in zip(figures["itls"], figures["output_lens"], strict=True)]
    times = {"ttft": figures["ttfts"], "tpot": tpots, "itl": [gap for gaps in figures["itls"] for gap in gaps], "e2e_latency": ends}
    return {name: sum(values) / len(values) * 1000 for name, values in times.items()}


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_latencies_contain_the_times_that_the_mock_recorded(backend: str, tmp_path: Path) -> None:
    """The client starts its clock before the mock reads a request and stops it after the mock has written a chunk."""
    script = Script(ttft=0.05, gap=0.005)
    dataset = IDS if "chat" not in backend else ("--dataset-name", "embedded", "--sharegpt-output-len", "11")
    flags = ("--num-prompts", "2", "--max-concurrency", "1", "--warmup-requests", "0", "--output-details")
    with mock_server(script) as port:
        figures, text = bench(port, tmp_path, "--backend", backend, *dataset, *flags)
    assert (figures["completed"], figures["failed"]) == (2, 0)
    for sent_at, ttft, gaps in zip(script.sent_at, figures["ttfts"], figures["itls"], strict=True):
        assert len(gaps) == len(sent_at) - 2 == 10
        assert ttft >= sent_at[1] - sent_at[0]
        assert ttft + sum(gaps) >= sent_at[-1] - sent_at[0]
    for name, expected in figures_of(figures).items():
        assert figures[f"mean_{name}_ms"] == pytest.approx(expected), name
    assert figures["total_output_tokens"] == 22
    assert figures["total_input_tokens"] == 14, "the server's count of the prompt wins"
    assert figures["output_throughput"] * figures["duration"] == pytest.approx(22)
    assert figures["duration"] * 1000 >= 2 * figures["mean_e2e_latency_ms"], "one request at a time"
    assert "Mean TTFT (ms):" in text


def test_closed_loop_respects_its_concurrency_limit(tmp_path: Path) -> None:
    script = Script(ttft=0.1, gap=0.02)
    with mock_server(script) as port:
        bench(port, tmp_path, *IDS, "--num-prompts", "6", "--max-concurrency", "2", "--warmup-requests", "0")
    spans = [(times[0], times[-1]) for times in script.sent_at]
    assert len(spans) == 6
    assert max(sum(start <= at < end for start, end in spans) for at, _ in spans) <= 2


def test_failed_requests_are_counted_and_shown(tmp_path: Path) -> None:
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


def test_run_without_successful_requests_exits_1(tmp_path: Path) -> None:
    script = Script(fail=lambda number: "status")
    with mock_server(script) as port:
        figures, _ = bench(port, tmp_path, *IDS, "--num-prompts", "2", "--warmup-requests", "0", expect=1)
    assert figures["failed"] == 2
    assert figures["mean_ttft_ms"] is None


def test_failed_warm_up_reports_the_reason(tmp_path: Path) -> None:
    with mock_server(Script(fail=lambda number: "status")) as port:
        figures, text = bench(port, tmp_path, *IDS, "--num-prompts", "2", expect=2)
    assert figures == {}
    assert "the mock refuses" in text


def test_missing_server_is_one_line_and_exit_2(tmp_path: Path) -> None:
    _, text = bench(9, tmp_path, *IDS, "--ready-check-timeout-sec", "1", expect=2)
    assert "no server is ready" in text
    assert "Traceback" not in text


def test_a_server_with_openais_paths_alone_is_measured(tmp_path: Path) -> None:
    script = Script(ttft=0.01, gap=0.01, unknown=("/ready", "/get_model_info", "/get_server_info"))
    model = tmp_path / "config.json"
    model.write_text('{"vocab_size": 1000}')
    with mock_server(script) as port:
        flags = ("--backend", "vllm", "--model", str(tmp_path), "--num-prompts", "2", "--ready-check-timeout-sec", "5")
        figures, _ = bench(port, tmp_path, *IDS, *flags)
    assert figures["completed"] == 2
    assert script.calls[:3] == ["/ready", "/health", "/v1/models"]


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:99999", "http://127.0.0.1:http", "http://[::1"])
def test_invalid_address_is_one_line_and_exit_2(url: str, tmp_path: Path) -> None:
    _, text = bench(9, tmp_path, *IDS, "--base-url", url, expect=2)
    assert f"the server's address {url!r} is" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", ["missing/out.jsonl", ".", "x" * 256])
def test_unwritable_output_file_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    script = Script()
    with mock_server(script) as port:
        _, text = bench(port, tmp_path, *IDS, "--num-prompts", "2", "--output-file", name, expect=2)
    assert f"--output-file {name}" in text
    assert "Traceback" not in text
    assert not script.sent_at, "nothing was sent"


@pytest.mark.parametrize(("output", "stdout", "status"), [("/dev/full", None, 1), ("out.jsonl", "/dev/full", 0)])
def test_a_full_disk_or_stdout_does_not_cost_the_result(output: str, stdout: str | None, status: int, tmp_path: Path) -> None:
    with mock_server(Script()) as port:
        flags = f"--port {port} {' '.join(IDS)} --num-prompts 2 --output-file {output} --disable-tqdm"
        command = f"{sys.executable} -m runtime.bench_serving {flags} {f'> {stdout}' if stdout else ''}"
        environment = os.environ | {"PYTHONPATH": str(PYTHON)}
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert "o space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    line = (tmp_path / "out.jsonl").read_text() if stdout else next(line for line in done.stdout.splitlines() if line.startswith("{"))
    assert json.loads(line)["completed"] == 2


@contextmanager
def started(port: int, tmp_path: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    common = ("--port", str(port), *IDS, "--warmup-requests", "0", "--disable-tqdm", "--output-file", "out.jsonl")
    command = [sys.executable, "-m", "runtime.bench_serving", *common, *flags]
    environment = os.environ | {"PYTHONPATH": str(PYTHON)}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def interrupt(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """Ctrl-C as soon as `ready`."""
    while not ready():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)


def test_ctrl_c_stops_the_profile(tmp_path: Path) -> None:
    script = Script(ttft=60.0)
    with mock_server(script) as port, started(port, tmp_path, "--num-prompts", "2", "--profile") as process:
        interrupt(process, lambda: len(script.requests) == 2)
        _, told = process.communicate(timeout=60.0)
    assert (process.returncode, script.calls[-1]) == (130, "/stop_profile")
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir())


def test_ctrl_c_keeps_the_requests_that_have_ended(tmp_path: Path) -> None:
    def stall(number: int) -> str:
        script.ttft = 60.0 if number >= 2 else script.ttft
        return ""

    script = Script(ttft=0.05, gap=0.01, fail=stall)
    flags = ("--num-prompts", "9", "--max-concurrency", "2", "--output-details")
    with mock_server(script) as port, started(port, tmp_path, *flags) as process:
        interrupt(process, lambda: len(script.requests) == 4)
        out, told = process.communicate(timeout=60.0)
    assert (process.returncode, told) == (130, "bench_serving: interrupted; the result covers the 2 requests that had ended\n")
    assert "Interrupted Serving Benchmark Result" in out
    figures = json.loads((tmp_path / "out.jsonl").read_text())
    assert (figures["interrupted"], figures["completed"], figures["failed"], figures["errors"]) == (True, 2, 0, ["", ""])
    assert figures["total_output_tokens"] == 22


def test_ctrl_c_keeps_the_result_of_a_server_that_hangs(tmp_path: Path) -> None:
    def hang(number: int) -> str:
        script.ttft, script.stalled = (60.0, "/get_server_info") if number >= 2 else (script.ttft, "")
        return ""

    script = Script(ttft=0.05, gap=0.01, fail=hang)
    with mock_server(script) as port, started(port, tmp_path, "--num-prompts", "4", "--max-concurrency", "2") as process:
        interrupt(process, lambda: len(script.requests) == 4)
        process.communicate(timeout=30.0)  # a limit for a hang: an answer to a question about the server may take 60 s
    figures = json.loads((tmp_path / "out.jsonl").read_text())
    assert (process.returncode, figures["completed"], figures["server_info"]) == (130, 2, None)


def test_ctrl_c_after_the_last_answer_keeps_the_result(tmp_path: Path) -> None:
    script = Script(ttft=0.05, gap=0.01, stalled="/stop_profile")
    with mock_server(script) as port, started(port, tmp_path, "--num-prompts", "2", "--profile") as process:
        interrupt(process, lambda: "/stop_profile" in script.calls)
        process.communicate(timeout=60.0)
    figures = json.loads((tmp_path / "out.jsonl").read_text())
    assert (process.returncode, figures["interrupted"], figures["completed"]) == (130, True, 2)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    script = Script(ttft=0.05, gap=0.01, stalled="/stop_profile", fail=lambda number: setattr(script, "ttft", number * 60.0) or "")
    with mock_server(script) as port, started(port, tmp_path, "--num-prompts", "2", "--max-concurrency", "1", "--profile") as process:
        interrupt(process, lambda: len(script.requests) == 2)
        interrupt(process, lambda: "/stop_profile" in script.calls)
        out, told = process.communicate(timeout=60.0)
    assert (process.returncode, out, told) == (130, "", "")
    assert not list(tmp_path.iterdir())


def test_a_name_too_long_for_the_plot_is_refused_before_the_run(tmp_path: Path) -> None:
    _, text = bench(9, tmp_path, *IDS, "--output-file", "x" * 255, "--plot-throughput", expect=2)
    assert ".png: the file cannot be written: File name too long" in text


def test_host_may_be_an_ipv6_address(tmp_path: Path) -> None:
    _, text = bench(9, tmp_path, *IDS, "--host", "::1", "--ready-check-timeout-sec", "1", expect=2)
    assert "no server is ready at ::1:9 " in text


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai"])
def test_chunks_of_several_tokens_count_each_token(backend: str, tmp_path: Path) -> None:
    script = Script(ttft=0.05, gap=0.02, per_chunk=3, spec=True)
    with mock_server(script) as port:
        flags = ("--dataset-name", "random-ids", "--random-input-len", "5", "--random-output-len", "12", "--random-range-ratio", "1")
        figures, _ = bench(port, tmp_path, "--backend", backend, *flags, "--num-prompts", "2", "--output-details")
    assert figures["total_output_tokens"] == 24
    for gaps in figures["itls"]:
        assert len(gaps) == 9, "three chunks of three tokens follow the first chunk"
        assert all(len(set(gaps[i : i + 3])) == 1 for i in (0, 3, 6)), "a chunk's gap is split evenly among its tokens"
    expected = figures_of(figures)
    assert figures["mean_tpot_ms"] == pytest.approx(expected["tpot"])
    assert figures["mean_itl_ms"] == pytest.approx(expected["itl"])
    if backend == "sglang":
        assert figures["accept_length"] == pytest.approx(11 / 4), "of this run, from the answers"
        assert figures["per_position_acceptance"] == [1.0, 0.75]
    else:
        assert figures["accept_length"] == 9.0, "from the server's totals"
    assert figures["graph_hit_rate"] == 0.5


def test_goodput_flush_and_extra_body_take_effect(tmp_path: Path) -> None:
    script = Script(ttft=0.05, gap=0.02)
    flags = ("--goodput", "ttft:1", "--flush-cache", "--extra-request-body", '{"priority": 3}', "--top-p", "0.9", "--plot-throughput")
    with mock_server(script) as port:
        figures, text = bench(port, tmp_path, *IDS, "--num-prompts", "2", *flags)
    assert figures["request_goodput"] == 0.0
    assert "/flush_cache" in script.calls
    assert all(body["priority"] == 3 and body["sampling_params"]["top_p"] == 0.9 for body in script.requests)
    assert (tmp_path / "out.png").exists()
    assert "Request goodput" in text


def test_unstreamed_answers_have_no_tpot(tmp_path: Path) -> None:
    with mock_server(Script(ttft=0.05, gap=0.01)) as port:
        figures, _ = bench(port, tmp_path, *IDS, "--num-prompts", "2", "--disable-stream")
    assert figures["completed"] == 2
    assert figures["mean_tpot_ms"] is None
    assert figures["total_output_tokens"] == 22


def test_ids_for_a_chat_endpoint_are_refused_before_the_run(tmp_path: Path) -> None:
    script = Script()
    with mock_server(script) as port:
        _, text = bench(port, tmp_path, *IDS, "--backend", "sglang-oai-chat", "--num-prompts", "1", "--warmup-requests", "0", expect=2)
    assert text == "bench_serving: --backend sglang-oai-chat takes text; for token ids choose a completions backend\n"
