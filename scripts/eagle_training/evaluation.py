"""Measures acceptance with `runtime.Engine`, which answers prompts greedily with the head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import runtime
from eagle_training.conversations import loop_period
from runtime import Engine
from runtime.model_executor.acceptance import AcceptanceCounters, total
from runtime.text.tokenizer import Tokenizer

ASSETS = Path(runtime.__file__).parent / "assets"
CHAT_PROMPTS, EVERYDAY = ASSETS / "chat_prompts.jsonl", ASSETS / "everyday_prompts.jsonl"
NO_TEMPLATES, TEMPLATES = "everyday, kinds without templates", "everyday, kinds with templates"
"""The two sets of `EVERYDAY`: kinds of prompts that are not in `prompts.yaml`, and so not in the training text, and kinds that are."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Steps, topk and draft tokens of a server."""

    steps: int
    topk: int
    draft_tokens: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse `K/topk/D`; raise ValueError."""
        steps, topk, draft_tokens = (int(part) for part in text.split("/"))
        return cls(steps, topk, draft_tokens)

    def options(self, head: Path) -> dict[str, Any]:
        """Options of an `Engine` that drafts in this shape with the head in a folder."""
        return {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(head),
            "speculative_num_steps": self.steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.draft_tokens,
        }

    def __str__(self) -> str:
        return f"{self.steps}/{self.topk}/{self.draft_tokens}"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A set of prompts: texts of user turns, each with a kind."""

    name: str
    prompts: Sequence[str]
    kinds: Sequence[str]

    def first(self, count: int) -> PromptSet:
        """The first prompts, at most `count`."""
        return PromptSet(self.name, self.prompts[:count], self.kinds[:count])

    def every(self, step: int) -> PromptSet:
        """Every `step`-th prompt."""
        return PromptSet(self.name, self.prompts[::step], self.kinds[::step])


def read_prompts(name: str, path: Path, held_out: bool | None = None) -> PromptSet:
    """Read a file of {"kind", "prompt"} lines. With `held_out`, only lines whose field `held_out` has this value."""
    if not path.is_file():
        raise SystemExit(f"{path} is missing; run the generate phase first")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise SystemExit(f"{path} is damaged: a line is not valid JSON; run the generate phase again") from error
    if not rows:
        raise SystemExit(f"{path} is empty; run the generate phase again")
    rows = [row for row in rows if held_out is None or row["held_out"] == held_out]
    return PromptSet(name, [row["prompt"] for row in rows], [row["kind"] for row in rows])


def measure(model: Mapping[str, Any], head: Path, shape: Shape, sets: Sequence[PromptSet], new_tokens: int) -> list[dict[str, Any]]:
    """Start an engine with the head and answer all sets.

    Args:
        model: options of `Engine` for the target and the device.
        new_tokens: maximum answer length.

    Returns:
        One row per set: accept length and rates by position, over all answers, over answers without loops, and by kind.
    """
    with Engine(**dict(model) | shape.options(head)) as engine:
        tokenizer = Tokenizer.load(engine.config.model.tokenizer_path)
        facts = {"device": engine.config.device.device, "dtype": engine.config.device.dtype, "shape": str(shape), "new_tokens": new_tokens}
        return [facts | _measure_set(engine, tokenizer, one, shape.steps, new_tokens) for one in sets]


def _measure_set(engine: Engine, tokenizer: Tokenizer, prompts: PromptSet, steps: int, new_tokens: int) -> dict[str, Any]:
    ids = [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts.prompts]
    outputs = engine.generate(input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": new_tokens})
    counted = [count_drafts([output], steps) for output in outputs]
    loops = [loop_period(output["output_ids"])[0] > 0 for output in outputs]
    kinds = {
        kind: round(total(steps, [c for c, k in zip(counted, prompts.kinds, strict=True) if k == kind]).mean_accept_len, 3)
        for kind in dict.fromkeys(prompts.kinds)
    }
    return {
        "set": prompts.name,
        "prompts": len(ids),
        "tokens": sum(len(output["output_ids"]) for output in outputs),
        **msgspec.to_builtins(total(steps, counted).stats()),
        "looping_answers": sum(loops),
        "accept_length_without_loops": total(steps, [c for c, loop in zip(counted, loops, strict=True) if not loop]).mean_accept_len,
        "accept_length_by_kind": kinds,
    }


def count_drafts(outputs: Sequence[Mapping[str, Any]], steps: int) -> AcceptanceCounters:
    """Acceptance counts of outputs of `Engine.generate` with K = `steps`.

    The first token of an answer needs no draft.
    """
    counters = AcceptanceCounters(steps)
    for output in outputs:
        meta = output["meta_info"]
        windows = int(meta.get("spec_verify_ct", 0))
        if windows:
            accepted = np.array(meta["spec_accepted_by_position"][:steps], dtype=np.int64)
            counters.iterations += windows
            counters.drafted += windows
            counters.accepted += accepted
            counters.reached += np.concatenate([[windows], accepted[:-1]])
    return counters


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `measure` as Markdown."""
    deepest = max((len(row["rates"]) for row in rows), default=0)
    head = ["steps/topk/draft tokens", "prompts", "device", "answers", "tokens", "accept length", "without loops"]
    head += [f"position {i + 1}" for i in range(deepest)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [row["shape"], row["set"], f"{row['device']} {row['dtype']}", str(row["prompts"]), str(row["tokens"]),
                 f"{row['accept_length']:.3f}", f"{row['accept_length_without_loops']:.3f}"]  # fmt: skip
        cells += [f"{rate:.3f}" for rate in row["rates"]] + [""] * (deepest - len(row["rates"]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def kinds_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Accept lengths by kind, one Markdown table per set with several kinds; empty if there is none."""
    parts = []
    for name in dict.fromkeys(row["set"] for row in rows if len(row["accept_length_by_kind"]) > 1):
        found = [row for row in rows if row["set"] == name]
        head = [name, *(f"{row['shape']}, {row['device']} {row['dtype']}" for row in found)]
        lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        kinds = {kind: [row["accept_length_by_kind"][kind] for row in found] for kind in found[0]["accept_length_by_kind"]}
        for kind, values in (kinds | {"all": [row["accept_length"] for row in found]}).items():
            lines.append("| " + " | ".join([kind, *(f"{value:.2f}" for value in values)]) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
