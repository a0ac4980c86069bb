"""Throughput of sparse, quantised and latent-attention models with random weights, with and without drafts, relative to their roofs.

A roof reads the distinct experts that the server counted. Where it counted none, the roof assumes that tokens are routed independently.
Tokens of a window choose similar experts, so these shares are upper bounds (≤) and can exceed 100 % with drafts.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmark import layer_times, picture, plots
from benchmark.machine import gpu
from benchmark.markdown import Result, on_gpus, percent, pick, provenance, split, table
from benchmark.model_cases import CASES, Case, Served, prepare, prepare_tiny
from benchmark.record import Record
from benchmark.sweep import Setup, arguments, names, numbers, positive, random_ids, sweep

NAME = "model_matrix"
KEYS = ("model", "mode", "concurrency", "input_len", "output_len", "tp_size")
MODES = ("plain", "drafts")
PEERS_DEVICE = "nvidia-h200"
PEERS_SOURCE = (
    "kernel times of NVIDIA's aiconfigurator, commit 095f58a51 (SGLang 0.5.14, vLLM 0.22 to 0.24, TensorRT-LLM 1.3.0rc20), summed up"
)


def render(result: Result) -> str:
    """The tables and where they come from."""
    tables = summary(result)
    peers = f" Peers: {PEERS_SOURCE}." if " Peers at c=1" in tables else ""
    return f"{tables}\n\nTalon: {provenance(result)}{peers}"


def summary(result: Result) -> str:
    """The tables alone."""
    parts = []
    for title, rows in comparable(result["rows"]).items():
        case, one = CASES.get(rows[0]["model"]), pick(rows, mode="plain", concurrency=1, tp_size=1)
        beside = one is not None and gpu(result["machine"]) == PEERS_DEVICE
        peers = f" Peers at c=1, plain: {case.peers} tok/s." if case and case.peers and beside else ""
        parts += [f"**{title}**: output tok/s (share of the roof).{peers}", "", _table(rows), ""]
    if extrapolated := layer_times.summary(result["rows"]):
        parts += [extrapolated]
    return "\n".join(parts).strip()


def comparable(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table by its title: one model on as many GPUs, with prompts and answers of the same lengths."""

    def title(row: dict[str, Any]) -> str:
        name = CASES[row["model"]].title if row["model"] in CASES else row["model"]
        return f"{name}{on_gpus(row)}, {row['input_len']} → {row['output_len']} tokens"

    return split(rows, title)


def _title(mode: str, rows: list[dict[str, Any]]) -> str:
    case = next((CASES[row["model"]] for row in rows if row["model"] in CASES), None)
    if mode == "plain" or case is None:
        return mode
    name = "EAGLE-3" if case.algorithm == "EAGLE3" else case.algorithm
    depth = f" with {case.steps} drafts in every step" if case.fixed else ""
    return f"{name}{depth}, synthetic accept length {mode.removeprefix('accept-')}"


def _table(rows: list[dict[str, Any]]) -> str:
    columns = sorted({row["concurrency"] for row in rows})
    by = {(row["mode"], row["concurrency"]): row for row in rows}
    modes = sorted({row["mode"] for row in rows}, key=lambda mode: (mode != "plain", mode))
    lines = [[_title(mode, rows), *(_cell(by.get((mode, c))) for c in columns)] for mode in modes]
    for mode in modes:
        if mode != "plain" and any(("plain", c) in by for c in columns):
            lines.append([f"{mode} / plain", *(_ratio(by.get((mode, c)), by.get(("plain", c))) for c in columns)])
    lines += [[f"tokens per step, {mode}", *(_accepted(by.get((mode, c))) for c in columns)] for mode in modes if mode != "plain"]
    lines += [
        [f"distinct experts of a layer, {mode}", *(_experts(by.get((mode, c))) for c in columns)]
        for mode in modes
        if any(row.get("distinct_experts") for row in rows if row["mode"] == mode)
    ]
    return table(["", *(f"c={column}" for column in columns)], lines)


def _cell(row: dict[str, Any] | None) -> str | None:
    if row is None:
        return None
    share = f" ({'≤ ' if row.get('roof_assumed') else ''}{percent(row['roof_share'])})" if row.get("roof_share") else ""
    return f"{row['output_throughput']:.0f}{share}"


def _ratio(row: dict[str, Any] | None, plain: dict[str, Any] | None) -> str | None:
    if row is None or plain is None or row["commit"] != plain["commit"]:  # kernels may have changed in between
        return None
    if not row["server_flags"].startswith(plain["server_flags"]):  # the servers had different `--flags`
        return None
    return f"{row['output_throughput'] / plain['output_throughput']:.2f}x"


def _accepted(row: dict[str, Any] | None) -> str | None:
    """The measured accept length: servers choose the depth, so it differs from the synthetic one, which is that of three drafts."""
    return None if row is None or row["accept_length"] is None else f"{row['accept_length']:.2f}"


def _experts(row: dict[str, Any] | None) -> str | None:
    """The mean over layers, and the values of the layers with the fewest and the most."""
    if row is None or row.get("distinct_experts") is None:
        return None
    layers = row.get("distinct_experts_by_layer")
    return f"{row['distinct_experts']:.1f}" + (f" ({min(layers):.1f} to {max(layers):.1f})" if layers else "")


def plot(result: Result, file: Path) -> None:
    """Throughput by concurrency, one panel per table."""

    def panel(title: str, rows: list[dict[str, Any]]) -> plots.Panel:
        rows = sorted(rows, key=itemgetter("concurrency"))
        groups = plots.grouped((str(row["concurrency"]), _title(row["mode"], [row]), row["output_throughput"]) for row in rows)
        return plots.bars(groups, title, "output tokens/s", kind="concurrency")

    panels = [panel("\n".join(title.rsplit(", ", 1)), rows) for title, rows in comparable(result["rows"]).items()]
    picture.draw(result, file, "Sparse and quantised models", panels, columns=2)


def setups(model: str, case: Case, served: Served, modes: list[str]) -> list[Setup]:
    """One server per mode and, with drafts, per accept length, without prefix cache."""
    labels = {"model": model, "tp_size": case.tp_size}
    found = [Setup(labels | {"mode": "plain", "steps": 0}, served.target_flags)] if "plain" in modes else []
    for length in case.accept_lengths if "drafts" in modes else ():
        forced = ("--speculative-synthetic-accept-length", length)
        found.append(
            Setup(labels | {"mode": f"accept-{length}", "steps": case.steps}, (*served.target_flags, *served.draft_flags, *forced))
        )
    return found


def measure(record: Record, model: str, args: Any) -> None:
    """Write the checkpoint of one model, measure it, and remove it unless `--keep`."""
    case = CASES[model]
    case = dataclasses.replace(case, tp_size=args.tp_size or case.tp_size, flags=(*case.flags, *args.flags))
    served = prepare(case, args.folder)
    try:
        bursts = [random_ids(c, 1000, args.output_len, args.num_prompts) for c in args.concurrency]
        sweep(record, setups(model, case, served, args.modes), bursts, served.roof)
    finally:
        if not args.keep:
            shutil.rmtree(served.folder, ignore_errors=True)


def quick(record: Record, models: list[str], modes: list[str]) -> None:
    """A smoke run of tiny models on a CPU, each with one accept length."""
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            case = dataclasses.replace(CASES[model], accept_lengths=CASES[model].accept_lengths[:1], tp_size=1)
            served = prepare_tiny(case, Path(folder))
            sweep(record, setups(model, case, served, modes), [random_ids(1, 16, 8)])


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--models", type=names, default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--modes", type=names, default=list(MODES))
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 32, 64])
    parser.add_argument("--output-len", type=positive, default=1000)
    parser.add_argument(
        "--num-prompts", type=positive, help="requests of every load; default: 2 at concurrency 1, else twice the concurrency"
    )
    parser.add_argument("--tp-size", type=positive, help="GPUs that share the models; default: as many as each needs")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/random-checkpoints"), help="where checkpoints are written")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("--flags", type=str.split, default=[], help="more flags of every server, in one argument")
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    if args.quick:
        quick(record, args.models, args.modes)
    else:
        for model in args.models:
            measure(record, model, args)
    record.show(render, plot)


if __name__ == "__main__":
    main()
