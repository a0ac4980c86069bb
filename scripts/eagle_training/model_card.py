"""The README of a trained head: architecture, data, training, acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle_training.evaluation import kinds_tables, table

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
    measured = [_acceptance(run, evaluation), _repeat(evaluation)]
    parts = [_head(run), _use(), *measured, _data(run), _training(run), _seeds(run, evaluation), _limits()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(run: Mapping[str, Any]) -> str:
    head = run["head"]
    return (
        f"# EAGLE-3 draft head for {run['model']}\n\n"
        f"One decoder layer of width {head['hidden_size']} with an MLP of {head['intermediate_size']}, an LM head over "
        f"{head['draft_vocab_size']} of the target's {head['vocab_size']} tokens, and a projection of the inputs of "
        "target layers "
        f"{', '.join(str(layer) for layer in head['aux_layers'])}. {head['parameters'] / 1e6:.1f} million parameters, "
        f"{head['megabytes']:.1f} MB in bfloat16. The embedding is the target's."
    )


def _use() -> str:
    return (
        "```\npython -m runtime.launch_server --model-path TARGET --speculative-algorithm EAGLE3 \\\n"
        "    --speculative-draft-model-path THIS_FOLDER --speculative-num-steps 3 \\\n"
        "    --speculative-eagle-topk 1 --speculative-num-draft-tokens 4\n```"
    )


def unseen_kinds(run: Mapping[str, Any]) -> str:
    """How the kinds of prompts that have no templates were kept out of the training text."""
    if "kinds_share" not in run.get("data", {}):
        return "The head was trained on prompts of any kind that the model wrote itself, and on no templates."
    if "initial_head" in run.get("training", {}).get("settings", {}):
        return f"{KEPT_OUT} The head that this training continues may have seen some."
    return KEPT_OUT


def _acceptance(run: Mapping[str, Any], evaluation: Sequence[Mapping[str, Any]]) -> str:
    if not evaluation:
        return "## Acceptance\n\nNot measured yet."
    loops = "; ".join(
        f"{row['looping_answers']} of {row['prompts']} ({row['set']}, {row['shape']}, {row['device']})"
        for row in evaluation
        if row["looping_answers"]
    )
    text = (
        "## Acceptance\n\nGreedy, measured by the server. Accept length: tokens that a verified window commits, the "
        "bonus token included. "
        "Rate of a position: accepted drafts among those whose predecessors were accepted. The target wrote the "
        "held-out prompts, which "
        f"are excluded from training; the everyday and hand-made prompts are not from the model. {unseen_kinds(run)} "
        '"Without loops" excludes answers '
        "that end in a loop, "
        "which any draft predicts well"
    )
    text += f": {loops}." if loops else ": there were none."
    kinds = kinds_tables(evaluation)
    return text + "\n\n" + table(evaluation) + (f"\n\nAccept length by kind:\n\n{kinds}" if kinds else "")


def _repeat(evaluation: Sequence[Mapping[str, Any]]) -> str:
    """How to repeat the measurement: one command per device, and the machines."""
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in evaluation:
        runs.setdefault((row["device"], row["dtype"]), []).append(row)
    if not runs:
        return ""
    commands, places = [], []
    for (device, dtype), rows in runs.items():
        shapes = ",".join(dict.fromkeys(row["shape"] for row in rows))
        prompts, tokens = (max(row[name] for row in rows) for name in ("prompts", "new_tokens"))
        commands.append(
            f"python scripts/train_eagle.py --output THIS_FOLDER --phases evaluate --device {device} \\\n"
            f"    --dtype {dtype} --shapes {shapes} --prompts {prompts} --measured-tokens {tokens}"
        )
        where = dict.fromkeys(f"{row['machine']}, commit {row['commit']}" for row in rows if "machine" in row)
        places += [f"{device} {dtype}: {place}" for place in where]
    return (
        "Held-out prompts are in `held_out.jsonl`, everyday and hand-made prompts in the package's "
        "`assets/everyday_prompts.jsonl` and `assets/chat_prompts.jsonl`, the "
        "figures in "
        f"`evaluation.json`. Measured on: {'; '.join(places) or 'not noted'}. To repeat:\n\n```\n" + "\n".join(commands) + "\n```"
    )


def _data(run: Mapping[str, Any]) -> str:
    data = run.get("data", {})
    if "conversations" not in data:  # trained from another head's data
        return ""
    turns = (
        "User turns that the target writes itself as it continues the chat template, and its answers, greedy and at temperatures up to 1."
    )
    if "kinds_share" in data:
        turns = (
            "User turns from templates of many kinds, and turns that the target writes itself as it continues the chat "
            "template; some with a system prompt, some with a follow-up. The target's answers are greedy or at "
            "temperatures from 0.2 to 1."
        )
    return (
        f"## Data\n\n{turns} {data['conversations']:,} conversations with {data['answer_tokens']:,} "
        "answer tokens "
        f"({data['greedy_share']:.0%} of them greedy), and {data['held_out']} held-out prompts; loops are cut to two "
        "turns. "
        f"The draft's vocabulary covers {data['coverage']:.2%} of the tokens of training answers and "
        f"{data['held_out_coverage']:.2%} of "
        f"those of held-out answers.\n\n" + _made(data)
    )


def _training(run: Mapping[str, Any]) -> str:
    training = run.get("training")
    if not training:
        return ""
    settings = ", ".join(f"{name} {value}" for name, value in training["settings"].items())
    return (
        f"## Training\n\nTraining-time test over {training['settings']['passes']} passes; cross-entropy with the "
        "target's distribution "
        f"over the draft's vocabulary. {training['steps']:,} steps over {training['tokens']:,} tokens of text in "
        f"{training['seconds']:.0f} s: {settings}. Curves: `curves.png`, figures: `training.json`.\n\n" + _made(training)
    )


def _seeds(run: Mapping[str, Any], evaluation: Sequence[Mapping[str, Any]]) -> str:
    """Accept lengths of this head and of heads with other seeds, for equal measurements."""
    lines, runs = [], []
    for other in run.get("other_seeds", []):
        runs.append(f"Seed {other['seed']}, {other['seconds']:.0f} s on {other['device']}, commit {other['commit']}:\n\n"
                    f"```\n{other['command']}\n```")  # fmt: skip
        for row in evaluation:
            found = [one for one in other["rows"] if all(one[name] == row[name] for name in SAME)]
            if found:
                mine, theirs = row["accept_length"], found[0]["accept_length"]
                lines.append(f"| {row['shape']} | {row['set']} | {row['device']} {row['dtype']} | {mine:.3f} | {other['seed']} | "
                             f"{theirs:.3f} | {theirs - mine:+.3f} |")  # fmt: skip
    if not runs:
        return ""
    head = "| steps/topk/draft tokens | prompts | device | accept length | other seed | its accept length | difference |"
    text = "## Other seeds\n\nThe same training with another seed; each run has its own held-out prompts."
    return "\n\n".join([text, "\n".join([head, "|" + " --- |" * 7, *lines]), *runs])


def _made(phase: Mapping[str, Any]) -> str:
    machine = phase["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if name in ("torch", "triton"))
    return (
        f"Seed {phase['seed']}, {phase['seconds']:.0f} s on {machine['device']} ({versions}), commit "
        f"{phase['commit']}:\n\n"
        f"```\n{phase['command']}\n```"
    )


def _limits() -> str:
    return (
        "## Limits\n\nThe head was trained on the target's answers to short turns, mostly in English. "
        "Longer contexts, other "
        "languages and other system prompts lower acceptance, but never change the output: every draft is verified."
    )
