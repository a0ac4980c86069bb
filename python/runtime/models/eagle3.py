"""The EAGLE-3 draft head: one decoder layer fed with the token's embedding beside three of the target's hidden states, projected.

Source: EAGLE-3, Li et al. 2025, arXiv:2503.01840; tensor names follow the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.ops import Stream
from runtime.mem_cache.kv_pool import KVPool
from runtime.models.decoder import DecoderModel
from runtime.models.draft_config import DraftConfig
from runtime.models.draft_head import DraftBody, Extras, invert, own_or_shared
from runtime.models.eagle import own_bytes, own_or_target_head

NUM_AUX = 3


class LlamaForCausalLMEagle3:
    """`DraftModel`: own norm and LM head over a vocabulary that is often a part of the target's.

    The target's three states are projected by `fc`; deeper steps are fed the head's own residual stream, before the norm. That stream is
    float32, like the target's.
    """

    def __init__(self, config: DraftConfig, target: DecoderModel, linear: type[Linear] = Linear) -> None:
        """Allocate the head beside its target, whose dtype, device and operations it takes over.

        Raises:
            ConfigError: more than one layer, or widths that leave it open whose hidden state one is.
        """
        self.config = c = config.model
        self.aux_layers = config.aux_layers
        self.lookahead = 1
        if c.num_layers != 1:
            raise ConfigError(f"the EAGLE-3 draft head has {c.num_layers} layers; only heads of one layer are supported")
        self.input_width = NUM_AUX * (c.target_hidden_size or c.hidden_size)
        self.hidden_width = c.hidden_size
        if self.input_width == self.hidden_width:
            raise ConfigError(f"the EAGLE-3 draft head is as wide as three of its target's hidden states, {self.input_width}")
        self.hidden_dtype = torch.float32
        self.vocab_size = c.draft_vocab_size or c.vocab_size
        self._reduced = self.vocab_size != c.vocab_size
        self._target = target
        self._body = body = DraftBody(c, target.ops, target.dtype, target.device, linear)
        self._fc = body.weights.linear({"fc": c.hidden_size}, self.input_width, bias=False)
        self._layer = body.layer("midlayer.", 2 * c.hidden_size)
        self._embed_norm = body.norm("midlayer.input_layernorm.weight")
        self._hidden_norm = body.norm("midlayer.hidden_norm.weight")
        self._norm = body.norm("norm.weight")
        self._own_head = c.draft_vocab_size is not None and not c.tie_embeddings
        self.embed = target.embed
        self.lm_head = body.weights.linear({"lm_head": self.vocab_size}, c.hidden_size, bias=False) if self._own_head else target.lm_head
        self.to_target: torch.Tensor | None = None
        self.to_draft: torch.Tensor | None = None

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` cannot do without. Any constant `d2t` does for dummy weights."""
        return self._body.weights.expected() | ({"d2t": (self.vocab_size,)} if self._reduced else {})

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the weights; load the target first.

        Args:
            weights: (published name, tensor of any float dtype), in any order, each once; a leading `model.` is ignored.
                `d2t` int64 [Vd] holds what must be added to a draft id to get the target's; `t2d` says the same the other way round
                and is not read.

        Raises:
            ConfigError: tensors are missing, unexpected or of another shape; it names them.
        """
        extras = Extras(frozenset({"embed_tokens.weight", "fc.bias", "d2t", "t2d"} | (set() if self._own_head else {"lm_head.weight"})))
        self._body.weights.load(extras.split(weights), ("rotary_emb.inv_freq",))
        c, target = self.config, self._target
        own_embed = extras.take("embed_tokens.weight", (c.vocab_size, c.hidden_size))
        if own_embed is None and target.config.hidden_size != c.hidden_size:
            raise ConfigError("the draft checkpoint lacks embed_tokens.weight, and its target's embedding has another width")
        self.embed = own_or_shared(own_embed, target.embed)
        bias = extras.take("fc.bias", (c.hidden_size,))
        if bias is not None:
            self._fc.bias = bias.to(self.embed.device, target.dtype)
        self._load_head(extras)
        self._load_map(extras)

    def _load_head(self, extras: Extras) -> None:
        if self._own_head:
            return
        c = self.config
        if c.tie_embeddings:
            self.lm_head = Linear(self.embed[: self.vocab_size])
            return
        own = extras.take("lm_head.weight", (c.vocab_size, c.hidden_size))
        if own is None and self._target.config.hidden_size != c.hidden_size:
            raise ConfigError("the draft checkpoint lacks lm_head.weight, and its target's head has another width")
        self.lm_head = own_or_target_head(own, self._target)

    def _load_map(self, extras: Extras) -> None:
        offsets = extras.take("d2t", (self.vocab_size,))
        if offsets is None:
            if self._reduced:
                raise ConfigError(f"the draft checkpoint lacks d2t, and its vocabulary of {self.vocab_size} is not the target's")
            return
        to_target = offsets.to(self.embed.device, torch.int64) + torch.arange(self.vocab_size, device=self.embed.device)
        self.to_draft = invert(to_target, self.config.vocab_size, "d2t of the draft checkpoint")
        self.to_target = to_target

    def bind(self, kv_pool: KVPool, backend: AttentionBackend) -> None:
        """Give the head its KV pool and attention, once."""
        self._body.bind(kv_pool, backend)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the head's own weights and tables; what it shares with the target is not counted."""
        return own_bytes(self._body, self.embed, self.lm_head, self._target)

    def project(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """The target's three states side by side [T, input_width] -> the head's [T, hidden] float32."""
        return self._body.ops.linear(aux_hidden.to(self._body.dtype), self._fc).float()

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """The residual stream float32 [T, hidden] or [N, hidden], as `DraftModel.forward` says. States of `input_width` are projected."""
        hidden = batch.hidden_states
        assert hidden is not None, "a draft head needs hidden states"
        # A copy: the operations write the stream in place, and the caller's rows are another owner's.
        h = self.project(hidden) if hidden.shape[1] == self.input_width else hidden.to(torch.float32, copy=True)
        body = self._body
        embeds = body.ops.norm(F.embedding(batch.input_ids, self.embed).float(), self._embed_norm, body.dtype)
        x = torch.cat([embeds, body.ops.norm(h, self._hidden_norm, body.dtype)], dim=1)
        return body.run(self._layer, 0, body.ops.linear(x, self._layer.qkv_proj), Stream(h), batch, wanted).h

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the token after next: [N, hidden] before the norm -> float32 [N, Vd], written to `out` where given."""
        return self._body.ops.logits(self._normed(hidden), self.lm_head, out)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The draft id of the likeliest token, int64 [N]: the argmax of `logits(hidden)`."""
        return self._body.ops.greedy(self._normed(hidden), self.lm_head)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._body.ops.norm(hidden.float(), self._norm, self._body.dtype)

    def map_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids, int64 of any shape."""
        return ids if self.to_target is None else self.to_target[ids]
