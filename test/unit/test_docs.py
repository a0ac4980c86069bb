"""The documentation builds as a site without a warning, and its generated reference is current."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["flags.md", "endpoints.md", "metrics.md"])
def test_the_reference_is_what_the_code_says(name: str) -> None:
    import reference  # starts a server without a model

    assert (reference.PAGES / name).read_text() == reference.pages()[name], "run python scripts/reference.py"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "serve", "reference/flags", "benchmarks/faults"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
    assert 'src="../benchmark/results/cpu-2/faults.png"' in (tmp_path / "site" / "benchmarks" / "faults.html").read_text()
    assert (tmp_path / "site" / "benchmark" / "results" / "cpu-2" / "faults.png").is_file()
