"""One decode iteration taken apart from a torch-profiler trace (Chrome's format)."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "talon::"
FIRST_PHASE = "draft_decode"
"""Begins every iteration."""
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_DEEPEST = 16  # spans looked back at for the one around a moment
_COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")

KINDS = {
    "attention": ("flash", "_split_kernel", "_merge_kernel", "_deal_kernel", "_tail_kernel"),
    "GEMMs": ("gemm", "streamed", "nvjet", "splitKreduce", "gemv"),
    "norms, positions": ("_norm_kernel", "_rope_kernel"),
}
"""What kernels do, by a part of their names; what comes first counts."""
OTHER_KIND = "choosing tokens, state, copies"

Event = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """Means of one iteration, in microseconds; by phase for those named in the trace.

    Attributes:
        iterations: how many whole ones the figures are of.
        period_us: from the start of one to the start of the next.
        gpu_busy_us: while at least one kernel or copy ran.
        host_us: spent by the host inside each phase.
        gpu_us: of kernels launched in each phase, wherever they ran.
        kernels, launches, graph_launches, copies: how many.
    """

    iterations: int
    period_us: float
    gpu_busy_us: float
    host_us: dict[str, float]
    gpu_us: dict[str, float]
    kernels: float
    launches: float
    graph_launches: float
    copies: float
    top_kernels: list[tuple[str, float]] = field(default_factory=list)

    @property
    def gpu_idle(self) -> float:
        """Share of the period in which the GPU did nothing."""
        return 1.0 - self.gpu_busy_us / self.period_us


def load(file: Path) -> list[Event]:
    """The complete events of a trace, gzipped or not."""
    raw = file.read_bytes()
    data = json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)
    events = data["traceEvents"] if isinstance(data, dict) else data
    return [event for event in events if event.get("ph") == "X"]


def analyse(events: Sequence[Event]) -> Profile:
    """Take the iterations of a trace apart.

    The window runs from the first whole iteration's start to the last one's start, so that it holds whole iterations only.

    Raises:
        ValueError: the trace holds fewer than two iterations.
    """
    phases = sorted((e for e in events if _is_phase(e)), key=lambda e: e["ts"])
    starts = [e["ts"] for e in phases if e["name"] == PREFIX + FIRST_PHASE]
    if len(starts) < 2:
        raise ValueError(f"the trace holds {len(starts)} iterations ({PREFIX}{FIRST_PHASE}); two or more are needed")
    begin, end, count = starts[0], starts[-1], len(starts) - 1
    inside = [e for e in events if begin <= e["ts"] < end]
    gpu = [e for e in inside if e.get("cat") in GPU_EVENTS]
    calls = [e for e in inside if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    host: dict[str, float] = {}
    for e in phases:
        if begin <= e["ts"] < end:
            host[_phase(e)] = host.get(_phase(e), 0.0) + e["dur"] / count
    return Profile(
        iterations=count,
        period_us=(end - begin) / count,
        gpu_busy_us=covered((e["ts"], min(e["ts"] + e["dur"], end)) for e in gpu) / count,
        host_us=host,
        gpu_us={name: us / count for name, us in _gpu_by_phase(gpu, events, phases).items()},
        kernels=sum(e["cat"] == "kernel" for e in gpu) / count,
        launches=sum(e["name"] in _LAUNCHES for e in calls) / count,
        graph_launches=sum(e["name"] == "cudaGraphLaunch" for e in calls) / count,
        copies=sum(e["name"] in _COPIES for e in calls) / count,
        top_kernels=[(name, us / count) for name, us in _top(gpu)],
    )


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of `intervals`."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reach), 0.0)
        reach = max(reach, end)
    return total


def alone(events: Sequence[Event]) -> dict[str, float]:
    """GPU time by kind of work, each moment counted once: for the kernel that began first of those that run.

    A kernel that is launched early waits for the one before it, so that durations add up to more than the time that passes; these add up
    to the time in which the GPU was busy.
    """
    spent = dict.fromkeys((*KINDS, OTHER_KIND), 0.0)
    reach = float("-inf")
    for event in sorted(events, key=lambda e: e["ts"]):
        end = event["ts"] + event["dur"]
        spent[kind(event["name"])] += max(end - max(event["ts"], reach), 0.0)
        reach = max(reach, end)
    return spent


def kind(kernel: str) -> str:
    """What a kernel of this name does."""
    return next((name for name, words in KINDS.items() if any(word in kernel for word in words)), OTHER_KIND)


def _is_phase(event: Event) -> bool:
    """Host-side spans only: the profiler mirrors each onto the GPU's track."""
    return event["name"].startswith(PREFIX) and event.get("cat") != "gpu_user_annotation"


def _phase(event: Event) -> str:
    return event["name"].removeprefix(PREFIX)


def _gpu_by_phase(gpu: Sequence[Event], events: Sequence[Event], phases: Sequence[Event]) -> dict[str, float]:
    """GPU time by the phase whose call launched it; `other` for what was launched between phases."""
    launched_at = {e["args"]["correlation"]: e["ts"] for e in events if _is_call(e)}
    starts = [e["ts"] for e in phases]
    times: dict[str, float] = {}
    for e in gpu:
        name = _phase_at(launched_at.get(e.get("args", {}).get("correlation")), phases, starts)
        times[name] = times.get(name, 0.0) + e["dur"]
    return times


def _phase_at(at: float | None, phases: Sequence[Event], starts: Sequence[float]) -> str:
    """The innermost phase around a moment of the host; spans may hold shorter ones."""
    if at is None:
        return "other"
    last = bisect_right(starts, at) - 1
    around = (phases[i] for i in range(last, max(last - _DEEPEST, -1), -1) if at < phases[i]["ts"] + phases[i]["dur"])
    return next((_phase(event) for event in around), "other")


def _is_call(event: Event) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})


def _top(gpu: Sequence[Event], most: int = 12) -> list[tuple[str, float]]:
    times: dict[str, float] = {}
    for e in gpu:
        times[e["name"]] = times.get(e["name"], 0.0) + e["dur"]
    return sorted(times.items(), key=lambda item: -item[1])[:most]
