"""Shapes with which torch's attention on a CPU gives a query the same bits in every pass, found by trial."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch.nn import functional as F

ROW_BLOCK, KEY_BLOCK = 32, 512
"""Queries and keys per block of torch's kernel; for long prompts blocks have 64 and 256 queries."""
KEY_VECTOR = 16
"""Keys beyond a multiple of this are computed with another exponential function."""
KEY_COUNTS = range(KEY_VECTOR, KEY_BLOCK + 1, KEY_VECTOR)
PAIR_COUNTS = KEY_COUNTS[1::2]
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
"""Numbers of queries to test."""
PROMPT_REPEATS = 4
"""Copies of a block of queries that make a prompt: with AMX the kernel runs other GEMMs from about 64 queries on."""
LONG_REPEATS = (6, 24)
"""The same for prompts whose blocks have 64 and 256 queries."""
TRIED_COLUMNS = 512
"""Columns of all heads of a trial in 16 bits."""


@dataclass(frozen=True, slots=True)
class StableShapes:
    """The shapes to which passes are padded so that a query's bits depend only on its keys.

    The kernel runs one GEMM per block of queries and keys. The order in which a GEMM sums depends on its shape and on the processor. Of two
    processors with AVX-512, one sums all GEMMs of at least three rows alike, the other those of at least four. A GEMM over n keys equals
    one over 512 keys with the rest masked if n is at most 256 on the first, and at most 192 or at least 384 on the second. With AMX, torch
    runs other GEMMs in bfloat16 from about 64 queries on, which differ from those for fewer queries unless n is a multiple of 32.

    Attributes:
        min_rows: minimum number of queries in a block.
        last_keys: the number of keys to attend over, by the number of key vectors in the last block, from 0 on.
    """

    min_rows: int
    last_keys: tuple[int, ...]

    def key_count(self, num_keys: int) -> int:
        """The number of keys to attend over, at least `num_keys`, such that masked keys do not change the result."""

        blocks, rest = divmod(num_keys, KEY_BLOCK)
        return blocks * KEY_BLOCK + self.last_keys[-(-rest // KEY_VECTOR)]

    def missing_rows(self, rows: int) -> int:
        """The number of rows to add so that no block of queries has fewer than `min_rows`."""
        last = rows % ROW_BLOCK
        return max(0, self.min_rows - last) if last else 0


@dataclass(frozen=True, slots=True)
class HeadKind:
    """Sizes of a key and of a value, and the dtype in which the kernel multiplies."""

    key_dim: int
    value_dim: int
    dtype: torch.dtype


@functools.cache
def find_stable_shapes(kinds: frozenset[HeadKind]) -> StableShapes:
    """Try all shapes on this CPU against whole blocks, for all `kinds` of heads; takes about 0.1 s for each, 0.3 s in 16 bits.

    If blocks of other sizes give other bits even with all keys, no shapes do: then `any_shapes`.
    """
    trials = [_Trial(kind) for kind in kinds]
    if not all(trial.same_in_prompt(KEY_BLOCK, repeats) for trial in trials for repeats in (PROMPT_REPEATS, *LONG_REPEATS)):
        return any_shapes()
    wrong = [keys for keys in KEY_COUNTS if not all(trial.same(ROW_BLOCK, keys) and trial.same_in_prompt(keys) for trial in trials)]
    # In 16 bits a trial may show no difference by chance: numbers between two wrong ones count as wrong.
    stable = [keys for keys in KEY_COUNTS if not wrong or keys < wrong[0] or keys > wrong[-1]]
    if wrong and not set(wrong) & set(PAIR_COUNTS):
        stable = [*PAIR_COUNTS]  # odd numbers of vectors are wrong

    def same(rows: int) -> bool:
        return all(trial.same(rows, keys) for trial in trials for keys in stable)

    return StableShapes(min(takewhile(same, reversed(ROWS)), default=ROW_BLOCK), _round_up(stable))


def any_shapes() -> StableShapes:
    """Only whole vectors of keys, for devices that cannot or need not give equal bits."""
    return StableShapes(1, _round_up(KEY_COUNTS))


class _Trial:
    """Attention of one kind of heads over random numbers; of several heads in 16 bits, because rounding hides most differences."""

    def __init__(self, kind: HeadKind) -> None:
        noise, heads = torch.Generator().manual_seed(0), 1 if kind.dtype is torch.float32 else max(1, TRIED_COLUMNS // kind.key_dim)
        sizes = ((ROW_BLOCK, kind.key_dim), (KEY_BLOCK, kind.key_dim), (KEY_BLOCK, kind.value_dim))
        self._q, self._k, self._v = (torch.randn(heads, *size, generator=noise).to(kind.dtype) for size in sizes)
        self._whole = {seen: self._attend(ROW_BLOCK, KEY_BLOCK, seen) for keys in KEY_COUNTS for seen in (keys, keys - 1)}

    def same(self, rows: int, keys: int) -> bool:
        """Whether all blocks of `rows` queries over `keys` keys give the same bits as in whole blocks."""
        count = ROW_BLOCK // rows * rows
        return all(torch.equal(self._attend(rows, keys, seen), self._whole[seen][:, :count]) for seen in (keys, keys - 1))

    def same_in_prompt(self, keys: int, repeats: int = PROMPT_REPEATS) -> bool:
        """Whether the queries of a prompt of `repeats` blocks over `keys` keys give the same bits as in whole blocks."""
        wholes = {seen: self._whole[seen].repeat(1, repeats, 1) for seen in (keys, keys - 1)}
        return all(torch.equal(self._attend(repeats * ROW_BLOCK, keys, seen), whole) for seen, whole in wholes.items())

    def _attend(self, rows: int, keys: int, seen: int) -> torch.Tensor:
        """[heads, queries, value_dim], from `rows` queries at a time; the queries are repeated if there are fewer."""
        mask = torch.zeros(1, 1, rows, keys, dtype=self._q.dtype)
        mask[..., seen:] = torch.finfo(mask.dtype).min / 2
        q = self._q.repeat(1, max(1, rows // ROW_BLOCK), 1)
        q = q[:, : q.shape[1] // rows * rows].unflatten(1, (-1, rows)).transpose(0, 1)
        k, v = (part[:, :keys].expand(len(q), -1, -1, -1) for part in (self._k, self._v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1, 2)


def _round_up(stable: Sequence[int]) -> tuple[int, ...]:
    """For each number of vectors in a block, the smallest stable number of keys that contains them."""
    return (0, *(min(keys for keys in stable if keys >= needed) for needed in KEY_COUNTS))
