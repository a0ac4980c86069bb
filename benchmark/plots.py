"""Panels of a plot: lines, grouped bars and stacked bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Heights in inches: of a bar, and of the frame of a panel."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the names in its legend, its height in inches, and a function that paints it, given a colour per name."""

    names: Sequence[str]
    height: float
    paint: Callable[[Axes, Mapping[str, str]], None]


def lines(
    series: Points,
    title: str,
    x: str,
    y: str,
    level: float | None = None,
    marks: Mapping[str, float | None] | None = None,
    log: bool = False,
) -> Panel:
    """One line per name, with a logarithmic x axis.

    Args:
        series: points by name.
        title: title of the panel.
        x: label of the x axis.
        y: label of the y axis, with its unit.
        level: height of a horizontal line.
        marks: by name, where the line crosses `level`; marked with a star and the value.
        log: whether the y axis is logarithmic too.
    """

    def paint(axes: Axes, colours: Mapping[str, str]) -> None:
        if log:
            axes.set_yscale("log")
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
    """Groups of horizontal bars with their values; None has no bar.

    Args:
        groups: lengths by group and bar.
        title: title of the panel.
        unit: label of the length axis.
        kind: label of the group axis.
        bound: length of a vertical line, an upper bound for the bars.
        text: the text of (group, bar) instead of its value.
        room: space for texts, as a share of the longest bar.
    """
    names = _names(groups)

    def paint(axes: Axes, colours: Mapping[str, str]) -> None:
        width = 0.8 / max(len(names), 1)
        for i, name in enumerate(names):
            found = [(g, group, lengths[name]) for g, (group, lengths) in enumerate(groups.items()) if lengths.get(name) is not None]
            places = [g + (i - (len(names) - 1) / 2) * width for g, _, _ in found]
            drawn = axes.barh(places, [length for _, _, length in found], width, label=name, color=colours[name])
            labels = [text(group, name) if text else cell(length) for _, group, length in found]
            axes.bar_label(drawn, labels, padding=3, fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        longest = max((length for lengths in groups.values() for length in lengths.values() if length is not None), default=0.0)
        axes.set_xlim(0, (max(longest, bound or 0.0) or 1.0) * (1 + room))
        if bound is not None:
            axes.axvline(bound, color="black", linewidth=0.8, linestyle="--")
        _frame(axes, groups, title, unit, kind)

    return Panel(names, _FRAME + _BAR * (len(names) + 0.7) * len(groups), paint)


def stacks(groups: Groups, title: str, unit: str) -> Panel:
    """One stacked bar per group with the sum at its end; `groups` has lengths by group and part."""
    names = _names(groups)
    sums = [sum(length or 0.0 for length in parts.values()) for parts in groups.values()]

    def paint(axes: Axes, colours: Mapping[str, str]) -> None:
        ends = [0.0] * len(groups)
        for name in names:
            parts = [lengths.get(name) or 0.0 for lengths in groups.values()]
            drawn = axes.barh(range(len(groups)), parts, 0.75, left=ends, label=name, color=colours[name])
            labels = [cell(float(part)) if part > 0.06 * max(sums) else "" for part in parts]
            axes.bar_label(drawn, labels, label_type="center", fontsize=8, color="white")
            ends = [end + part for end, part in zip(ends, parts, strict=True)]
        for g, end in enumerate(ends):
            axes.annotate(cell(end), (end, g), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_xlim(0, (max(sums, default=0.0) or 1.0) * 1.12)
        _frame(axes, groups, title, unit, "")

    return Panel(names, _FRAME + 1.7 * _BAR * len(groups), paint)


def grouped(lengths: Iterable[tuple[str, str, float | None]]) -> Groups:
    """Lengths by group and bar, from (group, bar, length)."""
    groups: dict[str, dict[str, float | None]] = {}
    for group, bar, length in lengths:
        groups.setdefault(group, {})[bar] = length
    return groups


def _names(groups: Groups) -> list[str]:
    return list(dict.fromkeys(name for lengths in groups.values() for name in lengths))


def _frame(axes: Axes, groups: Groups, title: str, unit: str, kind: str) -> None:
    axes.set_yticks(range(len(groups)), list(groups), fontsize=9)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set(title=title, xlabel=unit, ylabel=kind)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
