"""Torch traces of this process."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from runtime.errors import ServingError, WrongProfile


class Profiler:
    """Owner of the running trace, if there is one."""

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._running: profile | None = None
        self._folder = ""

    def start(self, folder: str) -> None:
        """Start a trace. Raises `WrongProfile` if one is running, `ServingError` if the folder cannot be created."""
        if self._running is not None:
            raise WrongProfile("A profile is already running. Stop it first.")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ServingError(f"Cannot create the profile folder {folder}: {error.strerror}. Use another folder.") from error
        self._folder = folder
        self._running = profile(activities=self._activities)
        self._running.start()

    def stop(self) -> str:
        """Stop, write the trace in Chrome's format and return its path. Raises `WrongProfile` if none is running."""
        if self._running is None:
            raise WrongProfile("No profile is running.")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        done, self._running = self._running, None  # stopped even if writing fails
        done.stop()
        path = os.path.join(self._folder, f"scheduler-{time.time_ns()}.trace.json.gz")
        done.export_chrome_trace(path)
        return path

    def span(self, name: str) -> AbstractContextManager[object]:
        """A named span of the trace, if one is running."""
        return nullcontext() if self._running is None else torch.profiler.record_function(f"talon::{name}")
