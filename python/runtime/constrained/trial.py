"""Compiles a grammar in a fork of this process, which may use little time, memory and stack.

Compilers in native code cannot be interrupted. They may overflow their stack, and end the process when memory runs out.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np

from runtime.constrained.grammar import GrammarBackend, Matcher, allowed_tokens, mask_words
from runtime.errors import GrammarError
from runtime.sampling_params import GrammarSpec

MAX_SECONDS = 0.2
"""CPU seconds that one trial may take; large hand-written grammars take 0.06 s. CPU time, so that load does not change what is refused."""
MAX_WALL_SECONDS = 5.0
"""Wall-clock seconds that one trial may take, for overloaded machines."""
MAX_MIB = 512
"""Memory that one trial may take, in MiB of address space."""
STACK_MIB = 4
"""Stack of one trial, in MiB. The process that uses the grammar has more in all of its threads."""
FOLLOWED_TOKENS = 24
"""Tokens matched after compiling: lexers are built lazily, and those of some grammars grow without bound."""


class Refusal(NamedTuple):
    """Why a grammar cannot be used: the arguments of `GrammarError`."""

    kind: str
    reason: str

    @property
    def error(self) -> GrammarError:
        """The error of the request."""
        return GrammarError(self.kind, self.reason)


Outcome = GrammarSpec | Refusal
"""A grammar that compiles within the limits, as `GrammarBackend.translate` returns it; or why it cannot be used."""


class GrammarTrial:
    """Tries grammars. Its process has no other thread, because it forks.

    Args:
        backend: compiles them.
        vocab_size: ids of the model.
        eos_ids: tokens that end a text.
    """

    def __init__(self, backend: GrammarBackend, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._backend, self._eos_ids = backend, list(eos_ids)
        self._row = np.zeros(mask_words(vocab_size), dtype=np.int32)

    def serve(self, connection: Connection) -> None:
        """Answer each `GrammarSpec` with its `Outcome`, all in JSON, until the other side closes the connection."""
        while True:
            try:
                spec = msgspec.json.decode(connection.recv_bytes(), type=GrammarSpec)
                connection.send_bytes(msgspec.json.encode(self.run(spec)))
            except (EOFError, ConnectionError):
                return

    def run(self, spec: GrammarSpec) -> Outcome:
        """Translate and compile `spec` in a fork, and follow a text of it."""
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            self._compile(spec, theirs)
        os.close(theirs)
        with open(ours, "rb") as answer:
            said = answer.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return msgspec.json.decode(said, type=Outcome) if status == 0 else Refusal(spec.kind, _death(status))

    def _compile(self, spec: GrammarSpec, answer: int) -> NoReturn:
        """Write the outcome to the descriptor `answer` and end this process."""
        status = 1
        try:
            _limit()
            outcome = self._outcome(spec)
            with open(answer, "wb") as out:
                out.write(msgspec.json.encode(outcome))
            status = 0
        finally:
            os._exit(status)

    def _outcome(self, spec: GrammarSpec) -> Outcome:
        try:
            translated = self._backend.translate(spec)
            reason = self._follow(self._backend.compile(translated))
        except GrammarError as error:
            return Refusal(error.param or spec.kind, error.message)
        except MemoryError:
            return Refusal(spec.kind, f"It needs more than {MAX_MIB} MiB to compile. Make it smaller.")
        except Exception as error:  # an error of the library counts as an error of the grammar
            return Refusal(spec.kind, f"The compiler failed: {type(error).__name__}.")
        if reason:
            return Refusal(spec.kind, f"It is too complex: {reason.split('<')[0].strip()}. Make it smaller.")
        return translated

    def _follow(self, matcher: Matcher) -> str:
        """Follow a deterministic text of the grammar; return why it cannot continue, or an empty string."""
        rng = np.random.default_rng(0)
        for _ in range(FOLLOWED_TOKENS):
            if reason := matcher.fill(self._row):
                return reason
            allowed = allowed_tokens(self._row)
            allowed[self._eos_ids] = False
            if not allowed.any() or not matcher.push(int(rng.choice(np.flatnonzero(allowed)))):
                break
        return ""


def _death(status: int) -> str:
    """Why a compilation ended its process."""
    if status in (-signal.SIGPROF, -signal.SIGALRM):
        return f"It takes longer than {MAX_SECONDS:g} s to compile. Make it smaller."
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"The compiler crashes on it ({how}): it is nested too deeply, or needs more than {MAX_MIB} MiB. Make it smaller."


def _limit() -> None:
    """Limit this process. The kernel kills it when its time is over, even in native code or without a parent."""
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
