"""Grammar masks for the tokens that a draft model may propose."""

from __future__ import annotations

import torch

from runtime.layers.token_mask import TokenMask, forbid
from runtime.models.dflash import DFlashDraftModel
from runtime.models.draft_head import DraftModel


class DraftMask:
    """The tokens that grammars allow the draft model to propose, at W positions of each of B requests.

    If the draft model cannot produce any of the allowed tokens, its proposal is unmasked and will be rejected. If the grammar allows only
    one token, that token is the draft, even if the draft model cannot produce it.
    """

    def __init__(self, mask: TokenMask, draft: DraftModel | DFlashDraftModel) -> None:
        self._requests = mask.requests
        to_target, to_draft = draft.to_target, draft.to_draft
        allowed = mask.allowed(mask.requests, draft.vocab_size if to_draft is None else len(to_draft))
        self._forced = allowed.to(torch.uint8).argmax(-1) if to_target is not None else None
        self._is_forced = allowed.sum(-1) == 1
        if to_target is not None:
            allowed = allowed[..., to_target]
        self._allowed = allowed | ~allowed.any(-1, keepdim=True)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy of the draft's float32 [B * W, Vd] in which forbidden tokens have minus infinity."""
        masked = logits.float().clone()
        forbid(masked.view(-1, self._allowed.shape[1], logits.shape[1]), self._requests, self._allowed)
        return masked

    def tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """A copy of the drafts, the target's ids int64 [B * W], with forced tokens substituted."""
        if self._forced is None:
            return tokens
        tokens = tokens.clone()
        windows = tokens.view(-1, self._allowed.shape[1])
        windows[self._requests] = torch.where(self._is_forced, self._forced, windows[self._requests])
        return tokens

    def branches(self, tokens: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Substitute forced tokens in the `topk` most likely drafts int64 [B * W, topk] and their log-probabilities: a forced token is the
        only branch.
        """
        if self._forced is None:
            return tokens, scores
        W = self._allowed.shape[1]
        tokens, scores = tokens.clone(), scores.clone()
        first, all_scores = tokens.view(-1, W, tokens.shape[1])[..., 0], scores.view(-1, W, scores.shape[1])
        first[self._requests] = torch.where(self._is_forced, self._forced, first[self._requests])
        only = torch.full_like(all_scores[self._requests], -torch.inf)
        only[..., 0] = 0.0
        all_scores[self._requests] = torch.where(self._is_forced[..., None], only, all_scores[self._requests])
        return tokens, scores
