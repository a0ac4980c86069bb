"""Panels of a plot: lines, bars side by side, bars of stacked parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmark.markdown import cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Mapping[str, Sequence[tuple[float, float]]]
Groups = Mapping[str, Mapping[str, float | None]]
Text = Callable[[str, str], str]

_BAR = 0.2
_FRAME = 0.9
"""Inches: of a bar, and above and below all bars of a panel."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the names in its legend, its height in inches, and what paints it with a colour for each name."""

    names: Sequence[str]
    height: float
    paint: Callable[[Axes, Mapping[str, str]], None]


def lines(series: Points, title: str, x: str, y: str, level: float | None = None, marks: Mapping[str, float | None] | None = None) -> Panel:
    """One line for each name; x is drawn as powers of two.

    Args:
        series: points by name.
        title: of the panel.
        x: label of the axis.
        y: label of the axis, with its unit.
        level: where to draw a horizontal line.
        marks: by name, where the line falls through `level`, if it does; a star and the figure stand there.
    """

    def paint(axes: Axes, colours: Mapping[str, str]) -> None:
        for name, points in series.items():
            ordered = sorted(points)
            axes.plot([p[0] for p in ordered], [p[1] for p in ordered], marker="o", markersize=4, label=name, color=colours[name])
        axes.set_xscale("log", base=2)
        ticks = sorted({point[0] for points in series.values() for point in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        if level is not None:
            axes.axhline(level, color="black", linewidth=0.8)
            _mark(axes, level, {name: at for name, at in (marks or {}).items() if at is not None}, colours)
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)

    return Panel([*series], 3.6, paint)


def _mark(axes: Axes, level: float, marks: Mapping[str, float], colours: Mapping[str, str]) -> None:
    for name, at in marks.items():
        axes.axvline(at, color=colours[name], linestyle=":", linewidth=1)
        axes.plot([at], [level], marker="*", markersize=12, color=colours[name], zorder=3)
        style = {"color": colours[name], "fontsize": 9, "weight": "bold", "textcoords": "offset points"}
        axes.annotate(f"{at:.1f}", (at, level), xytext=(5, 6), **style)


def bars(
    groups: Groups, title: str, unit: str, *, kind: str = "", bound: float | None = None, text: Text | None = None, room: float = 0.15
) -> Panel:
    """Groups of bars that lie, with the value at the end of each: {group: {bar: length}}; what was not measured has no bar.

    Args:
        groups: lengths by group and bar.
        title: of the panel.
        unit: what lengths are, for the axis.
        kind: what groups are, for the axis.
        bound: where to draw a line that lengths should keep below.
        text: of (group, bar), in place of its value.
        room: for texts, as a share of the longest bar.
    """
    names = _names(groups)

    def paint(axes: Axes, colours: Mapping[str, str]) -> None:
        width = 0.8 / max(len(names), 1)
        for i, name in enumerate(names):
            found = [(g, group, lengths[name]) for g, (group, lengths) in enumerate(groups.items()) if lengths.get(name) is not None]
            places = [g + (i - (len(names) - 1) / 2) * width for g, _, _ in found]
            drawn = axes.barh(places, [length for _, _, length in found], width, label=name, color=colours[name])
            said = [text(group, name) if text else cell(length) for _, group, length in found]
            axes.bar_label(drawn, said, padding=3, fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        longest = max((length for lengths in groups.values() for length in lengths.values() if length is not None), default=0.0)
        axes.set_xlim(0, (max(longest, bound or 0.0) or 1.0) * (1 + room))
        if bound is not None:
            axes.axvline(bound, color="black", linewidth=0.8, linestyle="--")
        _frame(axes, groups, title, unit, kind)

    return Panel(names, _FRAME + _BAR * (len(names) + 0.7) * len(groups), paint)


def stacks(groups: Groups, title: str, unit: str, *, kind: str = "") -> Panel:
    """One bar a group, made of its parts, with their sum at its end: {group: {part: length}}."""
    names = _names(groups)
    sums = [sum(length or 0.0 for length in parts.values()) for parts in groups.values()]

    def paint(axes: Axes, colours: Mapping[str, str]) -> None:
        ends = [0.0] * len(groups)
        for name in names:
            parts = [lengths.get(name) or 0.0 for lengths in groups.values()]
            drawn = axes.barh(range(len(groups)), parts, 0.75, left=ends, label=name, color=colours[name])
            said = [cell(float(part)) if part > 0.06 * max(sums) else "" for part in parts]
            axes.bar_label(drawn, said, label_type="center", fontsize=8, color="white")
            ends = [end + part for end, part in zip(ends, parts, strict=True)]
        for g, end in enumerate(ends):
            axes.annotate(cell(end), (end, g), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_xlim(0, (max(sums, default=0.0) or 1.0) * 1.12)
        _frame(axes, groups, title, unit, kind)

    return Panel(names, _FRAME + 1.7 * _BAR * len(groups), paint)


def _names(groups: Groups) -> list[str]:
    return list(dict.fromkeys(name for lengths in groups.values() for name in lengths))


def _frame(axes: Axes, groups: Groups, title: str, unit: str, kind: str) -> None:
    axes.set_yticks(range(len(groups)), list(groups), fontsize=9)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set(title=title, xlabel=unit, ylabel=kind)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
