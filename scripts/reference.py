"""Generates the reference pages of the documentation from the code: flags, endpoints and metrics."""

from __future__ import annotations

import sys
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("python", "test", "test/unit")]

from front import ScriptedScheduler, make_manager  # noqa: E402  (the server without a model)

from runtime.config.flag_parser import flags  # noqa: E402
from runtime.config.server_args import ServerArgs  # noqa: E402
from runtime.entrypoints.server.server import create_app  # noqa: E402
from runtime.managers.observers.metrics import Metrics  # noqa: E402
from runtime.managers.telemetry.decode_stats import DecodeStats  # noqa: E402
from runtime.managers.telemetry.scheduler_stats import GroupLoad, SchedulerStats  # noqa: E402
from runtime.managers.telemetry.spec_stats import SpecStats  # noqa: E402

METHODS = ("get", "post", "delete")


def flags_page() -> str:
    """Every flag of the server, by group."""
    parts = [
        "# Flags\n\n`python -m runtime.launch_server --help` says the same. `--config FILE` reads them from YAML; the command line wins."
    ]
    defaults = {field.name: field.default for field in fields(ServerArgs)}
    for group, members in groupby(sorted(flags(), key=lambda flag: flag.group), key=lambda flag: flag.group):
        rows = [(", ".join(f"`{name}`" for name in flag.spellings), _default(defaults[flag.name]), flag.help) for flag in members]
        parts.append(f"## {group[:1].upper() + group[1:]}\n\n" + _table(("flag", "default", ""), rows))
    return "\n\n".join(parts) + "\n"


def endpoints_page(schema: dict[str, Any]) -> str:
    """Every endpoint of /openapi.json: what it does, the fields of its body, and its statuses."""
    parts = ["# Endpoints\n\n`GET /openapi.json` of a running server has the types and bounds of all fields."]
    for path, operations in schema["paths"].items():
        for method in METHODS:
            if (operation := operations.get(method)) is None:
                continue
            lines = [f"## `{method.upper()} {path}`", _sentence(operation)]
            if names := _fields(schema, operation):
                lines.append("Fields: " + ", ".join(f"`{name}`" for name in names) + ".")
            lines.append("Statuses: " + ", ".join(operation["responses"]) + ".")
            parts.append("\n\n".join(lines))
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Every metric of /metrics."""
    metrics = Metrics("model")
    spec, decode = SpecStats(1, 3, 1, [1, 0, 0]), DecodeStats(1, 1, 1, 1)
    stats = SchedulerStats(
        spec_by_context={"0": spec},
        decode=decode,
        spec_depth_steps_total={"3": 1},
        startup_seconds={"load": 1.0},
        groups=[GroupLoad(0, 0, 0)],
        max_cached_states=1,
    )
    metrics.render(stats)
    rows = []
    for family in metrics.registry.collect():
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append((f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), family.documentation))
    more = (
        "A server with a model also has the runs of each graph runner (`talon:runner_runs_total`), the drift of acceptance "
        "(`talon:spec_drift`, `talon:spec_drifted_positions`) and, if the model is sparse, its distinct experts (`talon:distinct_experts`, "
        "by sparse layer `talon:layer_distinct_experts`)."
    )
    return "# Metrics\n\n" + _table(("name", "type", "labels", ""), sorted(rows)) + f"\n\n{more}\n"


def _default(value: object) -> str:
    return "" if value is None or value is False else f"`{str(value).lower() if value is True else value}`"


def _sentence(operation: dict[str, Any]) -> str:
    """The first paragraph of the handler's docstring."""
    return " ".join(operation["description"].split("\n\n")[0].split())


def _fields(schema: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return sorted(schema["components"]["schemas"][name]["properties"]) if name else []


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [header, tuple("---" for _ in header), *(tuple(cell.replace("|", r"\|") for cell in row) for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    manager = make_manager(ScriptedScheduler())
    try:
        schema = create_app(manager).openapi()
    finally:
        manager.close()
    return {"flags.md": flags_page(), "endpoints.md": endpoints_page(schema), "metrics.md": metrics_page()}
