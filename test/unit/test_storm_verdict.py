"""What the storm benchmark calls a failure."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark.storm import failures

SHORT, LONG = 3.0, 60.0


def rows(**stormy: Any) -> list[dict[str, Any]]:
    row = {"phase": "storm", "wrong": [], "leaked_requests": 0, "leaked_pages": 0, "p99_s": 60.0, "memory": {}}
    return [row | {"phase": "calm", "p99_s": 30.0}, row | stormy]


def growth(slope: float) -> dict[str, Any]:
    return {"scheduler": {"first_mib": 900.0, "last_mib": 910.0, "slope_mib_per_hour": slope}}


@pytest.mark.parametrize("minutes", [SHORT, LONG])
def test_lost_requests_and_leaks_fail_every_run(minutes: float) -> None:
    assert failures(rows(), minutes) == []
    assert failures(rows(wrong=["no answer within 600 s"]), minutes) == ["no answer within 600 s"]
    assert failures(rows(leaked_pages=2), minutes) == ["storm: 2 leaked_pages"]


@pytest.mark.parametrize(
    ("stormy", "words"), [({"p99_s": 91.0}, "good clients wait 91.0 s"), ({"memory": growth(10.0)}, "scheduler grows by 10.0")]
)
def test_late_answers_and_growth_fail_long_runs_only(stormy: dict[str, Any], words: str) -> None:
    assert failures(rows(**stormy), SHORT) == []
    (found,) = failures(rows(**stormy), LONG)
    assert found.startswith(words)
