"""An estimate of greedy acceptance in the server, from a head's passes over known greedy answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from eagle_training.batches import make_batch
from eagle_training.conversations import Conversation
from eagle_training.head import EagleHead
from eagle_training.target import FrozenTarget
from runtime.model_executor.acceptance import AcceptanceCounters


def walk(hits: npt.NDArray[np.bool_], first_base: int, length: int) -> list[int]:
    """Accept lengths of one answer, including the bonus token.

    Args:
        hits: [K, L]. Whether pass `i` at base `b` predicts the token at `b + i + 2`.
        first_base: the position before the first token of the answer.
        length: length of the conversation.
    """
    K = len(hits)
    found, base = [], first_base
    while base + 2 < length:
        right = hits[: min(K, length - base - 2), base]
        accepted = len(right) if right.all() else int(np.argmin(right))
        found.append(accepted + 1)
        base += accepted + 1
    return found


@torch.no_grad()
def estimate(
    head: EagleHead, target: FrozenTarget, conversations: Sequence[Conversation], passes: int, batch_tokens: int, amp: torch.dtype
) -> AcceptanceCounters:
    """Acceptance on greedy conversations with K = `passes`."""
    counters = AcceptanceCounters(passes)
    ordered = sorted(conversations, key=lambda c: len(c.ids))
    while ordered:
        longest = len(ordered[-1].ids) + 32
        count = max(1, batch_tokens // longest)
        some, ordered = ordered[-count:], ordered[:-count]
        hits = _hits(head, target, some, passes, amp)
        lens = [n for row, c in zip(hits, some, strict=True) for n in walk(row, c.answer_start - 1, len(c.ids))]
        if lens:
            counters.add(np.array(lens))
    return counters


def _hits(head: EagleHead, target: FrozenTarget, some: Sequence[Conversation], passes: int, amp: torch.dtype) -> npt.NDArray[np.bool_]:
    batch = make_batch([[c] for c in some], max(len(c.ids) for c in some)).to(target.device)
    features, _ = target.run(batch.ids)
    vocabulary = torch.from_numpy(head.vocabulary).to(target.device)
    found = []
    with torch.autocast(target.device.type, amp, enabled=amp != torch.float32):
        for i, h in enumerate(head.unroll(batch.ids, features, passes)):
            guesses = torch.stack([vocabulary[head.logits(row).argmax(-1)] for row in h])
            # After the end of a row there are zeros, which `walk` never reads.
            wanted = torch.nn.functional.pad(batch.ids[:, i + 2 :], (0, min(i + 2, batch.ids.shape[1])))
            found.append(guesses == wanted)
    return torch.stack(found, dim=1).cpu().numpy()
