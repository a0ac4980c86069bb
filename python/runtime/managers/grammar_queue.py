"""Requests whose grammar is being compiled: they wait outside the run queue."""

from __future__ import annotations

from runtime.constrained.compiler import Compilation, GrammarCompiler
from runtime.errors import GrammarError, ServingError
from runtime.managers.req import Phase, Req
from runtime.sampling_params import GrammarSpec


class GrammarQueue:
    """Owner of the requests that wait for their grammar.

    Args:
        compiler: compiles grammars; None if the server has no grammar backend.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: list[tuple[Req, Compilation]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, spec: GrammarSpec) -> None:
        """Raise `GrammarError` if this server compiles no grammars."""
        if self._compiler is None:
            flags = "--grammar-backend; none with --speculative-synthetic-accept-length"
            raise GrammarError(spec.kind, f"this server has no grammar backend ({flags}).")

    def add(self, req: Req, spec: GrammarSpec) -> None:
        """Compile the grammar of `req` in the background."""
        assert self._compiler is not None, "checked on arrival"
        req.phase = Phase.COMPILING
        self._waiting.append((req, self._compiler.compile(spec)))

    def take(self) -> list[tuple[Req, ServingError | None]]:
        """Remove and return the requests whose compilation has ended: their grammar is set, or there is an error."""
        done: list[tuple[Req, ServingError | None]] = []
        waiting, self._waiting = self._waiting, []
        for req, compilation in waiting:
            if not req.alive:
                continue
            try:
                req.grammar = compilation.result()
            except ServingError as error:
                # The compiler caches errors; a traceback would keep the frames, and so the requests and steps, of this iteration alive.
                done.append((req, error.with_traceback(None)))
                continue
            if req.grammar is None:
                self._waiting.append((req, compilation))
            else:
                done.append((req, None))
        return done
