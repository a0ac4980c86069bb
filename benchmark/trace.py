"""Analyses decode iterations in a torch-profiler trace (Chrome's format)."""

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
"""The first phase of an iteration."""
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_DEEPEST = 16  # earlier spans that are searched for the one around a moment
_COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")

KINDS = {
    "attention": ("flash", "_split_kernel", "_merge_kernel", "_deal_kernel", "_tail_kernel"),
    "GEMMs": ("gemm", "streamed", "nvjet", "splitKreduce", "gemv"),
    "norms, positions": ("_norm_kernel", "_rope_kernel"),
}
"""Kinds of work by parts of kernel names; the first match counts."""
OTHER_KIND = "choosing tokens, state, copies"

Event = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """Means over the iterations of a trace, in microseconds.

    Attributes:
        iterations: number of whole iterations.
        period_us: time from the start of an iteration to the start of the next.
        gpu_busy_us: time in which at least one kernel or copy runs.
        host_us: host time by phase.
        gpu_us: time of the kernels launched in each phase, whenever they run.
        kernels, launches, graph_launches, copies: counts per iteration.
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


def load(file: Path) -> list[Event]:
    """The complete events of a trace, gzipped or not."""
    raw = file.read_bytes()
    data = json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)
    events = data["traceEvents"] if isinstance(data, dict) else data
    return [event for event in events if event.get("ph") == "X"]


def analyse(events: Sequence[Event]) -> Profile:
    """Analyse the iterations of a trace.

    The window is from the start of the first to the start of the last iteration, so that it has only whole iterations.

    Raises:
        ValueError: the trace has fewer than two iterations.
    """
    phases = sorted((e for e in events if _is_phase(e)), key=lambda e: e["ts"])
    starts = [e["ts"] for e in phases if e["name"] == PREFIX + FIRST_PHASE]
    if len(starts) < 2:
        raise ValueError(f"the trace has {len(starts)} iterations ({PREFIX}{FIRST_PHASE}); at least two are required")
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
    """GPU time by kind of work. Each moment counts once, for the running kernel that started first.

    A kernel that is launched early waits for the one before it, so durations add up to more than the elapsed time.
    These times add up to the time in which the GPU is busy.
    """
    spent = dict.fromkeys((*KINDS, OTHER_KIND), 0.0)
    reach = float("-inf")
    for event in sorted(events, key=lambda e: e["ts"]):
        end = event["ts"] + event["dur"]
        spent[kind(event["name"])] += max(end - max(event["ts"], reach), 0.0)
        reach = max(reach, end)
    return spent


def kind(kernel: str) -> str:
    """The kind of work of a kernel with this name."""
    return next((name for name, words in KINDS.items() if any(word in kernel for word in words)), OTHER_KIND)


def _is_phase(event: Event) -> bool:
    """Whether the event is a host-side span; the profiler mirrors each span onto the GPU's track."""
    return event["name"].startswith(PREFIX) and event.get("cat") != "gpu_user_annotation"


def _phase(event: Event) -> str:
    return event["name"].removeprefix(PREFIX)


def _gpu_by_phase(gpu: Sequence[Event], events: Sequence[Event], phases: Sequence[Event]) -> dict[str, float]:
    """GPU time by the phase that launched the work; `other` for launches between phases."""
    launched_at = {e["args"]["correlation"]: e["ts"] for e in events if _is_call(e)}
    starts = [e["ts"] for e in phases]
    times: dict[str, float] = {}
    for e in gpu:
        name = _phase_at(launched_at.get(e.get("args", {}).get("correlation")), phases, starts)
        times[name] = times.get(name, 0.0) + e["dur"]
    return times


def _phase_at(at: float | None, phases: Sequence[Event], starts: Sequence[float]) -> str:
    """The innermost phase around a moment on the host; spans may be nested."""
    if at is None:
        return "other"
    last = bisect_right(starts, at) - 1
    around = (phases[i] for i in range(last, max(last - _DEEPEST, -1), -1) if at < phases[i]["ts"] + phases[i]["dur"])
    return next((_phase(event) for event in around), "other")


def _is_call(event: Event) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})


def _top(gpu: Sequence[Event]) -> list[tuple[str, float]]:
    times: dict[str, float] = {}
    for e in gpu:
        times[e["name"]] = times.get(e["name"], 0.0) + e["dur"]
    return sorted(times.items(), key=lambda item: -item[1])[:12]
