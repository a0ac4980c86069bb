"""Starts each server once, runs each load on it, and records one row for each pair."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.record import Record, Row
from benchmark.server import Server, bench
from benchmark.shapes import Model, big_model, named_model, read_rate, tiny_model
from benchmark.step_bytes import ModelRoof

KEPT = (
    *("completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "output_throughput", "total_throughput"),
    *("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "p99_itl_ms"),
    *("mean_e2e_latency_ms", "accept_length", "per_position_acceptance", "steps_by_depth", "graph_hit_rate", "padding_waste"),
)
EXPERTS = ("distinct_experts", "distinct_experts_by_layer")
FACTS = ("exchange_micros", *EXPERTS)
"""Facts about the worker that are added to a row if it has them."""
COUNTED_PASSES = 256
"""Decode passes from which a server averages the distinct experts; after fewer, the average includes those of the load before."""


@dataclass(frozen=True)
class Setup:
    """One server: its labels in the rows and its flags."""

    labels: Mapping[str, Any]
    flags: Sequence[str]


@dataclass(frozen=True)
class Burst:
    """One load: its labels in the rows and the flags of `bench_serving`. Without a label `concurrency`, the rows have the measured mean."""

    labels: Mapping[str, Any]
    flags: Sequence[str] = field(default=())


def random_ids(concurrency: int, input_len: int, output_len: int, num_prompts: int | None = None, *more: str) -> Burst:
    """A closed loop of random token ids with exact lengths: 2 requests at concurrency 1, else twice the concurrency."""
    prompts = num_prompts or 2 * concurrency
    flags = ["--backend", "sglang-oai", "--dataset-name", "random-ids", "--random-range-ratio", "1", "--flush-cache"]
    flags += ["--random-input-len", str(input_len), "--random-output-len", str(output_len)]
    flags += ["--num-prompts", str(prompts), "--max-concurrency", str(concurrency), *more]
    return Burst({"concurrency": concurrency, "input_len": input_len, "output_len": output_len, "num_prompts": prompts}, flags)


def shared_prefix(shared: int, own: int, output_len: int, concurrency: int) -> Burst:
    """A closed loop of prompts of `shared` equal random tokens, then `own` further ones; twice as many requests as run together."""
    count = 2 * concurrency
    sizes = {"system-prompt-len": shared, "question-len": own, "output-len": output_len, "num-groups": 1, "prompts-per-group": count}
    flags = ["--backend", "sglang-oai", "--dataset-name", "generated-shared-prefix", "--tokenize-prompt", "--flush-cache"]
    flags += [part for name, size in sizes.items() for part in (f"--gsp-{name}", str(size))]
    flags += ["--num-prompts", str(count), "--max-concurrency", str(concurrency)]
    return Burst({"concurrency": concurrency, "input_len": shared + own, "output_len": output_len, "num_prompts": count}, flags)


def sweep(record: Record, setups: Sequence[Setup], bursts: Sequence[Burst], roof: ModelRoof | None = None) -> None:
    """Measure every burst on every setup.

    Args:
        record: gets the rows: the labels of both, the metrics in `KEPT`, and the share of the roof.
        setups: the servers, started one after the other.
        bursts: the loads.
        roof: the roof of the served model; the label `steps` of a setup is its draft depth (0 for plain decoding).
    """
    for setup in setups:
        with Server([*setup.flags]) as server:
            for burst in bursts:
                figures = bench(server, burst.flags)
                row: Row = {**setup.labels, "concurrency": figures["concurrency"], **burst.labels}
                row |= {name: figures[name] for name in KEPT} | {"ready_seconds": server.ready_seconds}
                row |= {"server_flags": " ".join(setup.flags)} | worker_facts(row, server.facts())
                if roof is not None:
                    row |= roof_share(row, roof, read_rate(record.data["machine"]))
                record.add(row)
                print(
                    f"  {row['output_throughput']:.1f} tok/s  TTFT {_ms(row['mean_ttft_ms'])}  TPOT {_ms(row['mean_tpot_ms'])}", flush=True
                )


def worker_facts(row: Row, facts: Mapping[str, Any]) -> Row:
    """The facts about the worker that describe the load of a row."""
    passes = row["total_output_tokens"] / row["concurrency"] / (row["accept_length"] or 1.0)
    return {name: found for name in FACTS if (found := facts.get(name)) and (passes >= COUNTED_PASSES or name not in EXPERTS)}


def roof_share(row: Row, roof: ModelRoof, bytes_per_second: float | None) -> Row:
    """`iteration_ms`, `roof_ms` and `roof_share` (roof / measured) of a decode step at the mean context of the run.

    A sparse model reads the `distinct_experts` of the row. Without them, routing is assumed to be independent, and the share is an upper
    bound (`roof_assumed`), except for passes of one token.

    With drafts, both times are means over the depths at which the steps ran (`steps_by_depth`), or those of the label `steps` if the server
    did not count them. The accept length is that of steps with drafts.
    """
    if bytes_per_second is None or not row["mean_tpot_ms"]:
        return {}
    context = row["input_len"] + row["output_len"] / 2
    accepted = row["accept_length"] or 1.0 if row.get("steps", 0) else 1.0
    steps = row.get("steps", 0) if accepted > 1 else 0  # the depth table may select depth 0
    counts = {int(depth): count for depth, count in (row.get("steps_by_depth") or {steps: 1}).items()}
    total = sum(counts.values())
    known = roof.with_counted(row.get("distinct_experts"))
    least = sum(count * known.roof_ms(depth, row["concurrency"], context, bytes_per_second) for depth, count in counts.items()) / total
    least /= row.get("tp_size", 1)  # each rank reads its part
    measured = row["mean_tpot_ms"] * sum(count * (accepted if depth else 1.0) for depth, count in counts.items()) / total
    assumed = known.target.experts is not None and known.target.experts.counted is None and row["concurrency"] * (max(counts) + 1) > 1
    return {"iteration_ms": measured, "roof_ms": least, "roof_share": least / measured} | ({"roof_assumed": True} if assumed else {})


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that all scripts share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smoke run with a tiny model on a CPU; results go to build/benchmark-quick")
    parser.add_argument("--out", type=Path, help="folder for result files instead of benchmark/results")
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add `--model` and `--head`."""
    parser.add_argument("--model", help="target: a folder or embedded; default: the 8B shape with dummy weights")
    parser.add_argument("--head", help="folder of the EAGLE head")


def served_model(args: argparse.Namespace) -> Model:
    """The model chosen by `--quick`, `--model` and `--head`; the 8B shape by default."""
    if args.quick:
        return tiny_model()
    return named_model(args.model, args.head) if getattr(args, "model", None) else big_model()


def positive(text: str) -> int:
    """An integer of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def numbers(text: str) -> list[int]:
    """`1,4,16` as a list; `none` is an empty one."""
    return [] if text == "none" else [positive(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """`fa3,flashinfer` as a list."""
    return text.split(",")


def _ms(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f} ms"
