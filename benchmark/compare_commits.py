"""This checkout compared with an older one on the same machine: throughput by concurrency, start-up time and graph memory.

Servers of both checkouts run alternately (old, new, new, old), so that a slow drift of the machine cancels out. The client is always that
of this checkout. `--old` is the `python` folder of the older checkout.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, table, with_provenance
from benchmark.record import Record
from benchmark.server import Server, bench, environment
from benchmark.serving_matrix import TITLES, setups
from benchmark.sweep import Setup, arguments, names, numbers, positive, random_ids, served_model

NAME = "compare_commits"
KEYS = ("mode", "backend", "disable_by_batch_size")
ORDER = ("old", "new", "new", "old")
FIGURES = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "accept_length")


def measure(setup: Setup, python: Path | None, concurrencies: list[int], lens: tuple[int, int]) -> dict[str, Any]:
    """Start one server and run every concurrency on it.

    `python`: the package folder of the older checkout, or None for this one.
    """
    variables = {} if python is None else {"PYTHONPATH": os.pathsep.join([str(python), environment()["PYTHONPATH"]])}
    with Server([*setup.flags], variables=variables) as server:
        facts = server.facts()
        runs = {}
        for concurrency in concurrencies:
            figures = bench(server, random_ids(concurrency, *lens).flags)
            runs[str(concurrency)] = {name: figures[name] for name in FIGURES}
            print(f"  c={concurrency}: {figures['output_throughput']:.1f} tok/s", flush=True)
    graphs = sum(graph["used_mib"] for graph in facts.get("graphs") or [])
    return {
        "ready_seconds": server.ready_seconds,
        "graphs_mib": graphs,
        "memory_mib": facts.get("memory_mib"),
        "startup_seconds": facts.get("startup_seconds"),
        "runs": runs,
    }


def mean(runs: list[dict[str, Any]], concurrency: str, figure: str) -> float:
    """The mean of one metric over runs of the same checkout."""
    return sum(run["runs"][concurrency][figure] for run in runs) / len(runs)


def ratio(old: list[dict[str, Any]], new: list[dict[str, Any]], concurrency: str) -> str | None:
    """Throughput of the new checkout relative to the old one's; None if the row has no load."""
    if concurrency not in old[0]["runs"]:
        return None
    return f"{mean(new, concurrency, 'output_throughput') / mean(old, concurrency, 'output_throughput'):.3f}x"


def summary(result: Result) -> str:
    """One row per mode: new throughput / old by concurrency, then start-up time and graph memory."""
    columns = sorted({int(c) for row in result["rows"] for c in row["old"][0]["runs"]})
    lines = []
    for row in result["rows"]:
        old, new = row["old"], row["new"]
        ratios = [ratio(old, new, str(c)) for c in columns]
        ready = " / ".join(f"{min(run['ready_seconds'] for run in runs):.1f}" for runs in (old, new))
        graphs = " / ".join(f"{runs[0]['graphs_mib']:.0f}" for runs in (old, new))
        limit = row["disable_by_batch_size"]
        name = f"{row['mode']}, {row['backend']}" + ("" if limit is None else f", drafts up to {limit} requests")
        lines.append([name, *ratios, ready, graphs])
    header = ["new / old output tok/s", *(f"c={c}" for c in columns), "ready s (old / new)", "graphs MiB (old / new)"]
    return table(header, lines)


render = with_provenance(summary)


def plot(result: Result, file: Path) -> None:
    """Throughput by concurrency of both checkouts, one panel per mode."""

    def panel(row: dict[str, Any]) -> plots.Panel:
        groups = {c: {name: mean(row[name], c, "output_throughput") for name in ("old", "new")} for c in row["old"][0]["runs"]}
        return plots.bars(groups, TITLES[row["mode"]], "output tokens/s", kind="concurrency")

    picture.draw(result, file, "Two checkouts on one machine", [panel(row) for row in result["rows"] if row["old"][0]["runs"]], columns=2)


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--old", type=Path, required=True, help="the python folder of the older checkout")
    parser.add_argument("--old-commit", required=True, help="its commit, for the record")
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 32, 64])
    parser.add_argument("--modes", type=names, default=list(TITLES))
    parser.add_argument("--backend", default="fa3")
    parser.add_argument("--start-only", action="store_true", help="measure start-up and memory, without a load")
    parser.add_argument("--disable-by-batch-size", type=positive, help="--speculative-disable-by-batch-size of both servers")
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    backend, lens = ("torch_native", (16, 8)) if args.quick else (args.backend, (1000, 1000))
    concurrencies = [] if args.start_only else [1, 2] if args.quick else args.concurrency
    more = [] if args.disable_by_batch_size is None else ["--speculative-disable-by-batch-size", str(args.disable_by_batch_size)]
    for setup in setups(served_model(args), args.modes, [backend]):
        compared = Setup({**setup.labels, "disable_by_batch_size": args.disable_by_batch_size}, [*setup.flags, *more])
        found: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
        for which in ORDER:
            print(which, flush=True)
            found[which].append(measure(compared, args.old.resolve() if which == "old" else None, concurrencies, lens))
        record.add({**compared.labels, **found, "old_commit": args.old_commit, "server_flags": " ".join(compared.flags)})
    record.show(render, plot)


if __name__ == "__main__":
    main()
