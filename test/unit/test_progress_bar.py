"""Progress bars."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest

from runtime.progress_bar import progress_bar


class FullDisk(io.StringIO):
    """A log file that takes nothing more."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert list(progress_bar(range(3), shown=True)) == [0, 1, 2]
