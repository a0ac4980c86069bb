"""A storm of good and hostile clients, and of kills on one rank and on two, loses no request and leaks no page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_benchmark_quick import check_quick_run

MINUTES = float(os.environ.get("TALON_STORM_MINUTES", "0.2"))
"""How long the storm takes; `scripts/test.sh` asks for 1.5 minutes."""


@pytest.mark.timeout(900)
def test_a_storm_loses_and_leaks_nothing(tmp_path: Path) -> None:
    # The storm takes as long with a small share of the processors, which it leaves to tests that end sooner with a large one.
    # Its clients pause, because what fills the processors adds no kind of event.
    flags = ["--minutes", str(MINUTES), "--clients", "8", "--think", "2"]
    check_quick_run("storm", flags, 4, tmp_path, seconds=240 + 120 * MINUTES, nice=10)
