"""A small, independent model as the draft. Its vocabulary is the target's, or lacks some of the ids that only pad the target's; a token map
restricts its drafts to some of its tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from runtime.layers.forward_batch import ForwardBatch
from runtime.models.decoder import DecoderModel
from runtime.models.draft_head import DraftModel
from runtime.models.token_map import invert
from runtime.models.weights import NamedTensors


class StandaloneDraft(DraftModel):
    """A whole model as a `DraftModel`, without lookahead: it reads the token at a position and no hidden state of the target.

    Attributes:
        model: the decoder, whose methods it has except `forward`.
    """

    lookahead, feature_width = 0, 0

    def __init__(self, model: DecoderModel, target_vocab: int, token_map: torch.Tensor | None) -> None:
        """Use a model whose weights are not yet loaded.

        Args:
            target_vocab: the size of the target's vocabulary, of which the model's may lack the last ids.
            token_map: int64 [Vd], the target ids that the draft may propose, or None for all that it has.

        Raises:
            ConfigError: the map names ids that the model lacks.
        """
        self.model, self.config, self.attention_specs = model, model.config, model.attention_specs
        self.hidden_width, self.hidden_dtype = model.config.hidden_size, model.dtype
        self.logits, self.greedy, self.bind, self.expected_weights = model.logits, model.greedy, model.bind, model.expected_weights
        own, self._has_map = model.config.vocab_size, token_map is not None
        self._lacks_ids = own < target_vocab
        kept = torch.arange(own) if token_map is None and self._lacks_ids else token_map
        self.vocab_size = own if kept is None else len(kept)
        if kept is not None:
            to_draft = invert(kept, own, "--speculative-token-map")
            self.to_target = kept.to(model.embed.device)
            self.to_draft = functional.pad(to_draft, (0, target_vocab - own), value=-1).to(model.embed.device)

    def load(self, weights: NamedTensors) -> None:
        """Fill the weights; the LM head keeps the rows of the map. Raises `ConfigError` as `DecoderModel.load`."""
        self.model.load(weights)
        if self._has_map and self.to_target is not None:
            self.model.lm_head = self.model.lm_head.select_rows(self.to_target)

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] or [N, hidden], for `logits`. Reads its last id for each that it lacks: no tokenizer writes those."""
        if self._lacks_ids:
            batch = replace(batch, input_ids=batch.input_ids.clamp(max=self.config.vocab_size - 1))
        return self.model.forward(batch, wanted=wanted)[0]

    def map_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids, int64 of any shape."""
        return self.to_target[ids] if self._has_map and self.to_target is not None else ids

    @property
    def kernel_launches(self) -> int:
        """Kernels of an eager pass, approximately."""
        return self.model.kernel_launches
