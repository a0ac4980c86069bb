"""The draft's vocabulary: the tokens that answers use most, and its maps from and to the target's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from eagle_training.conversations import Conversation


def answer_counts(conversations: Iterable[Conversation], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each id comes in answers, int64 [vocab_size]."""
    answers = [c.ids[c.answer_start :] for c in conversations]
    return np.bincount(np.concatenate(answers), minlength=vocab_size) if answers else np.zeros(vocab_size, np.int64)


def pick_vocabulary(counts: npt.NDArray[np.int64], size: int, always: Iterable[int] = ()) -> npt.NDArray[np.int64]:
    """The `size` most frequent ids, rising, int64 [size].

    Ids of `always` are among them. Ties, and room that no answer fills, go to the lowest ids: byte-pair vocabularies begin with the
    commonest pieces.
    """
    rank = counts.astype(np.int64).copy()
    rank[list(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-rank, kind="stable")[:size])


def coverage(counts: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> float:
    """The share of answers' tokens that `ids` holds."""
    return float(counts[ids].sum() / max(counts.sum(), 1))


def draft_to_target(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`d2t` as checkpoints keep it: what to add to a draft id to get the target's, int64 [Vd]."""
    return ids - np.arange(len(ids))


def target_in_draft(ids: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.bool_]:
    """`t2d` as checkpoints keep it: whether a target id has a draft id, bool [V]."""
    found = np.zeros(vocab_size, dtype=bool)
    found[ids] = True
    return found
