"""The DFlash draft: a few layers that fill a whole block of masked tokens in one pass, attending to KV made from the target's states.

Source: DFlash, arXiv:2602.06036; tensor names follow the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from runtime.distributed.parallel_group import ParallelGroup
from runtime.errors import ConfigError
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear
from runtime.models.decoder import DecoderModel
from runtime.models.draft_config import DraftConfig
from runtime.models.draft_head import DraftHead, OptionalTensors, shared_if_equal
from runtime.models.weights import NamedTensors


class DFlashDraftModel(DraftHead):
    """Weights and passes of one draft, which uses its target's embeddings and LM head unless it has its own.

    At positions of committed tokens its KV cache holds keys and values of the target's projected states, which `write_context`
    stores. `forward` writes KV of a block after them; it is overwritten once the target has verified the block.

    Attributes:
        draft_block: how blocks are filled.
        aux_layers: target layers whose input states the draft reads.
        feature_width: width of these states, concatenated.
    """

    def __init__(
        self, config: DraftConfig, target: DecoderModel, token_map: torch.Tensor | None = None, group: ParallelGroup | None = None
    ) -> None:
        """Allocate the draft.

        Args:
            token_map: int64 [Vd], the target ids that the draft may propose, or None for all.
            group: the ranks that share its blocks; by default those that share the target's.

        Raises:
            ConfigError: a token map for a draft that has its own.
        """
        assert config.draft_block is not None, "the configuration of a DFlash draft"
        super().__init__(config.model, target, group=group)
        if self.has_map and token_map is not None:
            raise ConfigError(f"--speculative-token-map: this draft has its own vocabulary, of {self.vocab_size} tokens. Leave it out.")
        self.keep_tokens(token_map)
        self.draft_block, self.aux_layers, parts = config.draft_block, config.aux_layers, self.parts
        hidden = self.config.hidden_size
        self.feature_width = len(self.aux_layers) * hidden
        self.fc = parts.weights.linear({"fc": hidden}, self.feature_width)
        self._context_norm, self._norm = parts.norm("hidden_norm.weight"), parts.norm("norm.weight")
        self._attention = [parts.attention(f"layers.{i}.self_attn.", i, causal=causal) for i, causal in enumerate(self.draft_block.causal)]
        self.layers = [
            parts.block(f"layers.{i}.", attention, parts.gated_mlp(f"layers.{i}.mlp.")) for i, attention in enumerate(self._attention)
        ]
        self.attention_specs = tuple(attention.spec for attention in self._attention)
        self._kv_projs: list[Linear] = []
        if self.has_map:
            self.lm_head = parts.weights.head("lm_head", self.vocab_size, hidden)

    def load(self, weights: NamedTensors) -> None:
        """Fill the weights; load the target first.

        Args:
            weights: (published name, tensor of any float dtype), in any order, each once; a leading `model.` is ignored. `d2t` as for
                `load_map`.

        Raises:
            ConfigError: tensors are missing, unexpected or have the wrong shape; the message names them.
        """
        optional = OptionalTensors(frozenset({"embed_tokens.weight", "d2t", "t2d"} | (set() if self.has_map else {"lm_head.weight"})))
        self.parts.weights.load(optional.split(weights), ("rotary_emb.inv_freq",))
        shape = self.config.vocab_size, self.config.hidden_size
        self.embed = shared_if_equal(optional.take("embed_tokens.weight", shape), self._target.embed)
        if not self.has_map:
            self.lm_head = self.kept_rows(self.own_head(optional.take("lm_head.weight", shape)))
        if self.to_target is None:
            self.load_map(optional)
        self._kv_projs = [layer.qkv_proj.tail(layer.heads.num_q_heads * layer.heads.head_dim) for layer in self._attention]

    def gemms(self) -> Iterator[Gemm]:
        """The GEMMs to autotune, in order, without the LM head."""
        yield Gemm("linear", self.fc, None)
        for proj in self._kv_projs:
            yield Gemm("linear", proj, None)
        for layer in self.layers:
            yield from layer.gemms()

    # ---- passes: may be captured in a graph, so they never synchronise with the device

    def write_context(self, batch: ForwardBatch) -> None:
        """Store keys and values of committed tokens, from the target's states `batch.hidden_states` [T, feature_width]."""
        assert batch.hidden_states is not None, "the context is made of the target's states"
        ops, dtype, context = self.ops, self.dtype, self.context(batch)
        states = ops.norm(ops.linear(batch.hidden_states.to(dtype), self.fc).float(), self._context_norm, dtype)
        for attention, kv_proj in zip(self._attention, self._kv_projs, strict=True):
            keys_only = replace(attention.heads, num_q_heads=0)
            ops.rope_and_cache(ops.linear(states, kv_proj), keys_only, attention.spec.layer_id, context)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Fill blocks: [T, hidden] in the model's dtype, after the final norm. Call `plan_pass` first."""
        stream = self.ops.embed(batch.input_ids, self.embed, self.layers[0].attn_norm, self.draft_block.embed_scale)
        context = self.context(batch)
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            stream = layer.forward(stream, context, None if following is None else following.attn_norm)
        return self.ops.norm(stream.h, self._norm, self.dtype)
