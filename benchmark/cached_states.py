"""Prompts that begin alike, on a model with linear attention, with and without its prefix cache.

Behind a cached prefix a request begins with a cached recurrent state. The weights are random; answers are decoded greedily, without drafts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, pick, table, with_provenance
from benchmark.model_cases import CASES, Served, prepare, prepare_tiny
from benchmark.record import Record
from benchmark.sweep import Burst, Setup, arguments, shared_prefix, sweep

NAME = "cached_states"
KEYS = ("model", "cache", "load")
MODEL = "qwen3.5-35b-a3b"
ON, OFF = "on", "off"
LOADS = ((2000, 200, 200, 32), (16000, 200, 200, 8))
"""(shared tokens of all prompts, further tokens of each, tokens of an answer, concurrency)."""
DISABLE = "--disable-radix-cache"


def bursts(quick: bool) -> list[Burst]:
    """The loads; a short one for a smoke run."""
    found = list[Burst]()
    for shared, own, output, concurrency in ((300, 8, 8, 2),) if quick else LOADS:
        burst = shared_prefix(shared, own, output, concurrency)
        title = f"{shared} shared + {own} → {output}, c={concurrency}"
        found.append(Burst({"load": title, **burst.labels}, burst.flags))
    return found


def setups(served: Served) -> list[Setup]:
    """A server with the prefix cache and one without."""
    flags = [flag for flag in served.target_flags if flag != DISABLE]
    return [Setup({"model": MODEL, "cache": cache}, flags if cache == ON else [*flags, DISABLE]) for cache in (ON, OFF)]


def summary(result: Result) -> str:
    """One row per load: throughput and mean TTFT without and with the cache, and the ratios."""
    rows, lines = result["rows"], []
    for load in dict.fromkeys(row["load"] for row in rows):
        off, on = (pick(rows, load=load, cache=cache) for cache in (OFF, ON))
        cells = [row and row[name] for name in ("output_throughput", "mean_ttft_ms") for row in (off, on)]
        gain = on["output_throughput"] / off["output_throughput"] if on and off else None
        lines.append([load, *cells, gain])
    head = ["prompt → answer", "tok/s, no cache", "tok/s", "TTFT (ms), no cache", "TTFT (ms)", "throughput / no cache"]
    return table(head, lines)


render = with_provenance(summary)


def plot(result: Result, file: Path) -> None:
    """Throughput by load."""
    groups: dict[str, Mapping[str, Any]] = {
        load: {f"cache {row['cache']}": row["output_throughput"] for row in result["rows"] if row["load"] == load}
        for load in dict.fromkeys(row["load"] for row in result["rows"])
    }
    title = CASES[MODEL].title
    picture.draw(result, file, f"Prompts that begin alike: {title}", [plots.bars(groups, "", "output tokens/s", kind="load")], columns=1)


def main() -> None:
    """Measure, record and plot."""
    args = arguments(__doc__).parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    with tempfile.TemporaryDirectory() as folder:
        served = (prepare_tiny if args.quick else prepare)(CASES[MODEL], Path(folder))
        sweep(record, setups(served), bursts(args.quick))
    record.show(render, plot)


if __name__ == "__main__":
    main()
