"""Machine code of CUDA programs survives a start, and a bad cache costs only the time to compile."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.layers.kernels.code_cache import CodeCache
from runtime.layers.kernels.once import once

CODE = bytes(range(256)) * 40
KEY = (b"source", b"--option", b"NVRTC 13")


class Compiler:
    """Counts how often it compiles."""

    def __init__(self, code: bytes = CODE) -> None:
        self.code, self.calls = code, 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.code


def test_second_start_reads_what_the_first_compiled(tmp_path: Path) -> None:
    compiler = Compiler()
    for _ in range(2):
        assert CodeCache(tmp_path / "new" / "cuda").code(KEY, compiler) == CODE
    assert compiler.calls == 1
    (file,) = (tmp_path / "new" / "cuda").iterdir()
    assert file.suffix == ".cubin", "no scratch file is left"


@pytest.mark.parametrize(
    "other", [(b"source2", *KEY[1:]), (KEY[0], b"--other", KEY[2]), (*KEY[:2], b"NVRTC 14"), (b"source--option", KEY[2])]
)
def test_code_of_other_inputs_is_not_used(tmp_path: Path, other: tuple[bytes, ...]) -> None:
    CodeCache(tmp_path).code(KEY, Compiler())
    assert CodeCache(tmp_path).code(other, Compiler(b"other")) == b"other"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[:-1],
        lambda content: content[:50] + b"\xff" + content[51:],
    ],
)
def test_a_damaged_file_is_compiled_anew_and_mended(tmp_path: Path, damage, caplog: pytest.LogCaptureFixture) -> None:
    CodeCache(tmp_path).code(KEY, Compiler())
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    compiler, code_cache = Compiler(), CodeCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert code_cache.code(KEY, compiler) == CODE
        assert code_cache.code(KEY, compiler) == CODE
    assert compiler.calls == 1
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path: Path, inside: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    code_cache, compiler = CodeCache(tmp_path / "file" / inside), Compiler()
    with caplog.at_level(logging.WARNING):
        for key in (KEY, KEY, (b"other",)):
            assert code_cache.code(key, compiler) == CODE
    assert compiler.calls == 3
    assert len(caplog.records) == 1


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cuda"
    CodeCache(folder).code((b"source",), lambda: b"machine code")
    folder.chmod(0o777)
    assert CodeCache(folder).code((b"source",), lambda: b"own code") == b"own code"
    assert "other users may write to" in caplog.text
    folder.chmod(0o700)
    assert CodeCache(folder).code((b"source",), lambda: b"other code") == b"machine code"


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def compile_late() -> bytes:
        start.wait(5)
        return CODE

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: CodeCache(tmp_path).code(KEY, compile_late), range(8)))
    assert found == [CODE] * 8
    assert CodeCache(tmp_path).code(KEY, Compiler(b"")) == CODE
    assert len(list(tmp_path.iterdir())) == 1


def test_code_that_does_not_compile_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        CodeCache(tmp_path / "cuda").code(KEY, fail)
    assert not (tmp_path / "cuda").exists()


def test_threads_that_ask_for_one_value_make_it_once() -> None:
    made: list[tuple[int, int]] = []

    @once
    def make(a: int, *, b: int) -> list[int]:
        made.append((a, b))
        threading.Event().wait(0.01)
        return [a, b]

    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda i: make(i % 2, b=3), range(16)))
    assert sorted(made) == [(0, 3), (1, 3)]
    assert {id(value) for value in values} == {id(make(0, b=3)), id(make(1, b=3))}


def test_a_call_that_raises_is_made_again() -> None:
    calls: list[int] = []

    @once
    def make(value: int) -> int:
        calls.append(value)
        if len(calls) == 1:
            raise ValueError("first")
        return value

    with pytest.raises(ValueError, match="first"):
        make(1)
    assert (make(1), make(1), calls) == (1, 1, [1, 1])
