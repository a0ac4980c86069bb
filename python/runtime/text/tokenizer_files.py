"""The files of a model folder that describe its tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from runtime.errors import ConfigError
from runtime.json_file import check_pointer, read_object
from runtime.small_file import read_small, unreadable

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FILE_AS_IT_IS = ("mistral", "mixtral", "ministral")
"""Model types for which transformers uses tokenizer.json unchanged, whatever `tokenizer_class` is."""
_ADDED_TOKENS = "added_tokens_decoder"
_DEFAULT, _TOOL_USE = "default", "tool_use"
"""The names of the chat template, and of that for chats with tools."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of a folder's tokenizer files.

    Attributes:
        definition: the JSON text of tokenizer.json, changed as transformers changes it.
        named_tokens: the texts of `bos_token`, `eos_token` and so on, for templates.
        chat_template: Jinja text, or None.
        tool_template: Jinja text for chats with tools, or None if `chat_template` is for them too.
        added_tokens: the tokens of tokenizer_config.json, by id; they win over those of `definition`, as in transformers.
        special_tokens: the tokens with a name, which are special whatever `definition` and `added_tokens` say, if the vocabulary has them.
        further_tokens: tokens without a name, most of them special; they count if the vocabulary has them and nothing else describes them.
    """

    definition: str
    named_tokens: Mapping[str, str]
    chat_template: str | None = None
    tool_template: str | None = None
    added_tokens: Sequence[AddedToken] = ()
    special_tokens: Sequence[AddedToken] = ()
    further_tokens: Sequence[AddedToken] = ()

    @classmethod
    def read(cls, folder: Path, chat_template: str | None = None) -> TokenizerFiles:
        """Read tokenizer.json and its companions.

        Args:
            folder: holds tokenizer.json.
            chat_template: a file, or Jinja text, instead of the folder's own template.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        settings = _settings(folder)
        definition = _read(folder / "tokenizer.json")
        if _is_rebuilt_llama(folder, settings):
            definition = _rebuild_llama(folder / "tokenizer.json", definition, settings)
        templates = _own_templates(folder, settings) if chat_template is None else {_DEFAULT: _given_template(chat_template)}
        named, default, for_tools = _named_tokens(settings), templates.get(_DEFAULT), templates.get(_TOOL_USE)
        return cls(definition, named, default, for_tools, _added_tokens(folder, settings), *_special_tokens(settings))


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is matched in texts before they are split into words, with the fields of `tokenizers.AddedToken`."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class _Unknown(msgspec.Struct):
    unk_token: Any = None


class Components(msgspec.Struct):
    """The processing steps in a tokenizer.json. The vocabulary, which may have megabytes, is skipped."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    model: _Unknown = msgspec.field(default_factory=_Unknown)


def without_tokens(definition: str, dropped: Container[int], **changes: Any) -> str:
    """A tokenizer.json without truncation, padding and the added tokens with ids in `dropped`; `changes` replaces further members."""
    members: dict[str, Any] = msgspec.json.decode(definition, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(members.get("added_tokens", b"[]"))
    members |= {"added_tokens": [token for token in added if token["id"] not in dropped], "truncation": None, "padding": None}
    return msgspec.json.encode(members | changes).decode()


class _TokenId(msgspec.Struct):
    id: int
    content: str


class _TokenIds(msgspec.Struct):
    added_tokens: list[_TokenId] = []


def tokenizer_eos_ids(folder: Path) -> tuple[int, ...]:
    """The id of the `eos_token` of the tokenizer's own files, if tokenizer.json lists it as an added token. Reads no more than that.

    Raises:
        ConfigError: a file is missing or malformed.
    """
    named = _named_tokens(_settings(folder)).get("eos_token")
    path = folder / "tokenizer.json"
    try:
        added = msgspec.json.decode(_read(path), type=_TokenIds).added_tokens
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return tuple(token.id for token in added if token.content == named)


def _settings(folder: Path) -> dict[str, Any]:
    named, config = _read_json(folder / "special_tokens_map.json"), _read_json(folder / "tokenizer_config.json")
    return {**named, **config} if _ADDED_TOKENS in config else {**config, **named}  # as transformers reads newer and older folders


def _is_rebuilt_llama(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether transformers builds this tokenizer from its class, and reads only the vocabulary from tokenizer.json."""
    is_llama = str(settings.get("tokenizer_class")).removesuffix("Fast") == "LlamaTokenizer"
    return is_llama and not str(_read_json(folder / "config.json").get("model_type")).startswith(_FILE_AS_IT_IS)


def _rebuild_llama(path: Path, text: str, settings: Mapping[str, Any]) -> str:
    """Add the spaces of a Llama 2 tokenizer as `legacy` and `add_prefix_space` define.

    Source: `LlamaTokenizer` of transformers 5.
    """
    definition = _parse(path, text)
    try:
        parts = {part["type"] for part in flatten_component(definition.get("decoder"))}
        is_plain_bpe = definition["model"].get("type", "BPE") == "BPE" and "ByteLevel" not in parts
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not describe a tokenizer: its model or its decoder is malformed") from error
    if not is_plain_bpe:
        return text
    prefix_space = settings.get("add_prefix_space") in (None, True)
    scheme = ("always" if settings.get("legacy") else "first") if prefix_space else "never"
    undo: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    undo += [{"type": "Fuse"}, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix_space else [])]
    definition["normalizer"] = None
    definition["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    definition["decoder"] = {"type": "Sequence", "decoders": undo}
    return json.dumps(definition)


def flatten_component(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the members of a component of tokenizer.json, recursively if it is a sequence; else the component itself."""
    if component is None:
        return []
    for key in ("pretokenizers", "decoders", "normalizers"):
        if key in component:
            return [part for member in component[key] for part in flatten_component(member)]
    return [component]


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _NAMED_TOKENS:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> list[AddedToken]:
    try:
        tokens = msgspec.convert(settings.get(_ADDED_TOKENS) or {}, dict[int, AddedToken], strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder / 'tokenizer_config.json'}: {_ADDED_TOKENS} must hold tokens by id: {error}") from error
    return [tokens[i] for i in sorted(tokens)]


def _special_tokens(settings: Mapping[str, Any]) -> tuple[list[AddedToken], list[AddedToken]]:
    """The special tokens with a name, some of which only this model has, such as `image_token`; and the others."""
    further = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    own = {name: token for name, token in settings.items() if name.endswith("_token") and isinstance(token, str)}
    named = own | {name: settings.get(name) for name in _NAMED_TOKENS} | (further if isinstance(further, dict) else {})
    others = further if isinstance(further, list) else []
    special = [msgspec.structs.replace(token, special=True) for value in named.values() for token in _given_token(value)]
    return special, [token for value in others for token in _given_token(value)]


def _given_token(value: object) -> list[AddedToken]:
    """The token given by its fields, or by its text if it is special; none for anything else."""
    fields = {"content": value, "normalized": False, "special": True} if isinstance(value, str) else value
    try:
        return [msgspec.convert(fields, AddedToken)]
    except msgspec.ValidationError:
        return []


def _own_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The folder's templates by name. Their own files win over tokenizer_config.json, as in transformers."""
    files = {_DEFAULT: folder / "chat_template.jinja", _TOOL_USE: folder / "additional_chat_templates" / f"{_TOOL_USE}.jinja"}
    if found := {name: _read(file) for name, file in files.items() if file.is_file()}:
        return found
    template = _read_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    entries = template if isinstance(template, list) else [{"name": _DEFAULT, "template": template}]
    named = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _given_template(chat_template: str) -> str:
    if "{" in chat_template:
        return chat_template
    if not os.path.isfile(chat_template):
        raise ConfigError(f"--chat-template {chat_template!r} is neither a file nor Jinja text")
    return _read(Path(chat_template))


def _read(path: Path) -> str:
    try:
        text = read_small(path)
        check_pointer(path)
        return text
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; give a folder with a tokenizer.json as --tokenizer-path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {unreadable(error)}") from error


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _parse(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
