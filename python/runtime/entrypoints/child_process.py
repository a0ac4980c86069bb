"""A child process as its parent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from runtime.batch import WorkerLimits
from runtime.distributed.rank_place import places_on_node
from runtime.entrypoints.child import ChildAlive, ChildConfig, ChildFailed, ChildFinished, ChildStatus, Role
from runtime.errors import ConfigError, ServingError

COMMAND = (sys.executable, "-m", "runtime.entrypoints.child")
"""The command that starts a child of this server; role and status descriptor follow."""
REPORT_SECONDS = 3.0
"""After one child has failed to start, how long to wait for reports of the others: the child that failed first may report last."""


class Child(ABC):
    """A process of the server as its parent sees it, started as a subprocess or by Ray.

    Attributes:
        ready: done when the child is ready or has failed to start; holds the limits of the scheduler's worker, or the error.
        gone: set when the process has ended.
        failed_at: when its start failed, in seconds since the epoch; infinite if it has not failed.
        finished: whether it was drained and exits by itself.
        beats: number of `ChildAlive` messages so far.
    """

    def __init__(self, role: Role) -> None:
        self.role: Role = role
        self.ready: asyncio.Future[WorkerLimits | None] = asyncio.get_running_loop().create_future()
        self.gone, self.finished, self.beats = asyncio.Event(), False, 0
        self.failed_at = math.inf

    @abstractmethod
    def describe_end(self) -> str:
        """How it ended, for the log."""

    @abstractmethod
    def dump_stacks(self) -> None:
        """Make it print its stacks and die."""

    @abstractmethod
    def kill(self) -> None:
        """End it now."""

    def _take_status(self, line: bytes) -> None:
        """Record a status report: a `ChildStatus` in JSON."""
        status = msgspec.json.decode(line, type=ChildStatus)
        if isinstance(status, ChildFailed):
            self._fail_start(ConfigError(status.message) if status.is_config else ServingError(status.message), status.at)
        elif isinstance(status, ChildFinished):
            self.finished = True
        elif isinstance(status, ChildAlive):
            self.beats += 1
        elif not self.ready.done():
            self.ready.set_result(status.limits)

    def _is_gone(self) -> None:
        """Record that the process has ended."""
        self.gone.set()
        end = self.describe_end()
        # A child that was killed by a signal is the first cause: the loss of another rank ends a child with an exit status.
        at = 0.0 if end.startswith("signal") else time.time()
        self._fail_start(ServingError(f"the {self.role} process died during its start ({end})"), at)

    def _fail_start(self, error: ServingError, at: float) -> None:
        """Set the error of `ready` unless it is done."""
        if not self.ready.done():
            self.failed_at = at
            self.ready.set_exception(error)


def start_child(
    role: Role, command: Sequence[str], config: ChildConfig, environment: dict[str, str], *, start_new_session: bool = False
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the process of a child and send it its configuration; also returns the descriptor of its status pipe."""
    ours, theirs = os.pipe()
    ring = config.place.ring if config.place else None
    inherited, arguments = (theirs, *(ring.all if ring else ())), [*command, role, str(theirs)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, pass_fds=inherited, start_new_session=start_new_session, env=environment)
    os.close(theirs)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(msgspec.json.encode(config))
    return process, ours


class ChildProcess(Child):
    """Starts one child process and reads its status pipe."""

    def __init__(self, role: Role, command: Sequence[str], config: ChildConfig) -> None:
        super().__init__(role)
        self._rest = b""
        # In its own session the child gets no SIGINT from Ctrl-C in the terminal; the parent decides when it ends.
        self._process, self._fd = start_child(role, command, config, environment_of(config), start_new_session=True)
        os.set_blocking(self._fd, False)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def describe_end(self) -> str:
        """How it ended, for the log."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its status pipe"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def dump_stacks(self) -> None:
        """Make it print its stacks and die, even if it is stopped."""
        self._signal(signal.SIGABRT)
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it now."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._fd >= 0:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._is_gone()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take_status(line)


async def first_failure(children: Sequence[Child], found: ServingError) -> ServingError:
    """The error of the child that failed first. `found` is the first error read, but a rank that loses another rank fails too."""
    if len(children) > 2:  # a scheduler and a detokenizer do not fail because of each other
        await asyncio.wait([child.ready for child in children], timeout=REPORT_SECONDS)
    first = min(children, key=lambda child: child.failed_at)
    error = first.ready.exception() if first.failed_at < math.inf else None
    return error if isinstance(error, ServingError) else found


def start_ranks(config: ChildConfig, command: Sequence[str]) -> list[ChildProcess]:
    """Start the ranks of this node, each with its place. Raises `ConfigError` if node 0 cannot be reached."""
    places = places_on_node(config.config.parallel, config.folder)
    try:
        roles = [f"worker-{place.rank}" if place.rank else "scheduler" for place in places]
        return [ChildProcess(role, command, structs.replace(config, place=place)) for role, place in zip(roles, places, strict=True)]
    finally:
        if places[0].ring is not None:
            places[0].ring.close()


def environment_of(config: ChildConfig) -> dict[str, str]:
    """This process's environment, with this package on PYTHONPATH and the rank's own GPU first in CUDA_VISIBLE_DEVICES."""
    root = str(Path(__file__).parents[2])
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    if config.place is not None and config.config.device.device == "cuda":
        found["CUDA_VISIBLE_DEVICES"] = config.config.parallel.visible_devices(config.place.rank, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return found
