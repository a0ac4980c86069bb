"""Servers that several files of process tests share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from warm_start import cold_start, warm_start

ROOT = Path(__file__).parents[2]
START_SECONDS = 240.0


@dataclass
class Embedded:
    """A server of the embedded model."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def state(self) -> dict[str, object]:
        """The scheduler's figures."""
        return httpx.get(f"{self.url}/get_server_info", timeout=10, verify=False).json()["internal_states"][0]

    def quiet(self, seconds: float = 20.0) -> dict[str, object]:
        """The figures once nothing runs or waits any more."""
        deadline = time.monotonic() + seconds
        while (state := self.state())["num_running_reqs"] or state["num_queue_reqs"] or state["token_usage"]:
            assert time.monotonic() < deadline, state
            time.sleep(0.05)
        return state


@pytest.fixture(scope="session", autouse=True)
def programs_start_warm() -> Iterator[None]:
    """Servers and benchmarks start as forks of a process that has imported them, except on a GPU: CUDA does not survive a fork."""
    with nullcontext() if torch.cuda.is_available() else warm_start():
        yield


@pytest.fixture
def programs_start_cold() -> Iterator[None]:
    """Programs start with an interpreter of their own, as a user starts them."""
    with cold_start():
        yield


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """The default server for the whole session. Of the processes that run tests, the first starts it as a user would, the others warm."""
    with ExitStack() as stack:
        with cold_start() if _is_first(tmp_path_factory) else nullcontext():  # ends with the start: later programs start warm
            server = stack.enter_context(serve_embedded())
        yield server


def _is_first(folders: pytest.TempPathFactory) -> bool:
    """Whether no other process that runs tests of this session asked before."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    try:
        (folders.getbasetemp().parent / f"embedded-{session}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@contextmanager
def serve_embedded(*flags: str) -> Iterator[Embedded]:
    """A server of the embedded model."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "runtime.launch_server", "--port", "0", *flags]
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            yield Embedded(process, _address(process, log), log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while True:
        ready = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("talon: ready")]
        if ready:
            return ready[0].split()[-1]
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.1)
