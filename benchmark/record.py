"""A result file: rows of figures, each with the commit and command that made it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmark import machine

RESULTS = Path(__file__).resolve().parent / "results"
QUICK = Path(__file__).resolve().parent.parent / "build" / "benchmark-quick"

Row = dict[str, Any]


class Record:
    """The rows of one benchmark on one machine, written after every row, so that a run cut short keeps what it has.

    A new row takes the place of the one with the same values under `keys`: parts of a table may be measured again alone.
    """

    def __init__(self, name: str, keys: Sequence[str], folder: Path | None = None, quick: bool = False) -> None:
        self._machine = machine.describe()
        self._keys = tuple(keys)
        self.file = (folder or (QUICK if quick else RESULTS)) / machine.slug(self._machine) / f"{name}.json"
        self.data: dict[str, Any] = {"name": name, "machine": self._machine, "rows": []}
        if self.file.is_file():
            self.data["rows"] = json.loads(self.file.read_text(encoding="utf-8"))["rows"]

    @property
    def rows(self) -> list[Row]:
        """All rows, earlier ones of the same file too."""
        return self.data["rows"]

    def add(self, figures: Mapping[str, Any]) -> None:
        """Keep one row and write the file."""
        row: Row = {**figures, "commit": machine.commit(), "command": machine.command(), "at": _now()}
        put(self.rows, row, self._keys)
        write(self.data, self.file)


def put(rows: list[Row], row: Row, keys: Sequence[str]) -> None:
    """Add a row, or let it take the place of the one with the same values under `keys`; its commands lose this machine's folders."""
    commands = {name: machine.portable(row[name]) for name in ("command", "server_flags") if name in row}
    same = [i for i, old in enumerate(rows) if all(old.get(key) == row.get(key) for key in keys)]
    if same:
        rows[same[0]] = row | commands
    else:
        rows.append(row | commands)


def write(data: Mapping[str, Any], file: Path) -> None:
    """Write a result file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
