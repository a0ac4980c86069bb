"""A client that streams completions in a thread, and records when each piece arrives."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import httpx

BODY = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "temperature": 0}


class Stream:
    """One streamed completion of a number of tokens or, with `forever`, one after the other until it leaves.

    Attributes:
        times: when each piece arrived, in seconds of `time.perf_counter`.
        ended: when the stream ended; 0 before.
        failed: whether it ended with an error.
    """

    def __init__(self, port: int, tokens: int, forever: bool = False) -> None:
        self.times, self.ended, self.failed = list[float](), 0.0, False
        self._url, self._body, self._forever = f"http://127.0.0.1:{port}/v1/completions", BODY | {"max_tokens": tokens}, forever
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> Stream:
        """Wait until the stream ends."""
        self._thread.join()
        return self

    def leave(self) -> None:
        """Close the connection at the next piece, if the stream has not ended."""
        self._left.set()
        self._thread.join()

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between pieces."""
        return [(b - a) * 1000 for a, b in pairwise(self.times)]

    def _run(self) -> None:
        try:
            self._read()
            while self._forever and not self._left.is_set():
                self._read()
        except httpx.HTTPError:
            self.failed = True
        self.ended = time.perf_counter()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60, trust_env=False, verify=False) as answer:
            for line in answer.iter_lines():
                self.failed |= '"error"' in line
                if line.startswith("data: {"):
                    self.times.append(time.perf_counter())
                if self._left.is_set():
                    return
