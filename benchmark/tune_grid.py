"""The choice of `runtime.tune` compared with every point of a grid of steps, topk and draft tokens, as servers on the same text.

All servers run at the same time and alternate; a value is the median of the bursts. `tuned` starts with the tuning file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import picture, plots
from benchmark.embedded_speculation import OFF, measure, room_for, speculation
from benchmark.markdown import Result, provenance, split, table
from benchmark.record import Record, Row
from benchmark.server import environment
from benchmark.shapes import eagle3, engine_options
from benchmark.sweep import arguments, names, numbers, positive
from runtime import Engine
from runtime.config.speculative import EMBEDDED_DRAFT

NAME = "tune_grid"
KEYS = ("model", "device", "shape", "batch")
TUNED = "tuned"
GRID = [OFF, "1/1/2", "2/1/3", "3/1/4", "5/1/6", "2/2/4", "3/2/6", "3/4/8"]


def tune(options: Mapping[str, Any], seconds: float, batches: list[int], file: Path) -> str:
    """Run `python -m runtime.tune` for a server with these options; returns its choice and writes the tuning file."""
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "runtime.tune", "--output", str(file), "--seconds", str(seconds), *flags]
    command += ["--batch-sizes", *map(str, batches)]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    return next(line for line in done.stdout.splitlines() if line.startswith("chosen: "))


def share(rows: list[Row], batch: int) -> float | None:
    """Tokens per second of the tuned server relative to those of the best point."""
    rates = {row["shape"]: row["tokens_per_second"] for row in rows if row["batch"] == batch}
    tuned, cells = rates.pop(TUNED, None), rates.values()
    return tuned / max(cells) if tuned is not None and cells else None


def render(result: Result) -> str:
    """The table, the choice, and the origin of the measurements."""
    chosen = "\n".join(dict.fromkeys(row["chosen"] for row in result["rows"] if "chosen" in row))
    return f"{summary(result)}\n\n`{chosen}`\n\n{provenance(result)}"


def summary(result: Result) -> str:
    """Tokens per second by shape and batch, and the tuned server's share of the best point."""
    lines, batches = [], sorted({row["batch"] for row in result["rows"]})
    for (model, device), rows in split(result["rows"], itemgetter("model", "device")).items():
        for shape, own in split(rows, itemgetter("shape")).items():
            rates = {row["batch"]: row["tokens_per_second"] for row in own}
            lines.append([f"{model}, {device}: {shape}, tok/s", *map(rates.get, batches)])
        lines.append([f"{model}, {device}: {TUNED} / best cell", *(share(rows, batch) for batch in batches)])
    return table(["steps/topk/draft tokens", *(f"batch {batch}" for batch in batches)], lines)


def plot(result: Result, file: Path) -> None:
    """Tokens per second by batch, one bar per shape."""
    panels = []
    for (model, device), rows in split(result["rows"], itemgetter("model", "device")).items():
        groups = plots.grouped((str(row["batch"]), row["shape"], row["tokens_per_second"]) for row in rows)
        panels.append(plots.bars(groups, f"{model}, {device}", "output tokens/s", kind="batch"))
    picture.draw(result, file, "The choice of runtime.tune and a grid of shapes", panels)


def main() -> None:
    """Tune, measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--shapes", type=names, default=GRID, help="comma-separated: off, or steps/topk/draft tokens")
    parser.add_argument("--batch", type=numbers, default=[1, 4], help="batch sizes")
    parser.add_argument("--bursts", type=positive, default=5, help="per batch size and server")
    parser.add_argument("--new-tokens", type=positive, default=48)
    parser.add_argument("--seconds", type=float, default=55.0, help="time for runtime.tune")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="model folder or file instead of the embedded model")
    parser.add_argument("--head", default=str(EMBEDDED_DRAFT), help="folder of its EAGLE-3 head")
    args = parser.parse_args()
    if args.quick:
        args.shapes, args.batch, args.bursts, args.new_tokens, args.seconds = [OFF, "1/1/2"], [1], 1, 8, 1.0
    record = Record(NAME, KEYS, args.out, args.quick)
    with engine_options(args.quick, {}, eagle3(args.head)) as (model, drafts):
        run(args, record, model, drafts)
    record.show(render, plot)


def run(args: argparse.Namespace, record: Record, model: Mapping[str, Any], drafts: Mapping[str, Any]) -> None:
    """Tune, measure and record one row per shape and batch size.

    Args:
        model: further options of all servers.
        drafts: further options of those that draft.
    """
    common = room_for(max(args.batch), args.device)
    if args.model is not None:
        common["model_path"] = args.model
    common |= model
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = Path(folder) / "tuning.json"
        chosen = tune(common | drafts, args.seconds, args.batch, file)
        options = {shape: speculation(shape, drafts) for shape in args.shapes} | {TUNED: {**drafts, "speculative_tuning": str(file)}}
        engines = {shape: stack.enter_context(Engine(**common, **one)) for shape, one in options.items()}
        tallies = measure(engines, args.batch, 1, args.new_tokens, args.bursts)
        tuning = json.loads(file.read_text(encoding="utf-8"))
    name = "tiny" if args.quick else Path(args.model).stem if args.model else "embedded"
    for (shape, batch), tally in tallies.items():
        labels = {"model": name, "device": args.device, "shape": shape, "batch": batch}
        facts = {"chosen": chosen, "tuning": tuning} if shape == TUNED else {}
        record.add(labels | tally.figures() | {"tokens_per_second": median(tally.rates), "rates": tally.rates} | facts)


if __name__ == "__main__":
    main()
