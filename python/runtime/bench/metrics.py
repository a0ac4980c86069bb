"""Computes the metrics of a run from its records, with the definitions of SGLang's client."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.bench.records import RequestRecord

GOODPUT_FIELDS = ("ttft", "tpot", "e2el")
Figures = dict[str, Any]


def count_chunks(record: RequestRecord, count: Callable[[str], int] | None) -> None:
    """Fill in the token count of each chunk if the server did not report them. The counts add up to `output_len`.

    Each chunk gets one token. If there are more tokens than chunks (speculation sends several at once), the rest is distributed in
    proportion to the length of each chunk's text: in tokens if `count` is given, else in characters.
    """
    if all(chunk.tokens is not None for chunk in record.chunks):
        return
    weights = [max((count or len)(chunk.text) - 1, 0) for chunk in record.chunks]
    total, rest = sum(weights), max(record.output_len - len(record.chunks), 0)
    seen = given = 0
    for chunk, weight in zip(record.chunks, weights, strict=True):
        seen += weight
        share = round(rest * seen / total) - given if total else 0
        chunk.tokens, given = 1 + share, given + share


def spread_itl(record: RequestRecord) -> list[float]:
    """Seconds between tokens: the gap before a chunk is split evenly among the tokens of the chunk."""
    gaps: list[float] = []
    for before, chunk in itertools.pairwise(record.chunks):
        tokens = max(chunk.tokens or 1, 1)
        gaps += [(chunk.at - before.at) / tokens] * tokens
    return gaps


def summarize(records: Sequence[RequestRecord], seconds: float, goodput: Mapping[str, float] | None = None) -> Figures:
    """The metrics of the JSON line that depend only on the records.

    Args:
        records: all records of the run, including failed ones, with `itl` filled in.
        seconds: length of the run.
        goodput: limits in ms, by `ttft`, `tpot` and `e2el`.
    """
    good = [record for record in records if record.success]
    inputs, outputs = (sum(getattr(record, name) for record in good) for name in ("prompt_len", "output_len"))
    timeline = per_second(good)
    figures: Figures = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "total_throughput": (inputs + outputs) / seconds,
        "concurrency": sum(record.latency for record in good) / seconds,
        "max_output_tokens_per_s": float(max(timeline.tokens, default=0)),
        "max_concurrent_requests": max(timeline.requests, default=0),
        "request_goodput": None if goodput is None else sum(meets(record, goodput) for record in good) / seconds,
        "cached_tokens": sum(record.cached_tokens for record in good),
    }
    for name, values in _latencies(good).items():
        figures |= percentiles(name, values)
    return figures


def _latencies(good: Sequence[RequestRecord]) -> dict[str, list[float]]:
    return {
        "e2e_latency": [record.latency for record in good],
        "ttft": [record.ttft for record in good],
        "tpot": [record.tpot for record in good if record.tpot is not None],
        "itl": [gap for record in good for gap in record.itl],
    }


def percentiles(name: str, seconds: Sequence[float]) -> Figures:
    """Mean, median, std, p90, p95, p99 and max of `seconds` in ms; all None if there is no value."""
    if not seconds:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", "p90", "p95", "p99", "max")}
    ms = np.asarray(seconds) * 1000.0
    p90, p95, p99 = np.percentile(ms, (90, 95, 99))
    figures = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std(), "p90": p90, "p95": p95, "p99": p99, "max": ms.max()}
    return {f"{kind}_{name}_ms": float(value) for kind, value in figures.items()}


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """Parse `ttft:200 tpot:20 e2el:5000` (ms); raise ValueError for anything else."""
    parsed = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        if name not in GOODPUT_FIELDS:
            raise ValueError(f"--goodput {limit!r}: the name must be one of {', '.join(GOODPUT_FIELDS)}, as in ttft:200")
        try:
            parsed[name] = float(value)
        except ValueError:
            raise ValueError(f"--goodput {limit!r}: {value!r} is not a number of milliseconds") from None
        if not (math.isfinite(parsed[name]) and parsed[name] > 0):
            raise ValueError(f"--goodput {limit!r}: the limit must be above 0")
    return parsed


def meets(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Whether a request stayed within every limit (ms)."""
    seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(seconds[name] * 1000.0 <= limit for name, limit in limits.items())


@dataclass(frozen=True, slots=True)
class Timeline:
    """For each second of the run: its output tokens, and the most requests open at once."""

    tokens: list[int]
    requests: list[int]


def per_second(good: Sequence[RequestRecord]) -> Timeline:
    """Count tokens and open requests in each second since the first request was sent.

    Requests that follow one another within a second are not counted together, unlike in SGLang's client.
    """
    if not good:
        return Timeline([], [])
    start = min(record.start for record in good)
    ends = [max([record.start + record.latency, *(chunk.at for chunk in record.chunks[-1:])]) for record in good]
    length = int(max(ends) - start) + 1
    tokens = [0] * length
    for record in good:
        for at, count in _token_times(record):
            tokens[int(at - start)] += count
    return Timeline(tokens, _max_open(good, start, length))


def _max_open(good: Sequence[RequestRecord], start: float, length: int) -> list[int]:
    """The most requests open at once in each second after `start`."""
    starts, ends = sorted(record.start - start for record in good), sorted(record.start + record.latency - start for record in good)
    most = [0] * length
    for at in (*range(length), *starts):  # the number only grows when a request starts
        most[int(at)] = max(most[int(at)], bisect_right(starts, at) - bisect_right(ends, at))
    return most


def _token_times(record: RequestRecord) -> list[tuple[float, int]]:
    """(time, tokens) of each chunk. The first chunk also gets the tokens that no chunk reports."""
    counts = [chunk.tokens or 1 for chunk in record.chunks]
    if counts:
        counts[0] = max(counts[0] + record.output_len - sum(counts), 0)
    return [(chunk.at, count) for chunk, count in zip(record.chunks, counts, strict=True)]


COUNTERS = {
    "steps": "spec_verify_steps_total",
    "accepted": "spec_accepted_tokens_total",
    "by_position": "spec_accepted_by_position",
    "drafted": "spec_drafted_by_position",
    "decodes": "decode_steps",
    "graphs": "graph_steps_total",
    "rows": "live_rows_total",
    "padding": "padded_rows_total",
}
"""The server's running totals; the run's value is the difference of two readings."""


def acceptance(records: Sequence[RequestRecord], before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Figures:
    """The metrics of speculation and CUDA graphs during the run: from the answers if all report them, else from the server's totals, or
    from its means, which include earlier runs, if it reports no totals.

    Args:
        records: the records of the run.
        before, after: the server's information before and after the run; None if it has none.

    Returns:
        accept_length, per_position_acceptance, graph_hit_rate, padding_waste, steps_by_depth and accept_length_by_context; None if
        unknown.
    """
    state = _state(after)

    def mean(name: str, total: str) -> Any:
        return None if COUNTERS[total] in state else state.get(name)

    figures: Figures = {
        "accept_length": mean("avg_spec_accept_length", "steps"),
        "per_position_acceptance": mean("per_position_acceptance", "steps"),
        "graph_hit_rate": mean("graph_hit_rate", "decodes"),
        "padding_waste": mean("padding_waste", "rows"),
        "steps_by_depth": None,
        "accept_length_by_context": None,
    }
    for known in (_from_totals(_state(before), state), _from_answers([record for record in records if record.success])):
        figures |= {name: value for name, value in known.items() if value is not None}
    return figures


def _state(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """The server's information as one flat dictionary; SGLang has its metrics under `internal_states`."""
    inner = ((info or {}).get("internal_states") or [{}])[0]
    return {**(info or {}), **{name: value for name, value in inner.items() if value is not None}}


def _from_totals(before: Mapping[str, Any], after: Mapping[str, Any]) -> Figures:
    delta = {name: _difference(before.get(key), after.get(key)) for name, key in COUNTERS.items()}
    steps = delta["steps"]
    rows = (delta["rows"] or 0) + (delta["padding"] or 0)
    old, depths = before.get("spec_depth_steps_total") or {}, after.get("spec_depth_steps_total") or {}
    return {
        "steps_by_depth": {k: n - old.get(k, 0) for k, n in sorted(depths.items()) if n > old.get(k, 0)} or None,
        "accept_length": 1 + delta["accepted"] / steps if steps and delta["accepted"] is not None else None,
        "per_position_acceptance": _shares(delta["by_position"], delta["drafted"], steps),
        "accept_length_by_context": _by_context(before, after),
        "graph_hit_rate": delta["graphs"] / delta["decodes"] if delta["decodes"] and delta["graphs"] is not None else None,
        "padding_waste": delta["padding"] / rows if rows and delta["padding"] is not None else None,
    }


def _by_context(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float] | None:
    """Accept length by context length class, keyed by the start of the class; None if the server reports none."""
    name = "spec_steps_and_accepted_by_context"
    if name not in after:
        return None
    totals = {start: _difference((before.get(name) or {}).get(start), new) for start, new in after[name].items()}
    return {start: 1 + accepted / steps for start, (steps, accepted) in totals.items() if steps} or None


def _shares(accepted: Sequence[int] | None, drafted: Sequence[int] | None, steps: int | None) -> list[float | None] | None:
    """Accepted / drafted by position; None if nothing was drafted. `steps` replaces `drafted` if the server does not report it."""
    if not steps or not accepted:
        return None
    return [count / of if of else None for count, of in zip(accepted, drafted or [steps] * len(accepted), strict=True)]


def _difference(old: Any, new: Any) -> Any:
    """The increase of a total, by position if it is a list; None if the server does not report it."""
    if isinstance(new, list):
        old = old if isinstance(old, list) and len(old) == len(new) else [0] * len(new)
        return [b - a for a, b in zip(old, new, strict=True)]
    return None if new is None else new - (old or 0)


def _from_answers(good: Sequence[RequestRecord]) -> Figures:
    if not good or not all(record.verify_steps for record in good):
        return {}
    steps = sum(record.verify_steps for record in good)
    tokens = sum(verified_tokens(record.output_len, record.verify_steps, record.accepted_by_position) for record in good)
    return {"accept_length": tokens / steps, "per_position_acceptance": _by_position(good, steps)}


def verified_tokens(output_len: int, verify_steps: int, accepted_by_position: Sequence[int]) -> int:
    """Number of tokens of an answer that verify passes produced.

    The first token comes from the prompt pass. Tokens of steps without drafts are excluded if the server reports acceptance by position.
    """
    if not verify_steps:
        return 0
    later = output_len - 1
    return min(later, verify_steps + sum(accepted_by_position)) if accepted_by_position else later


def _by_position(good: Sequence[RequestRecord], steps: int) -> list[float | None] | None:
    """For each draft position: of the verify passes that reached it, the fraction that accepted its draft."""
    width = min(len(record.accepted_by_position) for record in good)
    told = all(len(record.drafted_by_position) >= width for record in good)
    accepted = [sum(record.accepted_by_position[i] for record in good) for i in range(width)]
    drafted = [sum(record.drafted_by_position[i] for record in good) for i in range(width)] if told else None
    return _shares(accepted, drafted, steps)
