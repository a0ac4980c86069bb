"""The command line: `ServerArgs` from flags and a YAML file, one clear line for what is wrong."""

from __future__ import annotations

import argparse
import difflib
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

import shtab
import yaml

from runtime.config.server_args import Flag, ServerArgs
from runtime.errors import ConfigError

PROGRAM = "talon"
"""The installed command, the same as `python -m runtime.launch_server`."""

_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", tuple: "a list of whole numbers"}


@dataclass(frozen=True)
class Command:
    """One parsed command line: what to serve, and whether to only print or check it."""

    args: ServerArgs
    dump_config: bool
    check: bool


class _Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags, grouped for `--help`."""
    parser = _Parser(
        prog=PROGRAM,
        usage="%(prog)s [flags]",
        description="Serve a language model behind an OpenAI-compatible API.",
        epilog="Every flag may also stand in a YAML file given by --config; the command line wins.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    start = parser.add_argument_group("start")
    config = start.add_argument("--config", metavar="FILE", help="YAML file of flags, without the dashes.")
    start.add_argument("--dump-config", action="store_true", help="Print all flags as YAML that --config takes, and exit.")
    start.add_argument("--check", action="store_true", help="Decide everything, log why, and exit without loading the model.")
    shtab.add_argument_to(start, "--print-completion", parent=parser, help="Print the completion script of this shell, and exit.")
    config.complete = shtab.FILE  # type: ignore[attr-defined]
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, flag, kind in flags():
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], name, flag, kind)
    return parser


def flags() -> list[tuple[str, Flag, type]]:
    """(field, flag, type of one value) of every field of `ServerArgs`, in order."""
    hints = typing.get_type_hints(ServerArgs)
    return [(f.name, f.metadata["flag"], _plain(hints[f.name])) for f in fields(ServerArgs)]


def _fields_by_spelling() -> dict[str, str]:
    """The field of every spelling of a flag, both with underscores: that of the field itself, and of other names."""
    return {spelling.removeprefix("--").replace("-", "_"): name for name, flag, _ in flags() for spelling in (name, *flag.aliases)}


def parse(argv: Sequence[str]) -> Command:
    """Read the command line `argv` (without the program) and the file it names.

    Raises:
        ConfigError: for an unknown or malformed flag or key, naming the nearest one that exists.
    """
    parser = build_parser()
    given = _parse_known(parser, argv)
    if "config" in given:
        given = _parse_known(parser, _argv_from_yaml(Path(given["config"]))) | given
    dump, check = bool(given.pop("dump_config", False)), bool(given.pop("check", False))
    for key in ("config", "print_completion"):
        given.pop(key, None)
    return Command(ServerArgs(**given), dump, check)


def dump(args: ServerArgs) -> str:
    """`args` as YAML that `--config` takes; flags that were not asked for are left out."""
    asked = {name.replace("_", "-"): getattr(args, name) for name, _, _ in flags()}
    shown = {key: list(value) if isinstance(value, tuple) else value for key, value in asked.items() if value is not None}
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def from_fields(given: dict[str, object]) -> ServerArgs:
    """`ServerArgs` of keyword arguments, as the offline engine takes them; other spellings of a flag are taken too, such as `model`.

    Raises:
        ConfigError: for a name that is no flag, with the nearest one that is; for two names of one flag; for a value that it cannot be.
    """
    known, spelled, values = _fields_by_spelling(), dict[str, str](), dict[str, typing.Any]()
    of = {name: (flag, kind) for name, flag, kind in flags()}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"unknown option {key!r}{_nearest(key, list(known))}")
        other = spelled.setdefault(known[key], key)
        if other != key:
            raise ConfigError(f"{other!r} and {key!r} are names of one option; give one of them")
        left_out = value is None and getattr(ServerArgs, known[key]) is None
        values[known[key]] = None if left_out else _value(key, value, *of[known[key]])
    return ServerArgs(**values)


def _value(key: str, value: object, flag: Flag, kind: type) -> object:
    """`value` of a keyword option as its field holds it: what the command line would make of it."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is tuple and isinstance(value, (list, tuple)) and all(type(entry) is int for entry in value):
        return tuple(value)
    if kind is float and number:
        return float(typing.cast(float, value))
    if kind is str and (number or isinstance(value, os.PathLike)):
        value = str(value)
    if type(value) is not kind or kind is tuple:
        raise ConfigError(f"option {key!r} is {value!r}; it must be {_KINDS[kind]}")
    if flag.choices and value not in flag.choices:
        raise ConfigError(f"option {key!r} is {value!r}; it must be one of {', '.join(flag.choices)}")
    return value


def _parse_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, typing.Any]:
    given, unknown = parser.parse_known_args(list(argv))
    if unknown:
        known = list(parser._option_string_actions)
        name = unknown[0].partition("=")[0]
        raise ConfigError(f"unknown argument {unknown[0]!r}{_nearest(name, known)}; --help lists all")
    return vars(given)


def _argv_from_yaml(path: Path) -> list[str]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({type(error).__name__})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must be a mapping of flags to values")
    known = [spelling.replace("_", "-") for spelling in _fields_by_spelling()]
    lists = [name.replace("_", "-") for name, _, kind in flags() if kind is tuple]
    argv: list[str] = []
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in known:
            raise ConfigError(f"--config {path}: unknown key {str(key)!r}{_nearest(name, known)}")
        if isinstance(value, dict) or (isinstance(value, list) and name not in lists):
            raise ConfigError(f"--config {path}: {str(key)!r} is {value!r}; it takes one value")
        argv += _argv_of(name, value)
    return argv


def _argv_of(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}={str(value).lower()}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def _nearest(name: str, known: Sequence[str]) -> str:
    """A hint at the nearest of `known`: one that goes on from `name`, which may be cut short, before one that looks alike."""
    longer = [other for other in known if name.strip("-") and other.startswith(name)]
    close = difflib.get_close_matches(name, longer or known, n=1, cutoff=0.0 if longer else 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _plain(hint: object) -> type:
    """int of `int | None`, tuple of `tuple[int, ...] | None`."""
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.get_origin(hint) or hint  # type: ignore[return-value]


def _add(group: argparse._ArgumentGroup, name: str, flag: Flag, kind: type) -> None:
    names = (f"--{name.replace('_', '-')}", *flag.aliases)
    if kind is bool:
        # An optional value, so that the command line can also turn off what the file turned on.
        group.add_argument(*names, dest=name, nargs="?", const=True, type=_truth, metavar="true|false", help=flag.help)
    elif kind is tuple:
        group.add_argument(*names, dest=name, nargs="+", type=int, action=_ToTuple, metavar=flag.metavar, help=flag.help)
    else:
        action = group.add_argument(*names, dest=name, type=kind, choices=flag.choices, metavar=flag.metavar, help=flag.help)
        if flag.metavar == "PATH":
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def _truth(text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")


class _ToTuple(argparse.Action):
    def __call__(self, parser: object, namespace: argparse.Namespace, values: typing.Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))
