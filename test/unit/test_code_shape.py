"""Files, functions and the vocabulary of the code stay within their limits."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import runtime

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "runtime"
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_MEDIAN_FUNCTION_LINES = 6
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
PRIVATE_WORDS = (
    "riders?", "twins?", "nobody", "everyone", "everybody", "whoever", "somebody", r"judg\w+", r"settl\w+", "the office", "the cellar",
    "products of few rows", "so many", "the kernel before", "anew", "signs? of life",
)  # fmt: skip
"""Words of this project's past that a native-English engineer would not use here; `docs/glossary.md` has the field's words."""
TEXT_FILES = {".py", ".md", ".cu", ".html", ".toml"}


def modules() -> Iterator[tuple[str, str]]:
    """Path below the package and text of each module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), path.read_text(encoding="utf-8")


def function_lines(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and length of each function, its docstring included; without kernels, which are decorated by a `jit`."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION) and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_stay_short() -> None:
    lengths = {name: len(text.splitlines()) for name, text in modules()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_stay_short() -> None:
    lengths = [(f"{path} {name}", length) for path, text in modules() for name, length in function_lines(ast.parse(text))]
    assert [(name, length) for name, length in lengths if length > MAX_FUNCTION_LINES] == []
    assert statistics.median(length for _, length in lengths) <= MAX_MEDIAN_FUNCTION_LINES


def test_private_words_do_not_come_back() -> None:
    words = re.compile(rf"\b({'|'.join(PRIVATE_WORDS)})\b", re.IGNORECASE)
    paths = [path for folder in ("python", "docs") for path in (ROOT / folder).rglob("*") if path.suffix in TEXT_FILES]
    lines = [
        (str(path.relative_to(ROOT)), number, line.strip())
        for path in (ROOT / "README.md", *paths)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert lines == []


def test_the_public_names_are_pinned() -> None:
    assert runtime.__all__ == ["Engine", "__version__"]
