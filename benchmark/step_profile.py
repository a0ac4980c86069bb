"""One EAGLE iteration by phase, without iteration graphs: eager, with the draft-decode graph only, and with both draft graphs.

Host time is the time that the host spends in a phase. GPU time is the sum of the kernels launched in the phase. A kernel that is launched
early waits for the preceding one, and this wait is included, so GPU phases add up to more than the iteration. The GPU's idle share counts
every moment once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, cell, percent, pick, provenance, split, table
from benchmark.phases import METHODS, Phases
from benchmark.record import Record
from benchmark.server import apart
from benchmark.shapes import Model
from benchmark.sweep import add_model, arguments, names, positive, served_model
from benchmark.trace import analyse, load

NAME = "step_profile"
KEYS = ("model", "backend", "overlap", "graphs", "concurrency")
STEPS = 3
GRAPHS = ("eager", "decode", "both")
"""The draft graphs in use; the target's verify graph is always used."""
GROUP = itemgetter("model", "backend", "overlap", "concurrency")
"""What the rows of one table share."""
PROMPT_LEN = 256
TITLES = {"eager": "draft eager", "decode": "draft-decode graph", "both": "both draft graphs"}
PHASES = ("draft_decode", "verify", "accept", "draft_extend", "plan", "sample")


def flags(served: Model, backend: str, concurrency: int) -> list[str]:
    """The flags of one process."""
    found = [*served.target_flags, *served.eagle_flags("2.5", STEPS), "--attention-backend", backend, "--disable-radix-cache"]
    found.append("--disable-iteration-graph")  # its phases cannot be told apart
    graphs = ("--cuda-graph-max-bs", str(max(concurrency, 8)))
    return found if backend == "torch_native" else [*found, *graphs]


def measure(
    flags: Sequence[str], overlaps: Sequence[str], graphs: Sequence[str], concurrency: int, steps: int, keep: Path | None
) -> list[dict[str, Any]]:
    """Measure in this process; one row per overlap and choice of graphs. `keep` is a folder for the traces."""
    from benchmark.engine_loop import EngineLoop, build
    from runtime.model_executor.graph_runner import RunMode

    config, worker = build(flags)
    decode, extend = worker.parts.drafter.runners(STEPS)
    rows = []
    for overlap in overlaps:
        for name in graphs:
            for runner in (decode, extend):
                replayed = runner in {"eager": (), "decode": (decode,), "both": (decode, extend)}[name]
                runner.mode = RunMode.REPLAY if replayed else RunMode.EAGER
            loop = EngineLoop(config, worker, overlap == "on")
            loop.start(concurrency, PROMPT_LEN, (STEPS + 1) * (3 * steps + 40))
            loop.run(8)
            labels = {"overlap": overlap, "graphs": name, "concurrency": concurrency}
            alone = {"step_us": loop.run(steps) * 1e6}
            with Phases(worker) as phases:
                loop.run(steps)
            alone |= phases.figures()
            with tempfile.TemporaryDirectory() as folder:
                worker.start_profile(folder)
                loop.run(steps)
                trace = Path(worker.stop_profile())
                rows.append({**labels, **alone, **asdict(analyse(load(trace)))})
                if keep:
                    shutil.copy(trace, keep / f"{NAME}-{overlap}-{name}-{concurrency}{''.join(trace.suffixes[-3:])}")
            loop.stop()
    worker.close()
    return rows


def render(result: Result) -> str:
    """One table per model, backend, overlap and concurrency."""
    parts = []
    for (model, backend, overlap, concurrency), rows in split(result["rows"], GROUP).items():
        parts += [f"**{model}, {backend}, overlap {overlap}, concurrency {concurrency}**: one iteration", "", _part(rows), ""]
    return "\n".join([*parts, provenance(result)])


def summary(result: Result) -> str:
    """Length of an iteration and host time of both draft phases, without a profiler."""
    lines = []
    for (model, backend, overlap, concurrency), own in split(result["rows"], GROUP).items():
        found = [pick(own, graphs=graphs) for graphs in GRAPHS]
        rows = [row if row and "step_us" in row else None for row in found]
        cells = [row and _cut(row, rows[0], name) for name in ("step_us", "draft_host_us") for row in rows]
        lines.append([f"{model}, {backend}, overlap {overlap}, c={concurrency}", *cells])
    header = [f"{what}: {TITLES[graphs]}" for what in ("iteration (µs)", "host, draft phases (µs)") for graphs in GRAPHS]
    return table(["without a profiler", *header], lines)


def _part(rows: Sequence[dict[str, Any]]) -> str:
    found = {graphs: row for graphs in GRAPHS if (row := pick(rows, graphs=graphs)) is not None}
    lines: list[list[Any]] = []
    if all("step_us" in row for row in found.values()):
        lines.append(["iteration, no profiler (µs)", *(row["step_us"] for row in found.values())])
        for name, label in (*((phase, phase.replace("_", "-")) for phase in METHODS), ("draft", "both draft phases")):
            if all(f"{name}_host_us" in row for row in found.values()):
                cells = [_cut(row, found.get("eager"), f"{name}_host_us") for row in found.values()]
                lines.append([f"host: {label}, no profiler (µs)", *cells])
        if all("draft_extend_gpu_us" in row for row in found.values()):
            lines.append(
                [
                    "GPU: draft-extend and waiting for its launches, no profiler (µs)",
                    *(row["draft_extend_gpu_us"] for row in found.values()),
                ]
            )
    lines.append(["iteration (µs)", *(row["period_us"] for row in found.values())])
    lines.append(["GPU idle", *(percent(1 - row["gpu_busy_us"] / row["period_us"], 1) for row in found.values())])
    for unit, label in (("host_us", "host"), ("gpu_us", "GPU")):
        for phase in (*PHASES, "other"):
            values = [row[unit].get(phase) for row in found.values()]
            if any(values):
                lines.append([f"{label}: {phase.replace('_', '-')} (µs)", *values])
    lines.append(["host: both draft phases (µs)", *(_draft_host(row, found.get("eager")) for row in found.values())])
    for name in ("kernels", "launches", "graph_launches", "copies"):
        lines.append([name.replace("_", " "), *(row[name] for row in found.values())])
    return table(["", *(TITLES[graphs] for graphs in found)], lines)


def draft_host_us(row: dict[str, Any]) -> float:
    """Host time of both draft phases."""
    return row["host_us"].get("draft_decode", 0.0) + row["host_us"].get("draft_extend", 0.0)


def _cut(row: dict[str, Any], eager: dict[str, Any] | None, name: str) -> str:
    change = "" if eager is None or row is eager else f" ({(row[name] / eager[name] - 1) * 100:+.0f} %)"
    return f"{cell(row[name])}{change}"


def _draft_host(row: dict[str, Any], eager: dict[str, Any] | None) -> str:
    change = "" if eager is None or row is eager else f" ({(draft_host_us(row) / draft_host_us(eager) - 1) * 100:+.0f} %)"
    return f"{cell(draft_host_us(row))}{change}"


def plot(result: Result, file: Path) -> None:
    """Per model: the phases of an iteration on the host and on the GPU, then its time without a profiler."""
    models = split(result["rows"], itemgetter("model"))
    panels = [panel for name, rows in models.items() for panel in _panels(name, rows)]
    picture.draw(result, file, f"One EAGLE iteration: {', '.join(models)}", panels)


def _panels(model: str, rows: Sequence[dict[str, Any]]) -> list[plots.Panel]:
    named = {f"{row['backend']}, overlap {row['overlap']}, c={row['concurrency']}: {TITLES[row['graphs']]}": row for row in rows}

    def phases(unit: str) -> dict[str, dict[str, float]]:
        order = (*PHASES, "other")
        return {name: {p.replace("_", "-"): row[unit][p] for p in order if row[unit].get(p)} for name, row in named.items()}

    alone = {
        name: {"whole iteration": row["step_us"], "draft phases, host": row["draft_host_us"]}
        for name, row in named.items()
        if "step_us" in row
    }
    return [
        plots.stacks(phases("host_us"), f"{model}, host: phases, under the profiler", "µs per iteration"),
        plots.stacks(phases("gpu_us"), f"{model}, GPU: phases, sums of kernels that may overlap", "µs per iteration"),
        plots.bars(alone, f"{model}, without a profiler", "µs per iteration"),
    ]


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--backends", type=names, default=["fa3"])
    parser.add_argument("--overlap", type=names, default=["off"], help="on, off; off shows the host time that overlap hides")
    parser.add_argument("--graphs", type=names, default=[*GRAPHS])
    parser.add_argument("--concurrency", type=positive, default=1)
    parser.add_argument("--steps", type=positive, default=40, help="iterations per trace")
    parser.add_argument("--keep-traces", action="store_true", help="keep the traces next to the results (megabytes)")
    add_model(parser)
    args = parser.parse_args()
    record, served = Record(NAME, KEYS, args.out, args.quick), served_model(args)
    record.file.parent.mkdir(parents=True, exist_ok=True)
    order = {"overlaps": args.overlap, "graphs": args.graphs, "concurrency": args.concurrency, "steps": 4 if args.quick else args.steps}
    order |= {"keep": record.file.parent if args.keep_traces else None}
    for backend in ["torch_native"] if args.quick else args.backends:
        for row in apart(measure, flags=flags(served, backend, args.concurrency), **order):
            record.add({"model": served.name, "backend": backend, **row})
    record.show(render, plot)


if __name__ == "__main__":
    main()
