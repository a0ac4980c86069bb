"""Times of the draft phases without a profiler, on the host and on the GPU's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

METHODS = {"draft_decode": "propose", "draft_extend": "follow"}
"""The draft phases and the methods of a drafter that launch them."""


class Phases:
    """A context in which a worker's iterations without prompts are timed; `figures` returns the times.

    An event costs the host a few microseconds, so precise comparisons are measured outside this context.
    """

    def __init__(self, worker: Any) -> None:
        drafter = worker.parts.drafter
        self._iterate_inner, self._prompt_inner = worker._iterate, drafter.follow_prompt
        self._wrapped = [(worker, "_iterate", self._iterate), (drafter, "follow_prompt", self._prompt)]
        self._wrapped += [(drafter, method, self._phase(name, getattr(drafter, method))) for name, method in METHODS.items()]
        self._iterations: list[dict[str, Any] | None] = []
        self._now: dict[str, Any] | None = None

    def __enter__(self) -> Phases:
        self._iterations.append(None)
        for owner, method, wrapped in self._wrapped:
            setattr(owner, method, wrapped)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, method, _ in self._wrapped:
            delattr(owner, method)

    def _iterate(self, batch: Any, chunks: Any, *rest: Any) -> Any:
        if chunks is not None:
            return self._iterate_inner(batch, chunks, *rest)
        self._now = {}
        try:
            return self._iterate_inner(batch, chunks, *rest)
        finally:
            self._iterations.append(self._now)
            self._now = None

    def _prompt(self, *args: Any) -> Any:
        self._iterations.append(None)
        return self._prompt_inner(*args)

    def _phase(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if self._now is None:
                return inner(*args)
            marks = [_event()]
            started = time.perf_counter()
            found = inner(*args)
            self._now[f"{name}_host"] = time.perf_counter() - started
            self._now[name] = [*marks, _event()]
            return found

        return run

    def figures(self) -> dict[str, float]:
        """Microseconds of iterations that were directly followed by another one; empty if there were none.

        `..._host_us` is the mean host time in a phase, `draft_host_us` that of both phases. On a GPU, `iteration_us` is
        the median time from the start of one draft to the start of the next, and `draft_extend_gpu_us` the median from
        the end of verification to the end of draft-extend: its kernels, and the wait for their launches.
        """
        steady = [(one, after) for one, after in pairwise(self._iterations) if one is not None and after is not None]
        if not steady:
            return {}
        found = {f"{name}_host_us": statistics.fmean([one[f"{name}_host"] * 1e6 for one, _ in steady]) for name in METHODS}
        found["draft_host_us"] = sum(found.values())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            found["iteration_us"] = statistics.median([_us(one["draft_decode"][0], after["draft_decode"][0]) for one, after in steady])
            found["draft_extend_gpu_us"] = statistics.median([_us(*one["draft_extend"]) for one, _ in steady])
        return found


def _event() -> torch.cuda.Event | None:
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _us(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) * 1e3
