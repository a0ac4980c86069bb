"""Runs steps in the order submitted, asynchronously.

On a GPU kernel launches are asynchronous: a step is launched inline and its result is awaited later. On the CPU one
thread acts as the device, so that the scheduler prepares the next batch while the current one runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from runtime.batch import BatchResult, Pending, ScheduleBatch

T = TypeVar("T")
Wait = Callable[[], BatchResult]
Step = Callable[[ScheduleBatch], Wait]


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A submitted step; `wait` returns its result, or raises the step's exception."""

    wait: Wait


class DeviceQueue:
    """Owner of the thread that runs steps on the CPU. `step` launches a batch and returns a function that waits for its result."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step = step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device") if device.type == "cpu" else None

    def submit(self, batch: ScheduleBatch) -> Pending:
        """Queue one step. Its exceptions are raised by `wait`."""
        if self._thread is not None:
            return _Submitted(self._thread.submit(self._run, batch).result)
        try:
            with torch.inference_mode():
                return _Submitted(self._step(batch))
        except Exception as error:  # the scheduler fails these requests and continues
            failed: Future[BatchResult] = Future()
            failed.set_exception(error)
            return _Submitted(failed.result)

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` between steps, on the thread that runs them."""
        return self._thread.submit(function).result() if self._thread is not None else function()

    def close(self) -> None:
        """Wait for queued steps to end."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _run(self, batch: ScheduleBatch) -> BatchResult:
        with torch.inference_mode():
            return self._step(batch)()
