"""The folder of a server's sockets: private, and not confused by what others leave beside it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runtime.entrypoints.socket_folder import make_socket_folder
from runtime.errors import ConfigError


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as temp:
        monkeypatch.setattr(tempfile, "tempdir", temp)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(temp)


def dead_pid() -> int:
    pid = 4_000_000
    while psutil.pid_exists(pid):
        pid += 1
    return pid


def test_leftovers_of_dead_servers_are_removed(base: Path) -> None:
    left, alive, other = (base / name for name in (f"talon-{dead_pid()}-x", f"talon-{os.getpid()}-x", "talon-notes"))
    for folder in (left, alive, other):
        folder.mkdir(mode=0o700)
    made = Path(make_socket_folder())
    assert set(base.iterdir()) == {alive, other, made}
    assert made.stat().st_mode & 0o777 == 0o700


def test_the_folder_of_a_server_in_another_container_stays(base: Path) -> None:
    """Its process has a number that means nothing here, so a lock tells that it lives."""
    made = Path(make_socket_folder())
    elsewhere = made.rename(base / f"talon-{dead_pid()}-x")
    new = Path(make_socket_folder())
    assert set(base.iterdir()) == {elsewhere, new}


def test_links_and_files_of_others_stop_no_start(base: Path) -> None:
    target = base / "kept"
    target.mkdir()
    (target / "file").touch()
    dangling, link, file, shared = (base / f"talon-{dead_pid()}-{letter}" for letter in "abcd")
    dangling.symlink_to(base / "missing")
    link.symlink_to(target)
    file.touch()
    shared.mkdir()
    shared.chmod(0o777)
    made = Path(make_socket_folder())
    assert made.parent == base
    assert (target / "file").exists()
    assert all(path.is_symlink() or path.exists() for path in (dangling, link, file, shared))


def test_a_private_runtime_folder_is_preferred(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = base / "run"
    private.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private))
    assert Path(make_socket_folder()).parent == private


@pytest.mark.parametrize("case", ["open to others", "missing", "too long", "relative"])
def test_an_unsuitable_runtime_folder_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    folder = base / ("x" * 60 if case == "too long" else "run")
    if case != "missing":
        folder.mkdir(mode=0o700)
    if case == "open to others":
        folder.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "run" if case == "relative" else str(folder))
    assert Path(make_socket_folder()).parent == base


def test_without_a_folder_that_can_be_written_one_line_says_what_to_set(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(base / "missing"))
    with pytest.raises(ConfigError, match=r"No folder can be made .* no such file or directory\. Set TMPDIR"):
        make_socket_folder()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(ConfigError, match="no usable temporary directory"):
        make_socket_folder()
