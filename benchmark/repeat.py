"""The repeatability of `bench_serving`: the same burst several times on one server with real model compute.

All requests use the same seed. Synthetic acceptance then depends only on the token's position, and all runs take the same steps. Without a
seed each run would accept differently.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.client_agreement import FIGURES, farthest, median
from benchmark.markdown import Result, signed, table, with_provenance
from benchmark.record import Record
from benchmark.server import Server, bench
from benchmark.serving_matrix import TITLES, setups
from benchmark.sweep import arguments, names, numbers, positive, random_ids, served_model

NAME = "repeat"
KEYS = ("mode", "backend", "concurrency", "input_len", "output_len")
SEED = {"seed": 1}
BOUND = 3.0
LEAST = 8
"""Minimum number of requests per burst; with fewer, the mean TTFT is noise."""

Run = dict[str, Any]


def burst(server: Server, concurrency: int, lens: tuple[int, int], requests: int) -> Run:
    """One run with its own warm-up: the compared metrics and the accept length, which must be equal in all runs."""
    warm = ("--warmup-requests", str(concurrency), "--extra-request-body", json.dumps(SEED))
    flags = random_ids(concurrency, *lens, requests, *warm).flags
    figures = bench(server, flags)
    return {name: figures[name] for name in (*FIGURES, "completed", "failed", "total_output_tokens", "accept_length")}


def spread(runs: Sequence[Run]) -> dict[str, float | None]:
    """By metric, the largest signed deviation of a run from the median of the runs, in per cent."""
    found: dict[str, float | None] = {}
    for name in FIGURES:
        values = [run[name] for run in runs]
        middle = median(values)
        found[name] = max(((value / middle - 1) * 100 for value in values), key=abs) if middle else None
    return found


def summary(result: Result) -> str:
    """One row per server and concurrency: per cent by metric, and the accept length of each run."""
    lines = []
    for row in result["rows"]:
        title = f"{row['mode']}, {row['backend']}, {_load(row)}"
        cells = [signed(row["spread"][name]) for name in FIGURES]
        lines.append([title, *cells, f"**{signed(farthest(row['spread']))}**", len(row["runs"]), _accepted(row["runs"])])
    header = ["farthest run from the median, %", *FIGURES.values(), "farthest", "runs", "accept length"]
    return table(header, lines)


render = with_provenance(summary)


def _load(row: Run) -> str:
    return f"{row['concurrency']} at a time, {row['input_len']} → {row['output_len']} tokens"


def _accepted(runs: Sequence[Run]) -> str | None:
    """The accept length if all runs share it, else that of each run."""
    lengths = dict.fromkeys(f"{run['accept_length']:.3f}" for run in runs if run["accept_length"] is not None)
    return ", ".join(lengths) or None


def plot(result: Result, file: Path) -> None:
    """The largest deviation of each metric, with its bound."""
    groups: dict[str, dict[str, float | None]] = {}
    for row in result["rows"]:
        bar = f"{row['mode']}, {row['backend']}, {_load(row)}"
        for name, title in FIGURES.items():
            value = row["spread"][name]
            groups.setdefault(title, {})[bar] = None if value is None else abs(value)
    panel = plots.bars(groups, "", "farthest run from the median, %", bound=BOUND)
    picture.draw(result, file, "bench_serving, the same burst again on the same server", [panel])


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=numbers, default=[1, 16])
    parser.add_argument("--modes", type=names, default=list(TITLES))
    parser.add_argument("--backend", default="fa3")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each burst (default %(default)s)")
    parser.add_argument("--output-len", type=positive, default=256)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: the value must be at least 2")
    record = Record(NAME, KEYS, args.out, args.quick)
    backend, lens = ("torch_native", (16, 8)) if args.quick else (args.backend, (1000, args.output_len))
    for setup in setups(served_model(args), args.modes, [backend]):
        with Server([*setup.flags]) as server:
            for concurrency in [1, 2] if args.quick else args.concurrency:
                requests = 3 if args.quick else max(2 * concurrency, LEAST)
                runs = [burst(server, concurrency, lens, requests) for _ in range(args.rounds)]
                found = spread(runs)
                labels = {**setup.labels, "concurrency": concurrency, "input_len": lens[0], "output_len": lens[1], "num_prompts": requests}
                record.add(labels | {"runs": runs, "spread": found, "server_flags": " ".join(setup.flags)})
                print(f"  {setup.labels['mode']}, {concurrency} at a time: {signed(farthest(found))} %", flush=True)
    record.show(render, plot)


if __name__ == "__main__":
    main()
