"""Throughput and latency of the 8B shape with and without EAGLE by concurrency, and of SGLang and vLLM on the same kind of machine."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.machine import gpu
from benchmark.markdown import Result, on_gpus, percent, provenance, split, table
from benchmark.record import Record
from benchmark.shapes import Model
from benchmark.sweep import Setup, arguments, names, numbers, positive, random_ids, served_model, sweep

NAME = "serving_matrix"
KEYS = ("mode", "backend", "concurrency", "input_len", "output_len")
STEPS = 3
ACCEPT_LENGTH = "2.5"
EAGLE = "EAGLE 3/1/4, synthetic accept length 2.5"
TITLES = {"plain": "Plain decoding", "eagle": EAGLE, "eagle_whole": f"{EAGLE}, each rank with the whole draft"}


def peers(result: Result) -> dict[str, Any]:
    """The peers' results and their source; no rows if Talon ran on another kind of machine."""
    data = json.loads((Path(__file__).parent / "peers.json").read_text(encoding="utf-8"))
    sizes = {row.get("tp_size", 1) for row in result["rows"]}
    same = gpu(result["machine"]) == data["device"]
    return data | {"rows": [row for row in data["rows"] if same and {row.get("tp_size", 1)} == sizes]}


def setups(served: Model, modes: list[str], backends: list[str], tp_size: int = 1) -> list[Setup]:
    """One server per mode and attention backend, without prefix cache, like the peers."""
    ranks = ("--tp-size", str(tp_size)) if tp_size > 1 else ()
    found = []
    for backend in backends:
        for mode in modes:
            flags = (*served.target_flags, *ranks, "--attention-backend", backend, "--disable-radix-cache")
            eagle = () if mode == "plain" else served.eagle_flags(ACCEPT_LENGTH, STEPS)
            eagle = (*eagle, "--speculative-draft-tp-size", "1") if mode == "eagle_whole" else eagle
            labels = {"mode": mode, "backend": backend, "steps": STEPS if eagle else 0, **({"tp_size": tp_size} if ranks else {})}
            found.append(Setup(labels, (*flags, *eagle)))
    return found


def best_peer(rivals: list[dict[str, Any]], mode: str, concurrency: int) -> dict[str, Any] | None:
    """The peer with the highest throughput at this concurrency."""
    same = [row for row in rivals if (row["mode"], row["concurrency"]) == (mode, concurrency)]
    return max(same, key=lambda row: row["output_throughput"], default=None)


def render(result: Result) -> str:
    """One table per mode: Talon's rows, the peers' rows, and Talon's best relative to the best peer."""
    source = peers(result)
    peers_source = f" Peers: {source['source']}." if source["rows"] else ""
    return f"{summary(result)}\n\nTalon: {provenance(result)}{peers_source}"


def summary(result: Result) -> str:
    """The tables alone."""
    known, parts = peers(result), []
    for mode in TITLES:
        rows = [row for row in result["rows"] if row["mode"] == mode]
        if rows:
            parts += [
                f"**{TITLES[mode]}{on_gpus(rows[0])}**: output tok/s / mean TTFT ms / mean TPOT ms (share of the roof)",
                "",
                _mode_table(rows, known["rows"], mode),
                "",
            ]
    return "\n".join(parts).strip()


def _mode_table(rows: list[dict[str, Any]], rivals: list[dict[str, Any]], mode: str) -> str:
    columns = sorted({row["concurrency"] for row in rows})
    known = [row | {"system": "Talon"} for row in rows] + [row for row in rivals if row["mode"] == mode]
    lines = []
    for (system, backend), own in split(known, itemgetter("system", "backend")).items():
        by = {row["concurrency"]: row for row in own}
        lines.append([f"{system}, {backend}", *(_cell(by.get(column)) for column in columns)])
    if rivals:
        lines.append(["Talon's best against the best peer", *(_against(rows, rivals, mode, column) for column in columns)])
    return table(["", *(f"c={column}" for column in columns)], lines)


def _cell(row: dict[str, Any] | None) -> str | None:
    if row is None:
        return None
    if row["mean_tpot_ms"] is None:  # only a peer's throughput is known, or answers arrived in one piece
        return f"{row['output_throughput']:.0f}"
    share = f" ({percent(row['roof_share'])})" if row.get("roof_share") else ""
    return f"{row['output_throughput']:.0f} / {row['mean_ttft_ms']:.1f} / {row['mean_tpot_ms']:.2f}{share}"


def _against(rows: list[dict[str, Any]], rivals: list[dict[str, Any]], mode: str, concurrency: int) -> str | None:
    ours = max((row["output_throughput"] for row in rows if row["concurrency"] == concurrency), default=None)
    peer = best_peer(rivals, mode, concurrency)
    return None if ours is None or peer is None else f"{ours / peer['output_throughput']:.3f}x"


def model_name(row: dict[str, Any]) -> str:
    """The folder name of the served model."""
    words = row.get("server_flags", "").split()
    return Path(words[words.index("--model-path") + 1]).name if "--model-path" in words else "embedded model"


def plot(result: Result, file: Path) -> None:
    """Throughput by concurrency and system, one panel per mode."""
    known = [row | {"system": "Talon"} for row in result["rows"]] + peers(result)["rows"]

    def panel(mode: str) -> plots.Panel:
        own = sorted((row for row in known if row["mode"] == mode), key=itemgetter("concurrency"))
        groups = plots.grouped((str(row["concurrency"]), f"{row['system']}, {row['backend']}", row["output_throughput"]) for row in own)
        return plots.bars(groups, TITLES[mode] + on_gpus(result["rows"][0]), "output tokens/s", kind="concurrency")

    panels = [panel(mode) for mode in TITLES if any(row["mode"] == mode for row in result["rows"])]
    models = ", ".join(dict.fromkeys(model_name(row) for row in result["rows"]))
    picture.draw(result, file, f"Serving {models}", panels, columns=2)


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 32])
    parser.add_argument("--modes", type=names, default=["plain", "eagle"])
    parser.add_argument("--backends", type=names, default=["fa3"])
    parser.add_argument("--tp-size", type=positive, default=1, help="GPUs that share the model")
    args = parser.parse_args()
    name = NAME if args.tp_size == 1 else f"{NAME}_tp{args.tp_size}"
    record = Record(name, KEYS, args.out, args.quick)
    served = served_model(args)
    backends = ["torch_native"] if args.quick else args.backends
    lens = (16, 8) if args.quick else (1000, 1000)
    bursts = [random_ids(c, *lens) for c in ([1, 2] if args.quick else args.concurrency)]
    roof = served.shape.roof.of_ranks(args.tp_size) if served.shape else None
    sweep(record, setups(served, args.modes, backends, args.tp_size), bursts, roof)
    record.show(render, plot)


if __name__ == "__main__":
    main()
