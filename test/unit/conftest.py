"""What unit tests share."""

from __future__ import annotations

from pathlib import Path

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


@pytest.fixture(scope="session")
def programs(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels of `emulated` are kept for later sessions: g++ takes 20 s of a core for all of them."""
    cache = getattr(pytestconfig, "cache", None)  # absent with -p no:cacheprovider
    return tmp_path_factory.mktemp("programs") if cache is None else cache.mkdir("emulated")
