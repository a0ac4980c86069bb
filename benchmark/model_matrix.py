"""Throughput of sparse, quantised and latent models with random weights, with and without drafts, against their roofs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark import picture, plots, random_checkpoint
from benchmark.markdown import Result, percent, provenance, table
from benchmark.record import Record
from benchmark.shapes import CONFIGS, Model, tiny_sparse_model
from benchmark.step_bytes import ModelRoof, StepBytes
from benchmark.sweep import Burst, Setup, arguments, names, numbers, random_ids, sweep

NAME = "model_matrix"
KEYS = ("model", "mode", "concurrency", "input_len", "output_len", "tp_size")
STEPS = 3
ACCEPT_LENGTH = "2.5"


@dataclass(frozen=True, slots=True)
class Case:
    """One model of the matrix.

    Attributes:
        title: its name in the tables.
        shape, draft: folders of `benchmark/configs`.
        peers: tok/s of one request of a peer, the sum of its published kernel times; None where they are not published.
    """

    title: str
    shape: str
    draft: str
    peers: str | None = None


CASES = {
    "qwen3-30b-a3b": Case("Qwen3-30B-A3B, bf16", "qwen3-30b-a3b", "qwen3-30b-a3b-eagle3", "250"),
    "qwen3-30b-a3b-fp8": Case("Qwen3-30B-A3B-FP8", "qwen3-30b-a3b-fp8", "qwen3-30b-a3b-eagle3", "275 to 300"),
    "gpt-oss-20b": Case("gpt-oss-20b, MXFP4", "gpt-oss-20b", "gpt-oss-20b-eagle3", "345"),
}
PEERS_SOURCE = (
    "kernel times of NVIDIA's aiconfigurator, commit 095f58a51 (SGLang 0.5.14, vLLM 0.22 to 0.24, TensorRT-LLM 1.3.0rc20), summed up"
)
MODES = {"plain": "plain", "eagle": f"EAGLE-3, up to {STEPS} drafts, synthetic accept length {ACCEPT_LENGTH}"}


def render(result: Result) -> str:
    """One table per model."""
    return f"{summary(result)}\n\nTalon: {provenance(result)} Peers: {PEERS_SOURCE}."


def summary(result: Result) -> str:
    """The tables alone."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        case = CASES.get(model)
        rows = [row for row in result["rows"] if row["model"] == model]
        peers = f" Peers at c=1, plain: {case.peers} tok/s." if case and case.peers else ""
        parts += [f"**{case.title if case else model}**: output tok/s (share of the roof).{peers}", "", _table(rows), ""]
    return "\n".join(parts).strip()


def _table(rows: list[dict[str, Any]]) -> str:
    columns = sorted({row["concurrency"] for row in rows})
    by = {(row["mode"], row["concurrency"]): row for row in rows}
    lines = []
    for mode, title in MODES.items():
        if any(row["mode"] == mode for row in rows):
            lines.append([title, *(_cell(by.get((mode, column))) for column in columns)])
    lines.append(["drafts / plain", *(_ratio(by.get(("eagle", c)), by.get(("plain", c))) for c in columns)])
    if any(row.get("distinct_experts") for row in rows):
        lines.append(["distinct experts of a layer, plain", *(_experts(by.get(("plain", c))) for c in columns)])
        lines.append(["distinct experts of a layer, drafts", *(_experts(by.get(("eagle", c))) for c in columns)])
    return table(["", *(f"c={column}" for column in columns)], lines)


def _cell(row: dict[str, Any] | None) -> str | None:
    if row is None:
        return None
    share = f" ({percent(row['roof_share'])})" if row.get("roof_share") else ""
    return f"{row['output_throughput']:.0f}{share}"


def _ratio(row: dict[str, Any] | None, plain: dict[str, Any] | None) -> str | None:
    return None if row is None or plain is None else f"{row['output_throughput'] / plain['output_throughput']:.2f}x"


def _experts(row: dict[str, Any] | None) -> str | None:
    return None if row is None or row.get("distinct_experts") is None else f"{row['distinct_experts']:.1f}"


def plot(result: Result, file: Path) -> None:
    """Throughput by concurrency, one panel per model."""

    def panel(model: str) -> plots.Panel:
        groups: dict[str, dict[str, float | None]] = {}
        for row in sorted((row for row in result["rows"] if row["model"] == model), key=lambda row: row["concurrency"]):
            groups.setdefault(str(row["concurrency"]), {})[MODES[row["mode"]]] = row["output_throughput"]
        return plots.bars(groups, CASES[model].title if model in CASES else model, "output tokens/s", kind="concurrency")

    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    picture.draw(result, file, "Sparse and quantised models", [panel(model) for model in models], columns=2)


def setups(model: str, served: Model, modes: list[str], tp_size: int) -> list[Setup]:
    """One server per mode, without prefix cache."""
    ranks = ("--tp-size", str(tp_size)) if tp_size > 1 else ()
    found = []
    for mode in modes:
        drafts = served.eagle_flags(ACCEPT_LENGTH, STEPS) if mode == "eagle" else ()
        labels = {"model": model, "mode": mode, "steps": STEPS if drafts else 0, "tp_size": tp_size}
        found.append(Setup(labels, (*served.target_flags, *ranks, "--disable-radix-cache", *drafts)))
    return found


def measure(record: Record, case: Case, args: Any) -> None:
    """Write the checkpoint of one model, measure it, and remove it unless `--keep`."""
    folder = args.folder / case.shape
    if not (folder / "config.json").is_file():
        random_checkpoint.write(CONFIGS / case.shape, folder)
    try:
        flags = ("--model-path", str(folder), "--random-seed", "1", *args.flags)
        served = Model(case.shape, flags, str(CONFIGS / case.draft), None)
        roof = ModelRoof(StepBytes.of_target(folder), StepBytes.of_draft(CONFIGS / case.draft, folder))
        bursts = [random_ids(c, 1000, args.output_len, args.num_prompts) for c in args.concurrency]
        sweep(record, setups(case.shape, served, args.modes, args.tp_size), bursts, roof)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def quick(record: Record, modes: list[str]) -> None:
    """A smoke run with a tiny sparse model on a CPU."""
    served = tiny_sparse_model()
    bursts: list[Burst] = [random_ids(c, 16, 8) for c in (1, 2)]
    sweep(record, setups(served.name, served, modes, 1), bursts)


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--models", type=names, default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--modes", type=names, default=list(MODES))
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 32, 64])
    parser.add_argument("--output-len", type=int, default=1000)
    parser.add_argument("--num-prompts", type=int, help="requests of every load; default: 2 at concurrency 1, else twice the concurrency")
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/random-checkpoints"), help="where checkpoints are written")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("--flags", type=str.split, default=[], help="more flags of every server, in one argument")
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    if args.quick:
        quick(record, args.modes)
    else:
        for model in args.models:
            measure(record, CASES[model], args)
    plot(record.data, record.file.with_suffix(".png"))
    print(render(record.data))


if __name__ == "__main__":
    main()
