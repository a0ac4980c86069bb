"""Acceptance at temperature 1: the strict rule, the probabilistic rule run eagerly, and the probabilistic rule in graphs.

The strict rule accepts a draft if it equals the target's own sample; its drafts are the most likely tokens. The probabilistic rule samples
the drafts from q and accepts each with probability min(1, p / q). In graphs, q is an output of captured passes. If it were stale,
acceptance would fall while the output stayed correct, so the last two columns must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmark import draft_head, picture, plots
from benchmark.chat_text import PROMPTS, chat_text
from benchmark.markdown import Result, percent, pick, split, table, with_provenance
from benchmark.record import Record
from benchmark.shapes import Model
from benchmark.sweep import Burst, Setup, add_model, arguments, positive, served_model, sweep

NAME = "verify_exact"
KEYS = ("model", "rule")
STEPS = 3
RULES = {
    "strict": "strict: the target's own draw must be a draft",
    "eager": "probabilistic, eager",
    "graphs": "probabilistic, through graphs",
}


def setups(served: Model) -> list[Setup]:
    """Three servers.

    Trees use the strict rule: here the two most likely first drafts, with as many nodes as the chain verifies.
    """
    chain = served.eagle_flags(None, STEPS)
    tree = served.eagle_flags(None, STEPS, topk=2)
    flags = {"strict": [*tree], "eager": [*chain, "--disable-cuda-graph"], "graphs": [*chain]}
    common = (*served.target_flags, "--disable-radix-cache")
    labels = {"model": served.name, "steps": STEPS, **draft_head.label(served.head)}
    return [Setup({**labels, "rule": rule}, (*common, *flags[rule])) for rule in RULES]


def burst(concurrency: int, num_prompts: int, output_len: int, prompts: int = PROMPTS) -> Burst:
    """The held-out chat prompts at temperature 1, each answer with its own seed."""
    return chat_text(concurrency, num_prompts, output_len, prompts, "--temperature", "1", "--warmup-requests", "0")


def acceptance_rate(row: dict[str, object]) -> float | None:
    """Accepted drafts over drafts, from the accept length: (length - 1) / K."""
    length = row["accept_length"]
    return (length - 1) / STEPS if isinstance(length, int | float) else None


def standard_error(row: dict[str, Any]) -> float | None:
    """The standard error of the acceptance rate, if windows are independent.

    Entry i of `per_position_acceptance` is the share of windows with at least i + 1 accepted drafts.
    """
    shares, length = row["per_position_acceptance"], row["accept_length"]
    if not shares or not length:
        return None
    windows = (row["total_output_tokens"] - row["completed"]) / length  # first tokens come from prompt passes
    variance = sum((2 * i + 1) * share for i, share in enumerate(shares)) - sum(shares) ** 2
    return math.sqrt(max(variance, 0.0) / windows) / STEPS if windows > 0 else None


def summary(result: Result) -> str:
    """Per model: acceptance rate with its standard error, accept length, throughput and acceptance by position, one column per rule."""
    parts = []
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = {rule: pick(result["rows"], model=name, rule=rule) for rule in RULES}
        found = {rule: row for rule, row in rows.items() if row is not None}
        lines = [
            ["acceptance rate, ± standard error", *(_rate(row) for row in found.values())],
            ["accept length", *(row["accept_length"] for row in found.values())],
            ["output tok/s", *(row["output_throughput"] for row in found.values())],
            ["acceptance by position", *(_positions(row["per_position_acceptance"]) for row in found.values())],
        ]
        parts.append(table([name, *(RULES[rule] for rule in found)], lines))
    return "\n\n".join(parts)


render = with_provenance(summary)


def _rate(row: dict[str, Any]) -> str | None:
    share, error = acceptance_rate(row), standard_error(row)
    return None if share is None else percent(share, 1) + ("" if error is None else f" ± {error * 100:.1f}")


def _positions(shares: list[float] | None) -> str | None:
    return " / ".join(f"{share:.3f}" for share in shares) if shares else None


def plot(result: Result, file: Path) -> None:
    """Acceptance of all drafts and by position, one bar per rule, one panel per model."""

    def shares(row: dict[str, Any]) -> Iterator[tuple[str, str, float | None]]:
        yield "all drafts", RULES[row["rule"]], acceptance_rate(row)
        for i, share in enumerate(row["per_position_acceptance"] or []):
            yield f"draft {i + 1}", RULES[row["rule"]], share

    models = split(result["rows"], itemgetter("model"))
    panels = [plots.bars(plots.grouped(chain(*map(shares, rows))), name, "share accepted") for name, rows in models.items()]
    picture.draw(result, file, f"Drafts accepted at temperature 1: {', '.join(models)}", panels)


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    add_model(parser)
    parser.add_argument("--concurrency", type=positive, default=16)
    parser.add_argument(
        "--num-prompts", type=positive, default=5 * PROMPTS, help="minimum, rounded up to whole rounds (default %(default)s)"
    )
    parser.add_argument("--prompts", type=positive, default=PROMPTS, help="different chat prompts per round (default %(default)s)")
    parser.add_argument("--output-len", type=positive, default=256, help="maximum tokens per answer (default %(default)s)")
    args = parser.parse_args()
    if not args.quick and not (args.model and args.head):
        parser.error("--model and --head FOLDER are required: a target with weights and an EAGLE head trained for it")
    record = Record(NAME, KEYS, args.out, args.quick)
    load = burst(2, 4, 8, 4) if args.quick else burst(args.concurrency, args.num_prompts, args.output_len, args.prompts)
    sweep(record, setups(served_model(args)), [load])
    record.show(render, plot)


if __name__ == "__main__":
    main()
