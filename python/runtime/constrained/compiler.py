"""Compiles grammars outside the scheduler's loop: in a thread, with a cache, after a trial in another process."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from runtime.constrained.grammar import GrammarBackend, Matcher
from runtime.constrained.trial import STACK_MIB
from runtime.constrained.trial_process import TrialProcess
from runtime.errors import CompilerBusy, ConfigError, GrammarBackendFailed, GrammarError, ServingError
from runtime.sampling_params import GrammarSpec

log = logging.getLogger(__name__)

MAX_WAIT = 10.0
"""Seconds that a grammar waits for earlier ones to compile."""
MAX_CACHED = 256
MAX_CACHED_CHARS = 1 << 22
"""Total characters of all cached grammars."""


@dataclass(slots=True)
class _Entry:
    """A cached grammar: compiled, refused or being compiled.

    Attributes:
        future: the outcome.
        wanted_until: when the last request for it stops waiting.
    """

    future: Future[Matcher]
    wanted_until: float


@dataclass(frozen=True, slots=True)
class Compilation:
    """The wait of one request for its grammar.

    Attributes:
        future: the outcome.
        until: when the request stops waiting, in seconds of `clock`.
    """

    future: Future[Matcher]
    until: float
    clock: Callable[[], float]

    def result(self) -> Matcher | None:
        """The grammar; None while it is being compiled.

        Raises:
            GrammarError: it cannot be used.
            GrammarBackendFailed: no grammar can be used.
            CompilerBusy: other grammars keep the compiler busy.
        """
        if self.future.done():
            return self.future.result()
        if self.clock() > self.until:
            raise CompilerBusy
        return None


class GrammarCompiler:
    """Owner of the backend, the thread and the cache.

    Args:
        make_backend: makes the backend; called in the thread.
        trials: tries each new grammar first; closed with the compiler. None if another process has already tried all grammars.
        clock: monotonic seconds.
    """

    def __init__(
        self, make_backend: Callable[[], GrammarBackend], trials: TrialProcess | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._trials, self._clock = trials, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        usual = threading.stack_size(2 * STACK_MIB << 20)  # what fits a trial's stack must fit here
        self._backend = self._thread.submit(_load, make_backend)
        threading.stack_size(usual)
        self._cache: OrderedDict[GrammarSpec, _Entry] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Compilation:
        """Start to compile `spec`, unless it is compiled, refused or being compiled."""
        until = self._clock() + MAX_WAIT
        with self._lock:
            entry = self._cache.get(spec)
            if entry is None:
                entry = self._cache[spec] = _Entry(Future(), until)
                self._chars += len(spec.text)
                self._evict()
                self._thread.submit(self._run, entry, spec)
            self._cache.move_to_end(spec)
            entry.wanted_until = until
        return Compilation(entry.future, until, self._clock)

    def close(self) -> None:
        """Cancel queued compilations. The running one finishes."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._trials is not None:
            self._trials.close()

    def _run(self, entry: _Entry, spec: GrammarSpec) -> None:
        try:
            backend = self._backend.result()
            if self._clock() > entry.wanted_until:
                raise CompilerBusy
            translated = (self._trials or backend).translate(spec)
            entry.future.set_result(backend.compile(translated))
        except CompilerBusy as error:
            self._forget(entry, spec)
            entry.future.set_exception(error)
        except ServingError as error:
            entry.future.set_exception(error)
        except Exception as error:  # a library's fault must not end the thread with the request unanswered
            log.exception("a grammar could not be compiled")
            entry.future.set_exception(GrammarError(spec.kind, f"The compiler failed: {type(error).__name__}."))

    def _forget(self, entry: _Entry, spec: GrammarSpec) -> None:
        """Remove an entry, so that the next request with this grammar compiles it."""
        with self._lock:
            if self._cache.get(spec) is entry:
                del self._cache[spec]
                self._chars -= len(spec.text)

    def _evict(self) -> None:
        """Evict the least recently used grammars. Requests that wait for one keep its future."""
        while len(self._cache) > 1 and (len(self._cache) > MAX_CACHED or self._chars > MAX_CACHED_CHARS):
            spec, _ = self._cache.popitem(last=False)
            self._chars -= len(spec.text)


def _load(make_backend: Callable[[], GrammarBackend]) -> GrammarBackend:
    """The backend. Logs why it cannot be loaded, once for all requests, and raises `GrammarBackendFailed`."""
    try:
        return make_backend()
    except ConfigError as error:
        failed = GrammarBackendFailed(error.message)
        log.error("%s", failed)
        raise failed from error
    except Exception as error:  # a library's fault must not leave requests unanswered
        log.exception("the grammar backend could not be loaded")
        raise GrammarBackendFailed(f"{type(error).__name__}: {error}") from error
