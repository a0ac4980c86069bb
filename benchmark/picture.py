"""The plot of a result file: a PNG whose title names the machine and whose header has a digest of the rows."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.markdown import Result
from benchmark.plots import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 10.0
"""Width of every figure in inches; equal widths are scaled equally on a page."""
DPI = 100
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f3f99", "#a6761d", "#8c8c8c", "#222222")
_TITLE = 0.6
_LEGEND_LINE = 0.25
_LEGEND_COLUMNS = 4


def draw(result: Result, file: Path, title: str, panels: Sequence[Panel], columns: int = 1) -> None:
    """Draw `panels` into `file` in `columns` columns; without matplotlib only print a message.

    The plot of a quick run is composed, but neither laid out nor written, which takes most of the time: its figures mean nothing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no {file.name}: matplotlib is not installed; python -m benchmark.report draws it from the JSON")
        return
    machine = result["machine"]
    where = machine["device"] if machine["gpus"] else f"{machine['device']}, {machine['cores']} cores"
    figure = _figure(f"{title}\n{where}", panels, columns)
    if result.get("quick"):
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    _save(figure, file, digest(result))
    print(f"plot: {file}")


def digest(result: Result) -> str:
    """The digest of the rows that a plot shows."""
    return hashlib.sha256(json.dumps([result["machine"], result["rows"]], sort_keys=True).encode()).hexdigest()


def fault(result: Result, file: Path) -> str | None:
    """The fault of a result's plot; None if it exists and shows these rows."""
    if not file.is_file():
        return "is missing"
    return None if digest(result).encode() in file.read_bytes() else "shows other rows than its result file"


def _figure(title: str, panels: Sequence[Panel], columns: int) -> Figure:
    """A figure with the panels row by row.

    A name has the same colour in all panels. Legends are next to a single column or below several columns.
    """
    from matplotlib.figure import Figure

    columns = max(min(columns, len(panels)), 1)
    heights = [max(panel.height for panel in panels[start : start + columns]) for start in range(0, len(panels), columns)]
    names = list(dict.fromkeys(name for panel in panels for name in panel.names))
    below = columns > 1 and len(names) > 1
    legend = _LEGEND_LINE * math.ceil(len(names) / _LEGEND_COLUMNS) if below else 0.0
    figure = Figure(figsize=(WIDTH, sum(heights) + _TITLE + legend), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=11)
    _paint(figure, panels, columns, heights, dict(zip(names, itertools.cycle(_COLOURS), strict=False)))
    if below:
        handles = {name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), fontsize=8, loc="outside lower center", ncols=_LEGEND_COLUMNS)
    return figure


def _paint(figure: Figure, panels: Sequence[Panel], columns: int, heights: Sequence[float], colours: Mapping[str, str]) -> None:
    grid = figure.add_gridspec(max(len(heights), 1), columns, height_ratios=heights or None)
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(i, columns)])
        panel.paint(axes, colours)
        axes.title.set_fontsize(10)
        if columns == 1 and len(panel.names) > 1:
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def _save(figure: Figure, file: Path, rows: str) -> None:
    """Save with a palette, which makes the file four times smaller; octree quantisation preserves the colours of small areas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    header = PngInfo()
    header.add_text("rows", rows)
    pixels = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    pixels.quantize(64, Image.Quantize.FASTOCTREE).save(file, optimize=True, pnginfo=header)
