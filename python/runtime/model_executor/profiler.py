"""A torch trace of this process, from one call to the other."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager

import torch
from torch.profiler import ProfilerActivity, profile

from runtime.errors import RequestError, ServingError


class Profiler:
    """Owner of the one trace that may be running."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._running: profile | None = None
        self._folder = ""

    def start(self, folder: str) -> None:
        """Begin. Raises `RequestError` when a trace is running, `ServingError` when the folder cannot be made."""
        if self._running is not None:
            raise RequestError("a profile is already running; stop it first")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ServingError(f"--profile {folder} cannot be made: {error.strerror}; start the server with one that can") from error
        self._folder = folder
        self._running = profile(activities=self._activities)
        self._running.start()

    def stop(self) -> str:
        """End, and write the trace in Chrome's format; returns its path. Raises `RequestError` when none is running."""
        if self._running is None:
            raise RequestError("no profile is running")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        done, self._running = self._running, None  # over, whether or not it can be written
        done.stop()
        path = os.path.join(self._folder, f"{self._name}-{int(time.time())}.trace.json.gz")
        done.export_chrome_trace(path)
        return path


def span(name: str) -> AbstractContextManager[object]:
    """A named phase in the trace; costs under a microsecond when none is running."""
    return torch.profiler.record_function(f"talon::{name}")
