"""Compiles a grammar in a fork of this process, which may use little time, memory and stack.

Compilers in native code cannot be interrupted; they overflow their stack, and they end the process where memory runs out.
"""

from __future__ import annotations

import os
import resource
import signal
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec

from runtime.constrained.grammar import GrammarBackend
from runtime.errors import GrammarError
from runtime.sampling_params import GrammarSpec

MAX_SECONDS = 0.5
"""CPU time that one compilation may take: a busy machine refuses no other grammars than an idle one."""
MAX_WALL_SECONDS = 5.0
"""Time by the clock, on a machine with no time for it."""
MAX_MIB = 512
"""Memory that one compilation may take, in MiB of address space."""
STACK_MIB = 4
"""Stack of one compilation, in MiB. The process that uses the grammar has more in all of its threads."""


class Translated(msgspec.Struct, frozen=True, tag=True):
    """A grammar that compiles within the limits, as `GrammarBackend.translate` returns it."""

    grammar: GrammarSpec


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why a grammar cannot be used: the arguments of `GrammarError`."""

    kind: str
    reason: str

    @property
    def error(self) -> GrammarError:
        """The error of the request."""
        return GrammarError(self.kind, self.reason)


Outcome = Translated | Refusal


def serve_trials(backend: GrammarBackend, connection: Connection) -> None:
    """Answer each `GrammarSpec` with its `Outcome`, all in JSON, until the other side closes the connection.

    Call it in a process that has no other thread.
    """
    while True:
        try:
            spec = msgspec.json.decode(connection.recv_bytes(), type=GrammarSpec)
            connection.send_bytes(msgspec.json.encode(try_grammar(backend, spec)))
        except (EOFError, ConnectionError):
            return


def try_grammar(backend: GrammarBackend, spec: GrammarSpec) -> Outcome:
    """Translate and compile `spec` in a fork."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _compile(backend, spec, theirs)
    os.close(theirs)
    with open(ours, "rb") as answer:
        said = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return msgspec.json.decode(said, type=Outcome)
    return Refusal(spec.kind, _death(status))


def _death(status: int) -> str:
    """Why a compilation ended its process."""
    if status in (-signal.SIGPROF, -signal.SIGALRM):
        return f"It takes longer than {MAX_SECONDS:g} s to compile. Make it smaller."
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"The compiler crashes on it ({how}): it is nested too deeply, or needs more than {MAX_MIB} MiB. Make it smaller."


def _compile(backend: GrammarBackend, spec: GrammarSpec, answer: int) -> NoReturn:
    """Compile `spec`, write the outcome to the descriptor `answer` and end this process."""
    status = 1
    try:
        _limit()
        outcome = _outcome(backend, spec)
        with open(answer, "wb") as out:
            out.write(msgspec.json.encode(outcome))
        status = 0
    finally:
        os._exit(status)


def _limit() -> None:
    """Bound this process. The kernel ends it when its time is over, whatever it does then and whether its parent lives."""
    for number, timer, seconds in (
        (signal.SIGPROF, signal.ITIMER_PROF, MAX_SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, MAX_WALL_SECONDS),
    ):
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, seconds)
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    for limit, most in ((resource.RLIMIT_AS, used + (MAX_MIB << 20)), (resource.RLIMIT_STACK, STACK_MIB << 20), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    silent = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):  # native code prints why it ends the process
        os.dup2(silent, fd)


def _outcome(backend: GrammarBackend, spec: GrammarSpec) -> Outcome:
    try:
        translated = backend.translate(spec)
        backend.compile(translated)
    except GrammarError as error:
        return Refusal(error.param or spec.kind, error.message)
    except MemoryError:
        return Refusal(spec.kind, f"It needs more than {MAX_MIB} MiB to compile. Make it smaller.")
    except Exception as error:  # a library's fault is the grammar's
        return Refusal(spec.kind, f"The compiler failed: {type(error).__name__}.")
    return Translated(translated)
