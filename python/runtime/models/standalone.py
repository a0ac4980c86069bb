"""A small, independent model with the target's vocabulary as the draft."""

from __future__ import annotations

import torch

from runtime.layers.attention.base import AttentionBackend
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool
from runtime.models.decoder import DecoderModel
from runtime.models.draft_head import DraftModel
from runtime.models.weights import NamedTensors


class StandaloneDraft(DraftModel):
    """A whole model as a `DraftModel`, without lookahead: it reads the token at a position and no hidden state of the target.

    Attributes:
        model: the decoder.
    """

    def __init__(self, model: DecoderModel) -> None:
        self.model = model
        self.lookahead = 0
        self.config = model.config
        self.attention_specs = model.attention_specs
        self.input_width = 0
        self.hidden_width = model.config.hidden_size
        self.hidden_dtype = model.dtype
        self.vocab_size = model.config.vocab_size

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] or [N, hidden], for `logits`."""
        hidden = self.model.forward(batch)[0]
        return hidden if wanted is None else hidden[wanted]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the next token: [N, hidden] -> float32 [N, V], written to `out` where given."""
        return self.model.logits(hidden, out)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely next token, int64 [N]: the argmax of `logits(hidden)`."""
        return self.model.greedy(hidden)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` requires."""
        return self.model.expected_weights()

    def load(self, weights: NamedTensors) -> None:
        """Fill the weights."""
        self.model.load(weights)

    def bind(self, kv_pool: KVPool, backend: AttentionBackend) -> None:
        """Give the model its KV pool and attention backend."""
        self.model.bind(kv_pool, backend)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model."""
        return self.model.weight_bytes

    @property
    def kernel_launches(self) -> int:
        """Kernels of an eager pass, approximately."""
        return self.model.kernel_launches
