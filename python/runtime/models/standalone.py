"""A small, independent model with the target's vocabulary as the draft."""

from __future__ import annotations

import torch

from runtime.layers.forward_batch import ForwardBatch
from runtime.models.decoder import DecoderModel
from runtime.models.draft_head import DraftModel


class StandaloneDraft(DraftModel):
    """A whole model as a `DraftModel`, without lookahead: it reads the token at a position and no hidden state of the target.

    Attributes:
        model: the decoder, whose methods it has except `forward`.
    """

    lookahead, feature_width = 0, 0

    def __init__(self, model: DecoderModel) -> None:
        self.model, self.config, self.attention_specs = model, model.config, model.attention_specs
        self.hidden_width, self.hidden_dtype, self.vocab_size = model.config.hidden_size, model.dtype, model.config.vocab_size
        self.logits, self.greedy, self.bind = model.logits, model.greedy, model.bind
        self.expected_weights, self.load = model.expected_weights, model.load

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] or [N, hidden], for `logits`."""
        return self.model.forward(batch, wanted=wanted)[0]

    def map_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The same ids: both models have one vocabulary."""
        return ids

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model."""
        return self.model.weight_bytes

    @property
    def kernel_launches(self) -> int:
        """Kernels of an eager pass, approximately."""
        return self.model.kernel_launches
