"""One steady decode step by sampling parameters, with the sampling kernels and with their torch reference.

The scheduler and the worker run in one process, with graphs and overlap. Acceptance is real, because synthetic acceptance does not read the
drafts' probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from benchmark import picture, plots
from benchmark.markdown import Result, change, pick, provenance, split, table
from benchmark.record import Record, Row
from benchmark.server import apart
from benchmark.shapes import Model
from benchmark.sweep import add_model, arguments, names, numbers, positive, served_model

NAME = "sampling"
KEYS = ("model", "mode", "choice", "sampler", "batch")
STEPS = 3
GREEDY = "greedy"
CHOICES: dict[str, dict[str, float]] = {
    GREEDY: {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top_p 0.9, top_k 50": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    "temperature 0.8, top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
}
"""Sampling parameters by their name in the rows. Greedy steps do not sample; they are timed once, with the first sampler."""


def server_flags(served: Model, mode: str, sampler: str, batches: Sequence[int], on_cpu: bool) -> list[str]:
    """The flags of one process."""
    eagle = served.eagle_flags(None, STEPS) if mode == "eagle" else ()
    flags = [*served.target_flags, *eagle, "--sampling-backend", sampler, "--disable-radix-cache", "--log-level", "warning"]
    return flags if on_cpu else [*flags, "--cuda-graph-bs", *(str(batch) for batch in batches)]


def measure(flags: Sequence[str], choices: Sequence[str], batches: Sequence[int], context: int, steps: int) -> list[Row]:
    """Measure in this process; one row per choice and batch size."""
    from benchmark.engine_loop import EngineLoop, build
    from runtime.sampling_params import SamplingParams

    config, worker = build(flags)
    rows = []
    for choice in choices:
        for batch in batches:
            loop = EngineLoop(config, worker, overlap=True)
            loop.start(batch, context, (STEPS + 1) * (2 * steps + 40), SamplingParams(**CHOICES[choice]))  # type: ignore[arg-type]
            rows.append({"choice": choice, "batch": batch, "context": context, **loop.time_steps(batch, steps)})
            loop.stop()
    worker.close()
    return rows


def render(result: Result) -> str:
    """One row per mode, parameters and sampler, one column per batch size, relative to greedy steps."""
    rows = result["rows"]
    batches = sorted({row["batch"] for row in rows})
    lines = []
    for model, mode, choice, sampler in dict.fromkeys(tuple(row[name] for name in KEYS[:-1]) for row in rows):
        cells = []
        for batch in batches:
            row = pick(rows, model=model, mode=mode, choice=choice, sampler=sampler, batch=batch)
            greedy = pick(rows, model=model, mode=mode, choice=GREEDY, batch=batch)
            against = f" ({change(row['step_ms'], greedy['step_ms'])})" if row and greedy and row is not greedy else ""
            cells.append(f"{row['step_ms']:.3f}{against}" if row else None)
        lines.append([f"{model}, {mode}, {choice}", sampler, *cells])
    header = ["step (ms)", "sampling", *(f"batch {batch}" for batch in batches)]
    return "\n".join([table(header, lines), "", provenance(result)])


def summary(result: Result) -> str:
    """Step times: one row per mode and sampling parameters, one column per batch size and sampler."""
    rows = result["rows"]
    samplers = list(dict.fromkeys(row["sampler"] for row in rows if row["sampler"]))
    columns = [(batch, sampler) for batch in sorted({row["batch"] for row in rows}) for sampler in samplers]
    lines = []
    for model, mode, choice in dict.fromkeys((row["model"], row["mode"], row["choice"]) for row in rows):
        same = {"model": model, "mode": mode, "choice": choice}
        found = [pick(rows, **same, batch=b, sampler=None if choice == GREEDY else sampler) for b, sampler in columns]
        lines.append([f"{model}, {mode}, {choice}", *(row and f"{row['step_ms']:.3f}" for row in found)])
    return table(["step (ms)", *(f"batch {batch}, {sampler}" for batch, sampler in columns)], lines)


def plot(result: Result, file: Path) -> None:
    """Step time by sampling parameters, one panel per model, mode and batch size."""
    panels = []
    for (model, mode, batch), rows in split(result["rows"], itemgetter("model", "mode", "batch")).items():
        groups = plots.grouped((row["choice"], row["sampler"] or GREEDY, row["step_ms"]) for row in rows)
        panels.append(plots.bars(groups, f"{model}, {mode}, batch {batch}", "ms per step"))
    picture.draw(result, file, "One steady decode step by sampling parameters", panels, columns=2)


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--modes", type=names, default=["plain", "eagle"])
    parser.add_argument("--samplers", type=names, default=["triton", "pytorch"])
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 32])
    parser.add_argument("--context", type=positive, default=250, help="prompt tokens of each request")
    parser.add_argument("--steps", type=positive, default=25, help="timed steps per run; the faster of two runs counts")
    add_model(parser)
    args = parser.parse_args()
    record, served = Record(NAME, KEYS, args.out, args.quick), served_model(args)
    batches, context, steps = ([1, 2], 16, 4) if args.quick else (args.batch_sizes, args.context, args.steps)
    samplers = ["pytorch"] if args.quick else args.samplers
    for mode in args.modes:
        for sampler in samplers:
            choices = [choice for choice in CHOICES if choice != GREEDY or sampler == samplers[0]]
            flags = server_flags(served, mode, sampler, batches, args.quick)
            for row in apart(measure, flags=flags, choices=choices, batches=batches, context=context, steps=steps):
                record.add({"model": served.name, "mode": mode, "sampler": None if row["choice"] == GREEDY else sampler, **row})
    record.show(render, plot)


if __name__ == "__main__":
    main()
