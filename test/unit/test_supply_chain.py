"""The lock names every dependency with hashes, and the bill of materials lists them."""

from __future__ import annotations

import re
from pathlib import Path

import sbom

ROOT = Path(__file__).resolve().parents[2]


def test_every_dependency_is_locked_with_hashes() -> None:
    listed = {one["name"]: one for one in sbom.components((ROOT / "requirements.lock").read_text(encoding="utf-8"))}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = project.split("\ndependencies = [", 1)[1].split("\n]", 1)[0]
    asked = {name.lower() for name in re.findall(r'"([A-Za-z0-9._-]+)', dependencies)}
    assert {"torch", "fastapi"} <= asked <= listed.keys()
    assert len(listed) > len(asked)
    assert all(one["hashes"] for one in listed.values())
