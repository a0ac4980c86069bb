"""The embedded model on a CPU at batch 1 and 8, in float32, int8 and int4, next to `transformers.generate` on the same
weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.agreement import Agreement, compare, greedy_answers
from benchmark.markdown import Result, percent, pick, table, with_provenance
from benchmark.record import Record
from benchmark.server import Server, bench
from benchmark.sweep import arguments, positive, random_ids
from benchmark.transformers_decode import decode_rates

NAME = "cpu_serving"
KEYS = ("system", "quantization", "batch")
BATCHES = (1, 8)
QUANTIZED = ("int8", "int4")


def server_rows(server: Server, quantization: str, tokens: int) -> list[dict[str, Any]]:
    """Decode rates of Talon as seen by its HTTP client, without prompt time."""
    rows = []
    for batch in BATCHES:
        figures = bench(server, random_ids(batch, 32, tokens, batch).flags)
        gap = figures["mean_tpot_ms"]  # 0 if the answer of a quick run arrives in one piece
        row = {"system": "Talon", "quantization": quantization, "batch": batch, "tokens_per_second": batch * 1000 / gap if gap else None}
        names = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "failed")
        rows.append(row | {name: figures[name] for name in names} | {"ready_seconds": server.ready_seconds})
    return rows


def transformers_rows(folder: str, threads: int, tokens: int) -> list[dict[str, Any]]:
    """Decode rates of transformers on the weights in `folder`."""
    rates = zip(BATCHES, decode_rates(folder, BATCHES, tokens, threads), strict=True)
    return [{"system": "transformers", "quantization": "none", "batch": batch, "tokens_per_second": rate} for batch, rate in rates]


def summary(result: Result) -> str:
    """Rates, ratios, and the share of greedy tokens and whole answers of quantised weights that equal those of float32."""
    rows = result["rows"]
    base = pick(rows, system="transformers", batch=1)
    lines: list[list[Any]] = []
    for system, quantization in dict.fromkeys((row["system"], row["quantization"]) for row in rows):
        one, eight = (pick(rows, system=system, quantization=quantization, batch=batch) for batch in BATCHES)
        rates = [row["tokens_per_second"] if row else None for row in (one, eight)]
        against = rates[0] / base["tokens_per_second"] if rates[0] and base else None
        gain = rates[1] / rates[0] if rates[0] and rates[1] else None
        agreement = one.get("agreement") if one else None
        kind = "float32" if quantization == "none" else quantization
        whole = f"{one['whole_answers']} of {one['answers']}" if one and "answers" in one else None
        lines.append([f"{system}, {kind}", *rates, gain, against, percent(agreement, 2), whole])
    header = [
        *("", "batch 1 (tok/s)", "batch 8 (tok/s)", "8 against 1", "batch 1 against transformers"),
        *("greedy tokens as in float32, each after float32's text", "whole answers as in float32"),
    ]
    return table(header, lines)


render = with_provenance(summary)


def plot(result: Result, file: Path) -> None:
    """Tokens per second, one group per batch size."""

    def bar(row: dict[str, Any]) -> str:
        return f"{row['system']}, {'float32' if row['quantization'] == 'none' else row['quantization']}"

    groups = plots.grouped((str(row["batch"]), bar(row), row["tokens_per_second"]) for row in result["rows"])
    picture.draw(result, file, "Decoding with SmolLM2-135M", [plots.bars(groups, "", "decode tokens/s", kind="batch size")])


def measure(record: Record, flags: Sequence[str], tokens: int, prompts: int, threads: int) -> None:
    """Measure float32, then transformers on its weights, then quantised weights and their agreement, one after the other."""
    common = [*flags, "--cpu-threads", str(threads)]
    with Server([*common, "--quantization", "none"]) as server:
        answers = greedy_answers(server, prompts, min(tokens, 64))
        for row in server_rows(server, "none", tokens):
            record.add(row | {"agreement": 1.0})
        folder = server.get("/get_model_info")["model_path"]
    if any(Path(folder).glob("*.safetensors")):
        for row in transformers_rows(folder, threads, tokens):
            record.add(row)
    for quantization in QUANTIZED:
        with Server([*common, "--quantization", quantization]) as server:
            found: Agreement = compare(server, answers)
            for row in server_rows(server, quantization, tokens):
                same = {"agreement": found.same / found.tokens, "agreement_tokens": found.tokens}
                record.add(row | same | {"whole_answers": found.whole_answers, "answers": len(answers)})


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=positive, default=128, help="tokens to generate")
    parser.add_argument("--prompts", type=positive, default=80, help="held-out prompts to compare greedy answers on")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    if args.quick:
        from benchmark.shapes import tiny_model

        measure(record, tiny_model().target_flags[:-2], 8, 4, 1)
    else:
        measure(record, ("--device", "cpu", "--speculative-algorithm", "none"), args.tokens, args.prompts, args.threads)
    record.show(render, plot)


if __name__ == "__main__":
    main()
