"""The router of a sparse MLP, and its result, the routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KEPT_ROWS = 256
"""Maximum tokens of a pass whose masks a router keeps."""


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The rule by which logits become experts and weights; `MoeConfig` describes all fields except `shared`.

    Attributes:
        shared: 1 if the shared expert is stacked after the routed ones: every token uses it with weight 1.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "topk_softmax"]
    renormalize: bool
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    shared: int = 0
    group_best: int = 2

    @property
    def chosen(self) -> int:
        """Number of experts per token, including a stacked shared expert."""
        return self.top_k + self.shared


@dataclass(frozen=True, slots=True)
class Router:
    """The weights of a router, replicated on every rank.

    Attributes:
        weight: [E, hidden] in the model's dtype.
        bias: [E] in the model's dtype, or None.
        correction_bias: float32 [E], added to the scores for the choice only, or None.
        kept: int32 [rows, words] for `Routing.masks` of the last pass of at most `rows` tokens, or None.
    """

    weight: torch.Tensor
    rule: RoutingRule
    bias: torch.Tensor | None = None
    correction_bias: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    def kept_masks(self, tokens: int) -> torch.Tensor | None:
        """The buffer for the masks of a pass of `tokens` tokens; None if they are not kept."""
        return None if self.kept is None or tokens > len(self.kept) else self.kept[:tokens]

    @property
    def num_experts(self) -> int:
        """Number of routed experts on all ranks."""
        return self.weight.shape[0]


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of T tokens: k routed ones, followed by the shared one if it is stacked with them.

    Attributes:
        ids: int32 [T, k] or [T, k + 1], best first; ids within the whole layer, on every rank. The shared expert's id is E.
        weights: float32, the shape of `ids`; 1 for the shared expert.
        masks: int32 [T, words]: bit `id % 32` of word `id // 32` is set for each of a token's experts; words for all ids of the layer.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    masks: torch.Tensor
