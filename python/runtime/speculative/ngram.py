"""Drafts without a draft model: what followed the previous occurrence of the text's last tokens. On the host; no torch.

Source: prompt lookup decoding, Saxena 2023; as `--speculative-algorithm NGRAM`.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.batch import Int32


class NgramHistory:
    """One request's tokens, and where each n-gram of `min_n` to `max_n` tokens last ended.

    An n-gram is indexed when the token after it is known, so the end of the text never matches itself.
    """

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        assert 1 <= min_n <= max_n, "n-grams have at least one token"
        self._sizes = range(max_n, min_n - 1, -1)
        self._tokens: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int] | Int32) -> None:
        """Append tokens: the prompt, then what each step commits."""
        first = len(self._tokens)
        self._tokens += map(int, tokens)
        for n in self._sizes:
            # The n-gram before position p is indexed by p, where its continuation begins.
            start = max(first, n)
            recent = self._tokens[start - n :]
            ngrams = zip(*(recent[i:] for i in range(n)), strict=False)
            self._follows.update(zip(ngrams, range(start, len(self._tokens)), strict=False))

    def propose(self, count: int) -> list[int]:
        """`count` drafts: the continuation of the latest occurrence of the longest ending that occurred before; empty if none did.

        A continuation that reaches the end of the text starts over, which continues a repetition.
        """
        found = (self._follows.get(tuple(self._tokens[-n:])) for n in self._sizes)
        start = next((start for start in found if start is not None), None)
        if start is None:
            return []
        text, guesses = self._tokens, []
        for position in range(start, start + count):
            guesses.append(text[position] if position < len(text) else guesses[position - len(text)])
        return guesses
