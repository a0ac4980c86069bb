"""Incremental decoding of a text whose tokens arrive one by one."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import tokenizers

PROMPT_TAIL = 8
"""Number of prompt tokens that give the first output token its context: as many as one character may have."""
_MAX_HELD_TOKENS = 8
"""The most tokens of one character. A longer sequence of bytes is invalid and is decoded as such."""


class ByteStream:
    """Decoder for byte-level vocabularies: tokens are bytes, and UTF-8 determines where characters end."""

    def __init__(self, token_bytes: Callable[[int], bytes], skip: frozenset[int]) -> None:
        self._token_bytes, self._skip = token_bytes, skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_ids: Sequence[int]) -> str:
        """See `StreamDecoder`."""
        return self._utf8.decode(b"".join(self._token_bytes(i) for i in token_ids if i not in self._skip))


class WindowStream:
    """Decoder for any vocabulary: decodes the last tokens with and without the new ones; the difference is the new text.

    The earlier tokens are the context of the new ones; for example, they determine whether a leading space is kept.
    """

    def __init__(self, hf: tokenizers.Tokenizer, token_bytes: Callable[[int], bytes], skip: frozenset[int]) -> None:
        self._hf, self._token_bytes, self._skip = hf, token_bytes, skip
        self._context: list[int] = []
        self._held: list[int] = []

    @property
    def window(self) -> tuple[int, ...]:
        """The tokens that the next step decodes again."""
        return (*self._context, *self._held)

    def step(self, token_ids: Sequence[int]) -> str:
        """See `StreamDecoder`."""
        return "".join(self._add(i) for i in token_ids if i not in self._skip)

    def _add(self, token_id: int) -> str:
        self._held.append(token_id)
        before = self._hf.decode(self._context, skip_special_tokens=False)
        after = self._hf.decode(self._context + self._held, skip_special_tokens=False)
        incomplete = after.endswith("\ufffd") and len(self._held) < _MAX_HELD_TOKENS and not self._ends_as_written()
        if incomplete or len(after) <= len(before):
            if len(self._held) >= _MAX_HELD_TOKENS:  # these tokens have no text, such as ids that the tokenizer lacks
                self._held = []
            return ""
        self._context, self._held = self._held, []
        return after[len(before) :]

    def _ends_as_written(self) -> bool:
        """Whether the U+FFFD at the end is what the model wrote."""
        return b"".join(map(self._token_bytes, self._held)).endswith("\ufffd".encode())


StreamDecoder = ByteStream | WindowStream
"""Decodes the token ids of one text as they arrive. Not thread-safe.

`step` returns the text completed by its tokens; "" while a character is incomplete. An incomplete character at the end has no text.
"""
