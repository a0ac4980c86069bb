"""The command-line parser: `ServerArgs` from flags and a YAML file, with one clear line per mistake."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import inspect
import itertools
import json
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import shtab
import yaml

from runtime.config import sglang_flags
from runtime.config.refusals import flag_of
from runtime.config.server_args import ServerArgs
from runtime.config.yaml_file import parse_yaml, read_text
from runtime.errors import ConfigError

Options = TypeVar("Options")
PROGRAM = "talon"
"""The installed command, the same as `python -m runtime.launch_server`."""

OTHER_SPELLINGS = {
    ("speculative_algorithm", "NEXTN"): "EAGLE",
    ("kv_cache_dtype", "bf16"): "bfloat16",
    ("quantization", "unquant"): "none",
    ("quantization", "awq_marlin"): "awq",
    ("quantization", "gptq_marlin"): "gptq",
    ("reasoning_parser", "qwen3-thinking"): "qwen3",
    ("reasoning_parser", "deepseek-v3"): "qwen3",
    ("tool_call_parser", "qwen"): "qwen25",
    ("tool_call_parser", "glm"): "glm47",
    ("tool_call_parser", "glm45"): "glm47",
}
"""SGLang's other names of flag values."""
MISSPELT = 0.8
"""Minimum similarity at which an unknown name counts as a misspelling of a flag; a wrong guess would mislead."""
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Null characters, and what Python makes of bytes that are not UTF-8."""
_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", tuple: "a list of whole numbers"}


@dataclass(frozen=True)
class Command:
    """One parsed command line: what to serve, and whether to only print or check it."""

    args: ServerArgs
    dump_config: bool
    check: bool


@dataclass(frozen=True)
class Flag:
    """One field of `ServerArgs` as a flag.

    Attributes:
        hint: the field's type.
        kind: type of one value: bool, int, float, str, or tuple for a list of integers.
        choices: the allowed values; None for any of its kind.
        words: allowed texts in addition to values of its kind.
    """

    name: str
    hint: Any
    kind: type
    choices: tuple[str, ...] | None
    words: tuple[str, ...]
    group: str
    help: str
    metavar: str | None
    aliases: tuple[str, ...]

    @property
    def spellings(self) -> list[str]:
        """Its names on the command line."""
        return [flag_of(self.name), *self.aliases]

    @property
    def expected(self) -> str:
        """What its value must be, for error messages."""
        return f"one of {', '.join(self.choices)}" if self.choices else " or ".join([_KINDS[self.kind], *self.words])


@functools.cache
def flags() -> tuple[Flag, ...]:
    """All flags, in the order of the fields of `ServerArgs`."""
    hints, helps = typing.get_type_hints(ServerArgs), _docstrings()
    return tuple(_flag(field, hints[field.name], helps[field.name]) for field in fields(ServerArgs))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags, grouped for `--help`."""
    parser = _Parser(
        prog=PROGRAM,
        usage="%(prog)s [flags]",
        description="Serve a language model with an OpenAI-compatible API.",
        epilog="Every flag can also be set in a YAML file given by --config; the command line takes precedence.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    start = parser.add_argument_group("start")
    config = start.add_argument("--config", metavar="FILE", help="YAML file of flags, without the dashes.")
    start.add_argument("--dump-config", action="store_true", help="Print all flags as YAML for --config, and exit.")
    start.add_argument("--check", action="store_true", help="Resolve and log all options, and exit without loading the model.")
    shtab.add_argument_to(start, "--print-completion", parent=parser, help="Print the completion script of a shell, and exit.")
    config.complete = shtab.FILE  # type: ignore[attr-defined]
    groups = {flag.group: None for flag in flags()}
    sections = {group: parser.add_argument_group(group) for group in groups}
    for flag in flags():
        _add(sections[flag.group], flag)
    return parser


def parse(argv: Sequence[str]) -> Command:
    """Read the command line `argv` (without the program) and the file it names.

    Raises:
        ConfigError: for an unknown or malformed flag or key, naming the nearest one that exists.
    """
    parser = build_parser()
    given, unknown = parser.parse_known_args(_without_sglangs(argv, parser._option_string_actions))
    if unknown:
        name = unknown[0].partition("=")[0]
        known = list(parser._option_string_actions)
        raise ConfigError(f"Unknown argument {unknown[0]!r}{_nearest(name, known)}; --help lists all.")
    if dashes := [name for name, value in vars(given).items() if value == []]:  # some versions of argparse drop the value "--"
        raise ConfigError(f"{flag_of(dashes[0])} must not be '--'.")
    options: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(given).items()}
    file = options.pop("config", None)
    dump, check = options.pop("dump_config", False), options.pop("check", False)
    options.pop("print_completion", None)
    return Command(ServerArgs(**(_from_yaml(Path(file)) if file is not None else {}) | options), dump, check)


def read_own(options: type[Options], program: str, description: str, argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The options of another command, and the other arguments of `argv`, which are the server's flags. Raises `ConfigError`.

    Args:
        options: a dataclass; the metadata of each field has its arguments of `add_argument`.
        program: the module that is the command.
        description: what it does.
    """
    text = f"{description} Takes the server's flags too."
    parser = _Parser(prog=f"python -m runtime.{program}", description=text, allow_abbrev=False)
    for field in fields(options):  # pyright: ignore[reportArgumentType]
        parser.add_argument(flag_of(field.name), **field.metadata)
    own, rest = parser.parse_known_args(list(argv))
    return options(**vars(own)), rest


def parse_shared(argv: Sequence[str]) -> ServerArgs:
    """The server's flags on the command line of another command.

    Raises:
        ConfigError: as `parse`, and for the flags that only the server itself can act on.
    """
    command = parse(argv)
    if command.check or command.dump_config:
        raise ConfigError("--check and --dump-config belong to runtime.launch_server; leave them out")
    return command.args


def _without_sglangs(argv: Sequence[str], known: Mapping[str, object]) -> list[str]:
    """`argv` without flags that only SGLang has, and their values. Raises `ConfigError` for refused flags."""
    kept: list[str] = []
    at = 0
    while at < len(argv):
        name, equals, value = argv[at].partition("=")
        at += 1
        if name in known or not name.startswith("--"):
            kept.append(argv[at - 1])
            continue
        end = next((i for i in range(at, len(argv)) if argv[i].startswith("--")), len(argv))
        if sglang_flags.take(name.removeprefix("--").replace("_", "-"), [value] if equals else argv[at:end]):
            at = end
        else:
            kept.append(argv[at - 1])
    return kept


def dump(args: ServerArgs) -> str:
    """`args` as YAML for `--config`, without the flags that were not given."""
    asked = {flag.name.replace("_", "-"): getattr(args, flag.name) for flag in flags()}
    shown = {key: list(value) if isinstance(value, tuple) else value for key, value in asked.items() if value is not None}
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def from_fields(given: Mapping[str, object]) -> ServerArgs:
    """`ServerArgs` of the offline engine's keyword arguments; aliases of a flag are accepted too, such as `model`.

    Raises:
        ConfigError: for an unknown name, with the nearest flag; for two names of one flag; for a wrong type.
    """
    return ServerArgs(**_values(given))


class _Parser(argparse.ArgumentParser):
    """Raises `ConfigError` instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        for kind, expected in (("int", _KINDS[int]), ("float", _KINDS[float])):
            message = message.replace(f"invalid {kind} value: ", f"must be {expected}, not ")
        raise ConfigError(message)


def _from_yaml(path: Path) -> dict[str, Any]:
    content = parse_yaml("--config", path, read_text("--config", path))
    if not isinstance(content, dict | None):
        raise ConfigError(f"--config {path} must be a mapping of flags to values.")
    try:
        return _values({str(key): value for key, value in (content or {}).items()}, strict=False)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error


def _values(given: Mapping[str, object], strict: bool = True) -> dict[str, Any]:
    """The values of `given` by field. Without `strict`, numbers and truth values may be texts, and None leaves a default, except for a
    truth value: `enable-metrics:` looks as if it set the flag.
    """
    by_name = {spelling.lstrip("-").replace("-", "_"): flag for flag in flags() for spelling in flag.spellings}
    names, values = dict[str, str](), dict[str, Any]()
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in by_name:
            text = value if isinstance(value, str) else _json(value)
            if sglang_flags.take(name.replace("_", "-"), [] if value is True else [text]):
                continue
            known = [other.replace("_", "-") if "-" in key else other for other in by_name]
            raise ConfigError(f"Unknown option {key!r}{_nearest(key, known)}.")
        flag = by_name[name]
        if flag.name in names:
            raise ConfigError(f"{names[flag.name]!r} and {key!r} are names of the same option. Give one of them.")
        names[flag.name] = key
        if value is None and not strict and flag.kind is not bool:
            continue
        values[flag.name] = _value(key, value, flag, strict)
    return values


def _json(value: object) -> str:
    """The JSON of a value of YAML, which may contain itself or have keys that JSON does not allow."""
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _value(key: str, value: object, flag: Flag, strict: bool) -> object:
    value = OTHER_SPELLINGS.get((flag.name, str(value)), value)
    if flag.kind is str and isinstance(value, (int, float, os.PathLike)) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and _NO_TEXT.search(value):
        raise ConfigError(f"Option {key!r} must be UTF-8 without null characters; got {value!r}.")
    wrong = ConfigError(f"Option {key!r} must be {flag.expected}; got {value!r}.")
    if flag.choices is not None and value is not None and value not in flag.choices:
        raise wrong
    try:
        return msgspec.convert(value, flag.hint, strict=strict)
    except msgspec.ValidationError as error:
        raise wrong from error


def _nearest(name: str, known: Sequence[str]) -> str:
    """A hint at the nearest of `known`; a longer name that starts with `name` comes before a similar one."""
    longer = [other for other in known if name.strip("-") and other.startswith(name)]
    close = difflib.get_close_matches(name, longer or known, n=1, cutoff=0.0 if longer else MISSPELT)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _flag(field: Field[Any], hint: Any, help: str) -> Flag:
    plain, others = hint, ()
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        plain, *others = (arg for arg in typing.get_args(hint) if arg is not type(None))
    listed, names = typing.get_origin(plain) is typing.Literal, field.metadata["names"]
    choices = names() if names else typing.get_args(plain) if listed else None
    kind = str if choices else typing.get_origin(plain) or plain
    words = tuple(word for other in others for word in typing.get_args(other))
    shown = {name: field.metadata[name] for name in ("group", "metavar", "aliases")}
    return Flag(field.name, hint, kind, choices, words, help=help, **shown)


def _docstrings() -> dict[str, str]:
    """The string below each field of `ServerArgs`."""
    body = ast.parse(inspect.getsource(ServerArgs)).body[0].body  # type: ignore[attr-defined]
    pairs = [(field, doc) for field, doc in itertools.pairwise(body) if isinstance(field, ast.AnnAssign)]
    return {ast.unparse(field.target): doc.value.value for field, doc in pairs}


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    add = functools.partial(group.add_argument, *flag.spellings, dest=flag.name, help=flag.help)
    if flag.kind is bool:
        # The value is optional, so that the command line can also disable what the file enables.
        add(nargs="?", const=True, type=_truth, metavar="true|false")
    elif flag.kind is tuple:
        add(nargs="+", type=int, metavar=flag.metavar)
    else:
        action = add(type=functools.partial(_spelled, flag), choices=flag.choices, metavar=flag.metavar)
        if flag.metavar == "PATH":
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def _spelled(flag: Flag, text: str) -> object:
    if _NO_TEXT.search(text):
        raise argparse.ArgumentTypeError(f"must be UTF-8, not {text!r}")
    if flag.choices is not None and OTHER_SPELLINGS.get((flag.name, text), text) not in flag.choices:
        raise argparse.ArgumentTypeError(f"must be {flag.expected}, not {text!r}. {' '.join(flag.help.split())}")
    try:
        return text if text in flag.words else flag.kind(OTHER_SPELLINGS.get((flag.name, text), text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {flag.expected}, not {text!r}") from error


def _truth(text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
