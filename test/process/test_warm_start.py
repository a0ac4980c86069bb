"""Programs of the tests start as forks, unless their environment says what a running interpreter can no longer heed."""

from __future__ import annotations

import sys

import pytest

from process import fake
from runtime.constrained import llguidance_backend
from runtime.model_files.cache_folder import default_cache_dir
from runtime.model_files.embedded import embedded_folder
from runtime.text.tokenizer import Tokenizer
from warm_start import keep_tokenizer, program_of


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


def test_a_kept_tokenizer_is_that_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks have what a process of their own would have read."""
    folder = embedded_folder(default_cache_dir())
    read, read_again = Tokenizer.load(folder), Tokenizer.load(folder)
    assert read is not read_again
    monkeypatch.setattr(Tokenizer, "load", Tokenizer.load)
    monkeypatch.setattr(llguidance_backend, "LLTokenizer", llguidance_backend.LLTokenizer)
    keep_tokenizer()
    kept = Tokenizer.load(folder)
    assert kept is Tokenizer.load(str(folder))
    assert kept.definition == read.definition
    messages = [{"role": "user", "content": "Hello <|im_end|> there"}]
    assert kept.encode_chat(messages) == read.encode_chat(messages)
    template = "{{ messages[0]['content'] }}"
    assert Tokenizer.load(folder, chat_template=template).encode_chat(messages) != kept.encode_chat(messages)
