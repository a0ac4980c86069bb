"""The frozen target's states and predictions for each row of text, computed once and kept on the device for all epochs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eagle_training.batches import Batch
from eagle_training.target import FrozenTarget

CHUNK = 8192
"""Positions per chunk of logits over the target's whole vocabulary."""
SHARE = 0.7
"""The largest share of a device's free memory that is used."""
CPU_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Seen:
    """The target's outputs for a batch.

    Attributes:
        features: [B, L, 3 * H].
        hidden: [B, L, H], after the final norm.
        best: int32 [B, L], the most likely next token at positions in answers; undefined elsewhere.
    """

    features: torch.Tensor
    hidden: torch.Tensor
    best: torch.Tensor


def see(target: FrozenTarget, batch: Batch) -> Seen:
    """Run the target on a batch."""
    features, hidden = target.run(batch.ids)
    best = torch.zeros(batch.ids.numel(), dtype=torch.int32, device=target.device)
    places = torch.nonzero(batch.depth.flatten() >= 0).flatten().to(target.device)
    flat = hidden.flatten(0, 1)
    for some in places.split(CHUNK):
        best[some] = target.logits(flat[some]).argmax(-1).to(torch.int32)
    return Seen(features, hidden, best.view(batch.ids.shape))


class FeatureCache:
    """Caches the target's outputs by row, without padding; caches nothing if they do not fit into memory."""

    def __init__(self, target: FrozenTarget, lengths: npt.NDArray[np.int64]) -> None:
        self._target, self._lengths = target, lengths
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._known = np.zeros(len(lengths), dtype=bool)
        self._kept: Seen | None = None
        width, tokens = target.config.hidden_size, int(self._starts[-1])
        needed = tokens * (4 * width * target.dtype.itemsize + 4)
        limit = torch.cuda.mem_get_info(target.device)[0] * SHARE if target.device.type == "cuda" else CPU_BYTES
        if needed > limit:
            print(f"the target's states need {needed / 2**30:.0f} GiB and are computed in every epoch")
            return
        sizes = (((tokens, 3 * width), target.dtype), ((tokens, width), target.dtype), ((tokens,), torch.int32))
        self._kept = Seen(*(torch.empty(size, dtype=dtype, device=target.device) for size, dtype in sizes))

    def get(self, batch: Batch) -> Seen:
        """The target's outputs for a batch of numbered rows, from the cache if it has all of them."""
        kept = self._kept
        if kept is None or len(batch.numbers) == 0:
            return see(self._target, batch)
        starts, lengths = self._starts[batch.numbers], self._lengths[batch.numbers]
        if not self._known[batch.numbers].all():
            seen = see(self._target, batch)
            for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
                for mine, new in ((kept.features, seen.features), (kept.hidden, seen.hidden), (kept.best, seen.best)):
                    mine[start : start + length] = new[i, :length]
            self._known[batch.numbers] = True
            return seen
        B, L = batch.ids.shape
        places = starts[:, None] + np.minimum(np.arange(L)[None], lengths[:, None] - 1)
        index = torch.from_numpy(places).flatten().to(self._target.device, non_blocking=True)
        return Seen(*(one.index_select(0, index).unflatten(0, (B, L)) for one in (kept.features, kept.hidden, kept.best)))
