"""Planned and used memory of workers with a full KV pool.

Each case is a process. Its worker runs the largest prompt step. Then it decodes the largest batch with a full KV pool: first greedy, then
with every filter, penalties and 20 log-probabilities for all requests.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmark import picture, plots
from benchmark.markdown import Result, percent, provenance, table
from benchmark.record import Record, Row
from benchmark.server import apart
from benchmark.shapes import TARGET, Model, big_model, named_model, tiny_model
from benchmark.sweep import arguments, names
from runtime.errors import ConfigError

NAME = "memory_limits"
KEYS = ("case",)
MIB = 1 << 20
LONG_CONTEXT = 131072
STEPS = 4
"""Decode steps of each kind."""
PENALISED = 8
MAX_UNUSED = 0.02
"""Maximum share of the device memory that may stay unused."""
MAX_APART_MIB = 64.0
"""Maximum difference between the reserved and the used memory of a graph runner."""


@dataclass(frozen=True)
class Case:
    """One worker to fill. `spec`: steps, topk and draft tokens."""

    model: str
    batch: int
    chunk: int
    spec: tuple[int, int, int] | None = None
    long_context: bool = False
    backend: str = "fa3"

    @property
    def name(self) -> str:
        """The name in rows and for `--cases`."""
        spec = "eagle-" + "-".join(map(str, self.spec)) if self.spec else "plain"
        context = "-128k" if self.long_context else ""
        return f"{self.model}-{spec}-b{self.batch}-c{self.chunk}{context}" + ("" if self.backend == "fa3" else f"-{self.backend}")


CASES = (
    Case("8b", 1, 512),
    Case("8b", 256, 8192),
    Case("8b", 512, 16384),
    Case("8b", 32, 8192, long_context=True),
    Case("8b", 1, 8192, (3, 1, 4)),
    Case("8b", 256, 8192, (3, 1, 4)),
    Case("8b", 512, 512, (3, 1, 4)),
    Case("8b", 128, 16384, (5, 4, 8), long_context=True),
    Case("8b", 128, 8192, (5, 4, 8), backend="flashinfer"),
    Case("embedded", 512, 16384),
    Case("embedded", 256, 8192, (3, 1, 4)),
)


def flags(case: Case, served: Model, folder: Path) -> list[str]:
    """The server's flags of a case; `folder` is for files that the case needs."""
    target = [*served.target_flags]
    if case.long_context:
        config = json.loads((TARGET / "config.json").read_text(encoding="utf-8")) | {"max_position_embeddings": LONG_CONTEXT}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        target[target.index("--model-path") + 1] = str(folder)
    if case.spec:
        target += served.eagle_flags(None, *case.spec)
    if served.name == "tiny":
        return [*target, "--chunked-prefill-size", str(case.chunk)]
    limits = ["--cuda-graph-max-bs", str(case.batch), "--max-running-requests", str(case.batch)]
    return [*target, "--attention-backend", case.backend, *limits, "--chunked-prefill-size", str(case.chunk)]


def fill(flags: Sequence[str]) -> Row:
    """Build the worker in this process, fill it, and report its memory."""
    from benchmark.full_worker import FullWorker

    return FullWorker(flags).row(STEPS, PENALISED)


def faults(row: Row) -> list[str]:
    """The faults of a row; empty if the case fits."""
    if "error" in row:
        return [row["error"]]
    found = []
    if row["unused"] >= MAX_UNUSED:
        found.append(f"{percent(row['unused'], 1)} unused")
    apart = [g for g in row["graphs"] if abs(g["reserved_mib"] - g["used_mib"]) > MAX_APART_MIB]
    found += [f"{g['runner']}: {g['reserved_mib']:.0f} MiB reserved, {g['used_mib']:.0f} used" for g in apart]
    return found


def render(result: Result) -> str:
    """One row per case, then one per graph runner."""
    runners = [
        [row["case"], g["runner"], max(g["sizes"], default=None), g["seconds"], g["reserved_mib"], g["used_mib"]]
        for row in result["rows"]
        for g in row.get("graphs", [])
    ]
    parts = [summary(result), ""]
    if runners:
        parts += [table(["case", "runner", "largest batch", "seconds", "reserved MiB", "used MiB"], runners), ""]
    return "\n".join([*parts, provenance(result)])


def summary(result: Result) -> str:
    """One row per case."""
    columns = ("weights_and_context_mib", "activations_mib", "peak_mib", "kv_mib", "outside_mib", "unused_mib")
    lines = [
        [row["case"], *(row.get(name) for name in columns), percent(row.get("unused"), 2), "; ".join(faults(row)) or "fits"]
        for row in result["rows"]
    ]
    header = ["case", "weights, context (MiB)", "activations: planned", "used", "KV", "outside torch", "unused", "of the GPU", "result"]
    return table(header, lines)


def plot(result: Result, file: Path) -> None:
    """The unused memory of each case; the reserved and the used memory of each graph runner."""
    rows = [row for row in result["rows"] if "unused" in row]
    left = {row["case"]: {"unused": row["unused"] * 100} for row in rows}
    memory = {
        f"{row['case']}: {g['runner']}": {"reserved": g["reserved_mib"], "used": g["used_mib"]} for row in rows for g in row["graphs"]
    }
    most = MAX_UNUSED * 100
    panels = [
        plots.bars(left, f"Unused memory when full; at most {most:g} % is allowed", "per cent of the device", bound=most),
        plots.bars(memory, "Graph runners", "MiB"),
    ]
    picture.draw(result, file, "Memory at its limits", panels)


def run(case: Case, served: Model) -> Row:
    """`fill` in its own process; a row with `error` if the worker does not fit."""
    print("+", case.name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return apart(fill, flags=flags(case, served, Path(folder)))
        except (ConfigError, torch.OutOfMemoryError) as error:
            traceback.print_exception(error)
            return {"error": f"{type(error).__name__}: {error}"[:300]}


def main() -> int:
    """Fill, record and plot; return 1 if a case does not fit or wastes memory."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=names, help=f"some of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--model", help="file of the embedded model; without it its cases are skipped")
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    models = {"8b": big_model()} | ({"embedded": named_model(args.model, None)} if args.model else {})
    cases: Sequence[Case] = [case for case in CASES if case.model in models and (not args.cases or case.name in args.cases)]
    if args.quick:
        models, cases = {"tiny": tiny_model()}, [Case("tiny", 8, 64), Case("tiny", 8, 64, (5, 4, 8))]
    rows = list[Row]()
    for case in cases:
        rows.append({"case": case.name, **run(case, models[case.model])})
        record.add(rows[-1])
    record.show(render, plot)
    return 1 if any(map(faults, rows)) and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
