"""The embedded model with and without its own draft head on real text: tokens per second by batch size, and the crossover.

All servers of one run are up at the same time and alternate, so that a change of the machine's speed affects all of them equally.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark import draft_head, picture, plots
from benchmark.crossover import crossing
from benchmark.markdown import Result, cell, pick, provenance, split, table
from benchmark.record import Record
from benchmark.shapes import eagle3, engine_options
from benchmark.sweep import arguments, names, numbers, positive
from runtime import Engine
from runtime.bench.datasets import ASSETS, embedded_prompts
from runtime.bench.metrics import verified_tokens
from runtime.config.speculative import EMBEDDED_DRAFT
from runtime.text.tokenizer import Tokenizer

NAME = "embedded_speculation"
KEYS = ("device", "dtype", "quantization", "speculation", "batch", "text")
OFF, AUTO = "off", "auto"
EMBEDDED = eagle3(str(EMBEDDED_DRAFT))
"""Options for drafts of the embedded head."""
CHAT, EVERYDAY = "chat", "everyday"
CONTEXT = 1024
NEVER_PAUSED = 1 << 16
"""A batch size that never occurs."""


@dataclass(slots=True)
class Tally:
    """The output of one server at one batch size."""

    tokens: int = 0
    seconds: float = 0.0
    windows: int = 0
    drafted_tokens: int = 0
    rates: list[float] = field(default_factory=list)

    def add(self, outputs: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Add one burst, timed from its start to its last token."""
        tokens = sum(len(output["output_ids"]) for output in outputs)
        answers = [(len(output["output_ids"]), output["meta_info"]) for output in outputs]
        drafted = [(count, meta.get("spec_verify_ct", 0), meta.get("spec_accepted_by_position", ())) for count, meta in answers]
        self.tokens += tokens
        self.seconds += seconds
        self.windows += sum(windows for _, windows, _ in drafted)
        self.drafted_tokens += sum(verified_tokens(*one) for one in drafted)
        self.rates.append(tokens / seconds)

    def figures(self) -> dict[str, Any]:
        """The figures of a row."""
        return {
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds,
            "accept_length": self.drafted_tokens / self.windows if self.windows else None,
            "bursts": len(self.rates),
        }


@contextlib.contextmanager
def servers(shapes: Sequence[str], common: Mapping[str, Any], drafts: Mapping[str, Any]) -> Iterator[dict[str, Engine]]:
    """One engine per shape: `off`, `auto` or steps/topk/draft tokens."""
    with contextlib.ExitStack() as stack:
        yield {shape: stack.enter_context(Engine(**common, **speculation(shape, drafts))) for shape in shapes}


def speculation(shape: str, drafts: Mapping[str, Any] = EMBEDDED) -> dict[str, Any]:
    """Options of `Engine` for `off`, `auto` or steps/topk/draft tokens; a fourth number is the batch size above which
    drafting pauses.
    """
    if shape == OFF:
        return {"speculative_algorithm": "none"}
    if shape == AUTO:
        return {**drafts, "speculative_num_steps": AUTO}
    steps, topk, draft_tokens, *most = (int(part) for part in shape.split("/"))
    return {
        **drafts,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": draft_tokens,
        "speculative_disable_by_batch_size": most[0] if most else NEVER_PAUSED,
    }


def chat_prompts(engine: Engine, text: str = CHAT) -> list[list[int]]:
    """The hand-made or the everyday chat prompts as token ids, each a user turn; everyday prompts are interleaved by kind."""
    tokenizer = Tokenizer.load(engine.config.model.tokenizer_path)
    lines = embedded_prompts() if text == CHAT else everyday_prompts()
    return [tokenizer.encode_chat([{"role": "user", "content": line["prompt"]}]) for line in lines]


def everyday_prompts() -> list[dict[str, Any]]:
    """The everyday prompts, interleaved by kind."""
    lines = [json.loads(line) for line in (ASSETS / "everyday_prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    seen: Counter[str] = Counter()
    ranks = []
    for line in lines:
        ranks.append(seen[line["kind"]])
        seen[line["kind"]] += 1
    return [line for _, line in sorted(zip(ranks, lines, strict=True), key=lambda pair: pair[0])]


def measure(
    engines: Mapping[str, Engine], batches: Sequence[int], prompts: int, new_tokens: int, bursts: int = 1, text: str = CHAT
) -> dict[tuple[str, int], Tally]:
    """All servers answer the same prompts greedily, `batch` at a time, alternating after each burst."""
    asked = chat_prompts(next(iter(engines.values())), text)
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens}
    tallies = {(shape, batch): Tally() for batch in batches for shape in engines}
    for engine in engines.values():  # warm-up: touch memory pages, start threads
        engine.generate(input_ids=asked[-2:], sampling_params=sampling)
    for batch in batches:
        count = max(prompts, bursts * batch)
        for start in range(0, count, batch):
            burst = [asked[i % len(asked)] for i in range(start, start + batch)]
            for shape, engine in engines.items():
                engine.flush_cache()
                began = time.perf_counter()
                outputs = engine.generate(input_ids=burst, sampling_params=sampling)
                tallies[shape, batch].add(outputs, time.perf_counter() - began)
    return tallies


def ratios(rows: Sequence[Mapping[str, Any]], speculated: str) -> list[tuple[int, float]]:
    """(batch size, tokens per second with drafts / without) of rows of one kind."""
    found = []
    for row in rows:
        off = pick(list(map(dict, rows)), speculation=OFF, batch=row["batch"])
        if row["speculation"] == speculated and off is not None:
            found.append((row["batch"], row["tokens_per_second"] / off["tokens_per_second"]))
    return sorted(found)


def kinds(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by device and weights."""

    def kind(row: Mapping[str, Any]) -> str:
        weights = row["dtype"] if row["quantization"] == "none" else row["quantization"]
        return f"{row['device']}, {weights}" + (f", {row['text']} prompts" if row.get("text") else "")

    return split(rows, kind)


def render(result: Result) -> str:
    """Tokens per second without drafts, the ratios with drafts, accept length, and where each ratio falls below 1."""
    parts = []
    for kind, rows in kinds(result["rows"]).items():
        batches = sorted({row["batch"] for row in rows})
        parts += [f"**{kind}**", "", table(_header(batches), _lines(rows, batches)), ""]
    return "\n".join([*parts, provenance(result)])


def summary(result: Result) -> str:
    """The same in one table for all devices and weights."""
    batches = sorted({row["batch"] for row in result["rows"]})
    lines = [[f"{kind}: {name}", *cells] for kind, rows in kinds(result["rows"]).items() for name, *cells in _lines(rows, batches)]
    return table(_header(batches), lines)


def _header(batches: Sequence[int]) -> list[str]:
    return ["steps/topk/draft tokens", *(f"batch {batch}" for batch in batches), "accept length", "crossover"]


def _lines(rows: Sequence[Mapping[str, Any]], batches: Sequence[int]) -> list[list[Any]]:
    """One row without drafts, then one per shape, for rows of one device and one kind of weights."""
    rates = {row["batch"]: row["tokens_per_second"] for row in rows if row["speculation"] == OFF}
    lines: list[list[Any]] = [["off, tok/s", *map(rates.get, batches), None, None]]
    for shape in dict.fromkeys(row["speculation"] for row in rows if row["speculation"] != OFF):
        points = ratios(rows, shape)
        most = max((batch for batch, _ in points), default=None)
        where = f"never below 1 up to {most}" if points and min(r for _, r in points) >= 1.0 else cell(crossing(points))
        length = next((row["accept_length"] for row in rows if row["speculation"] == shape), None)
        lines.append([f"{shape}, ratio", *map(dict(points).get, batches), length, where])
    return lines


def plot(result: Result, file: Path) -> None:
    """The ratios by batch size; a star marks where a line falls below 1."""
    series = {}
    for kind, rows in kinds(result["rows"]).items():
        for shape in dict.fromkeys(row["speculation"] for row in rows if row["speculation"] != OFF):
            series[f"{kind}, {shape}"] = ratios(rows, shape)
    marks = {name: crossing(points) for name, points in series.items()}
    panel = plots.lines(series, "", "batch size", "tokens/s with drafts / without", 1.0, marks)
    picture.draw(result, file, "Where drafting stops paying off: SmolLM2-135M with its own draft (steps/topk/draft tokens)", [panel])


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--shapes", type=names, default=["3/1/4"], help="comma-separated: auto, or steps/topk/draft tokens[/largest batch]")
    parser.add_argument("--batch", type=numbers, default=[1, 2, 4, 8, 16], help="batch sizes")
    parser.add_argument("--prompts", type=positive, default=16, help="minimum number of prompts per batch size")
    parser.add_argument("--text", choices=(CHAT, EVERYDAY), default=CHAT, help="hand-made chat prompts, or everyday prompts of 16 kinds")
    parser.add_argument("--bursts", type=positive, default=1, help="minimum number of bursts per batch size; raise it on a GPU")
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=positive, help="CPU threads; default: all cores")
    parser.add_argument("--quantization", type=names, default=["int4", "int8", "none"], help="of the weights on a CPU, one run each")
    parser.add_argument("--model", help="file of the embedded model, if it cannot be fetched")
    parser.add_argument("--head", default=str(EMBEDDED_DRAFT), help="folder of another draft head")
    args = parser.parse_args()
    if args.quick:
        args.shapes, args.batch, args.prompts, args.new_tokens, args.threads, args.quantization = ["2/1/3"], [1, 2], 1, 4, 1, ["int4"]
    record = Record(NAME, KEYS, args.out, args.quick)
    with engine_options(args.quick, {}, eagle3(args.head)) as (model, drafts):
        run(args, record, model, drafts)
    record.show(render, plot)


def run(args: argparse.Namespace, record: Record, model: Mapping[str, Any], drafts: Mapping[str, Any]) -> None:
    """Measure and record one row per quantization, shape and batch size.

    Args:
        model: further options of all servers.
        drafts: further options of those that draft.
    """
    for quantization in args.quantization if args.device == "cpu" else ["none"]:
        common = _options(args, quantization) | model
        with servers([OFF, *args.shapes], common, drafts) as engines:
            chosen = engines[OFF].config.device
            tallies = measure(engines, args.batch, args.prompts, args.new_tokens, args.bursts, args.text)
        for (shape, batch), tally in tallies.items():
            labels = {"device": chosen.device, "dtype": chosen.dtype, "quantization": quantization, "speculation": shape, "batch": batch}
            labels |= {"text": EVERYDAY} if args.text == EVERYDAY else {}
            labels |= draft_head.label(args.head) if shape != OFF else {}
            record.add(labels | {"new_tokens": args.new_tokens, "threads": chosen.cpu_threads} | tally.figures())


def room_for(requests: int, device: str) -> dict[str, Any]:
    """Options of an engine that runs `requests` at once beside other engines on `device`."""
    options: dict[str, Any] = {"device": device, "context_length": CONTEXT, "max_running_requests": requests}
    # Otherwise each engine would take all of a GPU's memory.
    return options | ({"max_total_tokens": (requests + 1) * CONTEXT} if device == "cuda" else {})


def _options(args: argparse.Namespace, quantization: str) -> dict[str, Any]:
    options = room_for(max(args.batch), args.device)
    options["grammar_backend"] = "none"  # the servers need not load a grammar library each
    if args.device == "cpu":
        options["quantization"] = quantization
        if args.threads is not None:
            options["cpu_threads"] = args.threads
    if args.model is not None:
        options["model_path"] = args.model
    return options


if __name__ == "__main__":
    main()
