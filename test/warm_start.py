"""Starts the project's programs as forks of a process that has imported them, which saves each of them seconds of imports.

`WarmStart` runs such a process. Its `Popen` replaces `subprocess.Popen`: `python -m runtime.launch_server` and the other programs of
`program_of` begin as a fork, everything else as usual. What they start in turn, by `subprocess` or by `multiprocessing`, begins as a
fork of themselves. They remain processes of their own, children of the one that starts them, with the command line, environment, folder
and file descriptors asked for.

The processes in which pytest-xdist runs tests begin so, too. Each of them is born with a warm process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import multiprocessing.context
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import setproctitle

import warm_state

IMPORTED = (
    "runtime", "runtime.bench_serving", "runtime.launch_server", "runtime.entrypoints.child", "runtime.entrypoints.server.server",
    "runtime.entrypoints.prepare", "runtime.entrypoints.processes", "runtime.managers.scheduler", "runtime.model_executor.build",
    "runtime.models.registry", "runtime.speculative.registry", "runtime.speculative.dflash_drafter", "runtime.speculative.eagle_drafters",
    "runtime.speculative.ngram_drafter", "runtime.layers.attention.torch_native", "benchmark.sweep",
    "benchmark.picture", "httpx", "matplotlib.backends.backend_agg", "matplotlib.figure", "pydantic.v1", "uvicorn.lifespan.off",
)  # fmt: skip
IMPORTED_BY_TESTS = (
    "_hypothesis_pytestplugin", "gpu.attention_kinds", "hypothesis", "openai", "pytest", "scipy.stats", "transformers.modeling_utils",
    "xdist.remote",
)  # fmt: skip
"""Modules that processes that run tests import in addition to `IMPORTED`."""
TEST = Path(__file__).resolve().parent
OURS = ("runtime.", "benchmark.", "process.")
TEST_RUNNER = "import sys;exec(eval(sys.stdin.readline()))"
"""How pytest-xdist starts a process that runs tests."""
FOLDERS = (TEST / "process", TEST.parent / "scripts")
"""Where files of ours lie that run as programs."""
READ_AT_START = ("OMP_", "MKL_", "MALLOC_", "LD_", "PYTHON", "CUDA_", "TORCH")
"""Variables that an interpreter or a library reads once, when it starts."""
READ_BY_US = ("PYTHONPATH", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR")
"""Those of them that a fork heeds all the same. torch sets the last one itself while it is imported."""
USUAL_NICENESS = os.getpriority(os.PRIO_PROCESS, 0)
"""Of the tests: this module is imported by them, and by the process that they start warm programs from."""
LARGE_PAGE = 1 << 21
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_HIGH_FD = 512


@dataclass(frozen=True)
class Program:
    """A Python program to run: a module, a file or the text of one, its arguments, and the process that it wants.

    `fds`: the descriptors that it has when it starts.
    """

    module: str
    file: str
    text: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    new_session: bool
    unbuffered: bool
    fds: tuple[int, ...] = ()

    @property
    def runs_tests(self) -> bool:
        """Whether it is a process in which pytest-xdist runs tests."""
        return self.text == TEST_RUNNER

    def run(self) -> object:
        """Run it as `__main__` and return what it exits with."""
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        tempfile.tempdir = None  # found anew: TMPDIR may differ
        paths = [path for path in self.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        first = str(Path(self.file).parent) if self.file else self.folder
        sys.path[:] = dict.fromkeys([first, *paths, *sys.path])
        sys.argv = [self.module or self.file or "-c", *self.arguments]
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            if self.unbuffered and number > 0:
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        try:
            if self.module:
                sys.modules.pop(self.module, None)
                runpy.run_module(self.module, run_name="__main__", alter_sys=True)
            elif self.text:
                exec(compile(self.text, "<string>", "exec"), {"__name__": "__main__"})
            else:
                runpy.run_path(self.file, run_name="__main__")
        except SystemExit as end:
            return end.code
        return 0


def program_of(command: Sequence[str], environment: Mapping[str, str], folder: str, new_session: bool) -> Program | None:
    """The program of ours that `command` runs; None for any other command."""
    words, environment = [str(word) for word in command], dict(environment)
    if words[0] == "/usr/bin/env":
        words.pop(0)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
    if words.pop(0) != sys.executable or not words or _differs_at_start(environment):
        return None
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    if words[0] == "-u":
        unbuffered, _ = True, words.pop(0)
    if words[0] == "-m" and words[1].startswith(OURS):
        return Program(words[1], "", "", tuple(words[2:]), environment, folder, new_session, unbuffered)
    if words[0] == "-c" and ("from runtime import" in words[1] or words[1] == TEST_RUNNER):
        return Program("", "", words[1], tuple(words[2:]), environment, folder, new_session, unbuffered)
    if Path(words[0]).parent in FOLDERS:
        return Program("", words[0], "", tuple(words[1:]), environment, folder, new_session, unbuffered)
    return None


def _differs_at_start(environment: Mapping[str, str]) -> bool:
    def read(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if name.startswith(READ_AT_START) and name not in READ_BY_US}

    return read(environment) != read(os.environ)


class ForkedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks this process for programs of ours."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        shell, pipes, new_session = rest[2], rest[3:9], rest[14]
        program = None
        if not (shell or executable or preexec_fn or isinstance(args, (str, bytes))):
            program = program_of(args, os.environ if env is None else env, os.path.abspath(cwd or "."), new_session)
        if program is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        stdin, stdout, stderr = (theirs if theirs >= 0 else own for own, theirs in enumerate((pipes[0], pipes[3], pipes[5])))
        self.pid = self._start(program, {0: stdin, 1: stdout, 2: stderr} | {fd: fd for fd in pass_fds})
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _start(self, program: Program, fds: Mapping[int, int]) -> int:
        """Start `program` with descriptors `fds`, theirs to ours; return its process id."""
        return fork(lambda: become(program, fds))


def fork(main: Callable[[], object]) -> int:
    """Run `main` in a child, which exits with what it returns as Python does; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    atexit._clear()
    status: object = 1
    try:
        status = main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(status, str):
            print(status, file=sys.stderr)
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(0 if status is None else status & 255 if isinstance(status, int) else 1)


def become(program: Program, fds: Mapping[int, int], prepare: Callable[[], None] | None = None) -> object:
    """Run `program` in this process, a fresh fork, with no other descriptors than `fds`. `prepare`: see `start_our_programs`."""
    gc.freeze()  # what the parent left behind is not ours to close
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if program.new_session:
        os.setsid()
        _keep_niceness()
    _take(fds)
    if program.runs_tests:
        WarmStart.born_with = _fork_warm_process(prepare)
    else:
        subprocess.Popen = ForkedPopen  # type: ignore[misc]
        multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    return program.run()


def _fork_warm_process(prepare: Callable[[], None] | None) -> WarmProcess:
    """Start a warm process before this one has threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def serve() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        _take({0: null, 1: 2, 2: 2, theirs.fileno(): theirs.fileno()})  # pytest-xdist talks by the first two
        start_our_programs(theirs, prepare)

    pid = fork(serve)
    theirs.close()
    return WarmProcess(ours, lambda: os.waitpid(pid, 0))


def _keep_niceness() -> None:
    """Give a new session what its process is nicer than the tests.

    Linux schedules sessions against each other (autogroups), each with niceness 0 at first; that of a process counts within its session.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, 0) - USUAL_NICENESS
    for _ in range(20 if niceness > 0 else 0):
        try:
            Path("/proc/self/autogroup").write_text(str(niceness))
            return
        except BlockingIOError:  # root alone may change two sessions within 0.1 s
            time.sleep(0.05)
        except OSError:  # a system without autogroups
            return


def _take(fds: Mapping[int, int]) -> None:
    """Make `fds` the only open descriptors, under their names."""
    high = {name: fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for name, fd in fds.items()}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in high.values():
            with contextlib.suppress(OSError):
                os.close(fd)
    for name, fd in high.items():
        os.dup2(fd, name)
        os.close(fd)


@dataclass(frozen=True)
class WarmProcess:
    """A process that has imported everything.

    Attributes:
        socket: takes programs to start; the process exits when it is closed.
        wait: waits for the exit.
    """

    socket: socket.socket
    wait: Callable[[], object]


class WarmStart:
    """Starts programs as forks of a warm process until it is closed.

    Attributes:
        born_with: the warm process that this process was given at its start; None once it is in use.
    """

    born_with: ClassVar[WarmProcess | None] = None

    def __init__(self, tests: Sequence[str] = ()) -> None:
        """`tests`: files and folders of tests that the processes to start run; none for other programs."""
        self._process, WarmStart.born_with = WarmStart.born_with or _start_warm_process(tests), None
        self._lock = threading.Lock()
        start = self.start

        class Popen(ForkedPopen):
            """`subprocess.Popen` that forks the warm process."""

            def _start(self, program: Program, fds: Mapping[int, int]) -> int:
                return start(program, fds)

        self.Popen = Popen

    def start(self, program: Program, fds: Mapping[int, int]) -> int:
        """Start `program` as a child of this process; return its process id."""
        program = Program(**{**vars(program), "fds": tuple(fds)})
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the program is an orphan for a moment, and becomes our child
            try:
                socket.send_fds(self._process.socket, [pickle.dumps(program)], list(fds.values()))
                return int(self._process.socket.recv(64))
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        """End the process; what it started goes on."""
        self._process.socket.close()
        self._process.wait()


def _start_warm_process(tests: Sequence[str]) -> WarmProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(TEST.parent / "python"), str(TEST), str(TEST.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from warm_start import main; main()", str(theirs.fileno()), *tests]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | {"PYTHONPATH": path})
    theirs.close()
    return WarmProcess(ours, process.wait)


@contextlib.contextmanager
def warm_start(tests: Sequence[str] = ()) -> Iterator[WarmStart]:
    """`subprocess.Popen` forks a warm process. `tests`: those that the forks run, if they are processes that run tests."""
    usual, warm = subprocess.Popen, WarmStart(tests)
    subprocess.Popen = warm.Popen  # type: ignore[misc]
    try:
        yield warm
    finally:
        subprocess.Popen = usual  # type: ignore[misc]
        warm.close()


@contextlib.contextmanager
def cold_start() -> Iterator[None]:
    """`subprocess.Popen` starts an interpreter, as it does without `warm_start`."""
    forking, subprocess.Popen = subprocess.Popen, ForkedPopen.__base__  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        subprocess.Popen = forking  # type: ignore[misc]


def main() -> None:
    """The warm process: start what it is asked for until the socket closes."""
    asked, tests = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle.setproctitle("warm start")  # finds the place of the title, which is lost with the first environment
    gc.disable()  # collections during imports find next to nothing, and visit more objects each time
    for name in (*IMPORTED, *(IMPORTED_BY_TESTS if tests else ())):
        importlib.import_module(name)
    changed = import_tests(tests) if tests else {}
    prepare = warm_state.prepare_for_forks() if tests and _tests_start_programs() else None
    gc.collect()
    gc.enable()
    if tests:
        start_programs(asked, changed, prepare)
    else:
        start_our_programs(asked)
    os._exit(0)  # without the second that the interpreter takes to delete all modules


def import_tests(tests: Sequence[str]) -> dict[str, str]:
    """Import all files of `tests` by a collection of pytest, which takes each process that runs tests two seconds of a core, and more in a
    fresh clone, where it also compiles them. What fails is left to those processes, which report it. Nothing is imported if torch has
    several threads, because files may start them, and they do not survive a fork.

    Returns:
        the environment variables that the files set while they are imported.
    """
    import pytest
    import torch

    if torch.get_num_threads() > 1:
        return {}
    before, threads = dict(os.environ), os.listdir("/proc/self/task")
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        pytest.main([*tests, "--collect-only", "-n0", "-p", "no:cacheprovider"])
    for name, count in Counter(path.stem for path in TEST.glob("*/test_*.py")).items():
        if count > 1:  # pytest refuses a file of another folder under the name of a module
            sys.modules.pop(name, None)
    gc.unfreeze()  # conftest.py froze what collected the tests
    assert os.listdir("/proc/self/task") == threads, "a file of tests starts threads when it is imported; forks would lack them"
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _tests_start_programs() -> bool:
    """Whether tests that start our programs have been imported."""
    return any(Path(getattr(module, "__file__", None) or "").parent == TEST / "process" for module in list(sys.modules.values()))


def start_our_programs(asked: socket.socket, prepare: Callable[[], None] | None = None) -> None:
    """When the first program is asked for, get what each would read or compute, by `prepare` from the parent, then start programs."""
    if not asked.recv(1, socket.MSG_PEEK):
        return  # closed before it was of use
    if prepare is not None:
        prepare()
    else:
        warm_state.prepare()
        gc.collect()
    start_programs(asked)


def use_large_pages() -> None:
    """Move the memory of this process to pages of 2 MiB: a fork copies the page table, which takes 20 ms of a core with small ones.

    Linux can do so since 6.1. Older kernels refuse, and only the time differs.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_ = line.split()
        start, end = (int(address, 16) for address in span.split("-"))
        start, end = -(-start // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
        if access == "rw-p" and start < end:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def start_programs(
    asked: socket.socket, variables: Mapping[str, str] = MappingProxyType({}), prepare: Callable[[], None] | None = None
) -> None:
    """Start what is asked for until the socket closes. The others are for programs that run tests: environment variables, and how their
    warm processes `prepare`.
    """
    use_large_pages()
    while True:
        order, fds, *_ = socket.recv_fds(asked, 1 << 20, 64)
        if not order:
            asked.close()
            return
        program: Program = pickle.loads(order)
        if program.runs_tests:
            program = replace(program, environment={**program.environment, **variables})
        mine, its = os.pipe()
        between = os.fork()
        if not between:  # ends at once, so that its child becomes the child of the process that asked
            pid = fork(lambda program=program, fds=fds: become(program, dict(zip(program.fds, fds, strict=True)), prepare))
            os.write(its, str(pid).encode())
            os._exit(0)
        os.close(its)
        os.waitpid(between, 0)
        asked.send(os.read(mine, 64))
        for fd in (mine, *fds):
            os.close(fd)
