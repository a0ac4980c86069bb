"""Merges the rows of several result files of one script and one machine into one file.

    python -m benchmark.merge INTO FROM...

Rows keep their commit and command. Of rows with equal keys the newest is kept. INTO may be new.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.markdown import Result
from benchmark.record import put, write
from benchmark.report import SCRIPTS

SHARED = ("device", "cores", "python")
"""Facts that all rows of a file must share, in addition to package versions."""


class MergeError(Exception):
    """The files cannot be merged; the message says why."""


def merge(results: Sequence[Result], keys: Sequence[str]) -> Result:
    """One result with all rows, in the order in which their keys first appear.

    Raises:
        MergeError: the files differ in script, machine or versions.
    """
    first, rows = results[0], []
    packages: dict[str, str] = {}
    for result in results:
        _same("script", first["name"], result["name"])
        for fact in SHARED:
            _same(fact, first["machine"].get(fact), result["machine"].get(fact))
        for package, version in result["machine"]["packages"].items():
            _same(package, packages.setdefault(package, version), version)
        for row in result["rows"]:
            old = next((old for old in rows if all(old.get(key) == row.get(key) for key in keys)), None)
            if old is None or row["at"] >= old["at"]:
                put(rows, row, keys)
    return {**first, "machine": first["machine"] | {"packages": packages}, "rows": rows}


def _same(what: str, one: Any, other: Any) -> None:
    if one != other:
        raise MergeError(f"{what} is {one!r} in one file and {other!r} in another, so their rows cannot share a table")


def keys_of(result: Result) -> Sequence[str]:
    """The keys of the rows of a script.

    Raises:
        MergeError: there is no such script.
    """
    if result["name"] not in SCRIPTS:
        raise MergeError(f"{result['name']!r} is not a script; choose from {', '.join(SCRIPTS)}")
    return importlib.import_module(f"benchmark.{result['name']}").KEYS


def read(file: Path) -> Result:
    """The content of a result file.

    Raises:
        MergeError: the file is missing or is not a result file.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MergeError(f"{file} is not a result file: {error}") from error
    if not isinstance(found, dict) or not {"name", "machine", "rows"} <= found.keys():
        raise MergeError(f"{file} is not a result file: it has no name, machine and rows")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if INTO is written, 1 if the files cannot be merged."""
    parser = argparse.ArgumentParser(description="Merge the rows of result files; python -m benchmark.report shows them.")
    parser.add_argument("into", type=Path, help="a result file, which may be new")
    parser.add_argument("sources", type=Path, nargs="+", metavar="from", help="result files of the same script and machine")
    args = parser.parse_args(argv)
    try:
        old = [read(args.into)] if args.into.is_file() else []
        results = [*old, *(read(file) for file in args.sources)]
        merged = merge(results, keys_of(results[0]))
    except MergeError as error:
        print(f"merge: {error}", file=sys.stderr)
        return 1
    write(merged, args.into)
    print(f"{args.into}: {len(merged['rows'])} rows, {len(merged['rows']) - sum(len(result['rows']) for result in old)} of them new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
