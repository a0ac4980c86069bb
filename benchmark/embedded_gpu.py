"""The embedded model on a GPU at batch 1: tokens per second of the server and of `transformers.generate` on the same
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, table, with_provenance
from benchmark.record import Record, Row
from benchmark.server import Server, bench
from benchmark.shapes import named_model, tiny_model
from benchmark.sweep import arguments, names, positive, random_ids
from benchmark.transformers_decode import decode_rates

NAME = "embedded_gpu"
KEYS = ("system", "dtype")
PROMPT_LEN = 32


def server_row(flags: Sequence[str], backend: str, tokens: int) -> tuple[Row, str]:
    """The decode rate seen by one HTTP client, without prompt time, and the folder of the weights."""
    with Server([*flags, "--attention-backend", backend]) as server:
        figures = bench(server, random_ids(1, PROMPT_LEN, tokens, 4).flags)
        folder = server.get("/get_model_info")["model_path"]
    # All tokens of a very short answer may arrive together.
    rate = 1000 / figures["mean_tpot_ms"] if figures["mean_tpot_ms"] else figures["output_throughput"]
    row = {"system": f"Talon, {backend}", "tokens_per_second": rate, "ready_seconds": server.ready_seconds}
    return row | {name: figures[name] for name in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "failed")}, folder


def transformers_row(folder: str, dtype: str, tokens: int) -> Row:
    """The decode rate of `transformers.generate`, without prompt time."""
    (rate,) = decode_rates(folder, [1], tokens, threads=4, device="cuda", dtype=dtype)
    return {"system": "transformers", "dtype": dtype, "tokens_per_second": rate}


def best(rows: Sequence[dict[str, Any]], system: str) -> float | None:
    """The highest rate of a system."""
    return max((row["tokens_per_second"] for row in rows if row["system"].startswith(system)), default=None)


def summary(result: Result) -> str:
    """Rates, and their ratios to the best rate of `transformers`."""
    base = best(result["rows"], "transformers")
    lines = [
        [row["system"], row["dtype"], row["tokens_per_second"], row["tokens_per_second"] / base if base else None, row.get("mean_ttft_ms")]
        for row in result["rows"]
    ]
    header = ["batch 1", "weights", "tokens/s", "times the best of transformers", "TTFT (ms)"]
    return table(header, lines)


render = with_provenance(summary)


def plot(result: Result, file: Path) -> None:
    """Tokens per second."""
    groups = {f"{row['system']}, {row['dtype']}": {"tokens/s": row["tokens_per_second"]} for row in result["rows"]}
    picture.draw(result, file, "Decoding with SmolLM2-135M at batch 1", [plots.bars(groups, "", "decode tokens/s")])


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="embedded", help="file of the embedded model, if it cannot be fetched")
    parser.add_argument("--backends", type=names, default=["fa3", "flashinfer"])
    parser.add_argument("--tokens", type=positive, default=256)
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    served = tiny_model() if args.quick else named_model(args.model, None)
    tokens, dtype = (8, "float32") if args.quick else (args.tokens, "bfloat16")
    folder = ""
    for backend in ["torch_native"] if args.quick else args.backends:
        row, folder = server_row([*served.target_flags, "--dtype", dtype, "--disable-radix-cache"], backend, tokens)
        record.add(row | {"dtype": dtype})
    if any(Path(folder).glob("*.safetensors")):
        for dtype in ("bfloat16", "float32"):
            record.add(transformers_row(folder, dtype, tokens // 2))
    record.show(render, plot)


if __name__ == "__main__":
    main()
