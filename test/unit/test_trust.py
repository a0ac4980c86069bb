"""What the package may not contain, read from its source: ways to run what somebody else wrote."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import runtime

FILES = sorted(Path(runtime.__file__).parent.rglob("*.py"))
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
FROM_PICKLE = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("pd", "read_pickle")}
TEMPLATES = {"Environment", "NativeEnvironment", "SandboxedEnvironment", "Template"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def called(call: ast.Call) -> tuple[str, str]:
    """(object, attribute) of a call like `torch.load(...)`, ("", name) of a plain one."""
    if isinstance(call.func, ast.Attribute):
        return (call.func.value.id if isinstance(call.func.value, ast.Name) else "?"), call.func.attr
    return "", call.func.id if isinstance(call.func, ast.Name) else "?"


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(file.parts[-2:]))
def test_nothing_reads_pickles_or_runs_text(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert not UNSAFE_MODULES & set(imported(tree))
    for call in calls(tree):
        of, name = called(call)
        assert not (of == "" and name in UNSAFE_CALLS), f"line {call.lineno}: {name}()"
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        checked = given.get("weights_only")
        safe = isinstance(checked, ast.Constant) and checked.value is True
        assert safe or (of, name) not in FROM_PICKLE, f"line {call.lineno}: {of}.{name}()"
        for flag in ("shell", "trust_remote_code"):
            assert flag not in given, f"line {call.lineno}: {flag}="


def test_templates_run_in_the_immutable_sandbox_alone() -> None:
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        if "jinja2" in text and "jinja2" in set(imported(tree := ast.parse(text))):
            assert not [call.lineno for call in calls(tree) if called(call)[1] in TEMPLATES], file
            assert "ImmutableSandboxedEnvironment" in text, file
