"""Greedy answers with and without drafts, compared token by token: the embedded model in float32 on a CPU, chains and trees.

Equality can be required in float32 only. In narrower types a pass over several rows may round differently, and near-ties may flip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.embedded_speculation import OFF, chat_prompts, speculation
from benchmark.markdown import Result, provenance, table
from benchmark.record import Record
from benchmark.sweep import arguments, names
from runtime import Engine

NAME = "lossless"
KEYS = ("shape",)
SHAPES = ("3/1/4", "4/3/8")


def answers(shape: str, common: Mapping[str, Any], prompts: int, new_tokens: int) -> list[Mapping[str, Any]]:
    """Greedy outputs of a server with drafts of steps/topk/draft tokens, or `off`."""
    with Engine(**common, **speculation(shape)) as engine:
        return engine.generate(input_ids=chat_prompts(engine)[:prompts], sampling_params={"temperature": 0.0, "max_new_tokens": new_tokens})


def compare(plain: Sequence[Mapping[str, Any]], drafted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a row: which answers differ, and from which token on."""
    differences = []
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        a, b = one["output_ids"], other["output_ids"]
        if a != b:
            differences.append({"prompt": number, "token": next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))})
    windows = sum(int(output["meta_info"]["spec_verify_ct"]) for output in drafted)
    tokens = sum(len(output["output_ids"]) for output in drafted)
    return {
        "prompts": len(plain),
        "tokens": tokens,
        "windows": windows,
        "accept_length": (tokens - len(plain)) / windows,
        "differences": differences,
    }


def options(device: str, threads: int | None) -> dict[str, Any]:
    """The options of all engines of a run."""
    found: dict[str, Any] = {"device": device, "dtype": "float32", "quantization": "none", "context_length": 1024}
    return found if threads is None else found | {"cpu_threads": threads}


def render(result: Result) -> str:
    """The table and where it comes from."""
    return "\n".join([summary(result), "", provenance(result)])


def summary(result: Result) -> str:
    """One row per shape."""
    lines = [[row["shape"], row["prompts"], row["tokens"], row["accept_length"], len(row["differences"])] for row in result["rows"]]
    head = ["steps/topk/draft tokens", "prompts", "tokens", "accept length", "answers that differ"]
    return table(head, lines)


def plot(result: Result, file: Path) -> None:
    """Accept length and number of differing answers by shape."""
    rows = result["rows"]
    lengths = {row["shape"]: {"accept length": row["accept_length"]} for row in rows}
    differ = {row["shape"]: {"answers that differ": len(row["differences"])} for row in rows}

    def text(shape: str, _: str) -> str:
        row = next(row for row in rows if row["shape"] == shape)
        return f"{len(row['differences'])} of {row['prompts']}"

    panels = [
        plots.bars(lengths, "Accept length, by steps/topk/draft tokens", "tokens per window"),
        plots.bars(differ, "Answers that differ, by steps/topk/draft tokens", "answers", text=text),
    ]
    picture.draw(result, file, "Greedy answers with and without drafts: SmolLM2-135M, float32", panels)


def main() -> None:
    """Compare, record and print; exit with 1 if an answer differs."""
    parser = arguments(__doc__)
    parser.add_argument("--shapes", type=names, default=list(SHAPES), help="comma-separated list of steps/topk/draft tokens")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, help="default: all cores")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.new_tokens, args.threads = 2, 8, 1
    record, common = Record(NAME, KEYS, args.out, args.quick), options("cpu", args.threads)
    plain = answers(OFF, common, args.prompts, args.new_tokens)
    for shape in args.shapes:
        found = compare(plain, answers(shape, common, args.prompts, args.new_tokens))
        record.add({"shape": shape, "dtype": "float32", "new_tokens": args.new_tokens} | found)
        for difference in found["differences"]:
            print(f"{shape}: prompt {difference['prompt']} differs from token {difference['token']} on")
    plot(record.data, record.file.with_suffix(".png"))
    print(render(record.data))
    if any(row["differences"] for row in record.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
