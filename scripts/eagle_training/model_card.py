"""The README of a trained head: architecture, data, training, acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from eagle_training.evaluation import kinds_tables, table

TEMPLATE = Path(__file__).with_suffix(".md.jinja")
SAME = ("shape", "set", "device", "dtype")
"""Fields that two measured rows must share to be compared."""
KEPT_OUT = (
    "The kinds without templates were kept out of training: prompts of the model with a keyword of these kinds were dropped; "
    "a few without a keyword may remain."
)
"""How `kinds.is_held_out_kind` excludes the kinds that are used for evaluation."""


def model_card(run: Mapping[str, Any], evaluation: Sequence[Mapping[str, Any]]) -> str:
    """The card as Markdown.

    Args:
        run: the notes of `pipeline`: `model`, `head`, `data`, `training`, each with command, commit and machine, and `other_seeds` if
            heads with other seeds were compared.
        evaluation: rows of `evaluation.measure`, with the commit and machine that `pipeline` adds.
    """
    others = [(other["seed"], row) for other in run.get("other_seeds", []) for row in other["rows"]]
    loops = [
        f"{row['looping_answers']} of {row['prompts']} ({row['set']}, {row['shape']}, {row['device']})"
        for row in evaluation
        if row["looping_answers"]
    ]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        run={"data": {}, **run},
        evaluation=evaluation,
        unseen_kinds=unseen_kinds(run),
        loops="; ".join(loops),
        table=table(evaluation),
        kinds=kinds_tables(evaluation),
        devices=_devices(evaluation),
        seeds=[(mine, seed, row) for seed, row in others for mine in evaluation if all(mine[name] == row[name] for name in SAME)],
        versions=_versions,
    )


def unseen_kinds(run: Mapping[str, Any]) -> str:
    """How the kinds of prompts that have no templates were kept out of the training text."""
    if "kinds_share" not in run.get("data", {}):
        return "The head was trained on prompts of any kind that the model wrote itself, and on no templates."
    if "initial_head" in run.get("training", {}).get("settings", {}):
        return f"{KEPT_OUT} The head that this training continues may have seen some."
    return KEPT_OUT


def _devices(evaluation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each device and dtype that was measured: the options that repeat the measurement, and the machines."""
    found = []
    for device, dtype in dict.fromkeys((row["device"], row["dtype"]) for row in evaluation):
        rows = [row for row in evaluation if (row["device"], row["dtype"]) == (device, dtype)]
        shapes = ",".join(dict.fromkeys(row["shape"] for row in rows))
        prompts, tokens = (max(row[name] for row in rows) for name in ("prompts", "new_tokens"))
        where = dict.fromkeys(f"{device} {dtype}: {row['machine']}, commit {row['commit']}" for row in rows if "machine" in row)
        found.append({"device": device, "dtype": dtype, "shapes": shapes, "prompts": prompts, "tokens": tokens, "places": list(where)})
    return found


def _versions(phase: Mapping[str, Any]) -> str:
    """The versions of the packages that matter for a phase."""
    return ", ".join(f"{name} {version}" for name, version in phase["machine"]["packages"].items() if name in ("torch", "triton"))
