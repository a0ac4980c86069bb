"""The interface of draft models, and the base class of draft heads, which share parts of their target."""

from __future__ import annotations

from typing import Protocol

import torch

from runtime.distributed.parallel_group import ParallelGroup
from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend, AttentionSpec
from runtime.layers.candidate_head import CandidateHead
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.layers.lm_head import all_logits, greedy, greedy_by_copy
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, Stream
from runtime.layers.pass_context import PassContext
from runtime.mem_cache.kv_pool import KVPool
from runtime.mem_cache.state_pool import StatePool, StateSpec
from runtime.models.block import Block
from runtime.models.checkpoint_parts import in_memory
from runtime.models.config import ModelConfig
from runtime.models.context import ModelContext
from runtime.models.decoder import OTHER_LAUNCHES, DecoderModel
from runtime.models.parts import ModelParts
from runtime.models.token_map import ID_TYPES, invert
from runtime.models.weights import NamedTensors


class DraftModel(Protocol):
    """The interface through which a drafter uses its draft model. Methods on the decode path may be captured in a graph
    and never synchronise with the device.

    Attributes:
        lookahead: 1 for a head, which reads the hidden state at a position and the token after it; 0 for a standalone model, which reads
            the token at the position.
        config: the draft's decoder.
        attention_specs: its attention layers, for the draft's KV pool and backend.
        state_specs: none, because a draft cannot have recurrent states.
        aux_layers: target layers whose input stream the draft reads; () if it reads the target's last hidden state.
        feature_width: width of the target's states that draft-extend reads; 0 for a standalone model.
        hidden_width, hidden_dtype: of the state that `forward` returns and the next draft step reads.
        vocab_size: Vd, the number of ids that `logits` scores.
        to_target: int64 [Vd], the target's id of each draft id; None when they share one vocabulary.
        to_draft: int64 [V], the inverse, -1 for tokens without a draft id; None when they share one vocabulary.
    """

    lookahead: int = 1
    config: ModelConfig
    attention_specs: tuple[AttentionSpec, ...]
    state_specs: tuple[StateSpec, ...] = ()
    aux_layers: tuple[int, ...] = ()
    feature_width: int
    hidden_width: int
    hidden_dtype: torch.dtype
    vocab_size: int
    to_target: torch.Tensor | None = None
    to_draft: torch.Tensor | None = None

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Run the draft. For a head, `batch.hidden_states[t]` belongs to the position of the token before `batch.input_ids[t]`: it has
        `feature_width` columns from the target or `hidden_width` of the draft itself, in any float dtype. A standalone model reads none.

        Args:
            wanted: int64 [N], the tokens whose states are returned. KV is written for all tokens, but everything after
                the last attention is computed for these only; if N = 0, the last attention itself is left out.

        Returns:
            [T, hidden_width], or [N, hidden_width], in `hidden_dtype`, for `logits`, `greedy` and the next step. Not in
            the storage of `hidden_states`.
        """
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the token after the last one that was read: [N, hidden_width] -> float32 [N, Vd], written to `out` where given."""
        ...

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The draft id of the most likely token, int64 [N]: the argmax of `logits(hidden)`, the first of equal entries; nearly always for
        a head with candidates.
        """
        ...

    def map_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids, int64 of any shape."""
        ...

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` requires."""
        ...

    def load(self, weights: NamedTensors) -> None:
        """Fill the weights. Raises `ConfigError` that names the tensors that are missing, unexpected or of a wrong shape."""
        ...

    def bind(self, kv_pool: KVPool, backend: AttentionBackend, states: StatePool | None = None) -> None:
        """Give the draft its KV pool and attention backend. `states`: None, as a draft has no recurrent states."""
        ...

    @property
    def kernel_launches(self) -> int:
        """Kernels of an eager pass, approximately."""
        ...


class DraftHead:
    """A draft that uses its target's operations, dtype and device, and its embedding and LM head unless the draft has its own.
    Its weights are quantised as its own config says, or like its target's LM head if that is in int8, unless another context is given.

    Attributes:
        config: the draft's decoder.
        parts: makes the head's own parts.
        ops, dtype, group: the target's.
        layers: the blocks.
        embed, lm_head: the head's own, or the target's.
        head_norm: the norm before the LM head; None if `forward` has applied it, or there is none.
        vocab_size, to_target, to_draft: as in `DraftModel`.
        has_map: whether its checkpoint must have `d2t`, because its vocabulary is a part of the target's.
        candidate_head: the LM head with a copy in 8 bits for `greedy`; None if every token is scored in 16.
    """

    layers: list[Block]
    state_specs: tuple[StateSpec, ...] = ()
    head_norm: RMSNorm | None = None
    to_target: torch.Tensor | None = None
    to_draft: torch.Tensor | None = None
    candidate_head: CandidateHead | None = None

    def __init__(
        self, config: ModelConfig, target: DecoderModel, context: ModelContext | None = None, group: ParallelGroup | None = None
    ) -> None:
        """`group`: the ranks that share the head's blocks; by default those that share its target's."""
        self.config, self.vocab_size = config, config.draft_vocab_size or config.vocab_size
        self.has_map = self.vocab_size != config.vocab_size
        self.parts = ModelParts(config, (context or target.context.for_draft(config.quant)).with_blocks_of(group))
        self.ops: BlockOps = target.context.ops
        self.dtype = target.dtype
        self.group = target.context.group
        self.embed, self.lm_head = target.embed, target.lm_head
        self._target = target
        self._bound: tuple[KVPool, AttentionBackend] | None = None

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` requires."""
        return self.parts.weights.expected() | ({"d2t": (self.vocab_size,)} if self.has_map else {})

    def bind(self, kv_pool: KVPool, backend: AttentionBackend, states: StatePool | None = None) -> None:
        """Give the blocks their KV pool and attention backend. `states`: None, as a draft has no recurrent states."""
        self._bound = kv_pool, backend

    def context(self, batch: ForwardBatch) -> PassContext:
        """The context of one pass."""
        assert self._bound is not None, "bind comes before forward"
        return PassContext(batch, *self._bound)

    def run_layers(self, rows: torch.Tensor, stream: Stream, batch: ForwardBatch, wanted: torch.Tensor | None) -> torch.Tensor:
        """The residual stream after all layers, float32 [T, hidden], or [N, hidden] with `wanted`; the first attention reads `rows`."""
        context, last = self.context(batch), len(self.layers) - 1
        for i, layer in enumerate(self.layers):  # all layers but the last must output every token
            stream = layer.forward(stream, context, rows=rows if i == 0 else None, wanted=wanted if i == last else None)
        return stream.h

    def keep_tokens(self, to_target: torch.Tensor | None, name: str = "--speculative-token-map") -> None:
        """Let the head propose only these target ids, int64 [Vd]; None for all.

        Raises:
            ConfigError: they do not fit the vocabulary; the message calls them `name`.
        """
        if to_target is not None:
            self.to_target, self.vocab_size = to_target.to(self.embed.device), len(to_target)
            self.to_draft = invert(to_target, self.config.vocab_size, name).to(self.embed.device)

    def load_map(self, optional: OptionalTensors) -> None:
        """Read `d2t` int64 [Vd], which holds what is added to a draft id to get the target's; its inverse `t2d` is not read."""
        offsets = optional.take("d2t", (self.vocab_size,))
        if offsets is not None:
            if offsets.dtype not in ID_TYPES:
                raise ConfigError(f"tensor d2t has dtype {offsets.dtype}; the model expects integers")
            self.keep_tokens(offsets.to(torch.int64) + torch.arange(self.vocab_size, device=offsets.device), "d2t of the draft checkpoint")
        elif self.has_map:
            raise ConfigError(f"the draft checkpoint lacks d2t, and its vocabulary of {self.vocab_size} is not the target's")

    def map_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids, int64 of any shape."""
        return ids if self.to_target is None else self.to_target[ids]

    def kept_rows(self, head: Linear) -> Linear:
        """The rows of an LM head that score the tokens of `keep_tokens`: a copy, or `head` itself for all tokens."""
        return head if self.to_target is None else head.select_rows(self.to_target)

    def own_head(self, own: torch.Tensor | None) -> Linear:
        """A checkpoint's own LM head, or the target's if there is none or they are equal."""
        shared = self._target.lm_head
        if own is None:
            return shared
        if not shared.is_dense:  # the unquantised head to compare with is gone
            return Linear.sharded(own.to(shared.weight.device, self.dtype), self.group)
        part = own[shared.own_rows].clone() if shared.is_sharded else own
        weight = shared_if_equal(part, shared.weight)
        return shared if weight is shared.weight else shared.with_weight(weight)

    def find_candidates(self) -> None:
        """Let `greedy` rule out most tokens by an 8-bit copy of the LM head, where that is faster. After `load`."""
        self.candidate_head = self.ops.candidate_head(self.lm_head)

    @property
    def kernel_launches(self) -> int:
        """Kernels of an eager pass, approximately."""
        return sum(layer.kernel_launches for layer in self.layers) + OTHER_LAUNCHES

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the next token: [N, hidden] of `forward` -> float32 [N, Vd], written to `out` where given."""
        return all_logits(self.ops, self._normed(hidden), self.lm_head, out)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The draft id of the most likely token, int64 [N]: the argmax of `logits(hidden)`, with a `candidate_head` nearly always."""
        if self.candidate_head is not None:
            return greedy_by_copy(self.ops, self._normed(hidden), self.candidate_head)
        return greedy(self.ops, self._normed(hidden), self.lm_head)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.to(self.dtype) if self.head_norm is None else self.ops.norm(hidden.float(), self.head_norm, self.dtype)


class OptionalTensors:
    """Collects the optional tensors of a checkpoint while the others are loaded."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._found: dict[str, torch.Tensor] = {}

    def split(self, weights: NamedTensors) -> NamedTensors:
        """All other tensors; strips the prefix `model.` that some checkpoints add to names."""
        for name, tensor in weights:
            name = name.removeprefix("model.")
            if name in self._names:
                self._found[name] = in_memory(tensor[()])
            else:
                yield name, tensor

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The tensor, or None. Raises `ConfigError` if its shape is not `shape`."""
        tensor = self._found.get(name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ConfigError(f"tensor {name} has shape {list(tensor.shape)}; {list(shape)} was expected")
        return tensor


def shared_if_equal(own: torch.Tensor | None, shared: torch.Tensor) -> torch.Tensor:
    """The head's own matrix, converted to the dtype and device of the target's; the target's if there is none or they
    are equal, or cannot be compared because they are on the meta device.
    """
    if own is None or shared.is_meta:
        return shared
    own = own.to(shared.device, shared.dtype)
    # Heads are trained with the target's embedding frozen and often ship a copy of it, up to a gigabyte.
    return shared if own.shape == shared.shape and torch.equal(own, shared) else own
