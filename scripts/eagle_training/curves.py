"""The plot of a training run: loss, agreement by pass, held-out accept length."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_curves(file: Path, history: Sequence[Mapping[str, Any]], checks: Sequence[Mapping[str, Any]]) -> None:
    """Write the PNG; without matplotlib only print a message."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no {file.name}: matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4), dpi=100, layout="constrained")
    loss, agreement, held_out = figure.subplots(1, 3)
    tokens = [row["tokens"] for row in history]
    loss.plot(tokens, [row["loss"] for row in history], linewidth=1)
    _frame(loss, "Training loss", "cross-entropy")
    for i in range(len(history[0]["agreement"]) if history else 0):
        agreement.plot(tokens, [row["agreement"][i] for row in history], linewidth=1, label=f"pass {i + 1}")
    _frame(agreement, "Drafts equal to the target's token, training text", "share")
    if history:
        agreement.legend(fontsize=8)
    held_out.plot([row["tokens"] for row in checks], [row["accept_length"] for row in checks], marker="o")
    _frame(held_out, "Held-out greedy accept length", "tokens per window")
    figure.savefig(file)


def _frame(axes: Axes, title: str, unit: str) -> None:
    axes.set(title=title, xlabel="tokens of text", ylabel=unit)
    axes.grid(alpha=0.3)
