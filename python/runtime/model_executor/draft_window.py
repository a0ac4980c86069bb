"""A window of drafts: the tokens that one target pass verifies for each request."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from runtime.config.attention_caps import MAX_TREE_BITS
from runtime.config.draft_algorithms import tokens_per_step


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Shape of the windows: K `num_steps`, `topk` branches per node, D `num_draft_tokens` verified nodes, including the root."""

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        K, topk, D = self.num_steps, self.topk, self.num_draft_tokens
        assert topk + (K - 1) * topk**2 >= D - 1, "num_draft_tokens exceeds the nodes that are drafted"
        assert max(D, (K - 1) * topk) <= MAX_TREE_BITS, "a mask of num_draft_tokens or of num_steps does not fit into its bits"

    @property
    def tokens_per_step(self) -> int:
        """KV positions beyond the committed length that one iteration may write."""
        return tokens_per_step(self.num_steps, self.topk, self.num_draft_tokens)

    def at_depth(self, num_steps: int) -> TreeShape:
        """The window at a smaller depth: a shorter chain, or no drafts."""
        if num_steps == self.num_steps:
            return self
        assert num_steps == 0 or self.topk == 1, "a tree has one depth"
        return TreeShape(num_steps, 1, num_steps + 1)


NO_DRAFTS = TreeShape(num_steps=0, topk=1, num_draft_tokens=1)
"""The last committed token alone: verifying it is a decode step."""


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """D tokens for each of B requests: the last committed one, then the drafts, as a chain or as a tree with parents before children.

    Attributes:
        tokens: int64 [B, D]. Column 0 is the last committed token; -1 where a request takes no draft.
        parents: int64 [B, D]. The node above each node of a tree, -1 for the root; None for a chain.
        depths: int64 [B, D]. Distance of each node of a tree from the root; None for a chain.
        mask: int64 [B, D], for `ForwardBatch.tree_mask` with `tree_tail` D: bit j of node i is set if j is i or above
            it; None for a chain.
        probs: float32 [B, K, Vd], the distributions that a chain was drawn from; None for deterministic drafts.
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None = None
    depths: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    probs: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """D."""
        return self.tokens.shape[1]

    @property
    def _levels(self) -> torch.Tensor:
        """int64 [B or 1, D]: `depths`, also for a chain."""
        return torch.arange(self.width, device=self.tokens.device)[None] if self.depths is None else self.depths

    def part(self, start: int, stop: int) -> DraftWindow:
        """The windows of requests `start` to `stop`."""
        tensors = (self.tokens, self.parents, self.depths, self.mask, self.probs)
        tokens, *others = (tensor if tensor is None else tensor[start:stop] for tensor in tensors)
        assert tokens is not None
        return DraftWindow(tokens, *others)

    def capped(self, caps: torch.Tensor) -> DraftWindow:
        """The window with token -1, which no rule accepts, in place of the drafts beyond `caps`, int64 [B]."""
        beyond = self._levels > caps[:, None]
        parents = None if self.parents is None else torch.where(beyond, -2, self.parents)
        return replace(self, tokens=torch.where(beyond, -1, self.tokens), parents=parents)

    def positions(self, kv_lens: torch.Tensor) -> torch.Tensor:
        """int64 [B, D]: the sequence position of the token chosen after each node. kv_lens int32 [B]."""
        return kv_lens.to(torch.int64)[:, None] + self._levels + 1

    def drafts_before(self) -> torch.Tensor:
        """int64 [B, D, D]: for each node the drafts at and above it, -1 elsewhere. The root is committed already."""
        index = torch.arange(self.width, device=self.tokens.device)
        if self.mask is None:
            on_path = (index[None] <= index[:, None])[None]
        else:
            on_path = ((self.mask[:, :, None] >> index) & 1).bool()
        return torch.where(on_path & (index > 0), self.tokens[:, None], -1)
