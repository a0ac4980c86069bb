"""Compiles grammars beside the scheduler's loop: in threads, with a cache, bounded in time, size and number."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from runtime.constrained.grammar import Grammar, GrammarBackend
from runtime.constrained.grammar_size import check_size
from runtime.errors import CompilerBusy, GrammarError, RequestError
from runtime.sampling_params import GrammarSpec

log = logging.getLogger(__name__)

THREADS = 2
MAX_SECONDS = 0.6
"""Time that one compilation may take."""
MAX_WAIT = 10.0
"""Seconds that a grammar waits for a thread."""
MAX_CACHED = 256
MAX_CACHED_CHARS = 1 << 22
"""Text of all cached grammars together."""


class Compilation:
    """A grammar that is being compiled, or was.

    Args:
        spec: the grammar.
        clock: monotonic seconds.

    Attributes:
        started: when a thread began with it; None before.
        future: its outcome.
    """

    def __init__(self, spec: GrammarSpec, clock: Callable[[], float]) -> None:
        self._spec, self._clock = spec, clock
        self._asked = clock()
        self.started: float | None = None
        self.future: Future[Grammar] = Future()

    def start(self) -> None:
        """Note that a thread begins."""
        self.started = self._clock()

    def result(self) -> Grammar | None:
        """The grammar; None while it is being compiled.

        Raises:
            GrammarError: it cannot be used.
            CompilerBusy: other grammars keep all threads busy.
        """
        if self.future.done():
            return self.future.result()
        if self.started is not None and self._clock() - self.started > MAX_SECONDS:
            raise GrammarError(self._spec.kind, f"It takes longer than {MAX_SECONDS:g} s to compile. Make it smaller.")
        if self._clock() - self._asked > MAX_WAIT:
            raise CompilerBusy
        return None


class GrammarCompiler:
    """Owner of the backend, the threads and the cache.

    Args:
        make_backend: makes the backend; called in a thread.
        clock: monotonic seconds.
    """

    def __init__(self, make_backend: Callable[[], GrammarBackend], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._backend = self._threads.submit(make_backend)
        self._cache: OrderedDict[GrammarSpec, Compilation] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Compilation:
        """Begin to compile `spec`, or find it compiled or under way."""
        with self._lock:
            found = self._cache.get(spec)
            if found is not None:
                self._cache.move_to_end(spec)
                return found
            found = self._cache[spec] = Compilation(spec, self._clock)
            self._chars += len(spec.text)
            self._evict()
        self._threads.submit(self._run, found, spec)
        return found

    def close(self) -> None:
        """Forget what was not begun. A compilation under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, compilation: Compilation, spec: GrammarSpec) -> None:
        try:
            backend = self._backend.result()
            compilation.start()
            check_size(spec)
            compilation.future.set_result(backend.compile(spec))
        except RequestError as error:
            compilation.future.set_exception(error)
        except Exception as error:  # a library's fault must not end the thread with the request unanswered
            log.exception("a grammar could not be compiled")
            compilation.future.set_exception(GrammarError(spec.kind, f"The compiler failed: {type(error).__name__}."))

    def _evict(self) -> None:
        """Forget the grammars that were not used for the longest time. Requests that wait for one keep it."""
        while len(self._cache) > 1 and (len(self._cache) > MAX_CACHED or self._chars > MAX_CACHED_CHARS):
            spec, _ = self._cache.popitem(last=False)
            self._chars -= len(spec.text)
