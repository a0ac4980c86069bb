"""The Jinja environment of chat templates: sandboxed, and bounded in time and output."""

from __future__ import annotations

import contextvars
import json
import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import ConfigError, RequestError

MAX_SECONDS = 5.0
"""Time limit of one rendering."""
MAX_GROWTH = 16
EXTRA_CHARS = 1 << 20
"""The output may have `MAX_GROWTH` characters per character of the messages, and `EXTRA_CHARS` more."""

_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("render_deadline")


def compile_template(source: str) -> jinja2.Template:
    """Compile a template.

    Raises:
        ConfigError: it has a syntax error.
    """
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"The chat template is not valid Jinja: {error}") from error


def render_bounded(template: jinja2.Template, variables: Mapping[str, object], input_chars: int) -> str:
    """Render a compiled template.

    Args:
        template: from `compile_template`.
        variables: the variables of the template.
        input_chars: number of characters of the messages, which limits the length of the result.

    Raises:
        RequestError: the template fails, or exceeds its limits.
    """
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        return _join_bounded(template.generate(variables), EXTRA_CHARS + MAX_GROWTH * input_chars)
    except RequestError:
        raise
    except jinja2.TemplateError as error:
        raise RequestError(f"The chat template rejects these messages: {_first_line(error)}", "messages") from error
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise RequestError(f"The chat template cannot render these messages: {_first_line(error)}", "messages") from error
    finally:
        _deadline.reset(token)


def _join_bounded(pieces: Iterator[str], limit: int) -> str:
    kept, total = [], 0
    for piece in pieces:
        _check_time()
        kept.append(piece)
        total += len(piece)
        if total > limit:
            raise RequestError(f"The chat template makes more than {limit:,} characters of these messages.", "messages")
    return "".join(kept)


def _check_time() -> str:
    if time.monotonic() > _deadline.get():
        raise RequestError(f"The chat template takes more than {MAX_SECONDS:.0f} s for these messages.", "messages")
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return re.sub(r" at 0x[0-9a-f]+", "", lines[0])[:200] if lines else type(error).__name__


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also checks the time in every loop iteration and limits powers and repetition."""

    intercepted_binops = frozenset({"*", "**"})
    check_time = staticmethod(_check_time)

    def _generate(self, source: jinja2.nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        for loop in source.find_all(jinja2.nodes.For):
            call = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(call).set_lineno(loop.lineno))
        return super()._generate(source, name, filename, defer_init)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "**" and not (numbers and abs(left) <= 1e6 and abs(right) <= 64):
            raise jinja2.exceptions.SecurityError("a chat template may not compute powers that large")
        if operator == "*" and not numbers and _repeated_size(left, right) > EXTRA_CHARS:
            raise jinja2.exceptions.SecurityError("a chat template may not repeat text that often")
        return super().call_binop(context, operator, left, right)


def _repeated_size(left: Any, right: Any) -> int:
    text, times = (right, left) if isinstance(left, int) else (left, right)
    return len(text) * times


class _GenerationBlock(jinja2.ext.Extension):
    """Renders the body of `{% generation %}` ... `{% endgeneration %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a mutable set

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Sandbox:
    """The environment that Hugging Face's chat templates are written for."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
