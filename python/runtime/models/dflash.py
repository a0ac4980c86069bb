"""The DFlash draft: a few layers that fill a whole block of masked tokens in one pass, over keys and values of the target's states.

Source: DFlash, arXiv:2602.06036; tensor names follow the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional as F

from runtime.distributed.parallel_group import ParallelGroup
from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend
from runtime.layers.attention.layer import Attention
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear
from runtime.layers.lm_head import all_logits, greedy
from runtime.layers.ops import Stream
from runtime.mem_cache.kv_pool import KVPool
from runtime.models.block import Block
from runtime.models.decoder import OTHER_LAUNCHES, DecoderModel
from runtime.models.draft_config import DraftConfig
from runtime.models.draft_head import DraftBody
from runtime.models.weights import NamedTensors


class DFlashDraftModel:
    """Weights and passes of one draft, beside its target, whose embeddings and LM head it uses.

    At positions of committed tokens its KV cache holds keys and values of the target's projected states, which `write_context`
    stores. `forward` writes those of a block behind them; they are overwritten when the target has verified the block.

    Attributes:
        config: its decoder.
        block: how blocks are filled.
        aux_layers: target layers whose input it reads.
        input_width: of these states together.
        layers: the blocks of the decoder.
        to_target, to_draft: None: it has the target's vocabulary.
    """

    def __init__(self, config: DraftConfig, target: DecoderModel, group: ParallelGroup | None = None) -> None:
        """Allocate the draft beside its target. `group`: the ranks that share the blocks; by default those that share the target's."""
        assert config.block is not None, "the configuration of a DFlash draft"
        self.config, self.block, self.aux_layers = config.model, config.block, config.aux_layers
        self.vocab_size = self.config.vocab_size
        self.to_target: torch.Tensor | None = None
        self.to_draft: torch.Tensor | None = None
        hidden = self.config.hidden_size
        self.input_width = len(self.aux_layers) * hidden
        self._target = target
        self._body = body = DraftBody(self.config, target, group=group)
        self.fc = body.parts.weights.linear({"fc": hidden}, self.input_width)
        self._context_norm, self._norm = body.parts.norm("hidden_norm.weight"), body.parts.norm("norm.weight")
        parts = body.parts
        self._attention = [parts.attention(f"layers.{i}.self_attn.", i, causal=causal) for i, causal in enumerate(self.block.causal)]
        self.layers = [self._layer(i, attention) for i, attention in enumerate(self._attention)]
        self.attention_specs = tuple(attention.spec for attention in self._attention)
        self._kv_projs: list[Linear] = []

    def _layer(self, layer: int, attention: Attention) -> Block:
        parts, prefix = self._body.parts, f"layers.{layer}."
        before, between = (parts.norm(f"{prefix}{name}_layernorm.weight") for name in ("input", "post_attention"))
        return Block(attention, parts.gated_mlp(prefix + "mlp."), before, between)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` requires."""
        return self._body.parts.weights.expected()

    def load(self, weights: NamedTensors) -> None:
        """Fill the weights; load the target first.

        Args:
            weights: (published name, tensor of any float dtype), in any order, each once; a leading `model.` is ignored.

        Raises:
            ConfigError: tensors are missing, unexpected or of another shape; it names them.
        """
        named = ((name.removeprefix("model."), tensor) for name, tensor in weights)
        self._body.parts.weights.load(named, ("rotary_emb.inv_freq",))
        self._kv_projs = [layer.qkv_proj.tail(layer.heads.num_q_heads * layer.heads.head_dim) for layer in self._attention]

    def bind(self, kv_pool: KVPool, backend: AttentionBackend) -> None:
        """Give the draft its KV pool and attention backend."""
        self._body.bind(kv_pool, backend)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the draft's own weights and tables."""
        return self._body.num_bytes(self._target.embed, self._target.lm_head)

    @property
    def kernel_launches(self) -> int:
        """Kernels of an eager pass over a block, about."""
        return sum(layer.kernel_launches for layer in self.layers) + OTHER_LAUNCHES

    def gemms(self) -> Iterator[Gemm]:
        """The GEMMs that are to be autotuned, in order; the LM head is the target's."""
        yield Gemm("linear", self.fc, None)
        for proj in self._kv_projs:
            yield Gemm("linear", proj, None)
        for layer in self.layers:
            yield from layer.gemms()

    # ---- passes: captured, never read from the device

    def write_context(self, batch: ForwardBatch) -> None:
        """Store keys and values of committed tokens, from the target's states `batch.hidden_states` [T, input_width]."""
        assert batch.hidden_states is not None, "the context is made of the target's states"
        ops, dtype, context = self._body.ops, self._body.dtype, self._body.context(batch)
        states = ops.norm(ops.linear(batch.hidden_states.to(dtype), self.fc).float(), self._context_norm, dtype)
        for attention, kv_proj in zip(self._attention, self._kv_projs, strict=True):
            keys_only = replace(attention.heads, num_q_heads=0)
            ops.rope_and_cache(ops.linear(states, kv_proj), keys_only, attention.spec.layer_id, context)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Fill blocks: [T, hidden] in the model's dtype, after the norm before the head. The backend's `plan` has been called."""
        embeds = F.embedding(batch.input_ids, self._target.embed).float()
        stream, context = Stream(embeds.mul_(self.block.embed_scale)), self._body.context(batch)
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            stream = layer.forward(stream, context, None if following is None else following.attn_norm)
        return self._body.ops.norm(stream.h, self._norm, self._body.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the token at each position: [N, hidden] -> float32 [N, V]."""
        return all_logits(self._body.ops, hidden, self._target.lm_head)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely token at each position, int64 [N]: the argmax of `logits(hidden)`."""
        return greedy(self._body.ops, hidden, self._target.lm_head)


def check_depth(block_size: int, num_steps: int) -> None:
    """Raise `ConfigError` where a block has fewer masked tokens than `num_steps`."""
    if num_steps >= block_size:
        raise ConfigError(
            f"--speculative-num-steps is {num_steps}; this draft fills blocks of {block_size} tokens and drafts {block_size - 1} of them. "
            "Lower it or leave it out."
        )
