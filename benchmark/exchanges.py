"""Exchanges between GPUs of one host: our kernels and NCCL, replayed from graphs.

Sums are added to a float32 residual stream, which takes one kernel, or NCCL and a kernel that adds. Every rank gathers the rows of all
ranks, or gets its own rows of a sum. GB/s: the bytes that a rank must send at least, divided by our time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.spawn import spawn

from benchmark import picture, plots
from benchmark.markdown import Result, provenance, split, table
from benchmark.record import Record, Row
from benchmark.sweep import numbers, positive

if TYPE_CHECKING:
    from runtime.layers.cuda_group import CudaGroup
    from runtime.layers.kernels.push_exchange import PushExchange

NAME = "exchanges"
KEYS = ("ranks", "exchange", "rows", "columns")
COLUMNS = 8192
ROWS = [1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048]
CALLS, REPLAYS = 20, 9
TIMEOUT = 60.0
ROWS_FILE = "rows.json"


def measure(group: CudaGroup, rows: int, columns: int, device: torch.device) -> list[Row]:
    """Microseconds of each exchange of arrays of this many rows; the same on all ranks, which call it together."""
    fused = group.fused
    assert fused is not None, "our kernels work between these GPUs"
    x = torch.zeros((rows, columns), dtype=torch.bfloat16, device=device)
    h, whole = torch.zeros((rows, columns), device=device), torch.zeros((group.size * rows, columns), dtype=x.dtype, device=device)
    shots = [_micros(group, partial(_add, fused, x, h, limit)) for limit in (sys.maxsize, 0)]
    own = {"gather": _micros(group, lambda: group.gather_rows(x)), "own rows of a sum": _micros(group, lambda: group.scatter_sum(whole))}
    limit, fused.limit = fused.limit, 0  # these calls then use NCCL
    nccl = {
        "sum": _micros(group, lambda: h.add_(group.all_reduce(x))),
        "gather": _micros(group, lambda: group.gather_rows(x)),
        "own rows of a sum": _micros(group, lambda: group.scatter_sum(whole)),
    }
    fused.limit = limit
    found: dict[str, Row] = {"sum": {"us": min(shots), "one_shot_us": shots[0], "two_shots_us": shots[1] if group.size > 2 else None}}
    found |= {name: {"us": micros} for name, micros in own.items()}
    sent = {"sum": 2 * (group.size - 1) / group.size, "gather": group.size - 1, "own rows of a sum": group.size - 1}
    labels = {"ranks": group.size, "rows": rows, "columns": columns, "bytes": x.nbytes}
    return [
        {**labels, "exchange": name, **times, "nccl_us": nccl[name], "gb_per_s": sent[name] * x.nbytes / times["us"] / 1e3}
        for name, times in found.items()
    ]


def _add(fused: PushExchange, x: torch.Tensor, h: torch.Tensor, one_shot_limit: int) -> None:
    fused.one_shot_limit = one_shot_limit
    fused.add(x, h)


def _micros(group: CudaGroup, run: Callable[[], object]) -> float:
    from runtime.layers.kernels.graph_timer import median_micros

    run()
    torch.cuda.synchronize()
    group.gather(None)
    return group.agree(median_micros(run, REPLAYS, CALLS))


def one_rank(rank: int, ranks: int, folder: str, rows: list[int], columns: int) -> None:
    """Measure as one of the ranks; rank 0 writes the rows to ROWS_FILE in `folder`."""
    from runtime.distributed.rendezvous import Rendezvous
    from runtime.distributed.torch_group import TorchGroup
    from runtime.layers.cuda_group import CudaGroup

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    control = TorchGroup.join(Rendezvous.in_folder(folder), rank, ranks, TIMEOUT)
    group = CudaGroup(control, device, own_kernels=True, timeout=TIMEOUT)
    found = [row for count in rows for row in measure(group, count, columns, device)]
    if rank == 0:
        (Path(folder) / ROWS_FILE).write_text(json.dumps(found))


def render(result: Result) -> str:
    """One table for each number of ranks."""
    parts = []
    for ranks, rows in sorted(split(result["rows"], itemgetter("ranks")).items()):
        header = ["exchange", "rows", "KiB per rank", "one shot, µs", "two shots, µs", "ours, µs", "GB/s", "NCCL, µs", "NCCL / ours"]
        lines = [[row["exchange"], row["rows"], row["bytes"] / 1024, *_times(row)] for row in sorted(rows, key=lambda row: row["exchange"])]
        parts += [f"**{ranks} GPUs, rows of {rows[0]['columns']:,} bfloat16 numbers**", "", table(header, lines), ""]
    return "\n".join([*parts, provenance(result)])


def _times(row: Row) -> list[Any]:
    shots = [row.get("one_shot_us"), row.get("two_shots_us")]
    return [*shots, row["us"], row["gb_per_s"], row["nccl_us"], row["nccl_us"] / row["us"]]


def summary(result: Result) -> str:
    """How many times as long NCCL takes for sums."""
    sums = [row for row in result["rows"] if row["exchange"] == "sum"]
    counts = sorted({row["rows"] for row in sums})
    lines = []
    for ranks, rows in sorted(split(sums, itemgetter("ranks")).items()):
        by = {row["rows"]: row["nccl_us"] / row["us"] for row in rows}
        lines.append([f"{ranks} GPUs", *(by.get(count) for count in counts)])
    return table(["sums, NCCL's time / ours", *(f"{count} rows" for count in counts)], lines)


def plot(result: Result, file: Path) -> None:
    """Times of sums by bytes."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in result["rows"]:
        if row["exchange"] == "sum":
            for name in ("us", "nccl_us"):
                label = f"{'ours' if name == 'us' else 'NCCL'}, {row['ranks']} GPUs"
                series.setdefault(label, []).append((row["bytes"] / 1024, row[name]))
    panel = plots.lines(series, "", "KiB per rank", "µs", log=True)
    picture.draw(result, file, "Sums over the GPUs of one host, added to the residual stream", [panel])


def main() -> None:
    """Measure, record and plot."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmark.{NAME}", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for result files instead of benchmark/results")
    parser.add_argument("--ranks", type=numbers, default=[2, 4], help="numbers of GPUs (default %(default)s)")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="numbers of rows (default %(default)s)")
    parser.add_argument("--columns", type=positive, default=COLUMNS, help="numbers per row (default %(default)s)")
    args = parser.parse_args()
    if torch.cuda.device_count() < max(args.ranks):
        raise SystemExit(f"{parser.prog}: {max(args.ranks)} CUDA GPUs are required, and torch finds {torch.cuda.device_count()}")
    record = Record(NAME, KEYS, args.out)
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(one_rank, args=(ranks, folder, args.rows, args.columns), nprocs=ranks)
            for row in json.loads((Path(folder) / ROWS_FILE).read_text()):
                record.add(row)
    record.show(render, plot)


if __name__ == "__main__":
    main()
