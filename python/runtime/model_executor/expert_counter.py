"""Counts the distinct experts of decode passes, from the routers' masks and without synchronising with the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from runtime.layers.moe.definition import WORD
from runtime.layers.sparse_mlp import SparseMlp

EVERY = 16
"""One in this many decode passes is counted."""
RECENT = 16
"""Number of counted passes over which figures are averaged: few, so that they soon show another load."""


class ExpertCounter:
    """Distinct routed experts per layer and pass, without padding. Empty for a dense model; equal on all ranks."""

    def __init__(self, mlps: Sequence[SparseMlp]) -> None:
        self._routers = [mlp.router for mlp in mlps]
        self._passes = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)  # tokens, and the mean over layers
        self._layers: deque[npt.NDArray[np.int64]] = deque(maxlen=RECENT)

    def reset(self) -> None:
        """Forget all samples."""
        self._recent.clear()
        self._layers.clear()

    def sample(self, tokens: int | None) -> torch.Tensor | None:
        """Number of experts that the first `tokens` of the pass just launched are routed to: int64 [layers] on the device.

        None for passes that are not counted, which are most, and for passes that cannot be: with ragged windows, whose `tokens` is None,
        and with more tokens than routers keep masks of. After these, `mean` and `by_layer` forget earlier passes.
        """
        self._passes += 1
        if (self._passes - 1) % EVERY:
            return None
        kept = [] if tokens is None else [router.kept_masks(tokens) for router in self._routers]
        experts = self._routers[0].num_experts if self._routers else 0
        masks = [mask[:, : -(-experts // WORD)] for mask in kept if mask is not None]
        if not masks:
            self._layers.clear()
            return None
        places = torch.arange(WORD, dtype=torch.int32, device=masks[0].device)
        hit = (torch.stack(masks)[..., None] >> places) & 1
        return hit.amax(dim=1).flatten(1)[:, :experts].sum(1)  # the bit after them is the shared expert's

    def add(self, tokens: int, experts: npt.NDArray[np.int64]) -> None:
        """Add one sample, read on the host: int64 [layers]."""
        self._recent.append((tokens, float(experts.mean())))
        self._layers.append(experts)

    @property
    def by_layer(self) -> list[float]:
        """Distinct experts of each sparse layer, averaged over the last counted passes; [] before the first."""
        return np.mean(list(self._layers), axis=0).tolist() if self._layers else []

    @property
    def mean(self) -> float | None:
        """The mean over layers; None before the first counted pass."""
        return float(np.mean(list(self._layers))) if self._layers else None

    @property
    def independence(self) -> float | None:
        """How independently tokens choose experts, from the last counted passes: 1 if each is routed at random, 0 if all choose the same.

        None before the first pass of several tokens.
        """
        found = [self._independence(tokens, hit) for tokens, hit in self._recent if tokens > 1]
        return sum(found) / len(found) if found else None

    def _independence(self, tokens: int, hit: float) -> float:
        rule, total = self._routers[0].rule, self._routers[0].num_experts
        if rule.top_k >= total or hit >= total:
            return 1.0
        independent = math.log(1 - hit / total) / math.log(1 - rule.top_k / total)
        return min(max((independent - 1) / (tokens - 1), 0.0), 1.0)
