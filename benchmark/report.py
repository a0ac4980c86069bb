"""Writes the README's tables between their markers from the result files: no figure is typed by hand.

A marker is `<!-- begin:NAME -->` ... `<!-- end:NAME -->`, where NAME is a script's name, or NAME@MACHINE for one machine's folder.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

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
    "modes",
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


def render(name: str, results: Path) -> str:
    """The markdown of a marker; without a file it holds no figure and says so."""
    files = result_files(name, results)
    if not files:
        return f"Not measured yet: `python -m benchmark.{name.partition('@')[0]}` writes the figures.\n"
    return "\n\n".join(_module(name).render(_read(file)) for file in files) + "\n"


def fill(text: str, results: Path = RESULTS) -> str:
    """`text` with every marked part written anew.

    Raises:
        ReportError: a marker has no end, or its name is no script's.
    """
    filled = _MARKER.sub(
        lambda match: f"<!-- begin:{match['name']} -->\n{render(match['name'], results)}<!-- end:{match['name']} -->", text
    )
    open_markers = set(_BEGIN.findall(text)) - {match["name"] for match in _MARKER.finditer(text)}
    if open_markers:
        raise ReportError(f"markers without an end: {', '.join(sorted(open_markers))}")
    return filled


def redraw(results: Path) -> list[Path]:
    """Draw the plot of every result file; returns the pictures."""
    pictures = []
    for script in SCRIPTS:
        for file in sorted(results.glob(f"*/{script}.json")):
            pictures.append(file.with_suffix(".png"))
            _module(script).plot(_read(file), pictures[-1])
    return pictures


def _read(file: Path) -> Result:
    return json.loads(file.read_text(encoding="utf-8"))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmark.{name.partition('@')[0]}")


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all is written or up to date; 1 when `--check` found a difference or a marker is wrong."""
    parser = argparse.ArgumentParser(description="Write the tables of markdown files from the result files.")
    parser.add_argument("files", nargs="*", type=Path, help="default: README.md and docs/*.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a table differs from its file")
    parser.add_argument("--plots", action="store_true", help="draw every plot anew too")
    args = parser.parse_args(argv)
    stale = []
    try:
        for file in args.files or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
            text = file.read_text(encoding="utf-8")
            filled = fill(text, args.results)
            if filled != text:
                stale.append(file)
                if not args.check:
                    file.write_text(filled, encoding="utf-8")
        if args.plots and not args.check:
            redraw(args.results)
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    for file in stale:
        print(f"{file}: {'differs from its result files; run python -m benchmark.report' if args.check else 'written'}")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
