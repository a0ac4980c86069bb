"""What unit tests share."""

from __future__ import annotations

import pytest

from runtime.model_executor import depth_costs


@pytest.fixture(autouse=True)
def short_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth controllers start from the time of one iteration: measuring every batch size takes 0.6 s of each worker that has one."""
    monkeypatch.setattr(depth_costs, "BUDGET", 0.0)


@pytest.fixture
def full_measurement(short_measurement: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth controllers measure as in a server."""
    monkeypatch.setattr(depth_costs, "BUDGET", 60.0)
