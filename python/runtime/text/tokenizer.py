"""The tokenizer of a model folder."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import dropwhile
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from runtime.errors import ConfigError, RequestError
from runtime.text.bounded_encoding import BoundedEncoding
from runtime.text.byte_alphabet import token_to_bytes
from runtime.text.chat_template import ChatTemplate, Message, Rendered
from runtime.text.control_tokens import ControlTokens
from runtime.text.decode_stream import ByteStream, StreamDecoder, WindowStream
from runtime.text.request_template import render_isolated
from runtime.text.tokenizer_files import AddedToken, Components, TokenizerFiles, flatten_component, without_tokens

_BRACKETED = re.compile(r"[<\[{].*[>\]}]", re.DOTALL)
_WHITE = re.compile(r"\s*")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MIN_LONGEST_TOKEN = 64
"""Some tokenizers drop characters, or combine many into one unknown token, so the length of their longest token is not a bound."""


class Tokenizer:
    """The tokenizer of a Hugging Face style folder. Thread-safe; loads no torch.

    Attributes:
        bos_id, eos_id: the ids that begin and end a text, or None. The model's configuration may name others that end one.
        special_ids: control tokens, which are omitted from visible text.
        control_ids: `special_ids` and tags such as `</think>`, which only templates and the model can produce.
        definition: the JSON text of tokenizer.json.
        named_tokens: `bos_token`, `eos_token` and so on, by their names in the tokenizer's files.
        chat_template: the Jinja text of the chat template; without one, chats can be encoded only with a template in the request.
        tool_template: that for chats with tools; some models have another one for them.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._hf = tokenizers.Tokenizer.from_str(files.definition)
        self._hf.no_truncation()
        self._hf.no_padding()
        changed = self._add_tokens(files.added_tokens) + self._add_tokens(self._not_yet_special(files))
        self.definition = self._hf.to_str() if changed else files.definition
        self.named_tokens, self.chat_template = files.named_tokens, files.chat_template
        self.tool_template = files.tool_template or files.chat_template
        self._bytes: dict[int, bytes] = {}  # bytes of decoded tokens, by id
        added = self._hf.get_added_tokens_decoder()
        special = {i: token for i, token in added.items() if token.special}
        soft = {i: token for i, token in added.items() if not token.special and _BRACKETED.fullmatch(token.content)}
        self._control = {**special, **soft}
        self._control_tokens = ControlTokens(
            frozenset(token.content for token in special.values()), frozenset(token.content for token in soft.values())
        )
        self.special_ids = frozenset(special)
        self.control_ids = frozenset(self._control)
        self.bos_id, self.eos_id = self._named_id("bos_token"), self._named_id("eos_token")
        self._template = self._compiled(self.chat_template)
        self._tool_template = self._template if self.tool_template == self.chat_template else self._compiled(self.tool_template)

    @classmethod
    def load(cls, folder: str | Path, *, chat_template: str | None = None) -> Tokenizer:
        """Read tokenizer.json and its companions from `folder`.

        Args:
            folder: holds tokenizer.json.
            chat_template: a file, or Jinja text, instead of the folder's own template.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        files = TokenizerFiles.read(Path(folder), chat_template)
        try:
            return cls(files)
        except ConfigError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ConfigError(f"{Path(folder) / 'tokenizer.json'} cannot be read: {str(error)[:200]}") from error

    def _add_tokens(self, tokens: Iterable[AddedToken]) -> int:
        """Add tokens, or change those with the same text. Returns the number of new and changed ones."""
        given = [tokenizers.AddedToken(**msgspec.structs.asdict(token)) for token in tokens]
        known = set(map(repr, self._hf.get_added_tokens_decoder().values()))  # tokens are equal if their contents are
        changed = [token for token in given if repr(token) not in known]
        self._hf.add_tokens(changed)
        return len(changed)

    def _not_yet_special(self, files: TokenizerFiles) -> Iterator[AddedToken]:
        """The tokens with names, and further ones, that the vocabulary has, but not as special ones."""
        added = {token.content: token for token in self._hf.get_added_tokens_decoder().values()}
        for token in (*files.special_tokens, *files.further_tokens):
            if token.content not in added and self._hf.token_to_id(token.content) is not None:
                yield token
        for token in files.special_tokens:
            known = added.get(token.content)
            if known is not None and not known.special:
                yield AddedToken(known.content, known.single_word, known.lstrip, known.rstrip, known.normalized, special=True)

    def _compiled(self, template: str | None) -> ChatTemplate | None:
        return None if template is None else ChatTemplate(template, self.named_tokens, self._control_tokens)

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self._hf.token_to_id(token)

    @cached_property
    def vocab_size(self) -> int:
        """The highest id + 1; the model may have more, padded, ids. Copies the vocabulary once, which takes 35 ms for 49k tokens."""
        return max(self._hf.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of `special_ids` by their text."""
        return {self._control[token].content: token for token in self.special_ids}

    # ---- text to ids

    def encode(self, text: str, add_special_tokens: bool = True, bound: BoundedEncoding | None = None) -> list[int]:
        """Tokenise a raw prompt; control tokens written in it become control tokens.

        Args:
            text: any text.
            add_special_tokens: whether to begin as the model was trained to (often with a BOS token).
            bound: refuses a prompt of too many tokens.

        Raises:
            RequestError: `text` has a lone surrogate, or is too long for `bound`.
        """
        return (bound or BoundedEncoding()).encode(self._hf, text, add_special_tokens, self._splits_words)

    def encode_plain(self, text: str) -> list[int]:
        """Tokenise text without producing control tokens, even if they are written in it."""
        return self._plain_ids(self._plain, text, BoundedEncoding())

    def _plain_ids(self, plain: tokenizers.Tokenizer, text: str, bound: BoundedEncoding) -> list[int]:
        if not text:
            return []
        ids = bound.encode(plain, text, False, self._splits_words)
        if not self._forbidden_ids.isdisjoint(ids):
            raise RequestError("The text spells a control token that this tokenizer cannot encode as plain text.")
        return ids

    @cached_property
    def longest_token(self) -> int:
        """Most characters per token, and at least `MIN_LONGEST_TOKEN`: it gives a lower bound of a prompt's number of tokens."""
        return max(MIN_LONGEST_TOKEN, *map(len, self._hf.get_vocab(with_added_tokens=True)))

    @cached_property
    def _splits_words(self) -> bool:
        """Whether no token spans two words of letters."""
        parts = flatten_component(self._components.pre_tokenizer)
        by_regex = any(part["type"] == "Split" or (part["type"] == "ByteLevel" and part.get("use_regex", True)) for part in parts)
        plain_normalizer = all(part["type"] == "NFC" for part in flatten_component(self._components.normalizer))
        added = self._hf.get_added_tokens_decoder().values()
        return self._is_byte_level and by_regex and plain_normalizer and not any(" " in token.content for token in added)

    @cached_property
    def _forbidden_ids(self) -> frozenset[int]:
        unknown = self._components.model.unk_token
        return frozenset(i for i in self.special_ids if self._control[i].content != unknown)

    @cached_property
    def _components(self) -> Components:
        return msgspec.json.decode(self.definition, type=Components)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its control tokens."""
        return tokenizers.Tokenizer.from_str(without_tokens(self.definition, self._control))

    @cached_property
    def _plain_inside(self) -> tokenizers.Tokenizer:
        """`_plain` for text inside a prompt: some tokenizers add a space before the first word only."""
        steps = copy.deepcopy(self._components.pre_tokenizer)
        changed = [part for part in flatten_component(steps) if part.get("prepend_scheme") == "first"]
        for part in changed:
            part["prepend_scheme"] = "never"
        if not changed:
            return self._plain
        return tokenizers.Tokenizer.from_str(without_tokens(self.definition, self._control, pre_tokenizer=steps))

    # ---- chats

    @cached_property
    def describes_tools(self) -> bool:
        """Whether the chat template renders descriptions of tools."""
        return self._tool_template is not None and self._tool_template.traits.describes_tools

    @cached_property
    def short_chat(self) -> str:
        """The text of a conversation with one empty message; "" if the template does not render it."""
        try:
            return self.render_chat([{"role": "user", "content": ""}])
        except RequestError:
            return ""

    def encode_chat(
        self, messages: Sequence[Message], *, chat_template: str | None = None, bound: BoundedEncoding | None = None, **options: Any
    ) -> list[int]:
        """Tokenise a conversation. Only the template can produce control tokens, never the text of a message.

        Args:
            messages: JSON objects with a `role` and usually a `content`.
            chat_template: Jinja text instead of the model's own template.
            bound: refuses a prompt of too many tokens.
            options: the other arguments of `ChatTemplate.render`.

        Raises:
            RequestError: there is no template, or it rejects the messages, or it takes too long, or the prompt is too long.
        """
        return self._encode_rendered(self._render(messages, chat_template, options), bound or BoundedEncoding())

    def render_chat(self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any) -> str:
        """Return the text of a conversation, with the arguments of `encode_chat`."""
        return self._render(messages, chat_template, options).plain

    def _render(self, messages: Sequence[Message], chat_template: str | None, options: dict[str, Any]) -> Rendered:
        if chat_template is not None:
            return render_isolated(chat_template, self.named_tokens, self._control_tokens, messages, options)
        template = self._tool_template if options.get("tools") else self._template
        if template is None:
            raise RequestError(
                "This model has no chat template. Use /v1/completions, or start the server with --chat-template FILE.", "messages"
            )
        return template.render(messages, **options)

    def _encode_rendered(self, rendered: Rendered, bound: BoundedEncoding) -> list[int]:
        if rendered.mark not in rendered.text:
            return bound.encode(self._hf, rendered.text, False, self._splits_words)
        ids: list[int] = []
        for piece in self._split_at_control_tokens(rendered.text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._plain_ids(self._plain_inside if ids else self._plain, piece.replace(rendered.mark, ""), bound)
        return ids

    def _split_at_control_tokens(self, text: str) -> list[str | int]:
        """Split `text` into plain texts and ids of control tokens. Some control tokens absorb the white space around them."""
        pieces: list[str | int] = []
        start = 0
        for match in self._control_spellings.finditer(text):
            token_id = self._control_ids[match[0]]
            token, before = self._control[token_id], text[start : match.start()]
            pieces += [before.rstrip() if token.lstrip else before, token_id]
            start = _skip_white(text, match.end()) if token.rstrip else match.end()
        return [*pieces, text[start:]]

    @cached_property
    def _control_ids(self) -> dict[str, int]:
        return {token.content: i for i, token in self._control.items()}

    @cached_property
    def _control_spellings(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._control_ids, key=len, reverse=True))) or r"(?!)")

    # ---- ids to text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence. Invalid UTF-8 becomes U+FFFD; unknown ids have no text."""
        return self._hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text, or None."""
        return self._hf.token_to_id(text)

    def has_id(self, token_id: int) -> bool:
        """Return whether a token has this id."""
        return self._hf.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, for log-probabilities. An incomplete character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; b"" for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            if (token := self._hf.id_to_token(token_id)) is None:
                return b""
            known = self._bytes[token_id] = self._spelled(token)
        return known

    def _spelled(self, token: str) -> bytes:
        if self._is_byte_level:
            return token_to_bytes(token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

    def stream(self, skip_special_tokens: bool = True, prompt_tail: Sequence[int] = (), shown: Sequence[int] = ()) -> StreamDecoder:
        """Return a decoder for one text that arrives token by token; each token costs O(1).

        Args:
            skip_special_tokens: omit control tokens.
            prompt_tail: the last tokens of the prompt; they are context and are not returned.
            shown: control tokens that are kept nevertheless.
        """
        skip = self.special_ids.difference(shown) if skip_special_tokens else frozenset[int]()
        decoder = ByteStream(self.token_bytes, skip) if self._is_byte_level else WindowStream(self._hf, self.token_bytes, skip)
        # Drop the rest of a character at the start of the tail: it would make the following bytes invalid too.
        decoder.step(list(dropwhile(lambda token: b"\x80" <= self.token_bytes(token)[:1] < b"\xc0", prompt_tail)))
        return decoder

    @cached_property
    def _is_byte_level(self) -> bool:
        return [part["type"] for part in flatten_component(self._components.decoder)] == ["ByteLevel"]


def _skip_white(text: str, start: int) -> int:
    found = _WHITE.match(text, start)
    return found.end() if found else start
