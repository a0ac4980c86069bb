"""Markdown tables of result rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Result = dict[str, Any]
Row = TypeVar("Row", bound=Mapping[str, Any])
K = TypeVar("K")

_LABELS = {"tune_products": "autotune", "autotune_gemms": "autotune", "products": "GEMMs"}
"""Labels of recorded keys that differ from the key."""


def label(key: str) -> str:
    """A key of a result row as tables and plots show it."""
    return _LABELS.get(key, key.replace("_", " "))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; all columns but the first are aligned right."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(" --- " if i == 0 else " ---: " for i in range(len(header))) + "|"]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A number with three or four significant digits; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
    return str(value)


def on_gpus(row: Result) -> str:
    """What a title says of the GPUs that share the model of a row; empty for one."""
    ranks = row.get("tp_size", 1)
    return f", on {ranks} GPUs" if ranks > 1 else ""


def percent(value: float | None, digits: int = 0) -> str:
    """A share in per cent."""
    return "-" if value is None else f"{value * 100:.{digits}f} %"


def change(new: float | None, old: float | None) -> str:
    """The change from `old` to `new` in per cent, signed."""
    return "-" if not new or not old else f"{(new / old - 1) * 100:+.1f} %"


def signed(value: float | None) -> str:
    """A signed difference; a dash for None."""
    return "-" if value is None else f"{value:+.2f}"


def models(result: Result) -> str:
    """The models of the rows, for a title."""
    return ", ".join(dict.fromkeys(row["model"] for row in result["rows"]))


def provenance(result: Result) -> str:
    """One line with machine, versions, and the commits and commands of the rows."""
    rows, machine = result["rows"], result["machine"]
    versions = ", ".join(f"{name} {machine['packages'][name]}" for name in ("torch", "sglang-kernel") if name in machine["packages"])
    commits = ", ".join(sorted({f"`{row['commit']}`" for row in rows}))
    commands = "; ".join(dict.fromkeys(f"`{row['command']}`" for row in rows))
    where = f"{machine['device']} ({machine['cores']} cores), Python {machine['python']}"
    return f"{where}, {versions}; commit {commits}; {commands}."


def split(rows: Iterable[Row], key: Callable[[Row], K]) -> dict[K, list[Row]]:
    """The rows by `key`, in the order in which the keys appear."""
    found: dict[K, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def pick(rows: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """The first row with these values, or None."""
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def with_provenance(tables: Callable[[Result], str]) -> Callable[[Result], str]:
    """`tables` followed by where their rows come from."""
    return lambda result: f"{tables(result)}\n\n{provenance(result)}"
