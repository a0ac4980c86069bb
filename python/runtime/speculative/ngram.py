"""Drafts without a draft model: what followed the previous occurrence of the text's last tokens. On the host; no torch.

Source: prompt lookup decoding, Saxena 2023; as `--speculative-algorithm NGRAM`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.batch import Int32

MULTIPLIER = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
BULK = 64
"""From this many new tokens on, hashing them together is faster than one by one."""


class NgramHistory:
    """One request's tokens, and where each n-gram of `min_n` to `max_n` tokens last ended.

    An n-gram is indexed when the token after it is known, so the end of the text never matches itself.
    """

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        assert 1 <= min_n <= max_n, "n-grams have at least one token"
        self._sizes = range(max_n, min_n - 1, -1)
        self._tokens: list[int] = []
        self._follows: dict[int, dict[int, int]] = {n: {} for n in self._sizes}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int] | Int32) -> None:
        """Append tokens: the prompt, then what each step commits."""
        new = [int(t) for t in tokens]
        first = len(self._tokens)
        self._tokens += new
        for n in self._sizes:
            # The n-gram before position p is indexed by p, where its continuation begins.
            start = max(first, n)
            if len(self._tokens) - start >= BULK:
                keys = _hash_all(np.array(self._tokens[start - n : -1], dtype=np.uint64), n)
                self._follows[n].update(zip(keys.tolist(), range(start, len(self._tokens)), strict=True))
            else:
                self._follows[n].update((_hash(self._tokens[p - n : p]), p) for p in range(start, len(self._tokens)))

    def propose(self, count: int) -> list[int]:
        """`count` drafts: the continuation of the latest occurrence of the longest ending that occurred before; empty if none did.

        A continuation that reaches the end of the text starts over, which continues a repetition.
        """
        start = self._match()
        if start is None:
            return []
        text, guesses = self._tokens, []
        for position in range(start, start + count):
            guesses.append(text[position] if position < len(text) else guesses[position - len(text)])
        return guesses

    def _match(self) -> int | None:
        """Where the continuation begins, or None."""
        text = self._tokens
        for n in self._sizes:
            if len(text) < n:
                continue
            ending = text[-n:]
            start = self._follows[n].get(_hash(ending))
            if start is not None and text[start - n : start] == ending:  # hashes may collide
                return start
        return None


def _hash(tokens: Sequence[int]) -> int:
    """A polynomial of the tokens, modulo 2^64."""
    key = 0
    for token in tokens:
        key = (key * MULTIPLIER + token + 1) & MASK
    return key


def _hash_all(tokens: np.ndarray, n: int) -> np.ndarray:
    """`_hash` of every n-gram of uint64 [T]: uint64 [T - n + 1]."""
    keys = np.zeros(len(tokens) - n + 1, dtype=np.uint64)
    for i in range(n):
        keys = keys * np.uint64(MULTIPLIER) + tokens[i : i + len(keys)] + np.uint64(1)
    return keys
