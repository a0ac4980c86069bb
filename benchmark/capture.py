"""Start-up: seconds by phase, and the seconds and the memory of each graph runner.

Each server starts twice: once with an empty kernel cache, as on a new machine, and once with the cache that the first
start left.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, label, provenance, table
from benchmark.record import Record
from benchmark.server import Server
from benchmark.serving_matrix import model_name, setups
from benchmark.sweep import arguments, names, served_model

NAME = "capture"
KEYS = ("mode", "backend")


def measure(record: Record, labels: dict[str, Any], flags: list[str]) -> None:
    """Start one server twice, and record the measurements of the second start and the ready time of the first."""
    with tempfile.TemporaryDirectory() as kernels:
        variables = {"TRITON_CACHE_DIR": kernels}
        with Server(flags, variables=variables) as server:
            first = server.ready_seconds
        with Server(flags, variables=variables) as server:
            facts = server.facts()
    shown = {name: facts.get(name) for name in ("startup_seconds", "graphs", "memory_mib")}
    times = {"first_ready_seconds": first, "ready_seconds": server.ready_seconds}
    record.add({**labels, **times, **shown, "server_flags": " ".join(flags)})
    print(f"  ready after {first:.1f} s, second start {server.ready_seconds:.1f} s", flush=True)


def render(result: Result) -> str:
    """Time to ready by phase, then one row per graph runner."""
    runners = [
        [
            f"{row['mode']}, {row['backend']}",
            *(graph["runner"], len(graph["sizes"]), max(graph["sizes"], default=None), graph["seconds"]),
            *(graph["reserved_mib"], graph["used_mib"]),
        ]
        for row in result["rows"]
        for graph in row["graphs"] or []
    ]
    header = ["server", "runner", "batch sizes", "largest", "seconds", "reserved MiB", "used MiB"]
    return "\n".join([summary(result), "", table(header, runners), "", provenance(result)])


def summary(result: Result) -> str:
    """Time to ready by phase."""
    known = [_reported(row) for row in result["rows"]]
    phases = list(dict.fromkeys(phase for times in known for phase in times))
    lines = [
        [f"{row['mode']}, {row['backend']}", *map(times.get, phases), row["ready_seconds"], row.get("first_ready_seconds")]
        for row, times in zip(result["rows"], known, strict=True)
    ]
    return table(["server", *(f"{phase} (s)" for phase in phases), "ready (s)", "ready, kernels compiled (s)"], lines)


def plot(result: Result, file: Path) -> None:
    """Seconds of start-up by phase; seconds and MiB of each graph runner."""
    rows = result["rows"]
    start = {f"{row['mode']}, {row['backend']}": _phases(row) for row in rows}
    runners = {f"{row['mode']}, {row['backend']}: {graph['runner']}": graph for row in rows for graph in row["graphs"] or []}
    seconds = {name: {"seconds": graph["seconds"]} for name, graph in runners.items()}
    memory = {name: {"reserved": graph["reserved_mib"], "used": graph["used_mib"]} for name, graph in runners.items()}
    panels = [
        plots.stacks(start, "From start to ready", "seconds"),
        plots.bars(seconds, "Capture of each graph runner", "seconds"),
        plots.bars(memory, "Memory of each graph runner", "MiB"),
    ]
    models = ", ".join(dict.fromkeys(model_name(row) for row in rows))
    picture.draw(result, file, f"Start-up: {models}", panels)


def _reported(row: dict[str, Any]) -> dict[str, float]:
    """Seconds by phase, as the server reports them."""
    return {label(phase): seconds for phase, seconds in (row["startup_seconds"] or {}).items()}


def _phases(row: dict[str, Any]) -> dict[str, float]:
    """The phases that the server reports, and the remaining time: processes, imports, sockets."""
    known = _reported(row)
    return known | {"processes, imports": max(row["ready_seconds"] - sum(known.values()), 0.0)}


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--modes", type=names, default=["plain", "eagle"])
    parser.add_argument("--backends", type=names, default=["fa3"])
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    for setup in setups(served_model(args), args.modes, ["torch_native"] if args.quick else args.backends):
        measure(record, dict(setup.labels), [*setup.flags])
    record.show(render, plot)


if __name__ == "__main__":
    main()
