"""One EAGLE iteration taken apart, run eagerly, with the draft-decode graph only, and with both draft graphs; the traces are the proof."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark import plots
from benchmark.markdown import Result, cell, percent, pick, provenance, table
from benchmark.record import Record
from benchmark.server import Server, bench
from benchmark.shapes import Model
from benchmark.sweep import add_model, arguments, names, random_ids, served_model
from benchmark.trace import analyse, load

NAME = "step_profile"
KEYS = ("model", "backend", "overlap", "graphs", "concurrency")
STEPS = 3
GRAPHS = {
    "eager": ("--disable-draft-decode-cuda-graph", "--disable-draft-extend-cuda-graph"),
    "decode": ("--disable-draft-extend-cuda-graph",),
    "both": (),
}
TITLES = {"eager": "draft eager", "decode": "draft-decode graph", "both": "both draft graphs"}
PHASES = ("draft_decode", "verify", "accept", "draft_extend", "plan", "sample")


def flags(served: Model, graphs: str, backend: str, overlap: str, folder: Path) -> list[str]:
    """The server of one row; the target's verify graph is on in all of them."""
    extra = () if overlap == "on" else ("--disable-overlap-schedule",)
    common = ("--attention-backend", backend, "--disable-radix-cache", "--profile", str(folder))
    return [*served.target_flags, *served.eagle_flags("2.5", STEPS), *common, *extra, *GRAPHS[graphs]]


def measure(server: Server, concurrency: int, input_len: int, output_len: int, seconds: float) -> Path:
    """Trace `seconds` of steady decoding under a load that lasts longer; returns the trace."""
    load_flags = random_ids(concurrency, input_len, output_len, concurrency).flags
    bench(server, random_ids(concurrency, input_len, min(output_len, 16), concurrency).flags)
    load = threading.Thread(target=bench, args=(server, load_flags))
    load.start()
    before = _generated(server)
    while load.is_alive() and _generated(server) - before < 8 * concurrency:  # all prompts read, decoding runs
        time.sleep(0.02)
    server.post("/start_profile")
    time.sleep(seconds)
    answer = server.post("/stop_profile")
    load.join()
    return Path(next(str(value) for value in answer.values() if ".json" in str(value)))


def _generated(server: Server) -> int:
    return server.get("/get_server_info")["internal_states"][0].get("generation_tokens_total", 0)


def render(result: Result) -> str:
    """A table for each model, backend, overlap and concurrency."""
    parts = []
    groups = ("model", "backend", "overlap", "concurrency")
    for group in dict.fromkeys(tuple(row[key] for key in groups) for row in result["rows"]):
        rows = [row for row in result["rows"] if tuple(row[key] for key in groups) == group]
        model, backend, overlap, concurrency = group
        parts += [f"**{model}, {backend}, overlap {overlap}, concurrency {concurrency}**: one iteration", "", _part(rows), ""]
    return "\n".join([*parts, provenance(result)])


def _part(rows: Sequence[dict[str, Any]]) -> str:
    found = {graphs: row for graphs in GRAPHS if (row := pick(rows, graphs=graphs)) is not None}
    lines: list[list[Any]] = [["iteration (µs)", *(row["period_us"] for row in found.values())]]
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
    """Host time of the draft's phases."""
    return row["host_us"].get("draft_decode", 0.0) + row["host_us"].get("draft_extend", 0.0)


def _draft_host(row: dict[str, Any], eager: dict[str, Any] | None) -> str:
    change = "" if eager is None or row is eager else f" ({(draft_host_us(row) / draft_host_us(eager) - 1) * 100:+.0f} %)"
    return f"{cell(draft_host_us(row))}{change}"


def plot(result: Result, file: Path) -> None:
    """Host time and GPU time by phase."""

    def groups(unit: str) -> dict[str, dict[str, float]]:
        label = "{model} {backend}, overlap {overlap}, c={concurrency}: {graphs}"
        return {label.format(**row): row[unit] for row in result["rows"]}

    panels = [("host_us", "Host time"), ("gpu_us", "GPU time")]
    plots.draw(file, [lambda axes, u=unit, t=title: plots.bars(axes, groups(u), f"{t} of one iteration", "µs") for unit, title in panels])


def main() -> None:
    """Measure, keep, plot."""
    parser = arguments(__doc__)
    parser.add_argument("--backends", type=names, default=["fa3"])
    parser.add_argument("--overlap", type=names, default=["off"], help="on, off: off shows the host time that overlap hides")
    parser.add_argument("--graphs", type=names, default=[*GRAPHS])
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each trace")
    parser.add_argument("--keep-traces", action="store_true", help="keep the traces beside the results (megabytes)")
    add_model(parser)
    args = parser.parse_args()
    record, served = Record(NAME, KEYS, args.out, args.quick), served_model(args)
    backends, lens, seconds = (["torch_native"], (16, 600), 0.3) if args.quick else (args.backends, (256, 2000), args.seconds)
    for backend in backends:
        for overlap in args.overlap:
            for graphs in args.graphs:
                labels = {"model": served.name, "backend": backend, "overlap": overlap, "graphs": graphs, "concurrency": args.concurrency}
                with tempfile.TemporaryDirectory() as folder:
                    with Server(flags(served, graphs, backend, overlap, Path(folder))) as server:
                        trace = measure(server, args.concurrency, *lens, seconds)
                    record.add({**labels, **asdict(analyse(load(trace)))})
                    if args.keep_traces:
                        kept = record.file.with_name("-".join([NAME, *map(str, labels.values())]) + "".join(trace.suffixes[-3:]))
                        shutil.copy(trace, kept)
    plot(record.data, record.file.with_suffix(".png"))
    print(render(record.data))


if __name__ == "__main__":
    main()
