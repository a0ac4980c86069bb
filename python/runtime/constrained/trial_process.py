"""The process in which each new grammar is compiled first, as its parent sees it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Pipe

import msgspec

from runtime.constrained.trial import Outcome, Refusal
from runtime.errors import CompilerBusy
from runtime.sampling_params import GrammarSpec

log = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0
"""Seconds for one answer, including the start of the process, after which the process is replaced."""


class TrialProcess:
    """Starts the process, sends it grammars, and replaces it if it has ended. It ends by itself when its parent ends.

    Args:
        command: a program that calls `GrammarTrial.serve` with its standard input, a socket.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        """The pid of the running process, or of the last one."""
        return self._process.pid

    def translate(self, spec: GrammarSpec) -> GrammarSpec:
        """Let the process try `spec`; wait for the outcome. Returns what `GrammarBackend.translate` returns.

        Raises:
            GrammarError: it cannot be used, or compiling it takes too much time or memory.
            CompilerBusy: the process does not answer, nor does the one that replaced it.
        """
        for _ in range(2):
            with contextlib.suppress(EOFError, OSError):
                self._connection.send_bytes(msgspec.json.encode(spec))
                if self._connection.poll(ANSWER_SECONDS):
                    outcome = msgspec.json.decode(self._connection.recv_bytes(), type=Outcome)
                    if isinstance(outcome, Refusal):
                        raise outcome.error
                    return outcome
            self._replace()
        raise CompilerBusy

    def close(self) -> None:
        """End the process."""
        self._closed = True
        self._end()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        # It imports this package, and must have only one thread, because it forks.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), env=environment)
        theirs.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _replace(self) -> None:
        if self._closed:
            raise CompilerBusy
        log.warning("the process that test-compiles grammars died or does not respond; restarting it")
        self._end()
        self._connection.close()
        self._start()
