"""Throughput with and without speculation by concurrency, and the concurrency from which drafts make it slower.

Synthetic accept lengths are measured on random tokens. The real accept length is that of `--model` with its trained `--head`, which answer
the shipped chat prompts greedily until the model ends the text, so that texts are the same with and without drafts. Every prompt is sent
equally often at every concurrency.
"""

from __future__ import annotations

import argparse
import itertools
import math
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmark import draft_head, picture, plots
from benchmark.chat_text import PROMPTS, chat_text
from benchmark.markdown import Result, cell, models, pick, provenance, split, table
from benchmark.record import Record
from benchmark.shapes import Model
from benchmark.sweep import Burst, Setup, add_model, arguments, names, numbers, positive, random_ids, served_model, sweep

NAME = "crossover"
KEYS = ("model", "speculation", "text", "concurrency")
STEPS = 3
OFF, REAL = "off", "real"
A_SLOT = 4
"""Minimum number of real prompts per concurrent request. With fewer, the end of the run, with only a few answers, would weigh more."""


def setups(served: Model, accept_lengths: list[str], backend: str | None) -> list[Setup]:
    """Speculation off, then on at each accept length; `real` means real acceptance."""
    common = (*served.target_flags, "--disable-radix-cache", *(("--attention-backend", backend) if backend else ()))
    found = [Setup({"model": served.name, "speculation": OFF, "steps": 0}, common)]
    for length in accept_lengths:
        eagle = served.eagle_flags(None if length == REAL else length, STEPS)
        head = draft_head.label(served.head) if length == REAL else {}
        found.append(Setup({"model": served.name, "speculation": length, "steps": STEPS, **head}, (*common, *eagle)))
    return found


def real_text(concurrency: int, output_len: int, prompts: int = PROMPTS) -> Burst:
    """Enough chat prompts for this concurrency."""
    burst = chat_text(concurrency, A_SLOT * concurrency, output_len, prompts)
    return Burst({**burst.labels, "text": REAL}, burst.flags)


def random_text(concurrency: int, input_len: int, output_len: int) -> Burst:
    """Random token ids with exact lengths."""
    burst = random_ids(concurrency, input_len, output_len)
    return Burst({**burst.labels, "text": "random"}, burst.flags)


def measure(record: Record, served: Setup, random: list[Burst], real: list[Burst]) -> None:
    """Run random text with synthetic acceptance, real text with real acceptance, and both without drafts."""
    loads = {OFF: [*random, *real], REAL: real}
    sweep(record, [served], loads.get(served.labels["speculation"], random))


def ratios(rows: list[dict[str, Any]], speculation: str, text: str) -> list[tuple[int, float]]:
    """(concurrency, throughput with speculation / without) for each pair of rows."""
    found = []
    for row in rows:
        same = {name: row.get(name) for name in ("model", "output_len", "concurrency")}
        off = pick(rows, speculation=OFF, text=text, **same)
        if (row["speculation"], row["text"]) == (speculation, text) and off is not None:
            found.append((row["concurrency"], row["output_throughput"] / off["output_throughput"]))
    return sorted(found)


def crossing(points: list[tuple[int, float]]) -> float | None:
    """The concurrency at which the ratio falls below 1, interpolated on a logarithmic scale; None if it never does."""
    for (c0, r0), (c1, r1) in itertools.pairwise(points):
        if r0 >= 1.0 > r1:
            return 2 ** (math.log2(c0) + (r0 - 1.0) / (r0 - r1) * (math.log2(c1) - math.log2(c0)))
    return None


def render(result: Result) -> str:
    """Ratios by accept length and concurrency, and where each crosses 1."""
    parts = []
    for name, rows in split(result["rows"], itemgetter("model")).items():
        columns = sorted({row["concurrency"] for row in rows})
        lines: list[list[Any]] = []
        for speculation, text in _series(rows):
            points = ratios(rows, speculation, text)
            by = dict(points)
            lines.append([_title(speculation, text), measured(rows, speculation, text), *(by.get(c) for c in columns), _where(points)])
        parts += [f"**{name}**: throughput with speculation / without", ""]
        parts += [table(["acceptance", "accept length", *(f"c={column}" for column in columns), "crossover"], lines), ""]
        parts += [line for line in [same_texts(rows)] if line]
    return "\n".join([*parts, provenance(result)])


def summary(result: Result) -> str:
    """The ratios of all models in one table."""
    columns, lines = sorted({row["concurrency"] for row in result["rows"]}), []
    for name, rows in split(result["rows"], itemgetter("model")).items():
        for speculation, text in _series(rows):
            points = ratios(rows, speculation, text)
            length = cell(measured(rows, speculation, text))
            lines.append([f"{name}, {_title(speculation, text)}", length, *map(dict(points).get, columns), _where(points)])
    return table(["throughput with / without drafts", "accept length", *(f"c={c}" for c in columns), "crossover"], lines)


def _series(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(speculation, text) of the rows with drafts, real acceptance first."""
    found = dict.fromkeys((row["speculation"], row["text"]) for row in rows if row["speculation"] != OFF)
    return sorted(found, key=lambda pair: pair[0] != REAL)


def _title(speculation: str, text: str) -> str:
    return f"{speculation if speculation == REAL else f'synthetic {speculation}'}, {text} text"


def _where(points: list[tuple[int, float]]) -> str:
    """The concurrency at which the ratio falls below 1, or a text if it does not cross 1."""
    if not points:
        return "-"
    crossed = crossing(points)
    if crossed is not None:
        return cell(crossed)
    if points[-1][1] < 1:
        return f"below 1 from {points[0][0]} on"
    return f"above 1 up to {points[-1][0]}" if points[0][1] >= 1 else f"below 1 at {points[0][0]}, above 1 at {points[-1][0]}"


def measured(rows: list[dict[str, Any]], speculation: str, text: str) -> float | None:
    """The accept length over all tokens of a series: tokens divided by windows."""
    known = [row for row in rows if (row["speculation"], row["text"]) == (speculation, text) and row.get("accept_length")]
    tokens = sum(row["total_output_tokens"] for row in known)
    return tokens / sum(row["total_output_tokens"] / row["accept_length"] for row in known) if tokens else None


def same_texts(rows: list[dict[str, Any]]) -> str | None:
    """A sentence on whether answers to real text are equally long with and without drafts; greedy texts differ only by rounding."""
    pairs = []
    for on in rows:
        off = pick(rows, speculation=OFF, text=REAL, concurrency=on["concurrency"])
        if (on["speculation"], on["text"]) == (REAL, REAL) and off is not None:
            pairs.append((on["concurrency"], off["total_output_tokens"], on["total_output_tokens"]))
    if not pairs:
        return None
    differ = [f"{off} and {on} at c={concurrency}" for concurrency, off, on in sorted(pairs) if off != on]
    if not differ:
        return "Real text: as many tokens without drafts as with them at every concurrency.\n"
    return f"Real text, tokens without drafts and with them: {'; '.join(differ)}; equal elsewhere.\n"


def plot(result: Result, file: Path) -> None:
    """The ratios by concurrency; a star marks where a line falls below 1."""
    series = {}
    for name, rows in split(result["rows"], itemgetter("model")).items():
        for speculation, text in _series(rows):
            length = cell(measured(rows, speculation, text))
            label = f"real acceptance ({length})" if speculation == REAL else f"synthetic {speculation}"
            series[f"{name}, {label}, {text} text"] = ratios(rows, speculation, text)
    marks = {name: crossing(points) for name, points in series.items()}
    panel = plots.lines(series, "", "concurrency", "output tokens/s with speculation / without", 1.0, marks)
    picture.draw(result, file, f"Where speculation stops paying off: {models(result)}", [panel])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--accept-lengths", type=names, help="synthetic lengths and real; default: 1.5,2.5,3.5, and real with --head")
    parser.add_argument("--backend", default="fa3")
    parser.add_argument("--output-len", type=positive, default=256, help="tokens per answer to random text, maximum for chat prompts")
    parser.add_argument("--prompts", type=positive, default=PROMPTS, help="number of different chat prompts (default %(default)s)")
    add_model(parser)
    args = parser.parse_args()
    args.accept_lengths = args.accept_lengths or [*([REAL] if args.head else []), "1.5", "2.5", "3.5"]
    if not 1 <= args.prompts <= PROMPTS:
        parser.error(f"--prompts {args.prompts}: the value must be from 1 to {PROMPTS}")
    if REAL in args.accept_lengths and not (args.model and args.head and any(Path(args.head).glob("*.safetensors"))):
        parser.error("--accept-lengths real requires --model and --head FOLDER with an EAGLE head trained for the model")
    return args


def main() -> None:
    """Measure, record and plot."""
    args = parse()
    record = Record(NAME, KEYS, args.out, args.quick)
    served = served_model(args)
    if args.quick:  # the head has random weights, so its real acceptance is close to 0
        found, random, real = setups(served, [REAL, "2.5"], None), [random_text(c, 16, 8) for c in (1, 2)], [real_text(2, 4, 4)]
    else:
        found = setups(served, args.accept_lengths, args.backend)
        random = [random_text(c, 256, args.output_len) for c in args.concurrency] if set(args.accept_lengths) - {REAL} else []
        real = [real_text(c, args.output_len, args.prompts) for c in args.concurrency] if REAL in args.accept_lengths else []
    for setup in found:
        measure(record, setup, random, real)
    record.show(render, plot)


if __name__ == "__main__":
    main()
