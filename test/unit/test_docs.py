"""The documentation builds as a site without a warning, and its reference is made from the code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import reference

from runtime.config.flag_parser import flags
from runtime.managers.telemetry.metrics import COUNTERS, GAUGES, RATES

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_has_every_flag_endpoint_and_metric() -> None:
    pages = reference.pages()
    assert all(f"`{flag.spellings[0]}`" in pages["flags.md"] for flag in flags())
    assert all(f"POST {path}`" in pages["endpoints.md"] for path in ("/v1/chat/completions", "/generate", "/v1/messages"))
    assert all(f"`{name}" in pages["metrics.md"] for name, _, _ in (*GAUGES, *COUNTERS, *RATES))


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "serve", "reference/flags", "benchmarks/faults"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
    assert 'src="../benchmark/results/cpu-2/faults.png"' in (tmp_path / "site" / "benchmarks" / "faults.html").read_text()
    assert (tmp_path / "site" / "benchmark" / "results" / "cpu-2" / "faults.png").is_file()
