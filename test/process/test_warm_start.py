"""Programs of the tests start as forks, unless their environment says what a running interpreter can no longer heed."""

from __future__ import annotations

import sys

import pytest

from process import fake
from warm_start import program_of


def starts_warm() -> bool:
    return program_of([sys.executable, fake.__file__, "serve", "0.01"], fake.ENV, "/", new_session=True) is not None


def test_a_fake_server_starts_warm_after_all_tests_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that files of tests import set variables of their own after `ENV` is made."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setitem(fake.ENV, name, "1")
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert starts_warm()


def test_a_program_with_another_number_of_threads_starts_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert not starts_warm()
