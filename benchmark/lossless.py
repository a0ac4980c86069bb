"""Greedy answers with and without drafts, compared token by token: the embedded model on a CPU.

By default with float32 weights, for chains and trees. With --default-start the server runs with its defaults (int4),
with and without drafts, at batch sizes 1, 4 and 16; each answer must equal the plain answer to the same prompt alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark import draft_head, picture, plots
from benchmark.embedded_speculation import EMBEDDED, OFF, chat_prompts, speculation
from benchmark.markdown import Result, table, with_provenance
from benchmark.record import Record
from benchmark.shapes import engine_options
from benchmark.sweep import arguments, names, positive
from runtime import Engine

NAME = "lossless"
KEYS = ("shape",)
SHAPES = ("3/1/4", "4/3/8")
TOGETHER = (1, 4, 16)


def answers(shape: str, drafts: Mapping[str, Any], common: Mapping[str, Any], prompts: int, new_tokens: int) -> list[Mapping[str, Any]]:
    """Greedy outputs of a server with drafts of steps/topk/draft tokens, or `off`. `drafts`: as for `speculation`."""
    with Engine(**common, **speculation(shape, drafts)) as engine:
        return engine.generate(input_ids=chat_prompts(engine)[:prompts], sampling_params={"temperature": 0.0, "max_new_tokens": new_tokens})


def compare(plain: Sequence[Mapping[str, Any]], drafted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of a row: which answers differ, and from which token on."""
    differences = []
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        a, b = one["output_ids"], other["output_ids"]
        if a != b:
            differences.append({"prompt": number, "token": next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))})
    facts = [output["meta_info"] for output in drafted]
    windows, accepted = (sum(int(fact.get(name) or 0) for fact in facts) for name in ("spec_verify_ct", "spec_accept_token_num"))
    tokens = sum(len(output["output_ids"]) for output in drafted)
    return {
        "prompts": len(plain),
        "tokens": tokens,
        "windows": windows,
        "accept_length": 1 + accepted / windows if windows else None,
        "differences": differences,
    }


def shape_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per shape: answers with drafts compared with plain answers, in float32."""
    with engine_options(args.quick, {}, EMBEDDED) as (model, drafts):
        common = {**model, **options("cpu", args.threads)}
        plain = answers(OFF, drafts, common, args.prompts, args.new_tokens)
        for shape in args.shapes:
            yield {"shape": shape, "dtype": "float32"} | compare(plain, answers(shape, drafts, common, args.prompts, args.new_tokens))


def default_start_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per server and batch size: answers of the default start compared with plain answers to single requests."""
    threads = {} if args.threads is None else {"cpu_threads": args.threads}
    alone: list[Mapping[str, Any]] = []
    for name, drafts in (("plain", {"speculative_algorithm": "none"}), ("drafts", {})):
        with Engine(device="cpu", context_length=1024, **threads, **drafts) as engine:
            prompts = chat_prompts(engine)[: args.prompts]
            for together in TOGETHER:
                outputs = in_groups(engine, prompts, together, args.new_tokens)
                alone = alone or outputs
                yield {"shape": f"default start, {name}, {together} together", "dtype": engine.config.weights} | compare(alone, outputs)


def in_groups(engine: Engine, prompts: Sequence[list[int]], size: int, new_tokens: int) -> list[Mapping[str, Any]]:
    """Greedy outputs of an engine with an empty cache, `size` prompts at a time."""
    engine.flush_cache()
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens}
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [output for group in groups for output in engine.generate(input_ids=group, sampling_params=sampling)]


def options(device: str, threads: int | None) -> dict[str, Any]:
    """The options of all engines of a run."""
    found: dict[str, Any] = {"device": device, "dtype": "float32", "quantization": "none", "context_length": 1024}
    found["grammar_backend"] = "none"  # the engines need not load a grammar library each
    return found if threads is None else found | {"cpu_threads": threads}


def summary(result: Result) -> str:
    """One row per shape."""
    lines = [[row["shape"], row["prompts"], row["tokens"], row["accept_length"], len(row["differences"])] for row in result["rows"]]
    head = ["steps/topk/draft tokens", "prompts", "tokens", "accept length", "answers that differ"]
    return table(head, lines)


render = with_provenance(summary)


def plot(result: Result, file: Path) -> None:
    """Accept length and number of differing answers by shape, in float32 if that was compared."""
    dtype = "float32" if any(row["dtype"] == "float32" for row in result["rows"]) else result["rows"][0]["dtype"]
    rows = [row for row in result["rows"] if row["dtype"] == dtype]
    lengths = {row["shape"]: {"accept length": row["accept_length"]} for row in rows}
    differ = {row["shape"]: {"answers that differ": len(row["differences"])} for row in rows}

    def text(shape: str, _: str) -> str:
        row = next(row for row in rows if row["shape"] == shape)
        return f"{len(row['differences'])} of {row['prompts']}"

    panels = [
        plots.bars(lengths, "Accept length, by steps/topk/draft tokens", "tokens per window"),
        plots.bars(differ, "Answers that differ, by steps/topk/draft tokens", "answers", text=text),
    ]
    picture.draw(result, file, f"Greedy answers with and without drafts: SmolLM2-135M, {dtype}", panels)


def main() -> None:
    """Compare, record and print; exit with 1 if an answer differs."""
    parser = arguments(__doc__)
    parser.add_argument("--shapes", type=names, default=list(SHAPES), help="comma-separated list of steps/topk/draft tokens")
    parser.add_argument("--default-start", action="store_true", help="check the server's default start instead of float32 shapes")
    parser.add_argument("--prompts", type=positive, help="default: 80, or 64 with --default-start")
    parser.add_argument("--new-tokens", type=positive, help="default: 48, or 64 with --default-start")
    parser.add_argument("--threads", type=positive, help="default: all cores")
    args = parser.parse_args()
    prompts, new_tokens = (64, 64) if args.default_start else (80, 48)
    args.prompts, args.new_tokens = args.prompts or prompts, args.new_tokens or new_tokens
    if args.quick:
        args.prompts, args.new_tokens, args.threads = 2, 4, 1
    record = Record(NAME, KEYS, args.out, args.quick)
    for row in default_start_rows(args) if args.default_start else shape_rows(args):
        record.add(row | {"new_tokens": args.new_tokens, **draft_head.label()})
        for difference in row["differences"]:
            print(f"{row['shape']}: prompt {difference['prompt']} differs from token {difference['token']} on")
    if not args.default_start:
        plot(record.data, record.file.with_suffix(".png"))
    print(render(record.data))
    if any(row["differences"] for row in record.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
