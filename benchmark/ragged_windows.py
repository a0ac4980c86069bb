"""One steady iteration in which half of the requests want no drafts: windows of different widths against full ones.

The scheduler and the worker run in one process at a fixed depth; both kinds of windows run in turn, with the same requests. The text is the
same, so the ratio of the times is what ragged windows gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, models, table, with_provenance
from benchmark.record import Record, Row
from benchmark.server import apart
from benchmark.shapes import Model
from benchmark.sweep import add_model, arguments, numbers, positive, served_model

NAME = "ragged_windows"
KEYS = ("model", "batch")
STEPS, ROUNDS = 3, 6
"""Draft depth, and how often each kind of windows is timed."""


def server_flags(served: Model, most: int, on_cpu: bool) -> list[str]:
    """The flags of the process."""
    flags = [*served.target_flags, *served.eagle_flags("2.5", STEPS), "--disable-radix-cache", "--log-level", "warning"]
    return (
        flags if on_cpu else [*flags, "--attention-backend", "fa3", "--max-running-requests", str(most), "--cuda-graph-max-bs", str(most)]
    )


def total(runner: Any) -> int:
    """Runs of a graph runner so far."""
    return int(runner.replayed + runner.ran_eagerly)


def measure(flags: Sequence[str], batches: Sequence[int], context: int, steps: int) -> list[Row]:
    """Measure in this process; one row per batch size, with the median times."""
    from benchmark.engine_loop import EngineLoop, build
    from runtime.sampling_params import SamplingParams

    config, worker = build(flags)
    verifier, rows = worker.parts.verifier, list[Row]()
    ragged, passes = verifier.ragged, verifier.ragged_passes
    with worker.parts.monitor.without_sample():
        for batch in batches:
            loop = EngineLoop(config, worker, overlap=True)
            room = (STEPS + 1) * (2 * ROUNDS * (steps + 4) + 60)
            loop.start(batch, context, room, other=SamplingParams(temperature=0.0, speculative_num_steps=0))
            times: dict[bool, list[float]] = {True: [], False: []}
            runs = sum(map(total, ragged.values()))
            for turn in range(2 * ROUNDS):
                verifier.ragged_passes = (lambda live: []) if turn % 2 else passes
                loop.run(4)
                times[turn % 2 == 0].append(loop.run(steps))
            replayed = sum(map(total, ragged.values())) - runs
            loop.stop()
            figures = {"ragged_ms": 1e3 * median(times[True]), "full_ms": 1e3 * median(times[False])}
            rows.append({"batch": batch, "context": context, **figures, "ragged_passes": replayed})
    worker.close()
    return rows


def summary(result: Result) -> str:
    """One row per batch size."""
    lines = [
        [row["model"], row["batch"], f"{row['full_ms']:.3f}", f"{row['ragged_ms']:.3f}", f"{row['full_ms'] / row['ragged_ms']:.3f}"]
        for row in result["rows"]
    ]
    return table(["half of the requests without drafts", "requests", "full windows (ms)", "ragged windows (ms)", "speedup"], lines)


render = with_provenance(summary)


def plot(result: Result, file: Path) -> None:
    """Both times by batch size."""
    rows = result["rows"]
    groups = {f"{row['batch']} requests": {"full windows": row["full_ms"], "ragged windows": row["ragged_ms"]} for row in rows}
    panel = plots.bars(groups, "", "ms per iteration")
    picture.draw(result, file, f"Half of the requests without drafts: {models(result)}", [panel], columns=1)


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--batch-sizes", type=numbers, default=[32, 64, 128])
    parser.add_argument("--context", type=positive, default=500, help="prompt tokens of each request")
    parser.add_argument("--steps", type=positive, default=20, help="iterations of each timed run")
    add_model(parser)
    args = parser.parse_args()
    record, served = Record(NAME, KEYS, args.out, args.quick), served_model(args)
    batches, context, steps = ([4], 16, 4) if args.quick else (args.batch_sizes, args.context, args.steps)
    flags = server_flags(served, max(batches), args.quick)
    for row in apart(measure, flags=flags, batches=batches, context=context, steps=steps):
        record.add({"model": served.name, **row})
    record.show(render, plot)


if __name__ == "__main__":
    main()
