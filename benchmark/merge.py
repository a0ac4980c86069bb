"""Brings the rows of several result files of one script and one machine into one file: runs may measure parts of a table.

    python -m benchmark.merge INTO FROM...

Every row keeps its own commit and command. Of rows with the same keys the one measured last stays. INTO may be new.
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
"""What all rows of a file have in common, because a table says it once; versions of packages too."""


class MergeError(Exception):
    """These files do not belong in one; the message says why."""


def merge(results: Sequence[Result], keys: Sequence[str]) -> Result:
    """One result with the rows of all, in the order in which keys first come.

    Raises:
        MergeError: another script's, or measured on another machine or with other versions.
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
        raise MergeError(f"{what} is {one!r} in one file and {other!r} in another: their rows cannot stand in one table")


def keys_of(result: Result) -> Sequence[str]:
    """What tells the rows of a script apart.

    Raises:
        MergeError: no script of a table has this name.
    """
    if result["name"] not in SCRIPTS:
        raise MergeError(f"{result['name']!r} is no script of a table; there are {', '.join(SCRIPTS)}")
    return importlib.import_module(f"benchmark.{result['name']}").KEYS


def read(file: Path) -> Result:
    """A result file.

    Raises:
        MergeError: there is none, or it is something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MergeError(f"{file} is no result file: {error}") from error
    if not isinstance(found, dict) or not {"name", "machine", "rows"} <= found.keys():
        raise MergeError(f"{file} is no result file: it has no name, machine and rows")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0 when INTO is written; 1 when files do not belong together, and then nothing is written."""
    parser = argparse.ArgumentParser(description="Bring the rows of result files into one; python -m benchmark.report shows them.")
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
