"""Writes the README's tables and plots between their markers from the result files: no figure is typed by hand.

A marker is `<!-- begin:NAME -->` ... `<!-- end:NAME -->`, where NAME is a script's name, or NAME@MACHINE for one machine's folder.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmark import picture
from benchmark.machine import ROOT
from benchmark.markdown import Result
from benchmark.record import RESULTS

SCRIPTS = (
    "serving_matrix",
    "draft_extend_graph",
    "step_profile",
    "crossover",
    "capture",
    "verify_exact",
    "cpu_serving",
    "faults",
    "client_agreement",
    "repeat",
    "modes",
    "sampling",
    "embedded_gpu",
    "embedded_speculation",
    "lossless",
    "memory_limits",
)
_MARKER = re.compile(r"<!-- begin:(?P<name>[\w@-]+) -->\n(?P<body>.*?)<!-- end:(?P=name) -->", re.DOTALL)
_BEGIN = re.compile(r"<!-- begin:([\w@-]+) -->")


class ReportError(Exception):
    """A table cannot be written; the message says what to run."""


def result_files(name: str, results: Path) -> list[Path]:
    """The files of a marker's name: one machine's, or every machine's; none before the first run.

    Raises:
        ReportError: the name is no script's.
    """
    script, _, machine = name.partition("@")
    if script not in SCRIPTS:
        raise ReportError(f"marker {name!r}: no such benchmark; there are {', '.join(SCRIPTS)}")
    return sorted(results.glob(f"{machine or '*'}/{script}.json"))


def render(name: str, results: Path, page: Path) -> str:
    """The markdown of a marker in a file of the folder `page`; without a result file it holds no figure and says so."""
    files = result_files(name, results)
    if not files:
        return f"Not measured yet: `python -m benchmark.{name.partition('@')[0]}` writes the figures.\n"
    return "\n\n".join(f"{_module(name).render(_read(file))}\n\n{_link(file, page)}" for file in files) + "\n"


def _link(file: Path, page: Path) -> str:
    picture_file = Path(os.path.relpath(_picture(file), page)).as_posix()
    return f"![{file.stem.replace('_', ' ')}, {file.parent.name}]({picture_file})"


def fill(text: str, page: Path, results: Path = RESULTS) -> str:
    """`text` of a file in the folder `page`, with every marked part written anew.

    Raises:
        ReportError: a marker has no end, or its name is no script's.
    """
    filled = _MARKER.sub(
        lambda match: f"<!-- begin:{match['name']} -->\n{render(match['name'], results, page)}<!-- end:{match['name']} -->", text
    )
    open_markers = set(_BEGIN.findall(text)) - {match["name"] for match in _MARKER.finditer(text)}
    if open_markers:
        raise ReportError(f"markers without an end: {', '.join(sorted(open_markers))}")
    return filled


def redraw(results: Path) -> None:
    """Draw the plot of every result file beside it."""
    for file in _plotted(results):
        _module(file.stem).plot(_read(file), _picture(file))


def picture_faults(results: Path) -> list[str]:
    """A line for each result file whose plot is missing or shows other rows."""
    found = ((_picture(file), picture.fault(_read(file), _picture(file))) for file in _plotted(results))
    return [f"{file}: {fault}" for file, fault in found if fault]


def _plotted(results: Path) -> list[Path]:
    return [file for script in SCRIPTS for file in sorted(results.glob(f"*/{script}.json"))]


def _picture(file: Path) -> Path:
    return file.with_suffix(".png")


def _read(file: Path) -> Result:
    return json.loads(file.read_text(encoding="utf-8"))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmark.{name.partition('@')[0]}")


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all is written or up to date; 1 when `--check` found a difference or a marker is wrong."""
    parser = argparse.ArgumentParser(description="Write the tables of markdown files and draw the plots, from the result files.")
    parser.add_argument("files", nargs="*", type=Path, help="default: README.md and docs/*.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a table or a plot is not that of its file")
    args = parser.parse_args(argv)
    try:
        stale = _pages(args.files or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], args.results, write=not args.check)
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
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


def _pages(files: Sequence[Path], results: Path, write: bool) -> list[Path]:
    """The markdown files that differ from the result files; they are written anew if asked."""
    stale = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        filled = fill(text, file.resolve().parent, results.resolve())
        if filled != text:
            stale.append(file)
            if write:
                file.write_text(filled, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
