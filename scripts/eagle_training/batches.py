"""Padded batches of conversations, deterministic by seed, so that training can be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eagle_training.conversations import Conversation

ROUND_TO = 32
"""Row lengths are multiples of this, which limits the number of shapes."""
JOIN_MOST = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of text.

    Attributes:
        ids: int64 [B, L], zero after the end of a row.
        depth: int32 [B, L], on the CPU. `n` at a position that sees `n + 1` tokens of an answer, including its own, and predicts the next
            one; -1 elsewhere. Pass `i` of a chain trains there if `n >= i`: its base is then the token before the answer or a later one,
            as in serving.
        tokens: number of tokens without padding.
        numbers: int64 [B], the rows' indices in the list of all rows; empty if there is no such list.
    """

    ids: torch.Tensor
    depth: torch.Tensor
    tokens: int
    numbers: npt.NDArray[np.int64]

    def to(self, device: torch.device) -> Batch:
        """The batch with its ids on `device`."""
        return Batch(self.ids.to(device, non_blocking=True), self.depth, self.tokens, self.numbers)


def make_batch(rows: Sequence[Sequence[Conversation]], max_length: int, numbers: Sequence[int] = ()) -> Batch:
    """One row per list of conversations, which are concatenated."""
    lengths = [min(sum(len(c.ids) for c in row), max_length) for row in rows]
    width = -(-max(lengths) // ROUND_TO) * ROUND_TO
    ids = np.zeros((len(rows), width), dtype=np.int64)
    depth = np.full((len(rows), width), -1, dtype=np.int32)
    for i, row in enumerate(rows):
        at = 0
        for c in row:
            part = c.ids[: max_length - at]
            ids[i, at : at + len(part)] = part
            count = len(part) - 1 - c.answer_start
            if count > 0:
                first = at + c.answer_start
                depth[i, first : first + count] = np.arange(count)
            at += len(part)
    return Batch(torch.from_numpy(ids), torch.from_numpy(depth), sum(lengths), np.array(numbers, dtype=np.int64))


def join_rows(conversations: Sequence[Conversation], max_length: int, joined_share: float, seed: int) -> list[list[Conversation]]:
    """The rows of all epochs: `joined_share` of the conversations share rows, so that the head also sees long contexts."""
    rng = np.random.default_rng(seed)
    order = [conversations[i] for i in rng.permutation(len(conversations))]
    joined = int(len(order) * joined_share)
    return [*_join(order[:joined], max_length, rng), *([c] for c in order[joined:])]


def row_lengths(rows: Sequence[Sequence[Conversation]], max_length: int) -> npt.NDArray[np.int64]:
    """The tokens of each row, int64."""
    return np.array([min(sum(len(c.ids) for c in row), max_length) for row in rows], dtype=np.int64)


def epoch_batches(lengths: npt.NDArray[np.int64], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch, as row numbers. Rows of a batch have similar lengths; a padded batch has at most `batch_tokens` tokens."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    padded = -(-lengths // ROUND_TO) * ROUND_TO
    batches: list[list[int]] = [[]]
    for number in order[np.argsort(padded[order], kind="stable")].tolist():
        if batches[-1] and padded[number] * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(number)
    return [batches[i] for i in rng.permutation(len(batches)) if batches[i]]


def _join(conversations: Sequence[Conversation], max_length: int, rng: np.random.Generator) -> Iterator[list[Conversation]]:
    row: list[Conversation] = []
    wanted = int(rng.integers(2, JOIN_MOST + 1))
    for c in conversations:
        if row and (len(row) == wanted or sum(len(r.ids) for r in row) + len(c.ids) > max_length):
            yield row
            row, wanted = [], int(rng.integers(2, JOIN_MOST + 1))
        row.append(c)
    if row:
        yield row
