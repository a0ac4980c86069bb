"""Throughput of the 8B shape on different workloads, without drafts and at the depth that the controller chooses, compared with SGLang.

Short and long prompts, small and large batches, a shared prompt, sampling, and requests that arrive one by one; also with 8-bit keys and
values. Only the shared prompt hits the prefix cache. The context length of target and draft head is set to 32,768 tokens, for the longest
prompts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.depth_curve import AUTO, drafting
from benchmark.machine import gpu
from benchmark.markdown import Result, models, provenance, table
from benchmark.record import Record, Row
from benchmark.shapes import Model
from benchmark.sweep import Burst, Setup, arguments, names, random_ids, served_model, shared_prefix, sweep

NAME = "workloads"
KEYS = ("model", "mode", "workload")
PLAIN, NARROW_KV = "plain", "auto-e4m3-kv"
LOADS = ((1000, 1000, 1), (1000, 1000, 4), (1000, 1000, 16), (1000, 1000, 32), (1000, 1000, 64), (128, 128, 64), (128, 128, 128),
         (1000, 250, 128), (1000, 250, 256), (16000, 256, 1), (16000, 256, 8))  # fmt: skip
"""(tokens of a prompt, tokens of an answer, concurrency), for random prompts decoded greedily."""
SAMPLED = (500, 500, 16)
CONTEXT = 32768
SHARED = (2000, 200, 200, 32)
"""(shared tokens of all prompts, further tokens of each prompt, tokens of an answer, concurrency)."""
ARRIVING, SIGMA = (1000, 250, 8.0, 200), 0.8
"""(mean tokens of a prompt, of an answer, requests per second, requests): Poisson arrivals, log-normal lengths with this standard deviation
of their logarithm."""


def title(prompt: object, output: int, concurrency: int, more: str = "") -> str:
    """The name of a workload, as in the peers' file."""
    return f"{prompt} → {output}, c={concurrency}{more}"


def bursts(quick: bool) -> list[Burst]:
    """All workloads; four short ones for a smoke run."""
    loads, sampled, shared = (((16, 8, 2),), (16, 8, 2), (16, 8, 8, 2)) if quick else (LOADS, SAMPLED, SHARED)
    arriving = (16, 8, 50.0, 4) if quick else ARRIVING
    found = [_named(title(prompt, output, c), random_ids(c, prompt, output)) for prompt, output, c in loads]
    prompt, output, c = sampled
    sampling = random_ids(c, prompt, output, None, "--temperature", "0.8", "--top-p", "0.95")
    return [
        *found,
        _named(title(f"{shared[0]} shared + {shared[1]}", *shared[2:]), shared_prefix(*shared)),
        _named(title(prompt, output, c, ", sampled"), sampling),
        _arriving(*arriving),
    ]


def _named(name: str, burst: Burst) -> Burst:
    return Burst({"workload": name, **burst.labels}, burst.flags)


def _arriving(prompt: int, output: int, rate: float, requests: int) -> Burst:
    """Requests that arrive at random, however many are open."""
    flags = ["--backend", "sglang-oai", "--dataset-name", "random-ids", "--flush-cache", "--random-length-sigma", str(SIGMA)]
    flags += ["--random-input-len", str(prompt), "--random-output-len", str(output)]
    flags += ["--num-prompts", str(requests), "--request-rate", str(rate)]
    name = f"{prompt} → {output} on average, {rate:g} requests/s"
    return Burst({"workload": name, "input_len": prompt, "output_len": output, "num_prompts": requests, "request_rate": rate}, flags)


def with_long_context(served: Model, folder: Path) -> Model:
    """The same shapes with a context of `CONTEXT` tokens, written to `folder`."""
    flags = list(served.target_flags)
    at = flags.index("--model-path") + 1
    copies = [folder / "target" / Path(flags[at]).name, folder / "head"]
    for source, copy in zip((flags[at], served.head), copies, strict=True):
        copy.mkdir(parents=True)
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
        (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}), encoding="utf-8")
    flags[at] = str(copies[0])
    return replace(served, target_flags=tuple(flags), head=str(copies[1]))


def setups(served: Model, modes: list[str], quick: bool) -> list[Setup]:
    """A server for each mode."""
    common = (*served.target_flags, *(() if quick else ("--attention-backend", "fa3")))
    drafts = {PLAIN: (), AUTO: drafting(served), NARROW_KV: (*drafting(served), "--kv-cache-dtype", "fp8_e4m3")}
    return [Setup({"model": served.name, "mode": mode}, (*common, *drafts[mode])) for mode in modes]


def peers(result: Result) -> dict[str, Any]:
    """The peer's results and their source; none if Talon ran on another kind of machine."""
    data = json.loads((Path(__file__).parent / "peers_workloads.json").read_text(encoding="utf-8"))
    return data if gpu(result["machine"]) == data["device"] else data | {PLAIN: {}, AUTO: {}}


def render(result: Result) -> str:
    """One line per workload: throughput in both modes, and the ratios."""
    known = peers(result)
    source = f" Peer: {known['source']}." if known[PLAIN] else ""
    return f"{summary(result)}\n\nTalon: {provenance(result)}{source}"


def summary(result: Result) -> str:
    """The tables alone: throughput, and times of requests that arrive at a given rate."""
    known, lines = peers(result), list[list[Any]]()
    closed, arriving = ([row for row in result["rows"] if ("request_rate" in row) == opens] for opens in (False, True))
    with_narrow = any(row["mode"] == NARROW_KV for row in closed)
    for name in dict.fromkeys(row["workload"] for row in closed):
        ours = {row["mode"]: row["output_throughput"] for row in closed if row["workload"] == name}
        plain, auto, narrow = ours.get(PLAIN), ours.get(AUTO), ours.get(NARROW_KV)
        line = [name, plain, _ratio(plain, known[PLAIN].get(name)), auto, _ratio(auto, known[AUTO].get(name)), _ratio(auto, plain)]
        lines.append([*line, narrow] if with_narrow else line)
    head = ["prompt → answer", "plain, tok/s", "against SGLang", "auto, tok/s", "against SGLang with EAGLE", "auto / plain"]
    found = table([*head, "auto, 8-bit KV, tok/s"] if with_narrow else head, lines)
    return found if not arriving else f"{found}\n\n{_times(arriving)}"


def _times(rows: Sequence[Row]) -> str:
    """Mean times of requests with Poisson arrivals and log-normal lengths."""
    columns = ("mean_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "p99_ttft_ms")
    lines = [[row["workload"], row["mode"], *(row[name] for name in columns)] for row in rows]
    head = ["Poisson arrivals, log-normal lengths", "mode", "TPOT (ms)", "TPOT, p99 (ms)", "TTFT (ms)", "TTFT, p99 (ms)"]
    return table(head, lines)


def _ratio(value: float | None, other: float | None) -> str | None:
    return None if value is None or not other else f"{value / other:.3f}"


def plot(result: Result, file: Path) -> None:
    """Both modes and the peer, relative to the peer's throughput without drafts if it is known, else to ours."""
    known = peers(result)
    base = known[PLAIN] or {
        row["workload"]: row["output_throughput"] for row in result["rows"] if row["mode"] == PLAIN and "request_rate" not in row
    }
    groups: dict[str, dict[str, float | None]] = {}
    for row in result["rows"]:
        if row["workload"] in base:
            groups.setdefault(row["workload"], {})[f"Talon, {row['mode']}"] = row["output_throughput"] / base[row["workload"]]
    for name, value in known[AUTO].items():
        if name in groups:
            groups[name]["SGLang, EAGLE 3/1/4"] = value / base[name]
    unit = "throughput / SGLang without drafts" if known[PLAIN] else "throughput / no drafts"
    picture.draw(result, file, f"Workloads: {models(result)}", [plots.bars(groups, "", unit, kind="workload")], columns=1)


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--modes", type=names, default=[PLAIN, AUTO, NARROW_KV])
    parser.add_argument("--only", type=names, default=[], help="only workloads whose name starts so, e.g. '128 → 128,1000 → 250'")
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    loads = [burst for burst in bursts(args.quick) if not args.only or burst.labels["workload"].startswith(tuple(args.only))]
    with tempfile.TemporaryDirectory() as folder:
        served = served_model(args) if args.quick else with_long_context(served_model(args), Path(folder))
        sweep(record, setups(served, args.modes, args.quick), loads)
    record.show(render, plot)


if __name__ == "__main__":
    main()
