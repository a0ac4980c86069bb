"""A server under test: start, wait, request, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from benchmark.machine import ROOT
from benchmark.ports import free_port

_LOG_TAIL = 3000
T = TypeVar("T")


class ServerFailed(Exception):
    """The server ended or was not ready in time; the message has the end of its log."""


def end_as_on_interrupt() -> None:
    """Make SIGTERM raise like Ctrl-C, so that this process stops the server, which is in its own session."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def environment() -> dict[str, str]:
    """The environment of child processes, with this checkout's package and tests first on PYTHONPATH."""
    paths = [str(ROOT / "python"), str(ROOT), str(ROOT / "test"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


class Server:
    """`python -m runtime.launch_server FLAGS`, or another `program`, on a free port, during a `with` block.

    Attributes:
        port: its TCP port.
        http: sends requests to it, each on a connection of its own.
        ready_seconds: time from the start of the process until `/ready` answered 200.
    """

    def __init__(
        self,
        flags: Sequence[str],
        timeout: float = 300.0,
        program: Sequence[str] = ("-m", "runtime.launch_server"),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`variables` are added to its environment."""
        self.flags = list(flags)
        self._variables = dict(variables or {})
        self._program = list(program)
        self.port = free_port()
        new_connections = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=60.0, limits=new_connections, trust_env=False, verify=False
        )
        self.ready_seconds = 0.0
        self._timeout = timeout
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server runs
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        end_as_on_interrupt()
        command = [sys.executable, *self._program, "--port", str(self.port), *self.flags]
        print("+", " ".join(command[1:]), flush=True)
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment() | self._variables, cwd=ROOT, start_new_session=True
        )
        try:
            self._wait_ready(started)
        except BaseException as error:
            if not isinstance(error, ServerFailed):  # after an interrupt, show what the server was doing
                print(self.log_tail(), file=sys.stderr)
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            print(self.log_tail(), file=sys.stderr)
        self._end()

    def get(self, path: str) -> dict[str, Any]:
        """The JSON answer of GET `path`."""
        return self.http.get(path).raise_for_status().json()

    def post(self, path: str, body: Any = None, timeout: float = 600.0) -> dict[str, Any]:
        """The JSON answer of POST `path`."""
        return self.http.post(path, json={} if body is None else body, timeout=timeout).raise_for_status().json()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def wait(self) -> int:
        """Wait until it exits by itself; return its exit status."""
        assert self._process is not None
        return self._process.wait(timeout=60)

    def facts(self) -> dict[str, Any]:
        """Facts about the worker: memory, graphs, start-up seconds by phase."""
        state = self.get("/get_server_info")["internal_states"][0]
        return state.get("worker") or state

    def log_tail(self) -> str:
        """The end of the server's output."""
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")[-_LOG_TAIL:]

    def _wait_ready(self, started: float) -> None:
        assert self._process is not None
        while time.perf_counter() - started < self._timeout:
            if self._process.poll() is not None:
                raise ServerFailed(f"the server ended with status {self._process.returncode}:\n{self.log_tail()}")
            with suppress(httpx.HTTPError):
                self.get("/ready")
                self.ready_seconds = time.perf_counter() - started
                return
            time.sleep(0.05)
        raise ServerFailed(f"the server was not ready after {self._timeout:.0f} s:\n{self.log_tail()}")

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.http.close()
        self._log.close()


def bench(server: Server, flags: Sequence[str]) -> dict[str, Any]:
    """Run `bench_serving` against `server` and return its JSON line. `flags` have the number of requests.

    Raises:
        ServerFailed: the client failed, or not all requests succeeded: a rate of those that remain is not the server's.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        command = [sys.executable, "-m", "runtime.bench_serving", "--port", str(server.port), "--output-file", str(out), *flags]
        print("+", " ".join(command[1:]), flush=True)
        done = subprocess.run([*command, "--disable-tqdm"], env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServerFailed(f"bench_serving failed:\n{done.stdout[-_LOG_TAIL:]}{done.stderr[-_LOG_TAIL:]}\n{server.log_tail()}")
        if done.stderr.strip():
            print(done.stderr, file=sys.stderr)
        figures = json.loads(out.read_text(encoding="utf-8"))
    asked = int(flags[flags.index("--num-prompts") + 1])
    if figures["completed"] != asked:
        raise ServerFailed(f"{figures['completed']} of {asked} requests succeeded:\n{server.log_tail()}")
    return figures


def apart(measure: Callable[..., T], **order: Any) -> T:
    """Call `measure` in its own process, with an empty device; its errors are raised here."""
    print("+", measure.__qualname__, *order.get("flags", ()), flush=True)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, **order).result()
