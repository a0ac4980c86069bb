"""A result file: rows of measurements, each with its commit and command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmark import machine
from benchmark.whole_file import write_whole

RESULTS = Path(__file__).resolve().parent / "results"
QUICK = Path(__file__).resolve().parent.parent / "build" / "benchmark-quick"

Row = dict[str, Any]


class Record:
    """The rows of one benchmark on one machine, written after every row, so that an interrupted run keeps its rows.

    A new row replaces the one with the same values under `keys`, so that parts of a table can be measured again. Quick runs start with no
    rows, and are marked as `quick` in the file.
    """

    def __init__(self, name: str, keys: Sequence[str], folder: Path | None = None, quick: bool = False) -> None:
        """
        Raises:
            MachinesDiffer: the file has rows of another machine or of other versions.
        """
        found = machine.describe()
        self._keys = tuple(keys)
        self.file = (folder or (QUICK if quick else RESULTS)) / machine.slug(found) / f"{name}.json"
        self.data: dict[str, Any] = {"name": name, "machine": found, "rows": []} | ({"quick": True} if quick else {})
        if self.file.is_file() and not quick:
            old = json.loads(self.file.read_text(encoding="utf-8"))
            try:
                self.data |= {"machine": machine.same(found, old["machine"]), "rows": old["rows"]}
            except machine.MachinesDiffer as error:
                raise machine.MachinesDiffer(f"{self.file}: {error}; move the file, or write to another folder with --out") from error

    @property
    def rows(self) -> list[Row]:
        """All rows, including earlier ones of the same file."""
        return self.data["rows"]

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add one row and write the file."""
        row: Row = {**figures, "commit": machine.commit(), "command": machine.command(), "at": _now()}
        put(self.rows, row, self._keys)
        write(self.data, self.file)

    def show(self, render: Callable[[dict[str, Any]], str], plot: Callable[[dict[str, Any], Path], None]) -> None:
        """Draw the plot next to the file, except of a quick run, and print the tables."""
        plot(self.data, self.file.with_suffix(".png"))
        print(render(self.data))


def put(rows: list[Row], row: Row, keys: Sequence[str]) -> None:
    """Add a row or replace the one with the same values under `keys`; paths of this machine are removed from its commands."""
    commands = {name: machine.portable(row[name]) for name in ("command", "server_flags") if name in row}
    same = [i for i, old in enumerate(rows) if all(old.get(key) == row.get(key) for key in keys)]
    if same:
        rows[same[0]] = row | commands
    else:
        rows.append(row | commands)


def write(data: Mapping[str, Any], file: Path) -> None:
    """Write a result file atomically."""
    write_whole(file, json.dumps(data, indent=1) + "\n")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
