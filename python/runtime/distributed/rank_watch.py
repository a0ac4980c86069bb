"""Heartbeats between rank 0 and the other ranks, over a ZMQ socket, so that none waits for a rank that is gone. No torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import zmq

from runtime.distributed.zmq_socket import open_socket

log = logging.getLogger(__name__)

PERIOD = 0.5
"""Seconds between two heartbeats."""
SILENT_PERIODS = 10
"""Periods of half a second without a heartbeat after which a rank counts as lost: 5 s. Counting periods instead of reading a clock
tolerates a suspended machine."""
TELL_MS = 1000
"""Milliseconds that the last messages may take to be sent."""
PAUSE = b"\0"
"""Rank 0's answer when it is about to stop sending heartbeats for a while."""
PAUSE_PERIODS = 3
"""Periods until all other ranks have received `PAUSE`."""
MAX_PAUSE_PERIODS = 1200
"""Periods for which rank 0 may then be silent: 10 min."""


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """A heartbeat, or the reason why the rank exits."""

    rank: int
    failure: str = ""


class RankWatch:
    """Rank 0's side: receives heartbeats, answers each, and calls `lost` with a sentence about the first rank that is gone; the remaining
    ranks are told too.

    Args:
        address: where the other ranks connect.
        ranks: the other ranks.
        lost: called on the watching thread.
        stuck: called every half second; returns a sentence if rank 0 itself hangs, else "".
    """

    def __init__(self, address: str, ranks: range, lost: Callable[[str], None], stuck: Callable[[], str] = lambda: "") -> None:
        self._silent = dict.fromkeys(ranks, 0)
        self._senders = dict[int, bytes]()
        self._lost, self._stuck = lost, stuck
        self._socket = open_socket(zmq.ROUTER, address)
        self._socket.bind(address)
        self._done = threading.Event()
        self._answer, self._ending = b"", ""
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    @property
    def address(self) -> str:
        """The address where it listens, including the port."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        """Begin to expect heartbeats."""
        self._thread.start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Make the other ranks tolerate a longer silence of this process: torch holds the GIL while it writes a trace."""
        self._answer = PAUSE
        time.sleep(PAUSE_PERIODS * PERIOD)
        try:
            yield
        finally:
            self._answer = b""

    def end(self, why: str) -> None:
        """Tell the other ranks that rank 0 ends, and expect no more."""
        self._ending = why
        if self._thread.is_alive():
            self._thread.join(PERIOD + TELL_MS / 1000)

    def close(self) -> None:
        """Expect no more."""
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.context.destroy(linger=0)

    def _run(self) -> None:
        while not self._done.wait(PERIOD):
            why = self._hear_all() or self._ending or self._silent_rank() or self._stuck()
            if why and not self._done.is_set():
                self._tell(why)
                if why != self._ending:
                    self._lost(why)
                return

    def _tell(self, why: str) -> None:
        """Tell the other ranks to exit; otherwise they would wait for heartbeats."""
        for sender in self._senders.values():
            self._socket.send_multipart((sender, why.encode()), zmq.NOBLOCK)
        self._socket.close(linger=TELL_MS)
        self._socket.context.term()

    def _hear_all(self) -> str:
        heard = set[int]()
        while self._socket.poll(0):
            who, *frames = self._socket.recv_multipart()
            try:
                (frame,) = frames
                beat = msgspec.msgpack.decode(frame, type=Beat)
            except ValueError:  # of msgspec too: it is of no rank
                continue
            if beat.failure:
                return beat.failure
            heard.add(beat.rank)
            self._senders[beat.rank] = who
            self._socket.send_multipart((who, self._answer), zmq.NOBLOCK)
        for rank in self._silent:
            self._silent[rank] = 0 if rank in heard else self._silent[rank] + 1
        return ""

    def _silent_rank(self) -> str:
        silent = [rank for rank, periods in self._silent.items() if periods >= SILENT_PERIODS]
        return f"rank {silent[0]} hangs or is gone: no heartbeat for {SILENT_PERIODS * PERIOD:g} s" if silent else ""


class RankBeat:
    """The side of another rank: sends heartbeats, and calls `lost` if rank 0 answers none of them or says that it exits.

    Args:
        alive: called with each heartbeat.
    """

    def __init__(self, address: str, rank: int, lost: Callable[[str], None], alive: Callable[[], None] = lambda: None) -> None:
        self._rank, self._lost, self._alive = rank, lost, alive
        self._socket = open_socket(zmq.DEALER, address)
        self._socket.setsockopt(zmq.LINGER, TELL_MS)
        self._socket.connect(address)
        self._failure = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-beat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, failure: str = "") -> None:
        """Stop, and report a `failure` to rank 0."""
        self._failure = failure
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()
        if failure:
            self._send()
        self._socket.close()
        self._socket.context.term()

    def _run(self) -> None:
        silent, patience = 0, SILENT_PERIODS
        self._send()
        while not self._done.wait(PERIOD):
            self._send()
            self._alive()
            silent = 0 if self._socket.poll(0) else silent + 1
            while self._socket.poll(0):
                answer = self._socket.recv()
                patience = MAX_PAUSE_PERIODS if answer == PAUSE else SILENT_PERIODS
                if answer not in (b"", PAUSE):
                    self._lost(f"rank 0 ends: {answer.decode()}")
                    return
            if silent >= patience:
                self._lost(f"rank 0 does not answer for {patience * PERIOD:g} s")
                return

    def _send(self) -> None:
        self._socket.send(msgspec.msgpack.encode(Beat(self._rank, self._failure)), zmq.NOBLOCK)
