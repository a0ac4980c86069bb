"""Generates the benchmark tables and plots of the documentation from the result files.

`docs/benchmarks/NAME.md`, one page per script, is generated completely. In README.md and docs/*.md the text between the markers
`<!-- begin:NAME -->` and `<!-- end:NAME -->` is generated. NAME is a script; `NAME@MACHINE` shows only one machine, `NAME:summary` shows a
short table and a plot that links to the page, and `NAME:plot` shows only that plot.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from benchmark import draft_head, picture
from benchmark.machine import ROOT
from benchmark.markdown import Result
from benchmark.record import RESULTS

SCRIPTS = {
    "serving_matrix": "Serving an 8B model",
    "draft_extend_graph": "The draft-extend graph",
    "step_profile": "One iteration in detail",
    "crossover": "Where speculation stops paying off",
    "workloads": "Workloads beside SGLang",
    "depth_curve": "The chosen depth against fixed ones",
    "ragged_windows": "Windows of different widths",
    "tune_grid": "The tuned shape against a grid",
    "capture": "Start-up",
    "verify_exact": "Acceptance rules with sampling",
    "cpu_serving": "The embedded model on a CPU",
    "faults": "Faults",
    "abuse": "Beside the worst requests",
    "storm": "A storm of clients and kills",
    "client_agreement": "bench_serving against SGLang's client",
    "repeat": "Repeatability",
    "modes": "Graphs, overlap and attention backends",
    "sampling": "The cost of sampling",
    "embedded_gpu": "The embedded model on a GPU",
    "embedded_speculation": "The embedded model with its own draft",
    "lossless": "Greedy output with and without drafts",
    "exactness": "The price of exactness in bfloat16",
    "memory_limits": "Memory at its limits",
    "host_cost": "Host time",
    "compare_commits": "Two checkouts on one machine",
    "drift_alarm": "The drift alarm",
    "grammar": "Structured output",
    "moe_kernels": "Kernels of sparse layers",
    "model_matrix": "Sparse and quantised models",
    "cached_states": "Prefixes of a model with linear attention",
    "exchanges": "Exchanges between GPUs",
}
"""Titles of the generated pages by script."""
PAGES = ROOT / "docs" / "benchmarks"

_RANKS = re.compile(r"_tp\d+$")
_NAME = r"[\w@:-]+"
_MARKER = re.compile(rf"<!-- begin:(?P<name>{_NAME}) -->\n(?P<body>.*?)<!-- end:(?P=name) -->", re.DOTALL)
_BEGIN = re.compile(rf"<!-- begin:({_NAME}) -->")


class ReportError(Exception):
    """A marker is wrong; the message says how."""


def result_files(name: str, results: Path) -> list[Path]:
    """The result files of NAME or NAME@MACHINE; empty before the first run.

    Raises:
        ReportError: there is no such script.
    """
    script, _, machine = name.partition("@")
    if script not in SCRIPTS:
        raise ReportError(f"marker {name!r}: no such benchmark; choose from {', '.join(SCRIPTS)}")
    return _files(results, script, machine or "*")


def script_of(name: str) -> str:
    """The script of a result file: its name without `_tpN`."""
    return _RANKS.sub("", name)


def _files(results: Path, script: str, machine: str = "*") -> list[Path]:
    """The result files of a script; results of several ranks have a separate file, SCRIPT_tpN.json."""
    return sorted([*results.glob(f"{machine}/{script}.json"), *results.glob(f"{machine}/{script}_tp*.json")])


def render(name: str, results: Path, folder: Path) -> str:
    """The markdown of a marker on a page in `folder`.

    Raises:
        ReportError: there is no such script, or no such form of its tables.
    """
    source, _, form = name.partition(":")
    shows = {"": _whole, "summary": _summary, "plot": _plot}
    if form not in shows:
        raise ReportError(f"marker {name!r}: the forms are 'summary' and 'plot'")
    files, module = result_files(source, results), _module(source)
    if not files:
        return f"Not measured yet: `python -m benchmark.{module.NAME}` writes the figures.\n"
    return "\n\n".join(shows[form](module, file, folder) for file in files) + "\n"


def _whole(module: ModuleType, file: Path, folder: Path) -> str:
    return _noted(module.render(_read(file)), file, _plot_link(file, folder))


def _summary(module: ModuleType, file: Path, folder: Path) -> str:
    """The short table, and a plot that links to the script's page."""
    return _noted(module.summary(_read(file)), file, _plot(module, file, folder))


def _noted(tables: str, file: Path, plot: str) -> str:
    """The tables, a note on their rows if there is one, and the plot."""
    return "\n\n".join(filter(None, [tables, draft_head.note(_read(file)["rows"]), plot]))


def _plot(module: ModuleType, file: Path, folder: Path) -> str:
    """The plot, which links to the script's page."""
    return f"[{_plot_link(file, folder)}]({_relative(PAGES / f'{module.NAME}.md', folder)})"


def _plot_link(file: Path, folder: Path) -> str:
    return f"![{file.stem.replace('_', ' ')}, {file.parent.name}]({_relative(_picture(file), folder)})"


def _relative(file: Path, folder: Path) -> str:
    return Path(os.path.relpath(file, folder)).as_posix()


def fill(text: str, folder: Path, results: Path = RESULTS) -> str:
    """`text` of a page in `folder`, with the text between markers replaced.

    Raises:
        ReportError: a marker has no end or names nothing that can be shown.
    """
    filled = _MARKER.sub(
        lambda match: f"<!-- begin:{match['name']} -->\n{render(match['name'], results, folder)}<!-- end:{match['name']} -->", text
    )
    open_markers = set(_BEGIN.findall(text)) - {match["name"] for match in _MARKER.finditer(text)}
    if open_markers:
        raise ReportError(f"markers without an end: {', '.join(sorted(open_markers))}")
    return filled


def script_pages(results: Path = RESULTS) -> dict[Path, str]:
    """The generated pages: text by file in `PAGES`."""
    return {PAGES / f"{script}.md": _script_page(script, results) for script in SCRIPTS}


def _script_page(script: str, results: Path) -> str:
    files = result_files(script, results)
    machines = {file.parent.name: f"## {file.parent.name}\n\n" if len(files) > 1 else "" for file in files}
    parts = [heading + render(f"{script}@{machine}", results, PAGES) for machine, heading in machines.items()]
    discussion = _relative(ROOT / "docs" / "performance.md", PAGES)
    note = f"Generated by `python -m benchmark.report`; do not edit. [Discussion]({discussion})."
    about = inspect.cleandoc(_module(script).__doc__ or "")
    return "\n".join([f"# {SCRIPTS[script]}\n", f"{note}\n", f"{about}\n", *(parts or [render(script, results, PAGES)])])


def redraw(results: Path) -> None:
    """Draw the plot of every result file next to it."""
    for file in _plotted(results):
        _module(script_of(file.stem)).plot(_read(file), _picture(file))


def picture_faults(results: Path) -> list[str]:
    """One line per result file whose plot is missing or shows other rows."""
    found = ((_picture(file), picture.fault(_read(file), _picture(file))) for file in _plotted(results))
    return [f"{file}: {fault}" for file, fault in found if fault]


def _plotted(results: Path) -> list[Path]:
    return [file for script in SCRIPTS for file in _files(results, script)]


def _picture(file: Path) -> Path:
    return file.with_suffix(".png")


def _read(file: Path) -> Result:
    return json.loads(file.read_text(encoding="utf-8"))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmark.{name.partition('@')[0]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when everything is written or up to date, 1 when `--check` found a difference or a marker is wrong."""
    parser = argparse.ArgumentParser(description="Write the tables of markdown files and draw the plots from the result files.")
    parser.add_argument("files", nargs="*", type=Path, help="pages with markers; default: README.md, docs/*.md and docs/benchmarks")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files (default %(default)s)")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a table or a plot is out of date")
    args = parser.parse_args(argv)
    try:
        pages = {} if args.files else script_pages(args.results.resolve())
        pages |= _filled(args.files or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], args.results.resolve())
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    stale = _write(pages, write=not args.check)
    for file in stale:
        print(f"{file}: {'differs from its result files' if args.check else 'written'}")
    if not args.check:
        redraw(args.results)
        return 0
    faults = picture_faults(args.results)
    print(*faults, sep="\n", end="\n" if faults else "")
    if stale or faults:
        print("run python -m benchmark.report")
    return 1 if stale or faults else 0


def _filled(files: Sequence[Path], results: Path) -> dict[Path, str]:
    return {file: fill(file.read_text(encoding="utf-8"), file.resolve().parent, results) for file in files}


def _write(pages: Mapping[Path, str], write: bool) -> list[Path]:
    """The pages that differ from their files, which are written if `write`."""
    stale = [file for file, text in pages.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    for file in stale if write else ():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(pages[file], encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
