"""The draft's vocabulary: the most frequent tokens of answers, and its maps from and to the target's ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from eagle_training.conversations import Conversation


def answer_counts(conversations: Iterable[Conversation], vocab_size: int) -> npt.NDArray[np.int64]:
    """The count of each id in answers, int64 [vocab_size]."""
    answers = [c.ids[c.answer_start :] for c in conversations]
    return np.bincount(np.concatenate(answers), minlength=vocab_size) if answers else np.zeros(vocab_size, np.int64)


def pick_vocabulary(counts: npt.NDArray[np.int64], size: int, always: Iterable[int] = ()) -> npt.NDArray[np.int64]:
    """The `size` most frequent ids in ascending order, int64 [size].

    It contains the ids of `always`. Ties and unused places go to the lowest ids, because byte-pair vocabularies start with the most common
    pieces.
    """
    rank = counts.astype(np.int64).copy()
    rank[list(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-rank, kind="stable")[:size])


def coverage(counts: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> float:
    """The share of answer tokens that `ids` covers."""
    return float(counts[ids].sum() / max(counts.sum(), 1))


def draft_to_target(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`d2t` as in checkpoints: the offset from a draft id to the target id, int64 [Vd]."""
    return ids - np.arange(len(ids))


def target_in_draft(ids: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.bool_]:
    """`t2d` as in checkpoints: whether a target id has a draft id, bool [V]."""
    found = np.zeros(vocab_size, dtype=bool)
    found[ids] = True
    return found
