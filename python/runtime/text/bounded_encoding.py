"""Tokenises the texts of one prompt in slices, so that a text that is too long costs little."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import tokenizers

from runtime.errors import RequestError

SLICE_CHARS = 16384
"""A shorter text is encoded in one piece."""
_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")


class BoundedEncoding:
    """Encodes the texts of one prompt in order, up to a number of tokens.

    Args:
        limit: the maximum number of tokens; None for no limit.
        refuse: creates the error for a prompt of at least the given number of tokens.
    """

    def __init__(self, limit: int | None = None, refuse: Callable[[int], RequestError] | None = None) -> None:
        self._limit = limit
        self._refuse = refuse
        self._count = 0

    def encode(self, hf: tokenizers.Tokenizer, text: str, add_special_tokens: bool, splits_words: bool) -> list[int]:
        """Token ids of `text`.

        Args:
            splits_words: whether no token spans two words. Only then are the ids of slices equal to those of the whole text.

        Raises:
            RequestError: the prompt has too many tokens, or `text` has a lone surrogate.
        """
        if len(text) <= SLICE_CHARS:
            return self._add(encode_text(hf, text, add_special_tokens))
        if not splits_words:
            self._check_estimate(hf, text)
            return self._add(encode_text(hf, text, add_special_tokens))
        before, after = _special_ids(hf) if add_special_tokens else ([], [])
        ids = before
        for piece in slices(text):
            self._check_estimate(hf, piece)
            ids += self._add(encode_text(hf, piece, add_special_tokens=False))
            self._check(self._count)
        return ids + after

    def _add(self, ids: list[int]) -> list[int]:
        self._count += len(ids)
        return ids

    def _check_estimate(self, hf: tokenizers.Tokenizer, text: str) -> None:
        """Refuse a text that cannot be sliced, if arbitrary pieces of it have too many tokens. A cut adds at most two tokens."""
        count = self._count
        for start in range(0, len(text), SLICE_CHARS) if len(text) > 2 * SLICE_CHARS else ():
            count += max(0, len(encode_text(hf, text[start : start + SLICE_CHARS], add_special_tokens=False)) - 2)
            self._check(count)

    def _check(self, count: int) -> None:
        if self._limit is not None and self._refuse is not None and count > self._limit:
            raise self._refuse(count)


def slices(text: str) -> Iterator[str]:
    """Cut `text` at spaces between two words, into pieces of at least `SLICE_CHARS` characters."""
    start = 0
    while (cut := _BETWEEN_WORDS.search(text, start + SLICE_CHARS)) is not None:
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def encode_text(hf: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`. Raises `RequestError` if it has a lone surrogate."""
    try:
        return hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestError("The text has a lone surrogate (half of a pair), which is not a valid character.") from error


def _special_ids(hf: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after a text."""
    inside, whole = encode_text(hf, "a", False), encode_text(hf, "a", True)
    start = next(i for i in range(len(whole)) if whole[i : i + len(inside)] == inside)
    return whole[:start], whole[start + len(inside) :]
