"""The main program of a child process, which reports its status through a pipe and dies with its parent."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec
import setproctitle

from runtime import log as logging_setup
from runtime.batch import Worker, WorkerLimits
from runtime.config.runtime_config import RuntimeConfig
from runtime.distributed.rank_place import RankPlace
from runtime.entrypoints import cuda_context
from runtime.entrypoints.grammars import eos_ids_of, make_compiler
from runtime.entrypoints.kept_memory import bound_kept_memory, freeze_gc
from runtime.errors import ConfigError
from runtime.managers.detokenizer_manager import DetokenizerManager
from runtime.managers.ipc import Inbox, Outbox
from runtime.managers.messages import DrainReq, Heartbeat, ToDetokenizer, ToScheduler
from runtime.models.config import ModelConfig
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
"""Seconds between heartbeats of the detokenizer. (The scheduler has its own.)"""
_PR_SET_PDEATHSIG = 1

Role = str
"""scheduler, detokenizer, or worker-R for rank R of a sharded model."""
BuildWorker = Callable[[RuntimeConfig, ModelConfig], Worker]


class ChildConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a child reads from stdin, as JSON.

    Attributes:
        folder: the folder of the server's sockets.
        parent: the parent's pid.
        place: the child's place among the ranks; None if the model is not sharded.
    """

    config: RuntimeConfig
    folder: str
    parent: int
    place: RankPlace | None = None


class ChildReady(msgspec.Struct, frozen=True, tag=True):
    """The child is ready. The scheduler reports the limits of its worker."""

    limits: WorkerLimits | None = None


class ChildFailed(msgspec.Struct, frozen=True, tag=True):
    """The child cannot start.

    Attributes:
        is_config: the cause is the configuration, not a fault.
        at: when it failed, in seconds since the epoch, so that ranks on several hosts can be compared.
    """

    message: str
    is_config: bool
    at: float


class ChildFinished(msgspec.Struct, frozen=True, tag=True):
    """The child was drained and exits. An exit without this message is a failure."""


class ChildAlive(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat of a rank on another node than rank 0's, for the parent there."""


ChildStatus = ChildReady | ChildFailed | ChildFinished | ChildAlive


Report = Callable[[ChildStatus], None]
"""Writes a status to the pipe."""


def run(role: Role, status_fd: int, serve: Callable[[ChildConfig, Report], None]) -> int:
    """Run child process `role` until `serve` returns. The status pipe, JSON lines, stays open as long as the process lives.

    A rank of a sharded model exits here.

    Returns:
        The exit status: 0, 1 after a fault, 2 for a wrong configuration.
    """
    os.set_inheritable(status_fd, False)  # otherwise torch's helper processes keep the pipe open after our death

    def report(status: ChildStatus) -> None:
        os.write(status_fd, msgspec.json.encode(status) + b"\n")

    child = msgspec.json.decode(sys.stdin.buffer.read(), type=ChildConfig)
    _die_with(child, role)
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to all processes of a service, they are for the parent, which drains first
        signal.signal(number, signal.SIG_IGN)
    bound_kept_memory()
    setproctitle.setproctitle(f"talon::{role}")
    logging_setup.setup(_log_level(child), f"talon::{role}", child.config.server.log_format)
    faulthandler.enable()  # prints the stacks when the parent aborts a child that hangs
    if role != "detokenizer" and child.config.device.device == "cuda":
        cuda_context.create_early()
    status = _serve(child, role, serve, report)
    if child.place is not None:  # threads of gloo and NCCL would call std::terminate when another rank ends first
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _serve(child: ChildConfig, role: Role, serve: Callable[[ChildConfig, Report], None], report: Report) -> int:
    """Call `serve` and report how it ended. Returns the exit status."""
    try:
        serve(child, report)
    except ConfigError as error:
        report(ChildFailed(str(error), is_config=True, at=time.time()))
        return 2
    except Exception as error:
        failed_at = time.time()
        who = f"the {role}" if child.place is None else f"rank {child.place.rank} ({role})"
        log.exception("%s failed", who)
        report(ChildFailed(f"{who} failed: {type(error).__name__}: {error}", is_config=False, at=failed_at))
        return 1
    report(ChildFinished())
    return 0


def _log_level(child: ChildConfig) -> str:
    """Followers log warnings only; otherwise each would repeat rank 0's log."""
    level = child.config.server.log_level
    return "warning" if level == "info" and child.place is not None and child.place.rank > 0 else level


def serve_scheduler(child: ChildConfig, report: Report, build: BuildWorker) -> None:
    """Build the worker with `build`, then schedule until drained."""
    from runtime.managers.scheduler import Scheduler
    from runtime.models.registry import load_hf_config

    inbox: Inbox[ToScheduler] = Inbox(child.folder, "scheduler", ToScheduler)
    outbox = Outbox(child.folder, "detokenizer")
    model_config = load_hf_config(child.config.model.model_path)
    worker = build(child.config, model_config)
    config = child.config
    eos_ids = eos_ids_of(config.model.tokenizer_path, model_config)
    compiler = make_compiler(config, model_config, eos_ids)
    scheduler = Scheduler(config.scheduler, config.cache, worker, eos_ids, inbox.receive, outbox.send, compiler=compiler)
    freeze_gc()
    report(ChildReady(worker.limits))
    scheduler.run()
    worker.close()
    if compiler is not None:
        compiler.close()
    outbox.close()


def serve_detokenizer(child: ChildConfig, report: Report) -> None:
    """Detokenize until drained."""
    inbox: Inbox[ToDetokenizer] = Inbox(child.folder, "detokenizer", ToDetokenizer)
    to_tokenizer, to_scheduler = Outbox(child.folder, "tokenizer"), Outbox(child.folder, "scheduler")
    tokenizer, traced = Tokenizer.load(child.config.model.tokenizer_path), child.config.server.otlp_traces_endpoint is not None
    manager = DetokenizerManager(tokenizer, to_tokenizer.send, to_scheduler.send, timed=traced)
    freeze_gc()
    report(ChildReady())
    beaten_at = 0.0
    while not isinstance(message := inbox.receive(timeout=BEAT_SECONDS), DrainReq):
        if message is not None:
            manager.handle(message)
        if time.monotonic() - beaten_at >= BEAT_SECONDS:
            beaten_at = time.monotonic()
            to_tokenizer.send(Heartbeat(who="detokenizer"))
    to_tokenizer.close()
    to_scheduler.close()


def serve_rank(child: ChildConfig, report: Report) -> None:
    """Run the steps that rank 0 sends until it closes. Loads torch."""
    from runtime.entrypoints.rank import follow_rank_0
    from runtime.models.registry import load_hf_config

    def ready() -> None:
        freeze_gc()
        report(ChildReady())

    assert child.place is not None, "a rank needs a place"
    # On node 0, rank 0 reports this rank to the parent.
    alive = partial(report, ChildAlive()) if child.config.parallel.node_rank else lambda: None
    follow_rank_0(child.config, load_hf_config(child.config.model.model_path), child.place, ready, alive)


def build_worker(config: RuntimeConfig, model_config: ModelConfig, place: RankPlace | None = None) -> Worker:
    """Build the worker of this configuration; with `place`, the worker of rank 0. Loads torch."""
    if place is not None:
        from runtime.entrypoints.rank import lead

        return lead(config, model_config, place)
    from runtime.model_executor.build import build_worker as build
    from runtime.speculative.registry import make_drafter

    return build(config, model_config, make_drafter)


def _die_with(child: ChildConfig, role: Role) -> None:
    """Make the kernel end this process when its parent ends for any reason.

    The detokenizer gets SIGHUP and removes the folder of the sockets. The others get SIGKILL, because they may be in a long call during
    which Python handles no signal.
    """

    def clean_up(*_: object) -> None:
        shutil.rmtree(child.folder, ignore_errors=True)
        os._exit(1)

    signal.signal(signal.SIGHUP, clean_up)
    number = signal.SIGHUP if role == "detokenizer" else signal.SIGKILL
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != child.parent:  # the parent ended before prctl took effect
        clean_up()


def main(argv: list[str]) -> int:
    """`python -m runtime.entrypoints.child ROLE STATUS_FD`."""
    role, status_fd = argv[0], int(argv[1])
    if role == "detokenizer":
        return run("detokenizer", status_fd, serve_detokenizer)
    if role != "scheduler":
        return run(role, status_fd, serve_rank)
    return run(role, status_fd, lambda child, report: serve_scheduler(child, report, partial(build_worker, place=child.place)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
