"""Structured output: the cost of masks, throughput and acceptance of the embedded model with and without a schema, and hostile grammars.

Masks are timed as the worker computes them for one request and step: with a window of three drafts after the last committed token, and
without drafts. Each value is the best CPU time of five runs; the 99th percentile is of the first run. One server answers the same prompts
alternately with and without a schema, with the same number of tokens. Each hostile grammar is sent twice while another client streams: the
first time it is compiled, the second time the result is cached. The last table shows `talon::grammars` after its first grammar.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmark import picture, plots
from benchmark.embedded_speculation import Tally, chat_prompts, room_for, speculation
from benchmark.hostile_grammars import CALM_SECONDS, hostile_table, measure_hostile, measure_process, process_table
from benchmark.markdown import Result, pick, provenance, table
from benchmark.record import Record
from benchmark.shapes import tiny_model
from benchmark.sweep import arguments, names, numbers, positive
from runtime import Engine
from runtime.constrained.backends import make_backend
from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import Vocabulary, allowed_tokens, mask_words
from runtime.constrained.window_masks import WindowMasks
from runtime.sampling_params import GrammarSpec
from runtime.text.tokenizer import Tokenizer
from runtime.text.tokenizer_files import TokenizerFiles

NAME = "grammar"
KEYS = ("what", "backend", "vocabulary", "speculation", "batch", "grammar")
PARTS = ("masks", "serving", "acceptance", "hostile", "process")
WINDOW = 4
LARGE_VOCABULARY = 150_000
STEPS = 60
REPEATS = 5
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "age", "tags"],
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 20},
    {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "string", "format": "date"}]}, "minItems": 20},
    {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9})?$"}, "minItems": 20},
]
LOG = r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z (INFO|WARN|ERROR) [a-z]{2,12}(\.[a-z]{2,12}){0,3}: [ -~]{5,60}\n){40}"
MASKED = [*(GrammarSpec("json_schema", json.dumps(schema)) for schema in SCHEMAS), GrammarSpec("regex", LOG)]
"""Grammars whose masks are timed."""
RECORDS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "category": {"enum": ["person", "place", "animal", "plant", "food", "tool", "idea", "event"]},
            "year": {"type": "integer", "minimum": 0, "maximum": 2100},
            "is_real": {"type": "boolean"},
            "continent": {"enum": ["Africa", "Antarctica", "Asia", "Europe", "North America", "South America", "Australia"]},
        },
        "required": ["name", "category", "year", "is_real", "continent"],
        "additionalProperties": False,
    },
    "minItems": 50,
}
"""Record schemas as in typical programs; answers reach their token limit before the end of a record."""
STRING: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, str]] = {
    "free": {},
    "schema of records": {"json_schema": json.dumps(RECORDS)},
    "schema of one string": {"json_schema": json.dumps(STRING)},
    "one line": {"regex": r"[^\n]*"},
}
"""Grammars whose accept lengths are compared on the same prompts."""


def large_vocabulary(files: TokenizerFiles, size: int) -> Tokenizer:
    """The tokenizer of `files` with `size` tokens, as many as larger models have. The new tokens are words made of two other tokens."""
    definition = json.loads(files.definition)
    vocab, merges = definition["model"]["vocab"], definition["model"]["merges"]
    space = "\u0120"  # how byte-level BPE writes a space
    words = [token for token in vocab if token.isascii() and token.isalpha() and len(token) > 2]
    begins = words + [space + token for token in words if space + token in vocab]
    rng, added = np.random.default_rng(0), len(vocab)
    while added < size:
        left, right = begins[int(rng.integers(len(begins)))], words[int(rng.integers(len(words)))]
        if left + right not in vocab:
            vocab[left + right], added = added, added + 1
            merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
    return Tokenizer(TokenizerFiles(json.dumps(definition), files.named_tokens))


def time_window(constraint: Constraint, path: tuple[int, ...], words: int) -> list[float]:
    """CPU seconds of the masks of a chain, the first and the best time. The constraint's state does not change."""
    times = []
    for _ in range(REPEATS):
        at, rows = constraint.fork(), np.empty((len(path) + 1, words), dtype=np.int32)
        began = time.thread_time()
        masks = WindowMasks(at, rows)
        for length in range(len(path) + 1):
            masks.write(path[:length])
        times.append(time.thread_time() - began)
    return [times[0], min(times)]


def draft(constraint: Constraint, words: int, eos: frozenset[int], rng: np.random.Generator) -> tuple[int, ...]:
    """A sequence of allowed tokens with the length of a window's drafts; shorter if the text ends."""
    fork, path, row = constraint.fork(), (), np.empty(words, dtype=np.int32)
    while len(path) < WINDOW - 1:
        fork.fill(row)
        choices = [token for token in np.flatnonzero(allowed_tokens(row)).tolist() if token not in eos]
        if not choices:
            break
        path = (*path, choices[int(rng.integers(len(choices)))])
        fork.push(path[-1])
    return path


def mask_times(tokenizer: Tokenizer, backend: str, size: int, steps: int) -> dict[str, float]:
    """Microseconds of the masks of a step, on random walks through the grammars."""
    assert tokenizer.eos_id is not None, "every tokenizer that is measured names its end of text"
    eos, words = frozenset({tokenizer.eos_id}), mask_words(size)
    compiler = make_backend(backend, Vocabulary(tokenizer.definition, size, tuple(eos), tokenizer.special_tokens, tokenizer.token_bytes))
    rng = np.random.default_rng(1)
    windows: list[list[float]] = []
    singles: list[list[float]] = []
    for grammar in MASKED:
        constraint = Constraint(compiler.compile(compiler.translate(grammar)).fork(), eos)
        for _ in range(steps):
            singles.append(time_window(constraint, (), words))
            path = draft(constraint, words, eos, rng)
            if len(path) < WINDOW - 1:
                break
            windows.append(time_window(constraint, path, words))
            for token in path[: int(rng.integers(1, WINDOW))]:
                constraint.commit(token)
    first, best = np.array(windows).T * 1e6
    plain = np.array(singles)[:, 1] * 1e6
    return {"plain_us": float(np.median(plain)), "window_us": float(np.median(best)), "p99_us": float(np.quantile(first, 0.99))}


def measure_masks(record: Record, tokenizer_folder: Path, backends: list[str], large: int, steps: int) -> None:
    """Record mask times for the embedded model's vocabulary and for a large one."""
    files = TokenizerFiles.read(tokenizer_folder)
    for tokenizer in (Tokenizer(files), large_vocabulary(files, large)):
        for backend in backends:
            labels = {"what": "masks", "backend": backend, "vocabulary": tokenizer.vocab_size}
            record.add(labels | mask_times(tokenizer, backend, tokenizer.vocab_size, steps))


def measure_serving(record: Record, shape: str, batches: list[int], new_tokens: int, bursts: int, threads: int | None) -> None:
    """Record the throughput of one server that answers alternately with and without the schema."""
    options = room_for(max(batches), "cpu") | {"cpu_threads": threads}
    free = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    kinds = {"free": free, "schema": {**free, "json_schema": json.dumps(RECORDS)}}
    with Engine(**options, **speculation(shape)) as engine:
        asked = chat_prompts(engine)
        tallies = {(kind, batch): Tally() for batch in batches for kind in kinds}
        for sampling in kinds.values():  # warm-up: threads, memory pages, the grammar
            engine.generate(input_ids=asked[-2:], sampling_params=sampling)
        for batch in batches:
            for burst in range(bursts):
                prompts = [asked[(burst * batch + i) % len(asked)] for i in range(batch)]
                for kind, sampling in kinds.items():
                    engine.flush_cache()
                    began = time.perf_counter()
                    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
                    tallies[kind, batch].add(outputs, time.perf_counter() - began)
    for (kind, batch), tally in tallies.items():
        labels = {"what": kind, "backend": "llguidance", "speculation": shape, "batch": batch}
        record.add(labels | {"new_tokens": new_tokens} | tally.figures())


def measure_acceptance(record: Record, shape: str, batch: int, new_tokens: int, bursts: int, threads: int | None) -> None:
    """Record accept lengths of one server that answers the same prompts with each grammar."""
    options = room_for(batch, "cpu") | {"cpu_threads": threads}
    with Engine(**options, **speculation(shape)) as engine:
        asked = chat_prompts(engine)
        for name, fields in CONSTRAINTS.items():
            tally, sampling = Tally(), {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True, **fields}
            for burst in range(bursts):
                prompts = [asked[(burst * batch + i) % len(asked)] for i in range(batch)]
                tally.add(engine.generate(input_ids=prompts, sampling_params=sampling), 1.0)
            labels = {"what": "acceptance", "grammar": name, "speculation": shape, "batch": batch, "new_tokens": new_tokens}
            record.add(labels | {key: tally.figures()[key] for key in ("tokens", "accept_length")})


def render(result: Result) -> str:
    """Mask times, then tokens per second and accept length with and without the schema, by grammar, and of hostile grammars."""
    parts = [masks_table(result), summary(result), acceptance_table(result), hostile_table(result), process_table(result)]
    return "\n\n".join(filter(None, [*parts, provenance(result)]))


def masks_table(result: Result) -> str:
    """Mask times by backend and vocabulary; empty if not measured."""
    lines = [
        [f"{row['backend']}, {row['vocabulary']:,} tokens", *(row[name] for name in ("plain_us", "window_us", "p99_us"))]
        for row in result["rows"]
        if row["what"] == "masks"
    ]
    window = f"window of {WINDOW}"
    header = ["microseconds a request and step", "no drafts, median", f"{window}, median", f"{window}, 99th percentile"]
    return table(header, lines) if lines else ""


def acceptance_table(result: Result) -> str:
    """Accept lengths by grammar; empty if not measured."""
    rows = [row for row in result["rows"] if row["what"] == "acceptance"]
    header = ["grammar", "steps/topk/draft tokens, batch", "tokens", "accept length"]
    lines = [[row["grammar"], f"{row['speculation']}, {row['batch']}", row["tokens"], row["accept_length"]] for row in rows]
    return table(header, lines) if rows else ""


def summary(result: Result) -> str:
    """Throughput and accept length with and without a schema."""
    lines = []
    for row in result["rows"]:
        if row["what"] != "schema":
            continue
        free = pick(result["rows"], what="free", speculation=row["speculation"], batch=row["batch"])
        assert free is not None, "both kinds are measured together"
        rates = [free["tokens_per_second"], row["tokens_per_second"]]
        lines.append(
            [f"{row['speculation']}, batch {row['batch']}", *rates, rates[1] / rates[0], free["accept_length"], row["accept_length"]]
        )
    header = ["steps/topk/draft tokens", "free (tok/s)", "schema (tok/s)", "ratio", "accept length, free", "accept length, schema"]
    return table(header, lines) if lines else ""


def plot(result: Result, file: Path) -> None:
    """Tokens per second with and without the schema, and accept lengths by grammar, if measured."""
    served = [row for row in result["rows"] if row["what"] in ("free", "schema")]
    groups = plots.grouped((f"{row['speculation']}, {row['batch']}", row["what"], row["tokens_per_second"]) for row in served)
    panels = [plots.bars(groups, "", "tokens/s", kind="steps/topk/draft tokens, batch size")] if groups else []
    lengths = {row["grammar"]: {"accept length": row["accept_length"]} for row in result["rows"] if row["what"] == "acceptance"}
    panels += [plots.bars(lengths, "", "tokens per iteration", kind="grammar")] if lengths else []
    if panels:
        picture.draw(result, file, "SmolLM2-135M with and without a grammar", panels)


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=numbers, default=[1, 4, 16], help="batch sizes")
    parser.add_argument("--shapes", type=names, default=["off", "3/1/4"], help="off, or steps/topk/draft tokens")
    parser.add_argument("--bursts", type=positive, default=3, help="bursts per batch size and kind")
    parser.add_argument("--new-tokens", type=positive, default=48)
    parser.add_argument("--threads", type=positive, help="CPU threads; default: all cores")
    parser.add_argument("--backends", nargs="+", default=["llguidance"], help="grammar backends whose masks are timed")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part; may be repeated")
    args = parser.parse_args()
    large, steps, calm_seconds = LARGE_VOCABULARY, STEPS, CALM_SECONDS
    if args.quick:
        args.batch, args.bursts, args.new_tokens, args.threads = [2], 1, 8, 1
        large, steps, calm_seconds, args.shapes = 50_000, 4, 0.2, ["3/1/4"]
    record = Record(NAME, KEYS, args.out, args.quick)
    parts = args.only or PARTS
    if "masks" in parts:
        from runtime.model_files.model_source import resolve_model

        folder = resolve_model(None, load_format="auto", tokenizer_path=None, revision=None).tokenizer_folder
        measure_masks(record, Path(folder), args.backends, large, steps)
    if "serving" in parts:
        for shape in args.shapes:
            measure_serving(record, shape, args.batch, args.new_tokens, args.bursts, args.threads)
    if "acceptance" in parts:
        measure_acceptance(record, args.shapes[-1], args.batch[0], args.new_tokens, args.bursts, args.threads)
    flags = tiny_model().target_flags if args.quick else ["--device", "cpu"]
    if "hostile" in parts:
        measure_hostile(record, flags, calm_seconds)
    if "process" in parts:
        measure_process(record, flags)
    record.show(render, plot)


if __name__ == "__main__":
    main()
