"""The command line, run as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from benchmark.ports import free_port
from safetensors.torch import save_file

from process import fake
from process.fake import ENV, dummy_model, serving
from unit.small_tokenizer import write_small_tokenizer

COLD = pytest.mark.usefixtures("programs_start_cold")
"""An interpreter of its own for one test of each kind: a refused flag, a check, the help, a server."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dummy_model(tmp_path_factory.mktemp("models") / "tiny")


def launch(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime.launch_server", "--log-level", "warning", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=60)


def shell(before: str, redirections: str, model: Path, port: int) -> list[str]:
    """The command of a server that a shell starts, between `before` and `redirections`."""
    flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--log-level", "warning", "--port", str(port)]
    server = [sys.executable, str(Path(fake.__file__).resolve()), "serve", "0.01", *flags]
    return ["bash", "-c", f"{before} {shlex.join(server)} {redirections}"]


def told(process: subprocess.Popen[str], words: str) -> bool:
    """Whether the process prints a line with these words."""
    assert process.stdout is not None
    return any(words in line for line in process.stdout)


@contextlib.contextmanager
def started(command: list[str], port: int) -> Iterator[subprocess.Popen[str]]:
    """A server that answers, ended when the test ends."""
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            deadline = time.monotonic() + 60.0
            while not answers(f"http://127.0.0.1:{port}/ready"):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5.0, verify=False).status_code == 200
    return False


def assert_one_line(made: subprocess.CompletedProcess[str], *words: str) -> None:
    """It exits with status 2 and one line that contains these words."""
    assert made.returncode == 2, made.stderr
    assert made.stdout == ""
    assert made.stderr.startswith("talon: ")
    assert made.stderr.count("\n") == 1
    assert all(word in made.stderr for word in words), made.stderr


@COLD
def test_an_unknown_flag_prints_one_line_and_exits_with_2() -> None:
    assert_one_line(launch("--attention-backand", "fa3"), "--attention-backand", "--attention-backend")


def test_a_missing_model_folder_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    assert_one_line(launch("--port", "0", "--model-path", str(tmp_path / "nowhere")), "nowhere")


def test_a_folder_without_a_model_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    assert_one_line(launch("--port", "0", "--model-path", str(tmp_path)), "config.json")


def test_a_port_in_use_is_reported_before_the_model_is_read(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_line(launch("--port", port, "--model-path", str(tmp_path / "nowhere")), "127.0.0.1", port, "in use")


@pytest.mark.parametrize("port", ["65536", "-1"])
def test_a_port_out_of_range_prints_one_line_and_exits_with_2(port: str) -> None:
    assert_one_line(launch(f"--port={port}"), "--port", port, "65535")


def test_an_address_of_another_machine_is_refused() -> None:
    assert_one_line(launch("--host", "192.0.2.1"), "192.0.2.1")
    assert_one_line(launch("--host", "no such host"), "no such host")


def test_too_few_open_files_print_one_line_and_exit_with_2(model: Path) -> None:
    assert_one_line(
        subprocess.run(shell("ulimit -n 48 && exec", "", model, 0), capture_output=True, text=True, env=ENV, timeout=60),
        "Only 48 files may be open; the server needs 64.",
    )


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_server_whose_standard_streams_are_closed_serves(model: Path, closed: str) -> None:
    with started(shell("exec", closed, model, port := free_port()), port) as process:
        process.terminate()
        assert process.wait(60.0) == 0


def test_signals_that_the_parent_blocked_or_ignored_work(model: Path) -> None:
    env = "exec env --block-signal=TERM --block-signal=HUP --ignore-signal=INT --ignore-signal=CHLD"
    with started(shell(env, "", model, port := free_port()), port) as process:
        process.terminate()
        assert process.wait(60.0) == 0
    with started(shell(env, "", model, port := free_port()), port) as process:
        next(child for child in psutil.Process(process.pid).children() if child.name().startswith("talon::sch")).kill()
        assert process.stdout is not None
        assert "the scheduler process died: signal SIGKILL" in process.stdout.read()
    with started(shell(env, "", model, port := free_port()), port) as process:
        children = psutil.Process(process.pid).children()
        process.kill()
        assert psutil.wait_procs(children, timeout=60.0)[1] == []


def test_a_server_that_ignores_sighup_as_under_nohup_serves_on(model: Path) -> None:
    with started(shell("exec env --ignore-signal=HUP", "", model, port := free_port()), port) as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        process.terminate()
        assert process.wait(60.0) == 0


def test_an_api_key_file_may_be_a_pipe(model: Path) -> None:
    with started(shell("exec", "--api-key-file <(echo sk-pipe)", model, port := free_port()), port) as process:

        def status(key: str) -> int:
            return httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

        assert (status("sk-pipe"), status("sk-other")) == (200, 401)
        process.send_signal(signal.SIGHUP)
        assert told(process, "is a pipe, which can be read only once, at the start")
        assert status("sk-pipe") == 200


def test_a_signal_that_arrived_while_it_was_blocked_ends_the_start_with_its_exit_status() -> None:
    pending = "exec env --block-signal=TERM bash -c 'kill $$; exec \"$@\"' bash"
    command = ["bash", "-c", f"{pending} {shlex.join([sys.executable, '-m', 'runtime.launch_server', '--check'])}"]
    assert subprocess.run(command, env=ENV, timeout=60).returncode == 128 + signal.SIGTERM


@COLD
@pytest.mark.parametrize("command", ["launch_server", "bench_serving"])
def test_ctrl_c_while_a_command_is_imported_prints_nothing(command: str, tmp_path: Path) -> None:
    (tmp_path / "uvloop.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    env = {**ENV, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ENV['PYTHONPATH']}"}
    made = subprocess.run([sys.executable, "-m", f"runtime.{command}"], capture_output=True, text=True, env=env, timeout=60)
    assert (made.returncode, made.stdout, made.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.skipif(subprocess.run(["unshare", "-rpf", "true"]).returncode != 0, reason="needs user namespaces")
def test_process_1_of_a_container_ends_at_a_signal_before_it_serves(tmp_path: Path) -> None:
    os.mkfifo(config := tmp_path / "config.json")
    command = ["unshare", "-rpf", "--kill-child", sys.executable, "-m", "runtime.launch_server"]
    with subprocess.Popen([*command, "--model", str(tmp_path), "--load-format", "dummy", "--port", "0"], env=ENV) as process:
        try:
            with config.open("w"):  # waits until the server reads it, which it then does until this end is closed
                psutil.Process(process.pid).children()[0].terminate()
                assert process.wait(60.0) == 128 + signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.parametrize("flag", ["--check", "--context-length=1"])
def test_json_logs_have_no_other_lines(model: Path, flag: str) -> None:
    made = launch("--log-format", "json", "--enable-cache-report", "--model", str(model), "--load-format", "dummy", "--port", "0", flag)
    lines = [json.loads(line) for line in (made.stdout + made.stderr).splitlines()]
    assert {"warning", "info" if flag == "--check" else "error"} == {line["level"] for line in lines}


@COLD
def test_check_resolves_all_options_without_loading(model: Path) -> None:
    made = launch("--check", "--model", str(model), "--load-format", "dummy", "--device", "cpu", "--log-level", "info")
    assert made.returncode == 0, made.stderr
    assert "dtype float32" in made.stderr
    assert made.stdout == "talon: tiny can be served on cpu\n"
    assert_one_line(launch("--check", "--model", str(model), "--load-format", "dummy", "--context-length", "100000"), "--context-length")
    assert_one_line(launch("--check", "--model", str(model), "--load-format", "dummy", "--chat-template", "{{"), "not valid Jinja")


def test_check_refuses_a_draft_that_does_not_match(model: Path, tmp_path: Path) -> None:
    shape = json.loads((model / "config.json").read_text())

    def draft(name: str, **changes: object) -> list[str]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape | changes))
        return ["--check", "--model", str(model), "--load-format", "dummy", "--speculative-draft-model-path", str(tmp_path / name)]

    head = draft("head", architectures=["LlamaForCausalLMEagle"])
    assert_one_line(launch(*head, "--speculative-algorithm", "STANDALONE"), "head", "--speculative-algorithm EAGLE")
    assert launch(*head, "--speculative-algorithm", "EAGLE").returncode == 0
    whole = draft("whole", num_hidden_layers=2)
    assert_one_line(launch(*whole, "--speculative-algorithm", "EAGLE"), "whole", "--speculative-algorithm STANDALONE")
    other = draft("other", vocab_size=9)
    assert_one_line(launch(*other, "--speculative-algorithm", "STANDALONE"), "vocabulary of 9")


def test_check_refuses_weights_that_do_not_fit_their_config(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    save_file({"model.norm.weight": torch.zeros(width)}, tmp_path / "model.safetensors")
    write_small_tokenizer(tmp_path)
    assert_one_line(launch("--check", "--model", str(tmp_path), "--device", "cpu"), "it lacks", "model.embed_tokens.weight")


def test_check_refuses_to_split_experts_that_do_not_exist(model: Path) -> None:
    flags = ["--check", "--model", str(model), "--load-format", "dummy", "--device", "cpu", "--tp-size", "2", "--ep-size", "2"]
    assert_one_line(launch(*flags), "--ep-size", "has no experts")


def test_check_refuses_a_pool_for_less_than_one_request(model: Path) -> None:
    small = ["--check", "--model", str(model), "--load-format", "dummy", "--device", "cpu", "--max-total-tokens"]
    assert_one_line(launch(*small, "10"), "--max-total-tokens is 10", "Raise it")
    assert launch(*small, "4096").returncode == 0


@pytest.mark.parametrize(("ids", "message"), [(None, "holds no tensor or list"), ([1, 2, 2], "twice"), ([1 << 20], "outside 0..")])
def test_check_reads_the_token_map(model: Path, tmp_path: Path, ids: list[int] | None, message: str) -> None:
    shape, head, hot = json.loads((model / "config.json").read_text()), tmp_path / "head", tmp_path / "hot.pt"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(shape | {"architectures": ["LlamaForCausalLMEagle"]}))
    if ids is None:
        hot.write_text("not a tensor")
    else:
        torch.save(ids, hot)
    draft = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(head), "--speculative-token-map", str(hot)]
    assert_one_line(launch("--check", "--model", str(model), "--load-format", "dummy", *draft), "--speculative-token-map", message)


def test_dump_config_prints_yaml_that_config_reads(tmp_path: Path) -> None:
    first = launch("--dump-config", "--port", "1234", "--cuda-graph-bs", "1", "2")
    assert first.returncode == 0
    file = tmp_path / "talon.yaml"
    file.write_text(first.stdout)
    second = launch("--dump-config", "--config", str(file))
    assert second.stdout == first.stdout
    assert "port: 1234" in second.stdout


@COLD
def test_help_lists_the_flags_without_loading_torch() -> None:
    made = launch("--help")
    assert made.returncode == 0
    assert "--speculative-algorithm" in made.stdout
    code = "import sys, runtime.launch_server, runtime.entrypoints.child; print('torch' in sys.modules)"
    light = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, check=True)
    assert light.stdout.strip() == "False"


@COLD
def test_the_ready_line_names_a_working_request(model: Path) -> None:
    with serving(model, "--chat-template", "{% for m in messages %}{{ m['content'] }}{% endfor %}") as server:
        curl = next(line for line in server.output if line.startswith("curl "))
        assert server.url in curl
        # The fake model's tokens depend on the request's random seed.
        asked = f'{curl.rstrip()[:-2]}, "max_tokens": 3, "ignore_eos": true}}\''
        made = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=20)
        assert '"completion_tokens":3' in made.stdout.replace(" ", ""), made.stdout + made.stderr
        assert server.text().count("talon: ready") == 1
        assert "(float32 weights) at http://" in server.text()
        parent = psutil.Process(server.process.pid)
        titles = [process.cmdline()[0].strip() for process in (parent, *parent.children())]
        assert titles == ["talon::http", "talon::scheduler", "talon::detokenizer"]
