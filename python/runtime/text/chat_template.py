"""A chat template, rendered in a sandbox so that what the user wrote can be told from what the template wrote."""

from __future__ import annotations

import contextvars
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import ConfigError, InvalidField, RequestError

SECONDS = 5.0  # for one rendering
GROWTH = 16  # output characters per input character ...
SLACK = 1 << 20  # ... and this many more
KWARGS_CHARS = 16384

# Noncharacters: they stand for nothing in Unicode, so one that the request does not use can mark places in it.
_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
    | {"return_tensors", "return_dict", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"}
    | {"raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner", "self", "loop"}
)

_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("render_deadline")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text of a chat. `mark`, where it occurs, stands inside a control token that a user spelled: remove it, and do not join there."""

    text: str
    mark: str

    @property
    def plain(self) -> str:
        """The text without marks, as the model would read it if nothing were guarded."""
        return self.text.replace(self.mark, "")


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The spellings that user text must not turn into tokens.

    `special` are the tokens that are never text; `soft` are added tokens such as `</think>`, which an assistant's earlier
    messages may rightly contain and templates look for there.
    """

    special: frozenset[str] = frozenset()
    soft: frozenset[str] = frozenset()


class ChatTemplate:
    """A compiled template. Thread-safe.

    Args:
        source: Jinja text.
        named_tokens: `bos_token`, `eos_token` … as templates see them.
        control: what to guard against in users' text.

    Raises:
        ConfigError: the template has a syntax error.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str], control: ControlTokens) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        self._source = source
        self._named_tokens = dict(named_tokens)
        self._guard_all = _Guard(control.special | control.soft)
        self._guard_special = _Guard(control.special)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> Rendered:
        """Render a conversation.

        Args:
            messages: each with a `role` and usually a `content`, of JSON values only.
            add_generation_prompt: end with the header of the assistant's next message.
            continue_final_message: end inside the last message instead.
            template_kwargs: further variables; only plain JSON values under names that are free.

        Raises:
            RequestError: the template refuses the messages, or rendering exceeds its bounds.
        """
        _check_kwargs(template_kwargs or {})
        chat = _check_messages(messages)
        mark, tag = _unused_noncharacters(chat, template_kwargs)
        guarded: list[dict[str, Any]] = [self._guard_message(message, mark) for message in chat]
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
            tag += " "
            _append_to_text(guarded[-1], tag)
        variables = {
            **self._named_tokens,
            **{name: self._guard_all(value, mark) for name, value in (template_kwargs or {}).items()},
            "messages": guarded,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables, limit=SLACK + GROWTH * sum(map(_chars, chat)))
        return Rendered(_cut_at_tag(text, tag) if continue_final_message else text, mark)

    def _guard_message(self, message: Mapping[str, object], mark: str) -> dict[str, object]:
        guard = self._guard_special if message["role"] == "assistant" else self._guard_all
        return {str(key): value if key == "role" else guard(value, mark) for key, value in message.items()}

    def _run(self, variables: dict[str, object], limit: int) -> str:
        token = _deadline.set(time.monotonic() + SECONDS)
        try:
            return _join_bounded(self._template.generate(variables), limit)
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {_first_line(error)}", "messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            raise RequestError(f"the chat template cannot render these messages: {_first_line(error)}", "messages") from error
        finally:
            _deadline.reset(token)


# ---- guarding


class _Guard:
    """Puts a mark inside every spelling of a control token, and where the edge of a text could complete one."""

    def __init__(self, spellings: Collection[str]) -> None:
        spellings = [s for s in spellings if len(s) > 1]  # nothing fits inside a single character
        long = [re.escape(s) for s in sorted(spellings, key=len, reverse=True)]
        # A lookahead finds overlapping spellings too; the mark after the first character breaks each of them.
        self._inside = re.compile(f"(?=(?:{'|'.join(long)}))(.)", re.DOTALL) if long else None
        starts = {s[:n] for s in spellings for n in range(1, len(s))}
        ends = {s[n:] for s in spellings for n in range(1, len(s))}
        self._starts, self._ends = frozenset(starts), frozenset(ends)
        self._longest = max(map(len, spellings), default=0)

    def __call__(self, value: object, mark: str) -> Any:
        if isinstance(value, str):
            return self._text(value, mark)
        if isinstance(value, Mapping):
            return {self._text(str(key), mark): self(item, mark) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item, mark) for item in value]
        return value

    def _text(self, text: str, mark: str) -> str:
        if self._inside is None:
            return text
        return self._inside.sub(rf"\1{mark}", self._break_edges(text, mark))

    def _break_edges(self, text: str, mark: str) -> str:
        """Mark an end (or a beginning) that neighbouring text could complete to a control token.

        The mark goes one character in, so that templates that strip white space still see the same edge.
        """
        body = text.strip()
        if not body:
            return text
        offset = text.index(body[0])
        cuts = set()
        for n in range(1, min(self._longest, len(body) + 1)):
            if body[-n:] in self._starts:
                cuts.add(offset + len(body) - n + 1)
            if body[:n] in self._ends:
                cuts.add(offset + n - 1)
        for cut in sorted(cuts, reverse=True):
            text = text[:cut] + mark + text[cut:]
        return text


def _unused_noncharacters(chat: object, kwargs: object) -> tuple[str, str]:
    try:
        used = set(json.dumps([chat, kwargs], ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidField("messages", "…", "made of plain JSON values that are not nested deeply") from error
    free = [char for char in _NONCHARACTERS if char not in used]
    if len(free) < 2:
        raise RequestError("messages use all Unicode noncharacters; leave out U+FDD0 to U+FDEF", "messages")
    return free[0], free[1]


# ---- what comes in


def _check_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    if not messages:
        raise InvalidField("messages", [], "a list of at least one message")
    for message in messages:
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise InvalidField("messages.role", role, "a word such as system, user or assistant")
    return [dict(message) for message in messages]


def _check_kwargs(kwargs: Mapping[str, object]) -> None:
    field = "chat_template_kwargs"
    for name in kwargs:
        if name in _RESERVED or name.startswith("_") or not name.isidentifier():
            raise InvalidField(field, name, "a dictionary whose names are identifiers and not among those that the server sets")
    try:
        text = json.dumps(kwargs, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidField(field, "…", "made of plain JSON values") from error
    if len(text) > KWARGS_CHARS:
        raise InvalidField(field, f"{len(text)} characters", f"at most {KWARGS_CHARS} characters of JSON")


def _chars(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_chars(item) for item in value.values())
    return sum(map(_chars, value)) if isinstance(value, (list, tuple)) else 8


# ---- continuing the last message


def _append_to_text(message: dict[str, Any], tag: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + tag
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += tag
            return
    raise RequestError("continue_final_message is set, and the last message has no text to continue", "continue_final_message")


def _cut_at_tag(text: str, tag: str) -> str:
    at = text.rfind(tag.strip())
    if at < 0:
        raise RequestError("the chat template leaves out the end of the last message, so it cannot be continued", "continue_final_message")
    kept = text[:at]
    # A template that strips white space took the tag's trailing space; then it would have taken the message's too.
    return kept if text.startswith(tag, at) else kept.rstrip()


# ---- the sandbox


def _join_bounded(pieces: Iterator[str], limit: int) -> str:
    kept, total = [], 0
    for piece in pieces:
        _check_time()
        kept.append(piece)
        total += len(piece)
        if total > limit:
            raise RequestError(f"the chat template makes more than {limit} characters of these messages", "messages")
    return "".join(kept)


def _check_time() -> str:
    if time.monotonic() > _deadline.get():
        raise RequestError(f"the chat template takes more than {SECONDS:.0f} s", "messages")
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return re.sub(r" at 0x[0-9a-f]+", "", lines[0])[:200] if lines else type(error).__name__


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also looks at the clock in every turn of a loop and bounds repetition."""

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
            raise jinja2.exceptions.SecurityError("powers that large are not allowed in a chat template")
        if operator == "*" and not numbers and _repeated_size(left, right) > SLACK:
            raise jinja2.exceptions.SecurityError("repetitions that long are not allowed in a chat template")
        return super().call_binop(context, operator, left, right)


def _repeated_size(left: Any, right: Any) -> int:
    text, times = (right, left) if isinstance(left, int) else (left, right)
    return len(text) * times


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}` … `{% endgeneration %}`, which marks assistant text for training, and renders what is inside."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a set; nobody writes to it

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Sandbox:
    """The environment that Hugging Face's chat templates are written for."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., object]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
