"""The locks name every dependency with hashes, the two commands install from them, and the bill of materials lists them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sbom

ROOT = Path(__file__).resolve().parents[2]
TORCH = {"torch"}  # has locks of its own


def asked(part: str) -> set[str]:
    """Names in one list of pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(rf"^{part} = \[(.*?)\]$", project, re.DOTALL | re.MULTILINE)
    assert listed is not None
    return {name.lower() for name in re.findall(r'"([A-Za-z0-9._-]+)', listed[1])}


def locked(name: str) -> dict[str, list[dict[str, str]]]:
    """Hashes by package."""
    return {one["name"]: one["hashes"] for one in sbom.components((ROOT / "requirements" / name).read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    ("lock", "parts"), [("serve.lock", ["dependencies"]), ("test.lock", ["dependencies", "test", "dev", "clients"])]
)  # fmt: skip
def test_every_dependency_is_locked_with_hashes(lock: str, parts: list[str]) -> None:
    wanted, found = set[str]().union(*map(asked, parts)) - TORCH, locked(lock)
    assert {"fastapi", "msgspec"} <= wanted <= found.keys()
    assert len(found) > len(wanted)
    assert not TORCH & found.keys()
    assert all(found.values())


def test_the_locks_of_torch_have_hashes() -> None:
    assert TORCH <= locked("torch-cpu.lock").keys() < locked("torch.lock").keys()
    assert all(locked("torch-cpu.lock").values())
    assert all(locked("torch.lock").values())


def test_setup_installs_nothing_without_hashes() -> None:
    for script in ("setup.sh", "setup_clients.sh", "bench_clients.sh"):
        text = (ROOT / "scripts" / script).read_text(encoding="utf-8")
        installs = re.findall(r"(?:talon_install|pip install) .*", text)
        assert installs
        assert all(
            "--require-hashes" in one
            or one.startswith(("talon_install --no-build-isolation -e .", 'pip install --quiet --disable-pip-version-check --no-deps "$@"'))
            for one in installs
        )


def test_the_bill_of_materials_names_packages_with_hashes() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "sbom.py")], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    names = {one["name"] for one in document["components"]}
    assert names == {*locked("torch-cpu.lock"), *locked("serve.lock")}
