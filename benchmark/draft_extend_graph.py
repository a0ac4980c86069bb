"""The same server with the draft-extend graph off and on, by concurrency, attention backend and overlap.

With --in-process the scheduler and the worker run in one process, without HTTP and text. One worker alternates between off and on within
seconds, so that only the graph differs. The number after ± is the standard error of a change over the rounds. Three columns are timed in
iterations without prompts: the iteration on the GPU's clock, draft-extend on the GPU from the end of verification on, and its host time.

First tokens do not run in this graph. With overlap they still arrive earlier if the host is the bottleneck, because a prompt waits for the
step in flight. Runs of 1000 tokens have few first tokens, so one stall of the machine has a large effect (+42.1 % ± 32.9 is one round of
two). The answers of 128 tokens show TTFT better, because there are many more of them.

Longer contexts make verification longer: without overlap, answers of 1000 tokens gain less at 32 requests than answers
of 128.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, cell, change, models, percent, pick, provenance, split, table
from benchmark.phases import Phases
from benchmark.record import Record
from benchmark.server import apart
from benchmark.shapes import Model, read_rate
from benchmark.sweep import Setup, add_model, arguments, names, numbers, positive, random_ids, roof_share, served_model, sweep
from runtime.model_executor.acceptance import AcceptanceCounters
from runtime.model_executor.graph_runner import RunMode

NAME = "draft_extend_graph"
KEYS = ("model", "backend", "overlap", "loop", "output_len", "graph", "concurrency")
STEPS = 2
"""Depth of the chain: 2 steps, topk 1, 3 draft tokens."""

COLUMNS = (
    *("input_throughput", "output_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms"),
    *("mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "per_user_throughput", "accept_length"),
)
"""Columns of the table; a column without values in a series is omitted."""

STEADY = {
    "iteration_us": "iteration, GPU (µs)",
    "draft_extend_gpu_us": "draft-extend, GPU (µs)",
    "draft_extend_host_us": "draft-extend, host (µs)",
}
"""Times of iterations without prompts, by the names of `Phases`."""
WATCHED = 64
"""Tokens per answer while iterations are timed."""
HIDDEN = 0.05
"""Launches are hidden if the GPU waits for them in less than this share of an iteration."""

MIN_TOKENS = 2048
"""Minimum number of tokens in one run in process, up to eight answers per client."""
REPEATED = ("mean_ttft_ms", "mean_tpot_ms")
"""Columns whose value of every round is in the result file, for the standard error."""


def setups(served: Model, backends: list[str], overlaps: list[str]) -> list[Setup]:
    """Two servers per backend and overlap: the graph off, then on."""
    found = []
    for backend in backends:
        for overlap in overlaps:
            for graph in ("off", "on"):
                flags = [*served.target_flags, *served.eagle_flags("2.0", STEPS), "--attention-backend", backend, "--disable-radix-cache"]
                flags += ["--disable-iteration-graph"]  # which would include draft-extend
                flags += [] if overlap == "on" else ["--disable-overlap-schedule"]
                flags += [] if graph == "on" else ["--disable-draft-extend-cuda-graph"]
                labels = {"model": served.name, "backend": backend, "overlap": overlap, "loop": "server", "graph": graph, "steps": STEPS}
                found.append(Setup(labels, flags))
    return found


def turns(rounds: int) -> list[str]:
    """Off, on, on, off, and so on, so that a drift of the machine affects both equally."""
    return [graph for number in range(rounds) for graph in (("off", "on") if number % 2 == 0 else ("on", "off"))]


def measure(
    flags: Sequence[str], concurrencies: Sequence[int], lens: tuple[int, int], overlaps: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """Measure in this process; one row per concurrency, overlap and graph off or on."""
    from benchmark.engine_loop import EngineLoop, Served, build

    config, worker = build(flags)
    extend, rows = worker.parts.drafter.extend[STEPS], []
    for concurrency in concurrencies:
        requests = max(2 * concurrency, min(8 * concurrency, MIN_TOKENS // lens[1]))
        for overlap in overlaps:
            runs: dict[str, list[Served]] = {"off": [], "on": []}
            counts = {graph: AcceptanceCounters(STEPS) for graph in runs}
            phases = {graph: Phases(worker) for graph in runs}
            for graph in turns(rounds):
                extend.mode = RunMode.REPLAY if graph == "on" else RunMode.EAGER
                EngineLoop(config, worker, overlap == "on").serve(concurrency, concurrency, lens[0], 16)
                runs[graph].append(EngineLoop(config, worker, overlap == "on").serve(requests, concurrency, *lens))
                counts[graph].merge(worker.parts.monitor.counted())
                with phases[graph]:
                    EngineLoop(config, worker, overlap == "on").serve(concurrency, concurrency, lens[0], min(WATCHED, lens[1]))
                worker.reset()
            labels = {"overlap": overlap, "concurrency": concurrency, "input_len": lens[0], "output_len": lens[1]}
            for graph, served in runs.items():
                figures = {"num_prompts": rounds * requests, "rounds": rounds, **Served.together(served).figures()}
                by_round = [run.figures() for run in served]
                figures["by_round"] = {name: [run[name] for run in by_round] for name in REPEATED}
                figures |= {"accept_length": counts[graph].mean_accept_len, **phases[graph].figures()}
                rows.append({**labels, "graph": graph, **figures})
    worker.close()
    return rows


def render(result: Result) -> str:
    """One table per model, backend, overlap and answer length."""
    found, parts = pairs(result["rows"]), []
    for key, rows in split(result["rows"], _series).items():
        parts += [f"**{key}**", "", _part(rows), ""]
        hidden = _hidden(found.get(key, ()))
        parts += [hidden, ""] if hidden else []
    return "\n".join([*parts, provenance(result)])


def summary(result: Result) -> str:
    """The change of the mean TPOT by concurrency, for the shortest answers of each model, backend and overlap."""
    shortest: dict[str, dict[int, str]] = {}
    for series in pairs(result["rows"]).values():
        row = series[0][1]
        key = f"{row['model']}, {row['backend']}, overlap {row['overlap']}"
        shortest.setdefault(key, {concurrency: _change(on, off, "mean_tpot_ms") for concurrency, off, on in series})
    columns = sorted({concurrency for cells in shortest.values() for concurrency in cells})
    lines = [[key, *map(cells.get, columns)] for key, cells in shortest.items()]
    return table(["mean TPOT, on against off", *(f"c={column}" for column in columns)], lines)


def _series(row: dict[str, Any]) -> str:
    where = ", without HTTP" if row.get("loop") == "in-process" else ""
    lens = f", {row['input_len']} -> {row['output_len']}" if "output_len" in row else ""
    return f"{row['model']}, {row['backend']}, overlap {row['overlap']}{lens}{where}"


def _part(rows: list[dict[str, Any]]) -> str:
    columns = [name for name in (*COLUMNS, *STEADY) if any(_figure(row, name) is not None for row in rows)]
    lines: list[list[Any]] = []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        pair = {graph: pick(rows, concurrency=concurrency, graph=graph) for graph in ("off", "on")}
        for graph, row in pair.items():
            if row is not None:
                lines.append([concurrency, graph, *(_figure(row, name) for name in columns), percent(row.get("roof_share"))])
        off, on = pair["off"], pair["on"]
        if off is not None and on is not None:
            lines.append([concurrency, "**change**", *(_change(on, off, name) for name in columns), None])
    header = [STEADY.get(name, name) for name in columns]
    return table(["max_concurrency", "draft-extend graph", *header, "share of the roof"], lines)


def waits(off: dict[str, Any], on: dict[str, Any]) -> float | None:
    """The share of an iteration in which the GPU waits for launches that the graph would save; None if it was not
    timed.

    The kernels are the same with and without the graph, so any extra time without it is waiting.
    """
    if "iteration_us" not in off or "iteration_us" not in on:
        return None
    return 1 - on["iteration_us"] / off["iteration_us"]


def _hidden(found: Sequence[tuple[int, dict[str, Any], dict[str, Any]]]) -> str:
    """A sentence about the concurrencies of a series at which launches are hidden; "" if there are none."""
    hidden = {concurrency: share for concurrency, off, on in found if (share := waits(off, on)) is not None and share < HIDDEN}
    if not hidden:
        return ""
    return (
        f"Hidden at concurrency {', '.join(map(str, hidden))}: draft-extend is launched while the GPU verifies. "
        f"Without the graph the GPU waits for launches in at most {percent(max(0.0, *hidden.values()), 1)} of an "
        "iteration."
    )


def _change(on: dict[str, Any], off: dict[str, Any], name: str) -> str:
    """The change of a column, with its standard error if there are several rounds."""
    text, error = change(_figure(on, name), _figure(off, name)), standard_error(on, off, name)
    return text if error is None else f"{text} ± {error * 100:.1f}"


def standard_error(on: dict[str, Any], off: dict[str, Any], name: str) -> float | None:
    """The standard error of the mean change from `off` to `on` over the rounds, as a share; None for fewer than two
    rounds.
    """
    kept = [row.get("by_round", {}).get(name, ()) for row in (on, off)]
    ratios = [a / b for a, b in zip(*kept, strict=True)]
    return statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None


def _figure(row: dict[str, Any], name: str) -> float | None:
    """A column of a row.

    All prompts and all answers of a run have one length, so input throughput follows from output throughput.
    """
    if name == "per_user_throughput":
        return row["output_throughput"] / row["concurrency"]
    if name == "input_throughput" and row.get("output_len"):
        return row["output_throughput"] * row["input_len"] / row["output_len"]
    return row.get(name)


def pairs(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, dict[str, Any], dict[str, Any]]]]:
    """(concurrency, row without the graph, row with it) by series, if both were measured."""
    found: dict[str, list[tuple[int, dict[str, Any], dict[str, Any]]]] = {}

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["model"], row.get("loop", ""), row["backend"], row["overlap"] == "off", row.get("output_len", 0), row["concurrency"]

    for on in sorted(rows, key=place):
        off = pick(rows, **{key: on.get(key) for key in KEYS} | {"graph": "off"})
        if on["graph"] == "on" and off is not None:
            found.setdefault(_series(on), []).append((on["concurrency"], off, on))
    return found


def plot(result: Result, file: Path) -> None:
    """Throughput with the graph off and on by concurrency, with the changes of throughput and TPOT; one panel per
    series.
    """
    panels = [_panel(key, found) for key, found in pairs(result["rows"]).items()]
    picture.draw(result, file, f"Draft-extend graph off and on: {models(result)}", panels, columns=2)


def _panel(key: str, found: Sequence[tuple[int, dict[str, Any], dict[str, Any]]]) -> plots.Panel:
    rows = {(str(concurrency), f"graph {row['graph']}"): row for concurrency, off, on in found for row in (off, on)}
    lengths = plots.grouped((*place, row["output_throughput"]) for place, row in rows.items())

    def text(concurrency: str, name: str) -> str:
        row, off = rows[concurrency, name], rows[concurrency, "graph off"]
        gain = change(row["output_throughput"], off["output_throughput"])
        return cell(row["output_throughput"]) + (
            "" if row is off else f" ({gain}; TPOT {change(row['mean_tpot_ms'], off['mean_tpot_ms'])})"
        )

    unit = "output tokens/s (its change; change of TPOT)"
    return plots.bars(lengths, key, unit, kind="concurrency", text=text, room=0.75)


def in_process(
    record: Record, served: Model, backends: list[str], concurrencies: list[int], lens: tuple[int, int], overlaps: list[str], rounds: int
) -> None:
    """Measure each backend in its own process with one worker."""
    speed = read_rate(record.data["machine"])
    for backend in backends:
        setup = setups(served, [backend], ["on"])[-1]
        limit = [] if backend == "torch_native" else ["--cuda-graph-max-bs", str(max(concurrencies))]
        flags = [*setup.flags, *limit]
        for row in apart(measure, flags=flags, concurrencies=concurrencies, lens=lens, overlaps=overlaps, rounds=rounds):
            labelled = {**setup.labels, "loop": "in-process", **row}
            record.add(labelled | (roof_share(labelled, served.shape.roof, speed) if served.shape else {}))


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 32, 64])
    parser.add_argument("--backends", type=names, default=["fa3", "flashinfer"])
    parser.add_argument("--overlap", type=names, default=["on", "off"])
    parser.add_argument("--output-len", type=positive, default=1000)
    parser.add_argument("--in-process", action="store_true", help="no servers: one worker per backend")
    parser.add_argument(
        "--rounds", type=positive, default=2, help="with --in-process: alternating runs with off and on (default %(default)s)"
    )
    add_model(parser)
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    served = served_model(args)
    backends = ["torch_native"] if args.quick else args.backends
    lens, concurrencies = ((16, 8), [1, 2]) if args.quick else ((1000, args.output_len), args.concurrency)
    if args.in_process:
        in_process(record, served, backends, concurrencies, lens, args.overlap, args.rounds)
    else:
        bursts = [random_ids(c, *lens) for c in concurrencies]
        sweep(record, setups(served, backends, ["on"] if args.quick else args.overlap), bursts, served.shape and served.shape.roof)
    record.show(render, plot)


if __name__ == "__main__":
    main()
