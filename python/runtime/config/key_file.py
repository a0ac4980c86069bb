"""The file of --api-key-file: API keys with names and limits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import msgspec

from runtime.config.yaml_file import parse_yaml, read_text
from runtime.errors import ConfigError
from runtime.small_file import is_pipe

Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
FLAG = "--api-key-file"


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key. A limit that is None does not apply.

    Attributes:
        name: the name in logs and in the fair queue.
        admin: whether it allows the administration paths.
        requests_per_minute, tokens_per_minute: rate limits; tokens of prompts and outputs together.
        concurrent_requests: maximum requests at the same time.
        priority: the highest priority that counts against other keys; None: the value of --max-priority.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[!-~]+$")]
    key: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    admin: bool = False
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    concurrent_requests: Positive | None = None
    priority: int | None = None


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[tuple[ApiKey, ...], msgspec.Meta(min_length=1)]


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a YAML file with a list `keys`; a file with only one key is a key named "default".

    Raises:
        ConfigError: the file cannot be read, or an entry is wrong; names the entry.
    """
    text = _pipe_text(path) if is_pipe(path) else read_text(FLAG, path)
    content = parse_yaml(FLAG, path, text, secret=True)
    if isinstance(content, (str, int, float)) and not isinstance(content, bool):
        content = {"keys": [{"name": "default", "key": text.strip()}]}
    try:
        keys = msgspec.convert(content, _KeyFile).keys
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FLAG} {path}: {error}") from error
    for field in ("name", "key"):
        values = [getattr(key, field) for key in keys]
        if len(set(values)) < len(values):
            raise ConfigError(f"{FLAG} {path}: two entries have the same {field}.")
    for key in keys:
        if problem := key_problem(key.key):
            raise ConfigError(f"{FLAG} {path}: the key of {key.name} {problem}")
    return keys


@functools.cache
def _pipe_text(path: Path) -> str:
    """The text of a pipe. It can be read only once, but the start checks the keys before it uses them."""
    return read_text(FLAG, path)


def key_problem(key: str) -> str:
    """The problem of a key, as the end of a sentence; empty for a valid key."""
    if not key:
        return "is empty, which would leave the server open. Give a key, or leave the flag out."
    if not all("!" <= letter <= "~" for letter in key):
        return "has a character that an Authorization header cannot carry. Use printable ASCII without spaces."
    return ""
