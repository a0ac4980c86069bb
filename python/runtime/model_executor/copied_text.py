"""Which requests currently copy their prompt: their latest tokens form n-grams that the prompt contains. On the host; no torch.

Each request row has a set of hashed n-grams, as a bit set: a Bloom filter with one hash function (Bloom 1970). The hash is multilinear
(Lemire and Kaser 2014, arXiv:1202.4961), so two different n-grams collide with a probability of one over the number of bits.

`admit` and `copied` run on the thread that submits steps, `read` on the one that reads them; each writes only its own fields.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from runtime.batch import Flags, Int32

NGRAM, HITS = 4, 2
"""Text is copied if its last `HITS` n-grams of `NGRAM` tokens are in the prompt."""
TAIL = NGRAM + HITS - 1
"""Tokens in these n-grams."""
BITS_PER_TOKEN = 8
"""Minimum size of a bit set. One n-gram that is not in the prompt is found with a probability of at most 1/8, `HITS` of them with 1/64
if their tokens are unrelated to those of the prompt."""
MAX_PROMPT = 1 << 17
"""Tokens of a prompt whose n-grams are kept, the last ones. They take 128 KiB per row, so 256 rows take 32 MiB."""
MIN_BITS = 6
"""Binary logarithm of the smallest bit set."""
BLOCK = 1 << 13
"""N-grams of a prompt that are hashed together, so that their arrays fit into the cache."""
UNKNOWN = -1
"""In place of a token that is not known."""

_FACTORS = np.random.default_rng(0).integers(-(1 << 63), 1 << 63, NGRAM, dtype=np.int64) | 1
_TAIL_FACTORS = np.array([np.roll([*_FACTORS, *[0] * (HITS - 1)], shift) for shift in range(HITS)], dtype=np.int64).T
"""int64 [TAIL, HITS]: a product with it hashes the last `HITS` n-grams."""
_BACK = np.arange(-TAIL, 0)


class CopiedText:
    """Owner of the n-grams of each request's prompt and of its latest tokens, by request row of one attention group."""

    def __init__(self, rows: int, max_prompt: int = MAX_PROMPT) -> None:
        """`max_prompt`: the longest prompt, in tokens. Memory is only taken when prompts fill it."""
        self._max_bits = _bits_for(min(max_prompt, MAX_PROMPT))
        # Written by `admit`.
        self._sets = np.zeros((rows, 1 << (self._max_bits - 3)), dtype=np.uint8)
        self._shifts = np.full((rows, 1), 64 - MIN_BITS, dtype=np.uint64)
        self._since = np.zeros(rows, dtype=np.int64)  # the step in which the current request got the row
        self._admitted = deque[tuple[int, int, list[int]]]()  # step, row and last tokens of requests that `read` does not know yet
        # Written by `read`.
        self._tails = np.full((rows, TAIL), UNKNOWN, dtype=np.int64)
        self._copied = np.zeros(rows, dtype=np.bool_)
        self._step = -1  # the last step that was read
        # Constants.
        self._bases = (np.arange(rows) << self._max_bits)[:, None]
        self._tail_ends = (np.arange(rows) + 1) * TAIL

    def admit(self, row: int, step: int, tokens: Int32, prompt_len: int) -> None:
        """Give a row to a new request, or to one that resumes, in `step`.

        Args:
            tokens: int32, its prompt and its output so far; empty if unknown, then none of its text counts as copied.
        """
        self._since[row] = step
        prompt = tokens[:prompt_len][-MAX_PROMPT:]
        bits = min(_bits_for(len(prompt)), self._max_bits)
        found = np.zeros(1 << bits, dtype=np.bool_)
        for start in range(0, len(prompt), BLOCK):
            hashes = hash_ngrams(prompt[start : start + BLOCK + NGRAM - 1].astype(np.int64))
            found[(hashes >> np.uint64(64 - bits)).view(np.int64)] = True
        self._sets[row, : 1 << (bits - 3)] = np.packbits(found, bitorder="little")
        self._shifts[row] = 64 - bits
        known = tokens[-(NGRAM - 1) :].tolist()  # one token more would be an n-gram of the prompt itself
        self._admitted.append((step, row, [UNKNOWN] * (TAIL - len(known)) + known))

    def read(self, rows: Int32, step: int, accept_lens: Int32, tokens: Int32) -> None:
        """Append what `step` emitted. Called once per step, in order.

        Args:
            rows: int32 [B].
            accept_lens, tokens: as in `BatchResult`.
        """
        # Until this step, others may have had the rows of new requests.
        while self._admitted and self._admitted[0][0] <= step:
            _, row, self._tails[row] = self._admitted.popleft()
            self._copied[row] = False
        tails = self._shifted(self._tails[rows], accept_lens, tokens)
        self._tails[rows], self._copied[rows] = tails, self._hits(rows, tails)
        self._step = step  # last, because `copied` reads it on another thread

    def copied(self, rows: Int32) -> Flags:
        """bool [n]: whether the latest known tokens of each request copy its prompt."""
        return self._copied[rows] & (self._since[rows] <= self._step)

    def _shifted(self, tails: npt.NDArray[np.int64], accept_lens: Int32, tokens: Int32) -> npt.NDArray[np.int64]:
        """The last `TAIL` tokens of each request, int64 [B, TAIL], after those of a step follow `tails`."""
        ends = accept_lens.cumsum()
        starts, positions = ends - accept_lens, ends[:, None] + _BACK
        before = positions + (self._tail_ends[: len(tails)] - starts)[:, None]
        source = np.where(positions < starts[:, None], before, positions + tails.size)
        return np.concatenate((tails.ravel(), tokens), dtype=np.int64).take(source)

    def _hits(self, rows: Int32, tails: npt.NDArray[np.int64]) -> Flags:
        """bool [B]: whether the last n-grams of `tails` are all in the sets of `rows`."""
        hashes = (tails @ _TAIL_FACTORS).view(np.uint64) >> self._shifts[rows]
        places = hashes.view(np.int64) + self._bases[rows]
        found = self._sets.ravel().take(places >> 3) >> (places & 7)
        return (np.bitwise_and.reduce(found, axis=1) & 1).astype(np.bool_)


def hash_ngrams(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The 64-bit hash of each n-gram of `tokens`, in order; its high bits are the ones to use. Empty for fewer than `NGRAM` tokens."""
    count = max(len(tokens) - NGRAM + 1, 0)
    hashes = np.zeros(count, dtype=np.int64)
    for at, factor in enumerate(_FACTORS):
        hashes += tokens[at : at + count] * factor
    return hashes.view(np.uint64)


def _bits_for(tokens: int) -> int:
    """Binary logarithm of the size of the bit set of a prompt."""
    return max((BITS_PER_TOKEN * tokens - 1).bit_length(), MIN_BITS)
