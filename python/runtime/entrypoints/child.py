"""The life of a child process: take its orders from stdin, report through a pipe, and die with its parent."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import setproctitle

from runtime import log as logging_setup
from runtime.batch import Worker, WorkerLimits
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.collector import spare_start
from runtime.errors import ConfigError
from runtime.managers.detokenizer_manager import DetokenizerManager
from runtime.managers.ipc import Inbox, Outbox
from runtime.managers.messages import DrainReq, Heartbeat, ToDetokenizer, ToScheduler
from runtime.models.config import ModelConfig
from runtime.text.tokenizer import Tokenizer
from runtime.text.tokenizer_files import tokenizer_eos_ids

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
"""How often the detokenizer says that it lives. (The scheduler has its own pulse.)"""
_PR_SET_PDEATHSIG = 1

Role = Literal["scheduler", "detokenizer"]
BuildWorker = Callable[[RuntimeConfig, ModelConfig], Worker]


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a child must know, as JSON on its stdin: the configuration, the folder of the sockets, and who its parent is."""

    config: RuntimeConfig
    folder: str
    parent: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child serves; the scheduler's says what its worker holds."""

    limits: WorkerLimits | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child cannot start; `fault` says whether the user asked for the impossible or something broke."""

    message: str
    fault: Literal["config", "other"]


Report = Ready | Failed


class Reporter:
    """The child's end of its report pipe: JSON lines. The pipe stays open as long as the process lives."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # else a helper process of torch would keep the pipe open after our death
        self._fd = fd

    def send(self, report: Report) -> None:
        """Write one line."""
        os.write(self._fd, msgspec.json.encode(report) + b"\n")


def run(role: Role, report_fd: int, serve: Callable[[Orders, Reporter], None]) -> int:
    """Be child process `role`: returns its exit status."""
    reporter = Reporter(report_fd)
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    _die_with(orders.parent)
    setproctitle.setproctitle(f"talon::{role}")
    logging_setup.setup(orders.config.server.log_level, f"talon::{role}")
    faulthandler.enable()  # the parent aborts a child that hangs, so that its stacks are printed
    try:
        serve(orders, reporter)
    except ConfigError as error:
        reporter.send(Failed(str(error), "config"))
        return 2
    except Exception as error:
        log.exception("the %s failed", role)
        reporter.send(Failed(f"the {role} failed: {type(error).__name__}: {error}", "other"))
        return 1
    return 0


def serve_scheduler(orders: Orders, reporter: Reporter, build: BuildWorker) -> None:
    """Build the worker with `build`, then schedule until drained."""
    from runtime.managers.scheduler import Scheduler
    from runtime.models.registry import load_hf_config

    inbox: Inbox[ToScheduler] = Inbox(orders.folder, "scheduler", ToScheduler)
    outbox = Outbox(orders.folder, "detokenizer")
    model_config = load_hf_config(orders.config.model.model_path)
    eos_ids = dict.fromkeys((*model_config.eos_ids, *tokenizer_eos_ids(Path(orders.config.model.tokenizer_path))))
    worker = build(orders.config, model_config)
    config = orders.config
    scheduler = Scheduler(config.scheduler, config.cache, worker, tuple(eos_ids), inbox.receive, outbox.send)
    spare_start()
    reporter.send(Ready(worker.limits))
    scheduler.run()
    worker.close()
    outbox.close()


def serve_detokenizer(orders: Orders, reporter: Reporter) -> None:
    """Turn tokens into text until drained."""
    inbox: Inbox[ToDetokenizer] = Inbox(orders.folder, "detokenizer", ToDetokenizer)
    to_tokenizer, to_scheduler = Outbox(orders.folder, "tokenizer"), Outbox(orders.folder, "scheduler")
    manager = DetokenizerManager(Tokenizer.load(orders.config.model.tokenizer_path), to_tokenizer.send, to_scheduler.send)
    spare_start()
    reporter.send(Ready())
    beats, beaten_at = 0, 0.0
    while not isinstance(message := inbox.receive(timeout=BEAT_SECONDS), DrainReq):
        if message is not None:
            manager.handle(message)
        if time.monotonic() - beaten_at >= BEAT_SECONDS:
            beats, beaten_at = beats + 1, time.monotonic()
            to_tokenizer.send(Heartbeat(who="detokenizer", count=beats))
    to_tokenizer.close()
    to_scheduler.close()


def build_worker(config: RuntimeConfig, model_config: ModelConfig) -> Worker:
    """The worker that `config` asks for: plain, or speculative. Loads torch."""
    if config.speculative is not None:
        from runtime.speculative.build import build_speculative_worker as build
    else:
        from runtime.model_executor.build import build_worker as build
    return build(config, model_config)


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we could ask
        os._exit(1)


def main(argv: list[str]) -> int:
    """`python -m runtime.entrypoints.child ROLE REPORT_FD`."""
    role, report_fd = argv[0], int(argv[1])
    if role == "detokenizer":
        return run("detokenizer", report_fd, serve_detokenizer)
    return run("scheduler", report_fd, lambda orders, reporter: serve_scheduler(orders, reporter, build_worker))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
