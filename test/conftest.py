"""What all tests of a process share."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from runtime.config.machine import ask_for_steady_sums
from warm_start import warm_start

FIRST = ("test_storm.py", "test_stable_rows.py")
"""Files that take long with few tests: started late, one of them would run alone at the end."""

with suppress(ImportError):  # the tests for GPUs do without it
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machine")

ask_for_steady_sums()
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)  # without certificates: httpx reads all of them for each client, 20 ms of a core


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Let the processes of pytest-xdist begin as forks of one that has imported torch and the tests: CUDA does not survive a fork."""
    forks = session.config.pluginmanager.has_plugin("dsession") and not shutil.which("nvidia-smi")
    with warm_start(session.config.args) if forks else nullcontext():
        return (yield)


def pytest_collection() -> None:
    """Import the modules of all tests without garbage collections, which would find next to nothing."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests of `FIRST`; all others keep their order."""
    items.sort(key=lambda item: item.path.name not in FIRST)


def pytest_collection_finish() -> None:
    """Exclude those modules from later collections: each full one would visit them again. Small tests make little garbage."""
    gc.freeze()
    gc.set_threshold(5000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Let random weights and inputs that a test does not seed be the same in every run, so that a failure repeats."""
    import torch  # the process that starts the others does without it

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Remove what programs set up that ran in the process of a test: all later tests would log to a stream that is closed."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    if root.level != level:  # setting it clears what hundreds of loggers remember
        root.setLevel(level)
    for handler in list(root.handlers):
        if handler not in handlers:
            root.removeHandler(handler)
