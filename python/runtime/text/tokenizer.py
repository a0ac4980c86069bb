"""Text to token ids and back: the tokenizer of a model folder. No torch."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from runtime.errors import ConfigError, RequestError
from runtime.text.chat_template import ChatTemplate, ControlTokens, Rendered

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BRACKETED = re.compile(r"[<\[{].*[>\]}]", re.DOTALL)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WHITE = re.compile(r"\s*")
_MAX_HELD_TOKENS = 8  # no character is spelled in more; beyond, the bytes are invalid and are shown as such


class StreamDecoder(Protocol):
    """Turns the token ids of one text into text as they arrive. Not thread-safe."""

    def step(self, token_ids: Sequence[int]) -> str:
        """Return the text that `token_ids` complete; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """Return text still held back; an incomplete character at the very end is dropped."""
        ...


class Tokenizer:
    """The tokenizer of a Hugging Face style folder. Thread-safe.

    Attributes:
        vocab_size: highest known id + 1; a model may have more (padded) rows.
        eos_ids: the ids that end a text, from the tokenizer's and the model's configuration.
        bos_id: the id that begins a text, if there is one.
        special_ids: control tokens, left out of shown text.
    """

    def __init__(self, definition: str, settings: Mapping[str, Any], chat_template: str | None, eos_ids: Iterable[int] = ()) -> None:
        self._hf = tokenizers.Tokenizer.from_str(definition)
        self._hf.no_truncation()
        self._hf.no_padding()
        self._definition = definition
        added = self._hf.get_added_tokens_decoder()
        self._special = {i: token for i, token in added.items() if token.special}
        self._soft = {i: token for i, token in added.items() if not token.special and _BRACKETED.fullmatch(token.content)}
        self.special_ids = frozenset(self._special)
        self.vocab_size = max(self._hf.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._named = _named_tokens(settings)
        self.bos_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_ids]))
        self._template = self._compile(chat_template) if chat_template is not None else None

    @classmethod
    def load(cls, folder: str | Path, *, chat_template: str | None = None) -> Tokenizer:
        """Read tokenizer.json and its companions from `folder`.

        Args:
            folder: holds tokenizer.json.
            chat_template: a file, or Jinja text, in place of the folder's own template.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        folder = Path(folder)
        definition = _read(folder / "tokenizer.json")
        settings = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        template = _own_template(folder, settings) if chat_template is None else _given_template(chat_template)
        try:
            return cls(definition, settings, template, _eos_ids(folder))
        except ConfigError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ConfigError(f"{folder / 'tokenizer.json'} cannot be read: {str(error)[:200]}") from error

    def _id_of(self, name: str) -> int | None:
        return self._hf.token_to_id(self._named[name]) if name in self._named else None

    # ---- text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenise a raw prompt; control tokens spelled in it become control tokens.

        Args:
            text: any text.
            add_special_tokens: whether to begin as the model was trained to (often with a BOS token).

        Raises:
            RequestError: `text` holds half of a surrogate pair.
        """
        return _encode(self._hf, text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Tokenise text in which nothing becomes a control token, whatever it spells."""
        return self._plain_ids(self._plain, text)

    def _plain_ids(self, plain: tokenizers.Tokenizer, text: str) -> list[int]:
        if not text:
            return []
        ids = _encode(plain, text, add_special_tokens=False)
        if not self._forbidden_ids.isdisjoint(ids):
            raise RequestError("the text spells a control token that this tokenizer cannot write as plain text")
        return ids

    @cached_property
    def _forbidden_ids(self) -> frozenset[int]:
        unknown = json.loads(self._definition)["model"].get("unk_token")
        return frozenset(i for i, token in self._special.items() if token.content != unknown)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its control tokens."""
        return tokenizers.Tokenizer.from_str(json.dumps(self._definition_without_control()))

    @cached_property
    def _plain_inside(self) -> tokenizers.Tokenizer:
        """`_plain` for text that does not begin the prompt: some tokenizers put a space before the first word only."""
        definition = self._definition_without_control()
        changed = [part for part in _parts(definition.get("pre_tokenizer")) if part.get("prepend_scheme") == "first"]
        for part in changed:
            part["prepend_scheme"] = "never"
        return tokenizers.Tokenizer.from_str(json.dumps(definition)) if changed else self._plain

    def _definition_without_control(self) -> dict[str, Any]:
        definition = json.loads(self._definition)
        control = {**self._special, **self._soft}
        definition["added_tokens"] = [token for token in definition.get("added_tokens", []) if token["id"] not in control]
        definition["truncation"] = definition["padding"] = None
        return definition

    # ---- chats

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be encoded without a template of their own."""
        return self._template is not None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """Tokenise a conversation; only the template can make control tokens, never the text of a message.

        Args:
            messages: each with a `role` and usually a `content`, of JSON values only.
            add_generation_prompt: end with the header of the assistant's next message.
            continue_final_message: end inside the last message instead.
            template_kwargs: further variables of the template; plain JSON values.
            chat_template: Jinja text in place of the model's own template.

        Raises:
            RequestError: there is no template, or it refuses the messages, or it takes too long.
        """
        rendered = self._render(messages, add_generation_prompt, continue_final_message, template_kwargs, chat_template)
        return self._encode_rendered(rendered)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """Return the text of a conversation, with the arguments of `encode_chat`; for people to read."""
        return self._render(messages, add_generation_prompt, continue_final_message, template_kwargs, chat_template).plain

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, object] | None,
        chat_template: str | None,
    ) -> Rendered:
        return self._template_for(chat_template).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )

    def _template_for(self, chat_template: str | None) -> ChatTemplate:
        if chat_template is not None:
            try:
                return self._compile(chat_template)
            except ConfigError as error:
                raise RequestError(str(error), "chat_template") from error
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions, or start the server with --chat-template FILE")
        return self._template

    def _compile(self, source: str) -> ChatTemplate:
        special = frozenset(token.content for token in self._special.values())
        return ChatTemplate(source, self._named, ControlTokens(special, frozenset(token.content for token in self._soft.values())))

    def _encode_rendered(self, rendered: Rendered) -> list[int]:
        if rendered.mark not in rendered.text:
            return _encode(self._hf, rendered.text, add_special_tokens=False)
        ids: list[int] = []
        for piece in _split_at(rendered.text, self._control_spellings, {**self._special, **self._soft}):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._plain_ids(self._plain_inside if ids else self._plain, piece.replace(rendered.mark, ""))
        return ids

    @cached_property
    def _control_spellings(self) -> re.Pattern[str]:
        spellings = sorted((token.content for token in [*self._special.values(), *self._soft.values()]), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    # ---- ids to text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence; invalid UTF-8 shows as U+FFFD, unknown ids as nothing."""
        return self._hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return one token as text, for log-probabilities; half a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; b"" for an unknown id."""
        token = self._hf.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """Return a decoder for one text that arrives token by token; each token costs O(1)."""
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        return _ByteStream(self, skip) if self._is_byte_level else _WindowStream(self._hf, skip)

    @cached_property
    def _is_byte_level(self) -> bool:
        return [part["type"] for part in _parts(json.loads(self._definition).get("decoder"))] == ["ByteLevel"]


# ---- decoding as tokens arrive


class _ByteStream:
    """For byte-level vocabularies: tokens are bytes, and UTF-8 tells where characters end."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._tokenizer, self._skip = tokenizer, skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(self._tokenizer.token_bytes(i) for i in token_ids if i not in self._skip))

    def finish(self) -> str:
        self._utf8.reset()
        return ""


class _WindowStream:
    """For any vocabulary: decode the last tokens shown, alone and together with the new ones; the difference is new.

    The tokens shown before give the new ones their context, such as whether a leading space counts.
    """

    def __init__(self, hf: tokenizers.Tokenizer, skip: frozenset[int]) -> None:
        self._hf, self._skip = hf, skip
        self._context: list[int] = []
        self._held: list[int] = []

    def step(self, token_ids: Sequence[int]) -> str:
        return "".join(self._one(i) for i in token_ids if i not in self._skip)

    def _one(self, token_id: int) -> str:
        self._held.append(token_id)
        before = self._hf.decode(self._context, skip_special_tokens=False)
        after = self._hf.decode(self._context + self._held, skip_special_tokens=False)
        incomplete = after.endswith("\ufffd") and len(self._held) < _MAX_HELD_TOKENS
        if incomplete or len(after) <= len(before):
            return ""
        self._context, self._held = self._held, []
        return after[len(before) :]

    def finish(self) -> str:
        self._held = []
        return ""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the rest for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTES[letter] for letter in token)
    except KeyError:  # an added token, written as it is
        return token.encode()


# ---- encoding


def _encode(hf: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestError("the text holds half of a surrogate pair, which is no character") from error


def _split_at(text: str, spellings: re.Pattern[str], control: Mapping[int, tokenizers.AddedToken]) -> list[str | int]:
    """Cut `text` at the control tokens: text and ids in turn. Tokens that swallow white space around them do so."""
    by_content = {token.content: (i, token) for i, token in control.items()}
    pieces: list[str | int] = []
    at = 0
    for match in spellings.finditer(text):
        token_id, token = by_content[match[0]]
        before = text[at : match.start()]
        pieces += [before.rstrip() if token.lstrip else before, token_id]
        at = match.end()
        if token.rstrip:
            at = _WHITE.match(text, at).end()  # type: ignore[union-attr]
    return [*pieces, text[at:]]


def _parts(component: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Flatten a component of tokenizer.json: the members of a sequence, or the one that it is."""
    if component is None:
        return []
    members = next((component[key] for key in ("pretokenizers", "decoders", "normalizers") if key in component), None)
    return [component] if members is None else [part for member in members for part in _parts(member)]  # type: ignore[list-item]


# ---- the folder's files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; give a folder that holds a tokenizer.json as --tokenizer-path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _NAMED_TOKENS:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _eos_ids(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        ids = [ids] if isinstance(ids, int) else ids
        if ids:
            return [i for i in ids if isinstance(i, int)]
    return []


def _own_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read(file)
    template = _read_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _given_template(chat_template: str) -> str:
    if "{" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not path.is_file():
        raise ConfigError(f"--chat-template {chat_template!r} is neither a file nor Jinja text")
    return _read(path)
