"""The picture of a training run: loss, agreement by pass, held-out accept length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.plots import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_curves(file: Path, history: Sequence[Mapping[str, Any]], checks: Sequence[Mapping[str, Any]]) -> None:
    """Write the PNG; without matplotlib there is none, and it is said."""

    def loss(axes: Axes) -> None:
        axes.plot([row["tokens"] for row in history], [row["loss"] for row in history], linewidth=1)
        axes.set(title="Training loss", xlabel="tokens of text", ylabel="cross-entropy")

    def agreement(axes: Axes) -> None:
        for i in range(len(history[0]["agreement"]) if history else 0):
            axes.plot([row["tokens"] for row in history], [row["agreement"][i] for row in history], linewidth=1, label=f"pass {i + 1}")
        axes.set(title="Guesses that are the target's, training text", xlabel="tokens of text", ylabel="share")
        axes.legend(fontsize=8)

    def held_out(axes: Axes) -> None:
        axes.plot([row["tokens"] for row in checks], [row["accept_length"] for row in checks], marker="o")
        axes.set(title="Held-out greedy accept length", xlabel="tokens of text", ylabel="tokens a window")

    def with_grid(panel: Any) -> Any:
        def drawn(axes: Axes) -> None:
            panel(axes)
            axes.grid(alpha=0.3)

        return drawn

    draw(file, [with_grid(panel) for panel in (loss, agreement, held_out)])
