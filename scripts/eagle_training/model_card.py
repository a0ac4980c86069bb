"""The README of a trained head: what it is, what it was made of, what it reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle_training.evaluation import kinds_table, table

SAME = ("shape", "set", "device", "dtype")
"""What two measured rows must share to be compared."""


def model_card(run: Mapping[str, Any], evaluation: Sequence[Mapping[str, Any]]) -> str:
    """Markdown.

    Args:
        run: what `pipeline` noted of its phases: `model`, `head`, `data`, `training`, each with its command, commit and machine, and
            `other_seeds` where heads of other seeds were compared.
        evaluation: rows of `evaluation.measure`, with the commit and machine that `pipeline` adds.
    """
    measured = [_acceptance(evaluation), _repeat(evaluation)]
    parts = [_head(run), _use(), *measured, _data(run), _training(run), _seeds(run, evaluation), _limits()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(run: Mapping[str, Any]) -> str:
    head = run["head"]
    return (
        f"# EAGLE-3 draft head for {run['model']}\n\n"
        f"One decoder layer of width {head['hidden_size']} with an MLP of {head['intermediate_size']}, an LM head over "
        f"{head['draft_vocab_size']} of the target's {head['vocab_size']} tokens, and a projection of the target's streams into layers "
        f"{', '.join(str(layer) for layer in head['aux_layers'])}. {head['parameters'] / 1e6:.1f} million parameters, "
        f"{head['megabytes']:.1f} MB in bfloat16. The embedding is the target's."
    )


def _use() -> str:
    return (
        "```\npython -m runtime.launch_server --model-path TARGET --speculative-algorithm EAGLE3 \\\n"
        "    --speculative-draft-model-path THIS_FOLDER --speculative-num-steps 3 \\\n"
        "    --speculative-eagle-topk 1 --speculative-num-draft-tokens 4\n```"
    )


def _acceptance(evaluation: Sequence[Mapping[str, Any]]) -> str:
    if not evaluation:
        return "## Acceptance\n\nNot measured yet."
    loops = "; ".join(
        f"{row['looping_answers']} of {row['prompts']} ({row['set']}, {row['shape']}, {row['device']})"
        for row in evaluation
        if row["looping_answers"]
    )
    text = (
        "## Acceptance\n\nGreedy, measured by the server's own verification. Accept length: tokens a verified window commits, the bonus "
        "token included. A position's rate: drafts accepted of those whose predecessors were. Held-out prompts were written by the target "
        'and never trained on; hand-made ones were not written by the model at all. "Without loops" leaves out answers that end in a '
        "loop, which any draft guesses well"
    )
    text += f": {loops}." if loops else ": there were none."
    kinds = kinds_table(evaluation)
    return text + "\n\n" + table(evaluation) + (f"\n\nHand-made prompts by kind:\n\n{kinds}" if kinds else "")


def _repeat(evaluation: Sequence[Mapping[str, Any]]) -> str:
    """How to measure it again: a command for each device, and where each was measured."""
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
        "Held-out prompts are in `held_out.jsonl`, hand-made ones in the package's `assets/chat_prompts.jsonl`, the figures in "
        f"`evaluation.json`. Measured on: {'; '.join(places) or 'not noted'}. Again:\n\n```\n" + "\n".join(commands) + "\n```"
    )


def _data(run: Mapping[str, Any]) -> str:
    data = run.get("data", {})
    if "conversations" not in data:  # trained from another head's data
        return ""
    return (
        f"## Data\n\nWritten by the target: users' turns from the chat template's opening, partly with a short opener, then answers, "
        f"greedy and at temperatures up to 1. {data['conversations']:,} conversations with {data['answer_tokens']:,} answer tokens "
        f"({data['greedy_share']:.0%} of them greedy), {data['held_out']} more prompts held out; loops cut to two turns. "
        f"The draft's vocabulary holds {data['coverage']:.2%} of the tokens of training answers and {data['held_out_coverage']:.2%} of the "
        f"held-out ones.\n\n" + _made(data)
    )


def _training(run: Mapping[str, Any]) -> str:
    training = run.get("training")
    if not training:
        return ""
    settings = ", ".join(f"{name} {value}" for name, value in training["settings"].items())
    return (
        f"## Training\n\nTraining-time test over {training['settings']['passes']} passes; cross-entropy with the target's distribution "
        f"over the draft's vocabulary. {training['steps']:,} steps over {training['tokens']:,} tokens of text in "
        f"{training['seconds']:.0f} s: {settings}. Curves: `curves.png`, figures: `training.json`.\n\n" + _made(training)
    )


def _seeds(run: Mapping[str, Any], evaluation: Sequence[Mapping[str, Any]]) -> str:
    """Accept lengths of heads of other seeds beside this one's, where both were measured alike."""
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
    text = "## Other seeds\n\nThe same course from another seed; held-out prompts are those that each run held out."
    return "\n\n".join([text, "\n".join([head, "|" + " --- |" * 7, *lines]), *runs])


def _made(phase: Mapping[str, Any]) -> str:
    machine = phase["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if name in ("torch", "triton"))
    return (
        f"Seed {phase['seed']}, {phase['seconds']:.0f} s on {machine['device']} ({versions}), commit {phase['commit']}:\n\n"
        f"```\n{phase['command']}\n```"
    )


def _limits() -> str:
    return (
        "## Limits\n\nIt knows the texts that its target writes in answer to short single questions, mostly English. Longer contexts than "
        "it was trained on, other languages and changed system prompts cost acceptance, never correctness: every draft is verified."
    )
