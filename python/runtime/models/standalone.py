"""A small, independent model as the draft. Its vocabulary is the target's, or lacks some of the ids that only pad the target's."""

from __future__ import annotations

from dataclasses import replace

import torch

from runtime.layers.forward_batch import ForwardBatch
from runtime.models.decoder import DecoderModel
from runtime.models.draft_head import DraftModel
from runtime.models.token_map import invert


class StandaloneDraft(DraftModel):
    """A whole model as a `DraftModel`, without lookahead: it reads the token at a position and no hidden state of the target.

    Attributes:
        model: the decoder, whose methods it has except `forward`.
    """

    lookahead, feature_width = 0, 0

    def __init__(self, model: DecoderModel, target_vocab: int) -> None:
        """`target_vocab`: the size of the target's vocabulary, of which the model's may lack the last ids."""
        self.model, self.config, self.attention_specs = model, model.config, model.attention_specs
        self.hidden_width, self.hidden_dtype, self.vocab_size = model.config.hidden_size, model.dtype, model.config.vocab_size
        self.logits, self.greedy, self.bind = model.logits, model.greedy, model.bind
        self.expected_weights, self.load = model.expected_weights, model.load
        if self.vocab_size < target_vocab:
            self.to_target = torch.arange(self.vocab_size, device=model.embed.device)
            self.to_draft = invert(self.to_target, target_vocab, "the draft")

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] or [N, hidden], for `logits`. Reads its last id for each that it lacks: no tokenizer writes those."""
        if self.to_target is not None:
            batch = replace(batch, input_ids=batch.input_ids.clamp(max=self.vocab_size - 1))
        return self.model.forward(batch, wanted=wanted)[0]

    def map_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The same ids."""
        return ids

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model."""
        return self.model.weight_bytes

    @property
    def kernel_launches(self) -> int:
        """Kernels of an eager pass, approximately."""
        return self.model.kernel_launches
