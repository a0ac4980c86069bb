"""The heartbeat thread: it sends heartbeats while the loop that it watches makes progress."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

PERIOD = 0.5
"""Seconds between two heartbeats."""


class HeartbeatThread:
    """Calls `beat` every half second on a thread, so one long step does not look like a dead process.

    It counts periods instead of reading a clock, so that a suspended machine causes no false alarm.

    Args:
        beat: sends one heartbeat; must be safe to call from another thread.
        iteration: returns the number of iterations that the loop has begun.
        stall: seconds without progress after which the stacks are written to stderr and the heartbeat pauses.
    """

    def __init__(self, beat: Callable[[], None], iteration: Callable[[], int], stall: float) -> None:
        self._beat = beat
        self._iteration = iteration
        self._seen, self._still = -1, 0.0
        self._stall = stall
        self._stalled = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            if not self._is_stalled():
                self._beat()
            if self._done.wait(PERIOD):
                return

    def _is_stalled(self) -> bool:
        seen, self._seen = self._seen, self._iteration()
        self._still = self._still + PERIOD if seen == self._seen else 0.0
        stalled = self._still > self._stall
        if stalled and not self._stalled:
            log.error("no progress for %.0f s (--watchdog-timeout %.0f); the heartbeat stops", self._still, self._stall)
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        self._stalled = stalled
        return stalled
