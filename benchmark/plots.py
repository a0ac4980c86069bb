"""Plots of result rows as PNG files; without matplotlib there are none, and `report --plots` draws them later from the JSON."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Mapping[str, Sequence[tuple[float, float]]]


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def lines(axes: Axes, series: Points, title: str, x: str, y: str, log_x: bool = True) -> None:
    """One line for each name; x is drawn as powers of two."""
    for name, points in series.items():
        ordered = sorted(points)
        axes.plot([p[0] for p in ordered], [p[1] for p in ordered], marker="o", markersize=4, label=name)
    if log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({point[0] for points in series.values() for point in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if series:
        axes.legend(fontsize=8)


def bars(axes: Axes, groups: Mapping[str, Mapping[str, float]], title: str, y: str) -> None:
    """Groups of bars: {group: {bar: height}}."""
    kinds = list(dict.fromkeys(kind for heights in groups.values() for kind in heights))
    width = 0.8 / max(len(kinds), 1)
    for i, kind in enumerate(kinds):
        at = [g + (i - (len(kinds) - 1) / 2) * width for g in range(len(groups))]
        axes.bar(at, [heights.get(kind, 0.0) for heights in groups.values()], width, label=kind)
    axes.set_xticks(range(len(groups)), list(groups), rotation=0 if len(groups) < 5 else 30, fontsize=8)
    axes.set(title=title, ylabel=y)
    axes.grid(alpha=0.3, axis="y")
    if kinds:
        axes.legend(fontsize=8)


def draw(file: Path, panels: Sequence[Callable[[Axes], None]]) -> None:
    """Draw `panels` side by side into `file`; does nothing without matplotlib."""
    if not available():
        print(f"no {file.name}: matplotlib is not installed; python -m benchmark.report --plots draws it from the JSON")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    print(f"plot: {file}")
