"""Any small model of the target's vocabulary as its draft."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from runtime.layers.attention.base import AttentionBackend
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool
from runtime.models.decoder import DecoderModel


class StandaloneDraft:
    """`DraftModel` without lookahead: it reads the token at a position and needs nothing of the target's states."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.lookahead = 0
        self.config = model.config
        self.aux_layers: tuple[int, ...] = ()
        self.input_width = 0
        self.hidden_width = model.config.hidden_size
        self.hidden_dtype = model.dtype
        self.vocab_size = model.config.vocab_size
        self.to_target: torch.Tensor | None = None
        self.to_draft: torch.Tensor | None = None

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] or [N, hidden], for `logits`."""
        hidden = self._model.forward(batch)[0]
        return hidden if wanted is None else hidden[wanted]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the next token: [N, hidden] -> float32 [N, V], written to `out` where given."""
        return self._model.logits(hidden, out)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest next token, int64 [N]: the argmax of `logits(hidden)`."""
        return self._model.greedy(hidden)

    def map_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The same ids: there is one vocabulary."""
        return ids

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` wants."""
        return self._model.expected_weights()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the weights."""
        self._model.load(weights)

    def bind(self, kv_pool: KVPool, backend: AttentionBackend) -> None:
        """Give the model its KV pool and attention."""
        self._model.bind(kv_pool, backend)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model."""
        return self._model.weight_bytes
