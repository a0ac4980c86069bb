"""One steady decode step: graphs and eager, overlap on and off, FA3 and FlashInfer, and the GPU's idle time.

The scheduler and the worker run in one process. Steps are timed without a profiler. A trace of a few more steps gives the time in which the
GPU is busy; the rest of a step is idle time. The profiler makes gaps longer, but not kernels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, change, label, models, percent, pick, provenance, split, table
from benchmark.record import Record, Row
from benchmark.server import apart
from benchmark.shapes import Model, read_rate
from benchmark.sweep import add_model, arguments, names, numbers, positive, served_model
from benchmark.trace import GPU_EVENTS, KINDS, OTHER_KIND, alone, covered, load

NAME = "modes"
KEYS = ("model", "mode", "backend", "graphs", "overlap", "batch")
STEPS = 3
VARIANTS = (("on", "on"), ("one by one", "on"), ("on", "off"), ("off", "on"))
"""(graphs, overlap) of each variant; "one by one" means without iteration graphs. The first two are traced."""
TRACED_STEPS = 12
TOP = 16
IDLE = "GPU idle"
ABOVE_ROOF = """\
Where each microsecond above the roof goes. When several kernels run at once, the time counts for the one that started
first. The time to read weights is subtracted from GEMMs, and the time to read keys and values from attention, both at
the roof's bandwidth. Kernel times come from a trace and step times do not: where tracing slows kernels down, idle time
comes out too small, even below zero."""


def server_flags(served: Model, mode: str, backend: str, most: int) -> list[str]:
    """The flags of one process."""
    eagle = served.eagle_flags("2.5", STEPS) if mode == "eagle" else ()
    flags = [*served.target_flags, *eagle, "--attention-backend", backend, "--disable-radix-cache", "--log-level", "warning"]
    return flags if backend == "torch_native" else [*flags, "--cuda-graph-max-bs", str(most)]


def measure(flags: Sequence[str], batches: Sequence[int], context: int, steps: int) -> list[Row]:
    """Measure in this process; one row per variant and batch size. Eager samples are off, because one takes as long as five replays."""
    from benchmark.engine_loop import build

    config, worker = build(flags)
    with worker.parts.monitor.without_sample():
        rows = _measure(config, worker, batches, context, steps)
    worker.close()
    return rows


def _measure(config: Any, worker: Any, batches: Sequence[int], context: int, steps: int) -> list[Row]:
    from benchmark.engine_loop import EngineLoop
    from runtime.model_executor.graph_runner import RunMode

    rows = []
    for graphs, overlap in VARIANTS:
        if graphs == "one by one" and not worker.iteration_runners:
            continue
        for runner in (*worker.runners, *worker.iteration_runners):
            replays = graphs == "on" or (graphs == "one by one" and runner not in worker.iteration_runners)
            runner.mode = RunMode.REPLAY if replays else RunMode.EAGER
        for batch in batches:
            loop = EngineLoop(config, worker, overlap == "on")
            loop.start(batch, context, 8 * (2 * steps + TRACED_STEPS + 40))
            row = {"graphs": graphs, "overlap": overlap, "batch": batch, "context": context, **loop.time_steps(batch, steps)}
            if (graphs, overlap) in VARIANTS[:2]:
                row |= traced(loop, worker, row["step_ms"])
            loop.stop()
            rows.append(row)
    return rows


def traced(loop: Any, worker: Any, step_ms: float) -> Row:
    """Trace a few steps, starting with an idle device, and return a summary of the trace."""
    with tempfile.TemporaryDirectory() as folder:
        worker.start_profile(folder)
        traced_seconds = loop.run(TRACED_STEPS)
        gpu = [event for event in load(Path(worker.stop_profile())) if event.get("cat") in GPU_EVENTS]
    if not gpu:
        return {}
    busy = covered((e["ts"], e["ts"] + e["dur"]) for e in gpu) / TRACED_STEPS
    times: dict[str, list[float]] = {}
    for event in gpu:
        times.setdefault(event["name"][:90], []).append(event["dur"])
    top = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "kernels": len(gpu) / TRACED_STEPS,
        "busy_ms": busy / 1e3,
        "idle": max(1.0 - busy / (step_ms * 1e3), 0.0),
        "traced_step_ms": traced_seconds * 1e3,
        "traced_idle": 1.0 - busy / (traced_seconds * 1e6),
        "spent_us": {name: us / TRACED_STEPS for name, us in alone(gpu).items()},
        "top_kernels": [{"name": n, "count": len(t) / TRACED_STEPS, "us": sum(t) / TRACED_STEPS} for n, t in top],
    }


def roof(served: Model, mode: str, row: Row, bytes_per_second: float | None) -> dict[str, float | None]:
    """The time to read weights, keys and values in this step (`roof_ms`), and only weights (`weights_ms`)."""
    if served.shape is None or bytes_per_second is None:
        return {"roof_ms": None, "weights_ms": None}
    steps = STEPS if mode == "eagle" else 0
    whole, weights = (served.shape.roof.roof_ms(steps, batch, row["context"], bytes_per_second) for batch in (row["batch"], 0))
    return {"roof_ms": whole, "weights_ms": weights}


def above_roof(row: Row) -> dict[str, float] | None:
    """Microseconds of a step above its roof, by kind of work; None if the roof or the trace is unknown.

    GEMMs read weights and attention reads keys and values; only the time beyond these reads counts. Together with the
    roof, the parts add up to the step.
    """
    if not (row.get("roof_ms") and row.get("weights_ms") and row.get("spent_us")):
        return None
    spent, weights = row["spent_us"], row["weights_ms"] * 1e3
    reads = {"GEMMs": weights, "attention": row["roof_ms"] * 1e3 - weights}
    found = {label(name): us - reads.get(label(name), 0.0) for name, us in spent.items()}
    return found | {IDLE: row["step_ms"] * 1e3 - sum(spent.values())}


def render(result: Result) -> str:
    """The step times, the GPU's idle time, and the time above the roof."""
    rows, idle = result["rows"], []
    for row in rows:
        if "idle" in row:
            figures = [row["step_ms"], row["busy_ms"], percent(row["idle"], 1), percent(row["traced_idle"], 1), row["kernels"]]
            share = row["roof_ms"] / row["step_ms"] if row.get("roof_ms") else None
            idle.append([_steady(row), *figures, row.get("roof_ms"), percent(share)])
    parts = [_steps(rows), ""]
    if idle:
        header = ["steady decode", "step (ms)", "GPU busy (ms)", "GPU idle", "idle under the profiler", "kernels", "roof (ms)"]
        parts += [table([*header, "share of the roof"], idle), ""]
    if lost := [(row, found) for row in rows if (found := above_roof(row)) is not None]:
        names = ("GEMMs", "attention", *(name for name in KINDS if name not in ("GEMMs", "attention")), OTHER_KIND, IDLE)
        lines = [[_steady(row), row["step_ms"] * 1e3, row["roof_ms"] * 1e3, *(found[name] for name in names)] for row, found in lost]
        parts += [ABOVE_ROOF, "", table(["above the roof (µs)", "step", "roof", *names], lines), ""]
    return "\n".join([*parts, provenance(result)])


def summary(result: Result) -> str:
    """Step times: one row per model, mode and backend, one column per batch size and variant."""
    rows = result["rows"]
    names = dict(zip(VARIANTS, ("as served", "without iteration graphs", "without overlap", "without graphs"), strict=True))
    measured = {(row["batch"], row["graphs"], row["overlap"]) for row in rows}
    columns = [
        (batch, *variant) for batch in sorted({row["batch"] for row in rows}) for variant in VARIANTS if (batch, *variant) in measured
    ]
    lines = []
    for model, mode, backend in dict.fromkeys((row["model"], row["mode"], row["backend"]) for row in rows):
        found = [
            pick(rows, model=model, mode=mode, backend=backend, batch=batch, graphs=graphs, overlap=overlap)
            for batch, graphs, overlap in columns
        ]
        lines.append([f"{model}, {mode}, {backend}", *(row and f"{row['step_ms']:.3f}" for row in found)])
    return table(["step (ms)", *(f"batch {batch}, {names[graphs, overlap]}" for batch, graphs, overlap in columns)], lines)


def _steps(rows: Sequence[Row]) -> str:
    """Step times: one row per variant, one column per batch size."""
    lines, batches = [], sorted({row["batch"] for row in rows})
    for key in dict.fromkeys(tuple(row[name] for name in KEYS[:-1]) for row in rows):
        same = dict(zip(KEYS[:-1], key, strict=True))
        model, mode, backend, graphs, overlap = key
        base = {**same, "graphs": "on", "overlap": "on"}
        cells = []
        for batch in batches:
            row, first = pick(rows, batch=batch, **same), pick(rows, batch=batch, **base)
            against = f" ({change(row['step_ms'], first['step_ms'])})" if row and first and row is not first else ""
            cells.append(f"{row['step_ms']:.3f}{against}" if row else None)
        lines.append([f"{model}, {mode}", backend, graphs, overlap, *cells])
    return table(["step (ms)", "attention", "graphs", "overlap", *(f"batch {batch}" for batch in batches)], lines)


def _steady(row: Row) -> str:
    return f"{row['model']}, {row['mode']}, {row['backend']}, batch {row['batch']}" + (
        ", without iteration graphs" if row["graphs"] == "one by one" else ""
    )


def plot(result: Result, file: Path) -> None:
    """Step time by variant, one panel per model and mode."""

    def bar(row: Row) -> tuple[str, str, float]:
        return f"{row['backend']}, batch {row['batch']}", f"graphs {row['graphs']}, overlap {row['overlap']}", row["step_ms"]

    series = split(result["rows"], itemgetter("model", "mode"))
    panels = [plots.bars(plots.grouped(map(bar, rows)), f"{model}, {mode}", "ms per step") for (model, mode), rows in series.items()]
    picture.draw(result, file, f"One steady decode step: {models(result)}", panels, columns=2)


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--modes", type=names, default=["plain", "eagle"])
    parser.add_argument("--backends", type=names, default=["fa3", "flashinfer"])
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 32])
    parser.add_argument("--context", type=positive, default=1000, help="prompt tokens of each request")
    parser.add_argument("--steps", type=positive, default=60, help="timed steps per run; the faster of two runs counts")
    parser.add_argument("--flags", type=str.split, default=[], help="more flags of every process, in one argument")
    add_model(parser)
    args = parser.parse_args()
    record, served = Record(NAME, KEYS, args.out, args.quick), served_model(args)
    speed = read_rate(record.data["machine"])
    batches, context, steps = ([1, 2], 16, 4) if args.quick else (args.batch_sizes, args.context, args.steps)
    for mode in args.modes:
        for backend in ["torch_native"] if args.quick else args.backends:
            flags = [*server_flags(served, mode, backend, max(batches)), *args.flags]
            for row in apart(measure, flags=flags, batches=batches, context=context, steps=steps):
                labels = {"model": served.name, "mode": mode, "backend": backend}
                record.add({**labels, **row, **roof(served, mode, row, speed)})
    record.show(render, plot)


if __name__ == "__main__":
    main()
