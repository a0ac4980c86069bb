"""A server whose worker makes tokens up, for tests of everything around it; also the helpers that start and watch one.

    python fake.py serve BEHAVIOUR FLAGS...        the server
    python fake.py BEHAVIOUR scheduler FD          its scheduler process, started by the server

BEHAVIOUR is the seconds of one step, or `robust`, `config-error`, `broken` or `slow-load`. A step that reads the prompt token `POISON`
fails, except with `robust`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from fake_worker import FakeWorker
from runtime.batch import BatchResult, Pending, ScheduleBatch, Worker, WorkerLimits
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints import child
from runtime.errors import ConfigError
from runtime.models.config import ModelConfig

ROOT = Path(__file__).parents[2]
VOCAB = 1024
CONTEXT = 512
POISON = 666
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "test")]), "OMP_NUM_THREADS": "1"}


# ---- the worker


class TimedPending:
    """A step that takes its time."""

    def __init__(self, step: Pending, seconds: float) -> None:
        self._step, self._until = step, time.monotonic() + seconds

    def wait(self) -> BatchResult:
        time.sleep(max(0.0, self._until - time.monotonic()))
        return self._step.wait()


class TimedWorker(FakeWorker):
    """The worker without a model, as slow as asked."""

    def __init__(self, limits: WorkerLimits, step_seconds: float) -> None:
        super().__init__(limits)
        self._step_seconds = step_seconds
        self.fail_wait = fail_on_poison

    def submit(self, batch: ScheduleBatch) -> TimedPending:
        return TimedPending(super().submit(batch), self._step_seconds)


def fail_on_poison(batch: ScheduleBatch) -> None:
    """A prompt that breaks the device."""
    if POISON in batch.token_ids:
        raise RuntimeError("illegal access at 0xdeadbeef in /usr/lib/device.so")


def fake_limits(config: RuntimeConfig) -> WorkerLimits:
    """What the fake worker holds under `config`."""
    return WorkerLimits(
        max_total_tokens=16384,
        max_running_requests=config.scheduler.max_running_requests or 16,
        max_context_len=config.model.context_length,
        max_extend_tokens=config.scheduler.max_prefill_tokens,
        page_size=config.cache.page_size,
        vocab_size=VOCAB,
    )


def build(behaviour: str, config: RuntimeConfig, model_config: ModelConfig) -> Worker:
    if behaviour == "config-error":
        raise ConfigError("the fake worker cannot be built as asked")
    if behaviour == "broken":
        raise RuntimeError("the fake worker is broken")
    if behaviour == "slow-load":
        time.sleep(60.0)
    return FakeWorker(fake_limits(config)) if behaviour == "robust" else TimedWorker(fake_limits(config), float(behaviour))


# ---- starting and watching a server


def scheduler_command(behaviour: str = "0.01") -> list[str]:
    """What to run in place of the scheduler process."""
    return ["/usr/bin/env", f"PYTHONPATH={ENV['PYTHONPATH']}", sys.executable, str(Path(__file__).resolve()), behaviour]


def dummy_model(folder: Path) -> Path:
    """A folder with the configuration of a tiny model and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Server:
    """A running server: its process, its address, what it has written, and whether all of that has been read."""

    process: subprocess.Popen[str]
    lines: queue.Queue[str]
    temp: Path
    output: list[str]
    url: str = ""
    all_read: threading.Event = field(default_factory=threading.Event)

    def wait_ready(self, seconds: float = 60.0) -> None:
        """Wait for the ready line and learn the address from it."""
        deadline = time.monotonic() + seconds
        while "curl" not in (line := self._line(deadline)):
            if "ready" in line:
                self.url = line.split()[-1].rstrip('"}')

    def _line(self, deadline: float) -> str:
        while True:
            try:
                return self.lines.get(timeout=0.1)
            except queue.Empty:
                assert self.process.poll() is None, self.text()
                assert time.monotonic() < deadline, self.text()

    def text(self) -> str:
        """All that it wrote so far, with stdout and stderr together. Its last lines may be read after it has ended."""
        if self.process.poll() is not None:
            self.all_read.wait(5.0)
        return "".join(self.output)

    def child(self, title: str) -> psutil.Process:
        """Its child process with this title."""
        return next(p for p in psutil.Process(self.process.pid).children() if title in " ".join(p.cmdline()))

    def get(self, path: str) -> httpx.Response:
        """GET a path. Clients of http:// here and elsewhere read no certificates, which takes 20 ms."""
        return httpx.get(self.url + path, timeout=5.0, verify=False)

    def complete(self, prompt: list[int]) -> httpx.Response:
        """Ask for two tokens."""
        return httpx.post(
            f"{self.url}/v1/completions", json={"prompt": prompt, "max_tokens": 2, "ignore_eos": True}, timeout=10.0, verify=False
        )

    def state(self) -> dict[str, object]:
        """The scheduler's figures."""
        return self.get("/get_server_info").json()["internal_states"][0]

    def stream(self, max_tokens: int) -> Stream:
        """Begin a streamed completion."""
        return Stream(self.url, max_tokens)

    def folders(self) -> list[Path]:
        """What it left in its temporary folder."""
        return sorted(self.temp.iterdir())


class Stream:
    """A streamed completion read by a thread."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.events: list[str] = []
        self.first = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url, max_tokens), daemon=True)
        self._thread.start()
        assert self.first.wait(60.0)

    def _read(self, url: str, max_tokens: int) -> None:
        body = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30.0, verify=False) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.first.set()
        except httpx.HTTPError as error:
            self.events.append(f"broken: {error!r}")
        self.first.set()

    def join(self, seconds: float) -> bool:
        """Whether it ended within this time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


@contextmanager
def serving(model: Path, *flags: str, behaviour: str = "0.01", ready: bool = True, program: str = __file__) -> Iterator[Server]:
    """A fake server on a free port, ended when the test ends. `program`: the file that runs it."""
    with tempfile.TemporaryDirectory(prefix="t-") as temp:
        command = [sys.executable, str(Path(program).resolve()), "serve", behaviour, "--port", "0", "--served-model-name", "fake"]
        command += ["--model", str(model), "--load-format", "dummy", "--device", "cpu", *flags]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**ENV, "TMPDIR": temp, "XDG_RUNTIME_DIR": ""},
            start_new_session=True,
        )
        server = Server(process, queue.Queue(), Path(temp), [])
        reader = threading.Thread(target=_keep, args=(process, server), daemon=True)
        reader.start()
        try:
            if ready:
                server.wait_ready()
            yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            reader.join(5.0)


def _keep(process: subprocess.Popen[str], server: Server) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            server.output.append(line)
            server.lines.put(line)
    server.all_read.set()


def main() -> int:
    if sys.argv[1] == "serve":
        from runtime import launch_server

        return launch_server.main(sys.argv[3:], scheduler_command(sys.argv[2]))
    behaviour, report_fd = sys.argv[1], int(sys.argv[3])

    def serve(config: child.ChildConfig, report: child.Report) -> None:
        child.serve_scheduler(config, report, lambda config, model_config: build(behaviour, config, model_config))

    return child.run("scheduler", report_fd, serve)


if __name__ == "__main__":
    sys.exit(main())
