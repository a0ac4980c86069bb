"""The compiler of grammars: its cache and bounds, and the process in which each grammar is tried first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from runtime.constrained import compiler as compiler_module
from runtime.constrained.backends import make_backend
from runtime.constrained.compiler import GrammarCompiler
from runtime.constrained.grammar import GrammarBackend, MaskRow, Matcher, allowed_tokens, mask_words
from runtime.constrained.trial import GrammarTrial, Refusal
from runtime.constrained.trial_process import TrialProcess
from runtime.entrypoints.grammar_process import GrammarBackendConfig
from runtime.errors import CompilerBusy, GrammarBackendFailed, GrammarError
from runtime.sampling_params import GrammarSpec
from unit.grammars import VOCAB, json_tokenizer, vocabulary

CYCLE = "root ::= r0\n" + "\n".join(f'r{i} ::= r{(i + 1) % 3000} | "y"' for i in range(3000))
CHAIN = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(600)) + '\nr600 ::= "QZJ"'
OPTIONAL = "a?" * 20_000
PATTERNS = {"allOf": [{"properties": {"a": {"pattern": f".*{i}.*"}}} for i in range(40)]}
HARMFUL = "crashes on it|longer than 0.2 s"


class Trials:
    """Trials that count, and wait for a signal."""

    def __init__(self, waits: bool = False) -> None:
        self.tried: list[str] = []
        self.began, self.go = threading.Event(), threading.Event()
        if not waits:
            self.go.set()

    def translate(self, spec: GrammarSpec) -> GrammarSpec:
        self.tried.append(spec.text)
        self.began.set()
        self.go.wait(10)
        if spec.text.startswith("bad"):
            raise GrammarError(spec.kind, "It is bad.")
        return spec

    def close(self) -> None:
        self.go.set()


class Backend:
    """A backend that counts, and fails at one grammar."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def translate(self, spec: GrammarSpec) -> GrammarSpec:
        return spec

    def compile(self, translated: GrammarSpec) -> Matcher:
        if translated.text == "broken":
            raise ZeroDivisionError
        self.compiled.append(translated.text)
        return object()  # type: ignore[return-value]


class Text:
    """A grammar of one text that is over at once, and its matcher."""

    def push(self, token: int) -> bool:
        return False

    def fork(self) -> Text:
        return self

    def fill(self, row: MaskRow) -> str:
        row.fill(0)
        return ""


class Harmful:
    """A backend that does what native code may do to its process."""

    def translate(self, spec: GrammarSpec) -> GrammarSpec:
        return GrammarSpec(spec.kind, spec.text.lower())

    def compile(self, translated: GrammarSpec) -> Matcher:
        text = translated.text
        if text == "refuse":
            raise GrammarError("other", "It is bad.")
        if text == "fail":
            raise ZeroDivisionError
        if text == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "exit":
            raise SystemExit(3)
        if text == "memory":
            bytearray(1 << 30)
        if text == "endless":
            while True:
                pass
        if text == "asleep":
            time.sleep(60)
        return Text()


def tokenizer_folder(folder: Path) -> Path:
    """A folder with the files of `json_tokenizer`."""
    (folder / "tokenizer.json").write_text(json_tokenizer().definition, encoding="utf-8")
    return folder


def trial_process(folder: Path, backend: str) -> TrialProcess:
    config = GrammarBackendConfig(name=backend, tokenizer_path=str(tokenizer_folder(folder)), eos_ids=(0, 1), vocab_size=VOCAB)
    return TrialProcess(config.command)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialProcess]:
    process = trial_process(tmp_path_factory.mktemp("tokenizer"), "llguidance")
    yield process
    process.close()
    assert not psutil.pid_exists(process.pid)


@pytest.fixture(scope="module")
def llguidance() -> GrammarBackend:
    return make_backend("llguidance", vocabulary())


# ---- the compiler


def test_one_grammar_is_compiled_once_and_forgotten_when_others_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 2)
    backend, trials = Backend(), Trials()
    compiler = GrammarCompiler(lambda: backend, trials)
    for text in ("a", "a", "b", "a", "c", "a", "b"):
        compiler.compile(GrammarSpec("regex", text)).future.result(5)
    assert backend.compiled == trials.tried == ["a", "b", "c", "b"]
    compiler.close()


def test_a_refused_grammar_is_remembered_and_never_compiled() -> None:
    backend, trials = Backend(), Trials()
    compiler = GrammarCompiler(lambda: backend, trials)
    for _ in range(3):
        with pytest.raises(GrammarError, match="It is bad"):
            compiler.compile(GrammarSpec("regex", "bad")).future.result(5)
    assert trials.tried == ["bad"]
    assert backend.compiled == []
    compiler.close()


def test_a_grammar_that_waits_too_long_is_neither_tried_nor_remembered() -> None:
    backend, trials, now = Backend(), Trials(waits=True), [1.0]
    compiler = GrammarCompiler(lambda: backend, trials, lambda: now[0])
    first, second, third = (compiler.compile(GrammarSpec("regex", text)) for text in "abc")
    assert trials.began.wait(10)
    now[0] += compiler_module.MAX_WAIT / 2
    assert [each.result() for each in (first, second, third)] == [None] * 3
    late = compiler.compile(GrammarSpec("regex", "c"))
    now[0] += compiler_module.MAX_WAIT * 0.6
    for each in (first, second, third):
        with pytest.raises(CompilerBusy):
            each.result()
    assert late.result() is None, "each request has a time of its own"
    trials.go.set()
    late.future.result(5)
    with pytest.raises(CompilerBusy):
        second.result()
    assert trials.tried == backend.compiled == ["a", "c"]
    compiler.compile(GrammarSpec("regex", "b")).future.result(5)
    assert trials.tried == ["a", "c", "b"]
    compiler.close()


def test_a_fault_of_the_library_refuses_its_grammar_alone() -> None:
    compiler = GrammarCompiler(Backend, None)
    with pytest.raises(GrammarError, match="The compiler failed: ZeroDivisionError"):
        compiler.compile(GrammarSpec("regex", "broken")).future.result(5)
    assert compiler.compile(GrammarSpec("regex", "a")).future.result(5) is not None
    compiler.close()


def test_end_of_text_ids_unknown_to_the_tokenizer_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = str(tokenizer_folder(tmp_path))
    config = GrammarBackendConfig(name="llguidance", tokenizer_path=folder, eos_ids=(0, VOCAB - 1), vocab_size=VOCAB)
    compiler = GrammarCompiler(config.load, TrialProcess(config.command))
    matcher = compiler.compile(GrammarSpec("regex", "a?")).future.result(60)
    row = np.zeros(mask_words(VOCAB), dtype=np.int32)
    matcher.fill(row)
    assert allowed_tokens(row)[[0, VOCAB - 1]].tolist() == [True, False]
    assert [record.getMessage() for record in caplog.records] == [
        f"grammars never end a text with the end-of-text ids [{VOCAB - 1}], which the tokenizer does not have"
    ]
    compiler.close()


def test_a_backend_without_an_end_of_text_token_is_a_fault_of_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tokenizer_folder(tmp_path))
    config = GrammarBackendConfig(name="llguidance", tokenizer_path=folder, eos_ids=(VOCAB - 1,), vocab_size=VOCAB)
    compiler = GrammarCompiler(config.load, None)
    for text in "aba":
        with pytest.raises(GrammarBackendFailed, match=r"none of the model's end-of-text ids \[419\]\.$") as failed:
            compiler.compile(GrammarSpec("regex", text)).future.result(60)
        assert failed.value.status == 500
    assert caplog.text.count("could not be loaded") == 1
    compiler.close()


def test_a_backend_that_cannot_be_loaded_is_a_fault_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> GrammarBackend:
        raise ZeroDivisionError("no")

    trials = Trials()
    compiler = GrammarCompiler(fail, trials)
    for text in "aba":
        with pytest.raises(GrammarBackendFailed, match=r"backend could not be loaded: ZeroDivisionError: no\.$"):
            compiler.compile(GrammarSpec("regex", text)).future.result(5)
    assert trials.tried == []
    assert caplog.text.count("could not be loaded") == 1
    compiler.close()


# ---- trials


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fail", "The compiler failed: ZeroDivisionError."),
        ("killed", "The compiler crashes on it (SIGKILL)"),
        ("exit", "The compiler crashes on it (exit status 1)"),
        ("memory", "It needs more than 512 MiB to compile."),
        ("endless", "It takes longer than 0.2 s to compile."),
        ("asleep", "It takes longer than 0.2 s to compile."),
    ],
)
def test_a_trial_says_how_a_grammar_ends_its_process(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.constrained.trial.MAX_WALL_SECONDS", 2.0)
    refusal = GrammarTrial(Harmful(), VOCAB, (0, 1)).run(GrammarSpec("regex", text))
    assert isinstance(refusal, Refusal)
    assert str(refusal.error).startswith(f"The regex cannot be used: {reason}")


def test_a_trial_passes_errors_on() -> None:
    refusal = GrammarTrial(Harmful(), VOCAB, (0, 1)).run(GrammarSpec("structural_tag", "refuse"))
    assert isinstance(refusal, Refusal)
    assert str(refusal.error) == "The other cannot be used: It is bad."
    passed = GrammarTrial(Harmful(), VOCAB, (0, 1)).run(GrammarSpec("structural_tag", "GOOD"))
    assert passed == GrammarSpec("structural_tag", "good")


@pytest.mark.parametrize(
    ("kind", "grammar", "reason"),
    [
        ("ebnf", CYCLE, HARMFUL),
        ("ebnf", 'start: /"/ OTHER "\\""\nOTHER: /' + OPTIONAL + "/", HARMFUL),
        ("regex", OPTIONAL, HARMFUL),
        ("json_schema", {"properties": {"a": {"type": "string", "pattern": OPTIONAL}}}, HARMFUL),
        ("json_schema", {"patternProperties": {OPTIONAL: {}}}, HARMFUL),
        ("json_schema", PATTERNS, HARMFUL),
        ("structural_tag", {"format": {"type": "grammar", "grammar": CYCLE}}, HARMFUL),
        ("structural_tag", {"format": {"type": "regex", "pattern": OPTIONAL}}, HARMFUL),
        ("regex", "^((((a{1,200}){1,200}){1,200}){1,200})$", "It is too complex: lexer error"),
        ("regex", "(a", "unclosed group"),
        ("json_schema", {"$ref": "#"}, "refers to itself"),
    ],
)
def test_harmful_grammars_are_refused(trials: TrialProcess, llguidance: GrammarBackend, kind: Any, grammar: Any, reason: str) -> None:
    compiler = GrammarCompiler(lambda: llguidance, trials)
    pid, text = trials.pid, grammar if isinstance(grammar, str) else json.dumps(grammar)
    with pytest.raises(GrammarError, match=reason):
        compiler.compile(GrammarSpec(kind, text)).future.result(60)
    assert trials.pid == pid, "only a fork has ended"


def test_large_grammars_compile(trials: TrialProcess, llguidance: GrammarBackend) -> None:
    compiler = GrammarCompiler(lambda: llguidance, trials)
    for kind, text in (("ebnf", CHAIN), ("regex", "[a-z]{1,2000}"), ("regex", "(a?){20000}")):
        assert compiler.compile(GrammarSpec(kind, text)).future.result(60).fork() is not None


def test_grammars_of_xgrammar_are_tried_too(tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    trials = trial_process(tmp_path, "xgrammar")
    trials.translate(GrammarSpec("json_schema", '{"type": "object"}'))
    with pytest.raises(GrammarError, match=f"{HARMFUL}|needs more than"):
        trials.translate(GrammarSpec("regex", OPTIONAL * 10))
    with pytest.raises(GrammarError, match="cannot be used"):
        trials.translate(GrammarSpec("ebnf", "root ::= )"))
    trials.close()


def test_a_process_that_has_ended_is_replaced(trials: TrialProcess, caplog: pytest.LogCaptureFixture) -> None:
    trials.translate(GrammarSpec("regex", "a"))
    pid = trials.pid
    os.kill(pid, signal.SIGKILL)
    trials.translate(GrammarSpec("regex", "a"))
    assert trials.pid != pid
    assert "restarting it" in caplog.text


def test_a_process_that_cannot_start_leaves_grammars_untried() -> None:
    trials = TrialProcess([sys.executable, "-c", "pass"])
    with pytest.raises(CompilerBusy):
        trials.translate(GrammarSpec("regex", "a"))
    trials.close()


PARENT = """
import sys, threading, time
from runtime.constrained.trial_process import TrialProcess
from runtime.entrypoints.grammar_process import GrammarBackendConfig
from runtime.sampling_params import GrammarSpec
trials = TrialProcess(GrammarBackendConfig(name="llguidance", tokenizer_path=sys.argv[1], eos_ids=(0, 1), vocab_size=420).command)
trials.translate(GrammarSpec("regex", "a"))
print(trials.pid, flush=True)
trials.translate(GrammarSpec("regex", "a?" * 20000))
time.sleep(60)
"""


@pytest.mark.parametrize("tries", [False, True])
def test_the_process_ends_with_its_parent(tmp_path: Path, tries: bool) -> None:
    command = [sys.executable, "-c", PARENT, str(tokenizer_folder(tmp_path))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        deadline = time.monotonic() + 20
        while bool(process.children()) != tries and time.monotonic() < deadline:
            time.sleep(0.001)
        family = [process, *process.children()]
        parent.kill()
    assert not psutil.wait_procs(family, timeout=20)[1]
