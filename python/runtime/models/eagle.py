"""The EAGLE-1 and EAGLE-2 draft head: one decoder layer fed with the token's embedding beside the target's hidden state.

Source: EAGLE, Li et al. 2024, arXiv:2401.15077; tensor names and the missing first norm follow the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from runtime.layers.attention.base import AttentionBackend
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.ops import Stream
from runtime.mem_cache.kv_pool import KVPool
from runtime.models.decoder import DecoderModel
from runtime.models.draft_config import DraftConfig
from runtime.models.draft_head import DraftBody, Extras, invert, own_or_shared, take_rows
from runtime.models.weights import linear_tensors

EXTRAS = frozenset({"embed_tokens.weight", "lm_head.weight", "fc.bias"})


class LlamaForCausalLMEagle:
    """`DraftModel`: hidden states of target and head are alike, final-normed; the first layer has no input norm, and no norm ends the head.

    Embedding and LM head are the target's, unless the checkpoint brings other ones. With `token_map` the LM head keeps those rows only.
    """

    def __init__(
        self, config: DraftConfig, target: DecoderModel, linear: type[Linear] = Linear, token_map: torch.Tensor | None = None
    ) -> None:
        """Allocate the head beside its target, whose dtype, device and operations it takes over.

        Args:
            token_map: int64 [Vd], the target ids that the head may say, or None for all.
        """
        self.config = config.model
        self.aux_layers = config.aux_layers
        self.lookahead = 1
        hidden = self.config.hidden_size
        self.input_width = self.hidden_width = hidden
        self.hidden_dtype = target.dtype
        self._target = target
        self._body = DraftBody(self.config, target.ops, target.dtype, target.device, linear)
        self._fc = self._body.weights.linear({"fc": hidden}, 2 * hidden, bias=False)
        self._layers = [self._body.layer(f"layers.{i}.", hidden) for i in range(self.config.num_layers)]
        self._attn_norms = [self._body.norm(f"layers.{i}.input_layernorm.weight") for i in range(1, self.config.num_layers)]
        self.embed = target.embed
        self.to_target = None if token_map is None else token_map.to(target.device)
        vocab = self.config.vocab_size
        self.to_draft = None if self.to_target is None else invert(self.to_target, vocab, "--speculative-token-map")
        self.vocab_size = vocab if self.to_target is None else len(self.to_target)
        self.lm_head = self._hot(target.lm_head)

    def _hot(self, head: Linear) -> Linear:
        return head if self.to_target is None else take_rows(head, self.to_target)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` cannot do without."""
        return self._body.weights.expected()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the weights; load the target first.

        Args:
            weights: (published name, tensor of any float dtype), in any order, each once; a leading `model.` is ignored.

        Raises:
            ConfigError: tensors are missing, unexpected or of another shape; it names them.
        """
        extras = Extras(EXTRAS)
        self._body.weights.load(extras.split(weights), ("rotary_emb.inv_freq",))
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        self.embed = own_or_shared(extras.take("embed_tokens.weight", (vocab, hidden)), self._target.embed)
        bias = extras.take("fc.bias", (hidden,))
        if bias is not None:
            self._fc.bias = bias.to(self.embed.device, self._target.dtype)
        self.lm_head = self._hot(own_or_target_head(extras.take("lm_head.weight", (vocab, hidden)), self._target))

    def bind(self, kv_pool: KVPool, backend: AttentionBackend) -> None:
        """Give the head its KV pool and attention, once."""
        self._body.bind(kv_pool, backend)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the head's own weights and tables; what it shares with the target is not counted."""
        return own_bytes(self._body, self.embed, self.lm_head, self._target)

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] or [N, hidden] in the model's dtype, as `DraftModel.forward` says."""
        assert batch.hidden_states is not None, "a draft head needs hidden states"
        dtype = self.hidden_dtype
        ops, first = self._body.ops, self._layers[0]
        x = ops.linear(torch.cat([F.embedding(batch.input_ids, self.embed), batch.hidden_states.to(dtype)], dim=1), self._fc)
        of = [*(None for _ in self._attn_norms), wanted]  # attention of a later layer reads every token
        stream = self._body.run(first, 0, ops.linear(x, first.qkv_proj), Stream(x.to(torch.float32, copy=True)), batch, of[0])
        for i, norm in enumerate(self._attn_norms, start=1):
            layer = self._layers[i]
            stream = self._body.run(layer, i, ops.norm_linear(stream, norm, layer.qkv_proj), stream, batch, of[i])
        return stream.h.to(dtype)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the token after next: [N, hidden] -> float32 [N, Vd], written to `out` where given."""
        return self._body.ops.logits(hidden.to(self.hidden_dtype), self.lm_head, out)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The draft id of the likeliest token, int64 [N]: the argmax of `logits(hidden)`."""
        return self._body.ops.greedy(hidden.to(self.hidden_dtype), self.lm_head)

    def map_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids, int64 of any shape."""
        return ids if self.to_target is None else self.to_target[ids]


def own_or_target_head(own: torch.Tensor | None, target: DecoderModel) -> Linear:
    """A checkpoint's own LM head, or the target's where there is none or they are equal."""
    if own is None:
        return target.lm_head
    shared = target.lm_head.weight
    if not shared.is_floating_point():  # quantised: no telling whether it was the same
        return Linear(own.to(target.device, target.dtype))
    weight = own_or_shared(own, shared)
    return target.lm_head if weight is shared else Linear(weight)


def own_bytes(body: DraftBody, embed: torch.Tensor, lm_head: Linear, target: DecoderModel) -> int:
    """Bytes of a head's weights and tables without what it shares with its target."""
    shared = {t.data_ptr() for t in (target.embed, *linear_tensors(target.lm_head))}
    extras = {t.data_ptr(): t.nbytes for t in (embed, *linear_tensors(lm_head)) if t.data_ptr() not in shared}
    return body.weights.num_bytes() + sum(extras.values()) + body.rope.cos_sin.nbytes
