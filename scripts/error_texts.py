"""Extracts the texts of configuration errors from the source code."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runtime

ROOT = Path(runtime.__file__).parent


@dataclass(frozen=True, slots=True)
class ErrorTexts:
    """The error messages of a module.

    Attributes:
        about: the first sentence of the module's docstring.
        texts: its messages. Values are in braces by name; constants are inserted.
    """

    about: str
    texts: Sequence[str]


def error_texts(folder: str, mentioning: Sequence[str] = ("",)) -> list[ErrorTexts]:
    """The errors of the modules in `folder` of the package whose source contains one of the words `mentioning`."""
    found = []
    for path in sorted((ROOT / folder).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if any(word in source for word in mentioning) and (texts := _texts(path, ast.parse(source))):
            about = ast.get_docstring(ast.parse(source)) or ""
            found.append(ErrorTexts(" ".join(about.split()).partition(". ")[0].removesuffix("."), texts))
    return found


def _texts(path: Path, tree: ast.Module) -> list[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    errors = [node for node in calls if node.args and _makes_error(node)]
    if not errors:
        return []
    constants = vars(importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts)))
    helpers = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef) and _is_helper(each)}
    inside = {id(node) for helper in helpers.values() for node in ast.walk(helper)}
    loops, texts = _loops(tree, constants), list[str]()
    for node in errors:
        if id(node) not in inside:
            texts += [_text(node.args[0], constants, own) for own in loops.get(id(node), [{}])]
    for call in (node for node in calls if isinstance(node.func, ast.Name) and node.func.id in helpers):
        texts.append(_of_helper(helpers[call.func.id], call, constants))  # type: ignore[attr-defined]
    return list(dict.fromkeys(text for text in texts if re.search("[a-z]", re.sub("{[^}]*}", "", text))))


def _loops(tree: ast.Module, constants: Mapping[str, Any]) -> dict[int, list[dict[str, str]]]:
    """For every call inside a loop over constants, by the call's id: the texts of the loop's variables in each iteration."""
    found = dict[int, list[dict[str, str]]]()
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For) and _is_constant(node.iter)):
        names = [name.id for name in ast.walk(loop.target) if isinstance(name, ast.Name)]
        items = [item if len(names) > 1 else (item,) for item in _evaluated(loop.iter, constants)]
        own = [dict(zip(names, map(str, item), strict=True)) for item in items]
        found |= {id(call): own for call in ast.walk(loop) if isinstance(call, ast.Call)}
    return found


def _makes_error(call: ast.Call) -> bool:
    """Whether the call creates an error: it calls `ConfigError`, or `error` of the fields of a file."""
    match call.func:
        case ast.Name(id="ConfigError") | ast.Attribute(attr="error"):
            return True
    return False


def _is_helper(function: ast.FunctionDef) -> bool:
    """Whether the function only returns an error made from its parameters."""
    last = function.body[-1]
    return len(function.body) == 1 and isinstance(last, ast.Return) and isinstance(last.value, ast.Call) and _makes_error(last.value)


def _of_helper(helper: ast.FunctionDef, call: ast.Call, constants: Mapping[str, Any]) -> str:
    """The message of a call to a helper."""
    own = {name.arg: _text(value, constants, {}) for name, value in zip(helper.args.args, call.args, strict=True)}
    (returned,) = (node for node in ast.walk(helper) if isinstance(node, ast.Call) and _makes_error(node))
    return _text(returned.args[0], constants, own)


def _text(node: ast.expr, constants: Mapping[str, Any], own: Mapping[str, str]) -> str:
    """The text of an expression in a message; `own` has the texts of parameters."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants, own) for part in node.values)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants, own)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, constants, own) + _text(node.right, constants, own)
    if isinstance(node, ast.Name) and node.id in own:
        return own[node.id]
    return str(_evaluated(node, constants)) if _is_constant(node) else f"{{{_name(node)}}}"


def _is_constant(node: ast.expr) -> bool:
    """Whether an expression consists only of literals and constants of the module."""
    return all(each.id.strip("_").isupper() for each in ast.walk(node) if isinstance(each, ast.Name))


def _evaluated(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "<constant>", "eval"), dict(constants))


def _name(node: ast.expr) -> str:
    """The placeholder of a value: the field that is read, or the first name in the expression."""
    match node:
        case ast.BinOp():
            return "number"
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Name(), *_]):
            return "value"
        case ast.Call(args=[first, *_]):
            return _name(first)
        case ast.Constant(value=str(text)) if text.isidentifier():
            return text
    named = (each for each in ast.walk(node) if isinstance(each, ast.Attribute | ast.Name))
    return next((each.attr if isinstance(each, ast.Attribute) else each.id for each in named), "value").strip("_")
