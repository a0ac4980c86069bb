"""The printed result of a run: SGLang's columns and a throughput chart."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.bench.metrics import Figures, Timeline
from runtime.bench.records import RequestRecord

WIDTH = 50
_CHART_ROWS = 24
MAX_ERRORS = 5
_SECTIONS = (
    ("End-to-End Latency", "E2E Latency", "e2e_latency"),
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-Token Latency", "ITL", "itl"),
)


def render(figures: Figures, cache_report: bool = False) -> str:
    """The result table."""
    title = " Interrupted Serving Benchmark Result " if figures["interrupted"] else " Serving Benchmark Result "
    lines = [f"{title:=^{WIDTH}}", *_totals(figures)]
    for title, label, name in _SECTIONS:
        lines.append(f"{title:-^{WIDTH}}")
        kinds = ("mean", "median", "p90", "p95", "p99", "max") if name == "itl" else ("mean", "median", "p90", "p95", "p99")
        lines += [_row(f"{kind.capitalize()} {label} (ms):", figures[f"{kind}_{name}_ms"]) for kind in kinds]
    if cache_report:
        share = figures["cached_tokens"] / max(figures["total_input_tokens"], 1) * 100
        lines += [f"{'Cache Hit Details':-^{WIDTH}}", _row("Total prompt tokens:", figures["total_input_tokens"])]
        lines += [_row("Total cached tokens:", figures["cached_tokens"]), f"{'Cache hit rate:':<40} {share:.1f}%"]
    return "\n".join([*lines, "=" * WIDTH])


def _totals(figures: Figures) -> list[str]:
    names = (
        ("Backend:", "backend"),
        ("Traffic request rate:", "request_rate"),
        ("Max request concurrency:", "max_concurrency"),
        ("Successful requests:", "completed"),
        ("Failed requests:", "failed"),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Total generated tokens (retokenized):", "total_output_tokens_retokenized"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Input token throughput (tok/s):", "input_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_throughput"),
        ("Concurrency:", "concurrency"),
    )
    lines = [_row(label, figures[name]) for label, name in names]
    if figures["request_goodput"] is not None:
        lines.append(_row("Request goodput (req/s):", figures["request_goodput"]))
    if figures["accept_length"]:
        lines.append(_row("Accept length:", float(figures["accept_length"])))
    if figures["per_position_acceptance"]:
        shares = " ".join("-" if share is None else f"{share:.3f}" for share in figures["per_position_acceptance"])
        lines.append(f"{'Acceptance by position:':<40} {shares}")
    tables = (("Decode steps by draft depth:", "steps_by_depth"), ("Accept length by context from:", "accept_length_by_context"))
    for title, name in tables:
        if by := figures[name]:
            lines.append(f"{title:<40} {', '.join(f'{key}: {value:.4g}' for key, value in by.items())}")
    optional = (("Graph hit rate:", "graph_hit_rate"), ("Padding waste:", "padding_waste"))
    return lines + [_row(label, figures[name]) for label, name in optional if isinstance(figures[name], int | float)]


def _row(label: str, value: Any) -> str:
    if value is None:
        return f"{label:<40} {'not set' if 'concurrency' in label else 'n/a':<10}"
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def failures(records: Sequence[RequestRecord]) -> str:
    """The errors of a run with their counts; empty if there were none."""
    counts = Counter(record.error for record in records if record.error)
    lines = [f"{count} x {error}" for error, count in counts.most_common(MAX_ERRORS)]
    if len(counts) > MAX_ERRORS:
        lines.append(f"and {len(counts) - MAX_ERRORS} other errors (--output-details writes all of them)")
    return "\n".join(lines)


def chart(title: str, values: Sequence[int]) -> str:
    """A text chart with one bar per second, or per several seconds of a long run."""
    step = max(-(-len(values) // _CHART_ROWS), 1)
    bars = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(bars, default=0) or 1
    return "\n".join([title, *(f"{i * step:>6} s {'#' * round(bar / top * 32):<32} {bar:.0f}" for i, bar in enumerate(bars))])


def plot(timeline: Timeline, file: Path) -> bool:
    """Plot output tokens and open requests over time as PNG; return False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    above.step(range(len(timeline.tokens)), timeline.tokens, where="post")
    above.set(title="Output tokens per second", ylim=(0, None))
    below.step(range(len(timeline.requests)), timeline.requests, where="post", color="tab:orange")
    below.set(title="Concurrent requests", xlabel="Time (s)", ylim=(0, None))
    figure.savefig(file, dpi=120)
    return True


def origin(server_info: Mapping[str, Any] | None) -> dict[str, str | None]:
    """`commit` and `device` as reported by the server, else those of this checkout and this machine's GPU."""
    info = server_info or {}
    return {
        "commit": info.get("commit") or _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"),
        "device": info.get("device_name") or _first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "cpu",
    }


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().split("\n")[0] or None if done.returncode == 0 else None
