"""A decoder: embedding, the blocks of its family, final norm and LM head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from runtime.batch import ForwardMode
from runtime.distributed.agreement import Agreement
from runtime.layers.attention.base import AttentionBackend, AttentionSpec
from runtime.layers.bounded_head import BoundedHead
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.lm_head import all_logits, greedy, greedy_by_copy
from runtime.layers.pass_context import PassContext
from runtime.mem_cache.kv_pool import KVPool
from runtime.mem_cache.state_pool import StatePool, StateSpec
from runtime.models.block import DecoderBlock, attention_specs
from runtime.models.config import ModelConfig
from runtime.models.context import ModelContext
from runtime.models.parts import ModelParts
from runtime.models.weights import NamedTensors

MakeBlock = Callable[[ModelParts, str, int], DecoderBlock]
OTHER_LAUNCHES = 10
"""Kernels of a pass outside the blocks, approximately: embedding, final norm, head, sampling."""


class States(NamedTuple):
    """A model's states, in its dtype.

    Attributes:
        hidden: [N, hidden], after the final norm; N is smaller than T if only some tokens were wanted.
        aux: [T, A * hidden], the streams before A layers side by side; None if none is wanted.
    """

    hidden: torch.Tensor
    aux: torch.Tensor | None

    @property
    def features(self) -> torch.Tensor:
        """The states that a drafter reads."""
        return self.hidden if self.aux is None else self.aux

    def part(self, tokens: slice | torch.Tensor) -> States:
        """The states of some tokens: a slice, or int64 [n]."""
        return States(self.hidden[tokens], None if self.aux is None else self.aux[tokens])


class DecoderModel:
    """Weights and forward pass of one model. Owns its weights; the KV pool and the attention backend are bound once the
    memory plan is made.

    `forward`, `logits` and `greedy` may be captured in a graph and never synchronise with the device. Run them under
    `torch.inference_mode()`.

    Attributes:
        config: the architecture.
        context: operations, dtype, device, quantisation scheme and parallel group.
        embed: [vocab, hidden] in the model's dtype. Draft heads may share it.
        lm_head: hidden -> vocab, or this rank's rows of it. Draft heads may share it. With tied embeddings and
            unquantised weights its weight is `embed`.
        dtype: that of weights and activations; the residual stream is float32.
        layers: the blocks.
        sparse_mlps: the MLP of each sparse layer; none for a dense model.
        final_norm: the norm before the head.
        attention_specs: the attention of each layer that stores keys and values, for the KV pool and the backend.
        state_specs: the recurrent state of each linear-attention layer, for the state pool; none in most models.
        bounded_head: the LM head with a copy in int8 for `most_likely`; None if every token is scored in 16 bits.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, block: MakeBlock) -> None:
        """`block`: makes a layer of its family from the common prefix of its tensors' names and its number."""
        self.config, self.context, self.dtype = config, context, context.dtype
        self._parts = parts = ModelParts(config, context)
        self.sparse_mlps = parts.sparse_mlps
        embedding = config.weight_prefix + "embed_tokens"
        self.embed = parts.weights.tensor(embedding + ".weight", (config.vocab_size, config.hidden_size))
        self._embed_scale = float(torch.tensor(config.embed_scale, dtype=context.dtype)) / config.residual_scale
        self.layers = [block(parts, f"{config.weight_prefix}layers.{i}.", i) for i in range(config.num_layers)]
        self.final_norm = parts.norm(config.weight_prefix + "norm.weight")
        if config.tie_embeddings:
            self.lm_head = parts.weights.tied_linear(embedding, self.embed)
        else:
            self.lm_head = parts.weights.head(config.head_prefix + "lm_head", config.vocab_size, config.hidden_size)
        self.attention_specs: tuple[AttentionSpec, ...] = attention_specs(self.layers)
        states = (layer.attention.state_spec() for layer in self.layers)
        self.state_specs: tuple[StateSpec, ...] = tuple(state for state in states if state is not None)
        self.bounded_head: BoundedHead | None = None
        self._bound: tuple[KVPool, AttentionBackend, StatePool | None] | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and tables; shared ones count once."""
        return self._parts.weights.num_bytes + self._parts.rope_bytes

    def warmup_runs(self, rows: Iterable[int]) -> list[Callable[[], object]]:
        """Calls that compile the kernels other than GEMMs and the backend's: of one attention layer of each kind and one sparse MLP,
        because layers of a kind use the same kernels.
        """
        kinds = {type(layer.attention): layer.attention for layer in self.layers}
        attention = [run for layer in kinds.values() for run in layer.warmup_runs()]
        return attention + [run for mlp in self.sparse_mlps[:1] for run in mlp.warmup_runs(self.final_norm, rows)]

    @property
    def active_parameters(self) -> int:
        """Number of block weights that each token is multiplied with. Excludes the head, which only some rows need."""
        return sum(layer.attention.active_parameters + layer.mlp.active_parameters for layer in self.layers)

    @property
    def kernel_launches(self) -> int:
        """Kernels of an eager pass, approximately."""
        return sum(layer.kernel_launches for layer in self.layers) + OTHER_LAUNCHES

    def gemms(self) -> Iterator[Gemm]:
        """The GEMMs to autotune, in order."""
        for layer in self.layers:
            yield from layer.gemms()
        yield Gemm("logits", self.lm_head, self.final_norm)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name (Hugging Face's) and unsharded shape of every tensor that `load` requires."""
        return self._parts.weights.expected()

    def load(self, weights: NamedTensors) -> None:
        """Fill the weights. Fuses q/k/v and gate/up, and quantises if asked to, as tensors arrive.

        Args:
            weights: (Hugging Face's name, tensor of any float dtype on any device), in any order, each once.

        Raises:
            ConfigError: tensors are missing, unexpected or have the wrong shape; the message names them.
        """
        skip = ("rotary_emb.inv_freq", "lm_head.weight") if self.config.tie_embeddings else ("rotary_emb.inv_freq",)
        self._parts.weights.load(weights, skip, self.config.unused_weights)
        for layer in self.layers:
            layer.attention.weights_filled()

    def find_bounds(self) -> None:
        """Let `most_likely` rule out most tokens by a copy of the LM head in int8, where that is faster. After `load`."""
        self.bounded_head = self.context.ops.bounded_head(self.lm_head)

    def bind(self, kv_pool: KVPool, backend: AttentionBackend, states: StatePool | None = None) -> None:
        """Give the model its KV pool, its attention backend and, if it has linear attention, its recurrent states."""
        self._bound = kv_pool, backend, states

    def forward(self, batch: ForwardBatch, aux_layers: tuple[int, ...] = (), wanted: torch.Tensor | None = None, first: int = 0) -> States:
        """Run every block over the batch. `plan_pass` has been called for it.

        Args:
            aux_layers: layers whose *input*, the residual stream, is wanted, ascending; `num_layers` means the last
                output.
            wanted: int64 [N], the tokens whose hidden states are returned; the last layer computes only these after attention, and only
                KV if N = 0. None for all tokens.
            first: the first block, which reads the embeddings; above 0 only to time the last blocks.
        """
        assert self._bound is not None, "bind comes before forward"
        kv_pool, backend, states = self._bound
        now = None if states is None else self.context.ops.begin_states(states, batch)
        context = PassContext(batch, kv_pool, backend, now)
        in_prompt = batch.mode is ForwardMode.EXTEND
        stream = self.context.ops.embed(batch.input_ids, self.embed, self.layers[first].attn_norm, self._embed_scale, in_prompt)
        aux = []
        for i, layer in enumerate(self.layers[first:], first):
            if i in aux_layers:
                aux.append(self._state(stream.h))
            last = i + 1 == len(self.layers)
            stream = layer.forward(stream, context, None if last else self.layers[i + 1].attn_norm, wanted=wanted if last else None)
        if len(self.layers) in aux_layers:
            aux.append(self._state(stream.h))
        hidden = self.context.ops.norm(stream.h, self.final_norm, self.dtype)
        return States(hidden, torch.cat(aux, dim=1) if aux else None)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the next token: hidden [N, hidden] after the final norm -> float32 [N, vocab], written to `out`
        where given.
        """
        return self._capped(all_logits(self.context.ops, hidden, self.lm_head, out))

    def greedy(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        agreement: Agreement | None = None,
    ) -> torch.Tensor:
        """The most likely next token, int64 [N]: the argmax of `logits(hidden)`.

        Args:
            tokens: written where given.
            logits: float32 [N, rows of `lm_head` on this rank], written where given.
            agreement: the hash of committed tokens, compared with the other ranks' in the same exchange.
        """
        chosen = greedy(self.context.ops, hidden, self.lm_head, tokens, logits, agreement)
        if logits is not None:
            self._capped(logits)
        return chosen

    def most_likely(self, hidden: torch.Tensor, tokens: torch.Tensor, agreement: Agreement | None) -> None:
        """Write the argmax of `logits(hidden)` to `tokens` int64 [N]. `agreement`: as for `greedy`."""
        if self.bounded_head is None:
            self.greedy(hidden, tokens, None, agreement)
        else:
            greedy_by_copy(self.context.ops, hidden, self.bounded_head, tokens, agreement)

    def _state(self, h: torch.Tensor) -> torch.Tensor:
        """A copy of the stream float32 [T, hidden] in the model's dtype, as drafters read it."""
        scale = self.config.residual_scale
        return h.to(self.dtype, copy=True) if scale == 1.0 else (h * scale).to(self.dtype)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the model's factor and soft cap, if it has them, to float32 logits in place; their order does not change."""
        cap, scale = self.config.final_softcap, self.config.logit_scale
        logits = logits if scale == 1.0 else logits.mul_(scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
