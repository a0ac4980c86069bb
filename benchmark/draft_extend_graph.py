"""What the draft-extend graph gives: the same server with it off and on, over concurrency, attention backend and overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmark import plots
from benchmark.markdown import Result, change, percent, pick, provenance, table
from benchmark.record import Record
from benchmark.shapes import Model
from benchmark.sweep import Setup, add_model, arguments, names, numbers, random_ids, served_model, sweep

NAME = "draft_extend_graph"
KEYS = ("model", "backend", "overlap", "graph", "concurrency")
STEPS = 2
"""Steps 2, topk 1, draft tokens 3: the settings of the table that this one answers."""


def setups(served: Model, backends: list[str], overlaps: list[str]) -> list[Setup]:
    """For each backend and overlap two servers: the graph off, then on."""
    found = []
    for backend in backends:
        for overlap in overlaps:
            for graph in ("off", "on"):
                flags = [*served.target_flags, *served.eagle_flags("2.0", STEPS), "--attention-backend", backend, "--disable-radix-cache"]
                flags += [] if overlap == "on" else ["--disable-overlap-schedule"]
                flags += [] if graph == "on" else ["--disable-draft-extend-cuda-graph"]
                found.append(Setup({"model": served.name, "backend": backend, "overlap": overlap, "graph": graph, "steps": STEPS}, flags))
    return found


def render(result: Result) -> str:
    """A table for each model, backend and overlap."""
    rows, parts = result["rows"], []
    for name, backend, overlap in dict.fromkeys((row["model"], row["backend"], row["overlap"]) for row in rows):
        part = [row for row in rows if (row["model"], row["backend"], row["overlap"]) == (name, backend, overlap)]
        parts += [f"**{name}, {backend}, overlap {overlap}**", "", _part(part), ""]
    return "\n".join([*parts, provenance(result)])


def _part(rows: list[dict[str, Any]]) -> str:
    header = ["concurrency", "draft-extend graph", "output tok/s", "mean TTFT (ms)", "mean TPOT (ms)", "accept length", "share of the roof"]
    lines: list[list[Any]] = []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        pair = {graph: pick(rows, concurrency=concurrency, graph=graph) for graph in ("off", "on")}
        for graph, row in pair.items():
            if row is not None:
                figures = [row["output_throughput"], row["mean_ttft_ms"], row["mean_tpot_ms"], row["accept_length"]]
                lines.append([concurrency, graph, *figures, percent(row.get("roof_share"))])
        off, on = pair["off"], pair["on"]
        if off is not None and on is not None:
            gains = [change(on[name], off[name]) for name in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "accept_length")]
            lines.append([concurrency, "**change**", *gains, None])
    return table(header, lines)


def gains(result: Result) -> dict[str, list[tuple[float, float]]]:
    """By model, backend and overlap: (concurrency, gain of throughput in per cent)."""
    series: dict[str, list[tuple[float, float]]] = {}
    for on in result["rows"]:
        same = {key: on[key] for key in ("model", "backend", "overlap", "concurrency")}
        off = pick(result["rows"], graph="off", **same)
        if on["graph"] == "on" and off is not None:
            label = f"{on['model']} {on['backend']}, overlap {on['overlap']}"
            gain = (on["output_throughput"] / off["output_throughput"] - 1) * 100
            series.setdefault(label, []).append((on["concurrency"], gain))
    return series


def plot(result: Result, file: Path) -> None:
    """The gain at each concurrency, in one plot."""
    title = "Throughput gained by the draft-extend graph"
    plots.draw(file, [lambda axes: plots.lines(axes, gains(result), title, "concurrency", "per cent")])


def main() -> None:
    """Measure, keep, plot."""
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 32, 64])
    parser.add_argument("--backends", type=names, default=["fa3", "flashinfer"])
    parser.add_argument("--overlap", type=names, default=["on", "off"])
    parser.add_argument("--output-len", type=int, default=1000)
    add_model(parser)
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    served = served_model(args)
    if args.quick:
        found, bursts = setups(served, ["torch_native"], ["on"]), [random_ids(c, 16, 8) for c in (1, 2)]
    else:
        found = setups(served, args.backends, args.overlap)
        bursts = [random_ids(c, 1000, args.output_len) for c in args.concurrency]
    sweep(record, found, bursts, served.shape)
    plot(record.data, record.file.with_suffix(".png"))
    print(render(record.data))


if __name__ == "__main__":
    main()
