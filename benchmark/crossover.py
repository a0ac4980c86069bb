"""Where speculation stops paying: with and without it over concurrency, at several accept lengths and on real text."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, cell, pick, provenance, table
from benchmark.record import Record
from benchmark.shapes import Model
from benchmark.sweep import Burst, Setup, add_model, arguments, names, numbers, random_ids, served_model, sweep

NAME = "crossover"
KEYS = ("model", "speculation", "text", "concurrency")
STEPS = 3
OFF = "off"


def setups(served: Model, accept_lengths: list[str], backend: str | None) -> list[Setup]:
    """Speculation off, then on at each accept length; `real` lets the weights decide."""
    common = (*served.target_flags, "--disable-radix-cache", *(("--attention-backend", backend) if backend else ()))
    found = [Setup({"model": served.name, "speculation": OFF, "steps": 0}, common)]
    for length in accept_lengths:
        eagle = served.eagle_flags(None if length == "real" else length, STEPS)
        found.append(Setup({"model": served.name, "speculation": length, "steps": STEPS}, (*common, *eagle)))
    return found


def real_text(concurrency: int, output_len: int) -> Burst:
    """The held-out chat prompts, by the model's own chat template."""
    prompts = min(max(2 * concurrency, 4), 80)
    flags = ["--backend", "sglang-oai-chat", "--dataset-name", "embedded", "--sharegpt-output-len", str(output_len)]
    flags += ["--num-prompts", str(prompts), "--max-concurrency", str(concurrency), "--flush-cache"]
    return Burst({"concurrency": concurrency, "text": "real", "input_len": 0, "output_len": output_len, "num_prompts": prompts}, flags)


def ratios(rows: list[dict[str, Any]], speculation: str, text: str) -> list[tuple[int, float]]:
    """(concurrency, throughput with speculation / without), where both were measured."""
    found = []
    for row in rows:
        off = pick(rows, speculation=OFF, text=text, concurrency=row["concurrency"], model=row["model"])
        if (row["speculation"], row["text"]) == (speculation, text) and off is not None:
            found.append((row["concurrency"], row["output_throughput"] / off["output_throughput"]))
    return sorted(found)


def crossing(points: list[tuple[int, float]]) -> float | None:
    """The concurrency at which the ratio falls through 1, between measured points on a logarithmic scale; None if it never does."""
    for (c0, r0), (c1, r1) in itertools.pairwise(points):
        if r0 >= 1.0 > r1:
            return 2 ** (math.log2(c0) + (r0 - 1.0) / (r0 - r1) * (math.log2(c1) - math.log2(c0)))
    return None


def render(result: Result) -> str:
    """Ratios by accept length and concurrency, and where each crosses 1."""
    parts = []
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["model"] == name]
        columns = sorted({row["concurrency"] for row in rows})
        lines: list[list[Any]] = []
        for speculation, text in dict.fromkeys((row["speculation"], row["text"]) for row in rows):
            if speculation == OFF:
                continue
            points = ratios(rows, speculation, text)
            by = dict(points)
            crossed = crossing(points)
            where = "stays above 1" if crossed is None and points and points[-1][1] >= 1 else cell(crossed)
            lines.append([f"{speculation}, {text} text", *(by.get(column) for column in columns), where])
        parts += [f"**{name}**: throughput with speculation / without", ""]
        parts += [table(["accept length", *(f"c={column}" for column in columns), "crossover"], lines), ""]
    return "\n".join([*parts, provenance(result)])


def plot(result: Result, file: Path) -> None:
    """The ratios over concurrency; a star where a line falls through 1, and there speculation stops paying."""
    rows, series = result["rows"], {}
    for name, speculation, text in dict.fromkeys((row["model"], row["speculation"], row["text"]) for row in rows):
        if speculation != OFF:
            length = "real acceptance" if speculation == "real" else f"accept length {speculation}"
            series[f"{name}, {length}, {text} text"] = ratios([row for row in rows if row["model"] == name], speculation, text)
    marks = {name: crossing(points) for name, points in series.items()}
    panel = plots.lines(series, "", "concurrency", "output tokens/s with speculation / without", 1.0, marks)
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    picture.draw(result, file, f"Where speculation stops paying: {models}", [panel])


def main() -> None:
    """Measure, keep, plot."""
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--accept-lengths", type=names, default=["1.5", "2.5", "3.5"], help="synthetic ones, or real")
    parser.add_argument("--backend", default="fa3")
    parser.add_argument("--output-len", type=int, default=256)
    add_model(parser)
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    served = served_model(args)
    if args.quick:
        found, bursts = setups(served, ["2.5"], None), [_synthetic(c, 16, 8) for c in (1, 2)] + [real_text(2, 4)]
    else:
        found = setups(served, args.accept_lengths, args.backend)
        bursts = [(real_text(c, args.output_len) if args.model else _synthetic(c, 256, args.output_len)) for c in args.concurrency]
    sweep(record, found, bursts, None)
    plot(record.data, record.file.with_suffix(".png"))
    print(render(record.data))


def _synthetic(concurrency: int, input_len: int, output_len: int) -> Burst:
    burst = random_ids(concurrency, input_len, output_len)
    return Burst({**burst.labels, "text": "random"}, burst.flags)


if __name__ == "__main__":
    main()
