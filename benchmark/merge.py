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

from benchmark.machine import MachinesDiffer, same
from benchmark.markdown import Result
from benchmark.record import put, write
from benchmark.report import SCRIPTS, script_of


class MergeError(Exception):
    """The files cannot be merged; the message says why."""


def merge(results: Sequence[Result], keys: Sequence[str]) -> Result:
    """One result with all rows, in the order in which their keys first appear.

    Raises:
        MergeError: the files are of several scripts.
        MachinesDiffer: the files are of several machines or versions.
    """
    first, machine, rows = results[0], results[0]["machine"], []
    for result in results:
        if result["name"] != first["name"]:
            raise MergeError(f"script is {first['name']!r} in one file and {result['name']!r} in another")
        machine = same(machine, result["machine"])
        for row in result["rows"]:
            old = next((old for old in rows if all(old.get(key) == row.get(key) for key in keys)), None)
            if old is None or row["at"] >= old["at"]:
                put(rows, row, keys)
    return {**first, "machine": machine, "rows": rows}


def keys_of(result: Result) -> Sequence[str]:
    """The keys of the rows of a script.

    Raises:
        MergeError: there is no such script.
    """
    script = script_of(result["name"])
    if script not in SCRIPTS:
        raise MergeError(f"{script!r} is not a script; choose from {', '.join(SCRIPTS)}")
    return importlib.import_module(f"benchmark.{script}").KEYS


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
    except (MergeError, MachinesDiffer) as error:
        print(f"merge: {error}", file=sys.stderr)
        return 1
    write(merged, args.into)
    print(f"{args.into}: {len(merged['rows'])} rows, {len(merged['rows']) - sum(len(result['rows']) for result in old)} of them new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
