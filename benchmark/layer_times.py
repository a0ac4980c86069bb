"""Times of one sparse layer of DeepSeek-V3, from runs with 8 and with 4 layers, and an extrapolation to all 61 layers at TP 8."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.markdown import on_gpus, table
from benchmark.model_bytes import roof_of
from benchmark.random_checkpoint import write_config
from benchmark.shapes import CONFIGS
from benchmark.step_bytes import ModelRoof

MORE, FEWER = "deepseek-v3-8-layers", "deepseek-v3-4-layers"
COUNTS = {MORE: 8, FEWER: 4}
LAYERS, DENSE, RANKS = 61, 3, 8
HIDDEN = 7168
EXCHANGE_MICROS = 3.6
"""Microseconds of one all-reduce of a decode step over 8 GPUs of an NVLink host, published for SGLang 0.5.14."""
PUBLISHED = {1: 139.7, 32: 54.4}
"""tok/s per user by concurrency: SGLang, pull request 6606, TP 8, 3 draft steps."""
ASSUMPTIONS = (
    "A layer's time is the difference of both runs divided by 4. Extrapolated to 61 layers at TP 8, on these assumptions: (1) what is "
    "not all-reduce shrinks with the bytes that a rank reads, so kernels keep their share of the roof with less work; "
    f"(2) each layer has two all-reduces, measured here on fewer GPUs and {EXCHANGE_MICROS} us on 8; (3) routing is uniform, and the 53 "
    "sparse layers that were not run take as long; (4) the accept length stays. Published: SGLang pull request 6606, TP 8, real weights."
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an iteration: its milliseconds at the measured number of ranks, its number of all-reduces, its bytes by number of ranks."""

    ms: float
    exchanges: int
    bytes: dict[int, float]

    def on(self, ranks: int, measured: int, exchange_ms: float, exchange_ms_there: float) -> float:
        """Its milliseconds on `ranks` GPUs, extrapolated from those on `measured` GPUs."""
        share = (self.bytes[ranks] / ranks) / (self.bytes[measured] / measured)
        return max(self.ms - self.exchanges * exchange_ms, 0.0) * share + self.exchanges * exchange_ms_there


def summary(rows: Sequence[Row]) -> str:
    """The table; empty if the runs are missing."""
    by = {tuple(row.get(name) for name in ("model", "mode", "concurrency", "tp_size", "input_len", "output_len")): row for row in rows}
    pairs = [(row, by.get((FEWER, *key[1:]))) for key, row in by.items() if key[0] == MORE]
    found = [(more, fewer) for more, fewer in pairs if fewer is not None and more.get("iteration_ms") and fewer.get("iteration_ms")]
    if not found:
        return ""
    roofs = _roofs()
    lines = [_line(more, fewer, roofs) for more, fewer in found]
    head = ["", "ms of a sparse layer", "roof", "share", "all-reduce, us", "61 layers at TP 8, tok/s per user", "published"]
    return f"**One layer of DeepSeek-V3**\n\n{table(head, lines)}\n\n{ASSUMPTIONS}"


def _line(more: Row, fewer: Row, roofs: dict[str, ModelRoof]) -> list[str | None]:
    ranks, requests = more["tp_size"], more["concurrency"]
    accepted = (more["accept_length"] or 1.0) if more["steps"] else 1.0
    steps = more["steps"] if accepted > 1 else 0
    count = COUNTS[MORE] - COUNTS[FEWER]
    layer = (more["iteration_ms"] - fewer["iteration_ms"]) / count
    least = (more["roof_ms"] - fewer["roof_ms"]) / count
    context = more["input_len"] + more["output_len"] / 2
    read = {name: {n: roofs[name].of_ranks(n).bytes(steps, requests, context) for n in (ranks, RANKS)} for name in COUNTS}
    layer_bytes = {n: (read[MORE][n] - read[FEWER][n]) / count for n in (ranks, RANKS)}
    sparse = COUNTS[MORE] - DENSE
    rest_bytes = {n: read[MORE][n] - sparse * layer_bytes[n] for n in (ranks, RANKS)}
    exchange = _exchange_ms(more, requests * (steps + 1) * HIDDEN * 2)
    rest = Part(more["iteration_ms"] - sparse * layer, 2 * (DENSE + steps), rest_bytes)
    parts = [(Part(layer, 2, layer_bytes), LAYERS - DENSE), (rest, 1)]
    whole = sum(n * part.on(RANKS, ranks, exchange, EXCHANGE_MICROS / 1000) for part, n in parts)
    bound = "≤ " if more.get("roof_assumed") or fewer.get("roof_assumed") else ""
    published = PUBLISHED.get(requests) if steps else None
    return [
        f"{more['mode']}, c={requests}{on_gpus(more)}", f"{layer:.3f}", f"{least:.3f}",
        f"{bound}{least / layer:.0%}" if layer > 0 else None, f"{exchange * 1000:.1f}",
        f"{1000 * accepted / whole:.0f}", None if published is None else str(published),
    ]  # fmt: skip


def _exchange_ms(row: Row, size: int) -> float:
    """Milliseconds of an all-reduce of `size` bytes, the fastest measured at start-up; 0 if none was measured."""
    micros = {int(key): min(float(part) for part in value.split(" / ")) for key, value in (row.get("exchange_micros") or {}).items()}
    if not micros:
        return 0.0
    return micros[min((key for key in micros if key >= size), default=max(micros))] / 1000


def _roofs() -> dict[str, ModelRoof]:
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: roof_of(write_config(CONFIGS / "deepseek-v3", Path(folder) / name, {"num_hidden_layers": layers}), "MTP")
            for name, layers in COUNTS.items()
        }
