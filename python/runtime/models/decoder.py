"""A dense decoder of the Llama line, written once for every family in the block operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from runtime.batch import ForwardMode
from runtime.layers.attention.base import AttentionBackend
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.ops import BlockOps, HeadLayout, RMSNorm, Stream
from runtime.mem_cache.kv_pool import KVPool
from runtime.models.attention_specs import attention_specs
from runtime.models.config import ModelConfig
from runtime.models.rotary import build_rope
from runtime.models.weights import WeightTable


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one transformer block."""

    attn_norm: RMSNorm
    qkv_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o_proj: Linear
    mlp_norm: RMSNorm
    gate_up_proj: Linear
    down_proj: Linear


class DecoderModel:
    """Weights and forward pass of one model. Owner of its weights; the KV pool and the backend are bound once, after the memory plan.

    `forward`, `logits` and `greedy` may be captured and never read from the device. Run them under `torch.inference_mode()`.

    Attributes:
        config: the architecture.
        dtype: of weights and activations; the residual stream is float32.
        embed: [vocab, hidden] in `dtype`. Draft heads may share it.
        lm_head: hidden -> vocab. Draft heads may share it. With a tied embedding and no quantisation its weight is `embed`.
        layers: the blocks.
        final_norm: the norm before the head.
    """

    def __init__(self, config: ModelConfig, ops: BlockOps, dtype: torch.dtype, device: torch.device, linear: type[Linear]) -> None:
        self.config = config
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.layout = HeadLayout(config.num_q_heads, config.num_kv_heads, config.head_dim)
        self.rope = build_rope(config, device)
        self._weights = WeightTable(dtype, device, linear)
        self.embed = self._weights.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        self.final_norm = self._norm("model.norm.weight", config.hidden_size)
        self.lm_head = self._head(linear)
        self._specs = attention_specs(config, dtype)
        self._pool: KVPool | None = None
        self._attention: AttentionBackend | None = None

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` wants, under Hugging Face's names."""
        return self._weights.expected()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the weights; q/k/v and gate/up are fused, and quantised if the model is, as they come.

        Args:
            weights: (Hugging Face's name, tensor of any float dtype on any device), in any order, each once.

        Raises:
            ConfigError: tensors are missing, unexpected or of another shape; it names them.
        """
        skip = ("rotary_emb.inv_freq", "lm_head.weight") if self.config.tie_embeddings else ("rotary_emb.inv_freq",)
        self._weights.load(weights, skip)
        if self.config.tie_embeddings and self.lm_head.weight is not self.embed:
            self.lm_head.put(0, self.embed)

    def bind(self, kv_pool: KVPool, backend: AttentionBackend) -> None:
        """Give the model its KV pool and attention, once."""
        self._pool = kv_pool
        self._attention = backend

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and tables, shared ones once."""
        return self._weights.num_bytes(self.lm_head) + self.rope.cos_sin.nbytes

    @property
    def block_parameters(self) -> int:
        """Entries of the matrices that every token is multiplied with, the blocks'. The head is for chosen rows, the embedding is read."""
        products = [linear for layer in self.layers for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)]
        return sum(linear.out_features * linear.in_features for linear in products)

    def forward(self, batch: ForwardBatch, aux_layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run every block over the batch. The backend's `plan` has been called for it.

        Args:
            aux_layers: layers whose *input*, the residual stream entering them, is wanted, rising; `num_layers` means the last output.

        Returns:
            Hidden states after the final norm [T, hidden], and the streams [T, len(aux_layers) * hidden] side by side, both in `dtype`.
        """
        stream = Stream(F.embedding(batch.input_ids, self.embed).float(), in_prompt=batch.mode is ForwardMode.EXTEND)
        aux = []
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                aux.append(stream.h.to(self.dtype, copy=True))
            following = self.layers[i + 1].attn_norm if i + 1 < len(self.layers) else None
            stream = self.block(layer, i, stream, batch, following)
        if len(self.layers) in aux_layers:
            aux.append(stream.h.to(self.dtype, copy=True))
        hidden = self.ops.norm(stream.h, self.final_norm, self.dtype)
        return hidden, torch.cat(aux, dim=1) if aux else None

    def block(self, layer: DecoderLayer, layer_id: int, stream: Stream, batch: ForwardBatch, following: RMSNorm | None) -> Stream:
        """One transformer block: the stream in and out, perhaps in the same storage. `following`: the norm of the block after it."""
        assert self._pool is not None, "bind comes before forward"
        assert self._attention is not None, "bind comes before forward"
        ops = self.ops
        k_cache, v_cache = self._pool.flat(layer_id)
        qkv = ops.norm_linear(stream, layer.attn_norm, layer.qkv_proj)
        q = ops.rope_and_cache(
            qkv, self.layout, self.rope, layer.q_norm, layer.k_norm, batch.positions, batch.out_cache_loc, k_cache, v_cache
        )
        stream = ops.linear_add(self._attention.forward(q, self._specs[layer_id], batch), layer.o_proj, stream, layer.mlp_norm)
        return ops.linear_add(ops.norm_gate_up(stream, layer.mlp_norm, layer.gate_up_proj), layer.down_proj, stream, following)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the next token: hidden [N, hidden] after the final norm -> float32 [N, vocab], written to `out` where given."""
        return self.ops.logits(hidden, self.lm_head, out)

    def greedy(self, hidden: torch.Tensor, tokens: torch.Tensor | None = None, logits: torch.Tensor | None = None) -> torch.Tensor:
        """The likeliest next token, int64 [N]: the argmax of `logits(hidden)`; both written where given."""
        return self.ops.greedy(hidden, self.lm_head, tokens, logits)

    def _norm(self, name: str, width: int) -> RMSNorm:
        return RMSNorm(self._weights.tensor(name, (width,)), self.config.rms_eps)

    def _head(self, linear: type[Linear]) -> Linear:
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        if not self.config.tie_embeddings:
            return self._weights.linear({"lm_head": vocab}, hidden, bias=False)
        if linear is Linear:
            return Linear(self.embed)
        return linear.empty(vocab, hidden, False, self.dtype, self.device)

    def _layer(self, prefix: str) -> DecoderLayer:
        c, weights = self.config, self._weights
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        q_rows, kv_rows = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return DecoderLayer(
            attn_norm=self._norm(prefix + "input_layernorm.weight", c.hidden_size),
            qkv_proj=weights.linear(
                {attn + "q_proj": q_rows, attn + "k_proj": kv_rows, attn + "v_proj": kv_rows}, c.hidden_size, c.qkv_bias
            ),
            q_norm=self._norm(attn + "q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=self._norm(attn + "k_norm.weight", c.head_dim) if c.qk_norm else None,
            o_proj=weights.linear({attn + "o_proj": c.hidden_size}, q_rows, c.o_bias),
            mlp_norm=self._norm(prefix + "post_attention_layernorm.weight", c.hidden_size),
            gate_up_proj=weights.linear(
                {mlp + "gate_proj": c.intermediate_size, mlp + "up_proj": c.intermediate_size}, c.hidden_size, c.mlp_bias
            ),
            down_proj=weights.linear({mlp + "down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
        )
