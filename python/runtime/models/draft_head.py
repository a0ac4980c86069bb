"""What EAGLE draft heads have in common: their contract, their blocks and their vocabulary map."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Int8Linear, Linear
from runtime.layers.ops import BlockOps, HeadLayout, RMSNorm, Stream
from runtime.mem_cache.kv_pool import KVPool
from runtime.models.attention_specs import attention_specs
from runtime.models.config import ModelConfig
from runtime.models.rotary import build_rope
from runtime.models.weights import WeightTable

ID_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""In which a token map may be written."""


class DraftModel(Protocol):
    """What the speculative worker knows of a draft head. Methods on the decode path may be captured and never read from the device.

    Attributes:
        lookahead: 1 for a head that reads, beside the hidden state at a position, the token after it; 0 for a model that reads the
            token itself.
        config: the head's decoder: KV layers, heads and head size are the draft pool's.
        aux_layers: target layers whose input stream is wanted; () where the target's last hidden state is.
        input_width: width of the target's hidden state that draft-extend is fed.
        hidden_width, hidden_dtype: of the state that `forward` returns and the next draft step is fed.
        vocab_size: Vd, the ids of `logits`.
        to_target: int64 [Vd], the target's id of each draft id; None when they are one vocabulary.
        to_draft: int64 [V], the inverse, -1 where there is none; None as above.
    """

    lookahead: int
    config: ModelConfig
    aux_layers: tuple[int, ...]
    input_width: int
    hidden_width: int
    hidden_dtype: torch.dtype
    vocab_size: int
    to_target: torch.Tensor | None
    to_draft: torch.Tensor | None

    def forward(self, batch: ForwardBatch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Run the head. `batch.input_ids[t]` is the token after the one that `batch.hidden_states[t]` belongs to.

        `hidden_states` has `input_width` columns when it comes from the target, `hidden_width` when it is the head's own; any float dtype.

        Args:
            wanted: int64 [N], tokens whose states alone are returned; KV is written for all of them, and what lies behind the last
                attention is left out for the others.

        Returns:
            [T, hidden_width], or [N, hidden_width], in `hidden_dtype`, for `logits`, `greedy` and the next step. Not in the storage of
            `hidden_states`.
        """
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the token after next: [N, hidden_width] -> float32 [N, Vd], written to `out` where given."""
        ...

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The draft id of the likeliest token after next, int64 [N]: the argmax of `logits(hidden)`, of equal entries the first."""
        ...

    def map_to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids, int64 of any shape."""
        ...

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` cannot do without."""
        ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the weights. Raises `ConfigError` naming what is missing, unexpected or misshapen."""
        ...

    def bind(self, kv_pool: KVPool, backend: AttentionBackend) -> None:
        """Give the head its KV pool and attention, once."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the head's own weights and tables; what it shares with the target is not counted."""
        ...


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """The weights of one block of a draft head; what comes before its attention is the head's own affair."""

    qkv_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o_proj: Linear
    mlp_norm: RMSNorm
    gate_up_proj: Linear
    down_proj: Linear


class DraftBody:
    """The blocks of a draft head. Owner of their weights; the KV pool and the backend are bound once, after the memory plan."""

    def __init__(self, config: ModelConfig, ops: BlockOps, dtype: torch.dtype, device: torch.device, linear: type[Linear]) -> None:
        self.config = config
        self.ops = ops
        self.dtype = dtype
        self.weights = WeightTable(dtype, device, linear)
        self.rope = build_rope(config, device)
        self._layout = HeadLayout(config.num_q_heads, config.num_kv_heads, config.head_dim)
        self._specs = attention_specs(config, dtype)
        self._pool: KVPool | None = None
        self._attention: AttentionBackend | None = None

    def bind(self, kv_pool: KVPool, backend: AttentionBackend) -> None:
        """Give the blocks their KV pool and attention, once."""
        self._pool = kv_pool
        self._attention = backend

    def norm(self, name: str) -> RMSNorm:
        """A norm over the hidden size, filled by tensor `name`."""
        return RMSNorm(self.weights.tensor(name, (self.config.hidden_size,)), self.config.rms_eps)

    def layer(self, prefix: str, attention_in: int) -> DraftLayer:
        """The block of tensors `prefix`*, whose attention reads rows of `attention_in`."""
        c, weights = self.config, self.weights
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        q_rows, kv_rows = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        head_norm = [RMSNorm(weights.tensor(f"{attn}{n}_norm.weight", (c.head_dim,)), c.rms_eps) if c.qk_norm else None for n in "qk"]
        return DraftLayer(
            qkv_proj=weights.linear(
                {attn + "q_proj": q_rows, attn + "k_proj": kv_rows, attn + "v_proj": kv_rows}, attention_in, c.qkv_bias
            ),
            q_norm=head_norm[0],
            k_norm=head_norm[1],
            o_proj=weights.linear({attn + "o_proj": c.hidden_size}, q_rows, c.o_bias),
            mlp_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            gate_up_proj=weights.linear(
                {mlp + "gate_proj": c.intermediate_size, mlp + "up_proj": c.intermediate_size}, c.hidden_size, c.mlp_bias
            ),
            down_proj=weights.linear({mlp + "down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
        )

    def run(
        self, layer: DraftLayer, layer_id: int, qkv: torch.Tensor, stream: Stream, batch: ForwardBatch, wanted: torch.Tensor | None = None
    ) -> Stream:
        """The rest of a block, from its qkv rows on: the stream in and out, perhaps in the same storage; out for rows `wanted` alone."""
        assert self._pool is not None, "bind comes before forward"
        assert self._attention is not None, "bind comes before forward"
        ops = self.ops
        k_cache, v_cache = self._pool.flat(layer_id)
        q = ops.rope_and_cache(
            qkv, self._layout, self.rope, layer.q_norm, layer.k_norm, batch.positions, batch.out_cache_loc, k_cache, v_cache
        )
        mixed = self._attention.forward(q, self._specs[layer_id], batch)
        if wanted is not None:
            mixed, stream = mixed[wanted], Stream(stream.h[wanted])
        stream = ops.linear_add(mixed, layer.o_proj, stream, layer.mlp_norm)
        return ops.linear_add(ops.norm_gate_up(stream, layer.mlp_norm, layer.gate_up_proj), layer.down_proj, stream)


class Extras:
    """The tensors of a checkpoint that are not always there, set aside while the rest is loaded."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self.found: dict[str, torch.Tensor] = {}

    def split(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """All other tensors, under names without the `model.` that some checkpoints write."""
        for name, tensor in weights:
            name = name.removeprefix("model.")
            if name in self._names:
                self.found[name] = tensor
            else:
                yield name, tensor

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The tensor, or None; `ConfigError` where it has another shape."""
        tensor = self.found.get(name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ConfigError(f"tensor {name} has shape {list(tensor.shape)}; {list(shape)} was expected")
        return tensor


def own_or_shared(own: torch.Tensor | None, shared: torch.Tensor) -> torch.Tensor:
    """The head's own matrix in the dtype and on the device of the target's, or the target's where there is none or they are equal."""
    if own is None:
        return shared
    own = own.to(shared.device, shared.dtype)
    # Heads are trained on the target's frozen embedding, and often carry a copy: a gigabyte that need not be there twice.
    return shared if own.shape == shared.shape and torch.equal(own, shared) else own


def take_rows(linear: Linear, ids: torch.Tensor) -> Linear:
    """The outputs `ids` int64 [n] of a layer, as a layer of its own."""
    bias = None if linear.bias is None else linear.bias[ids]
    if isinstance(linear, Int8Linear):
        return Int8Linear(linear.weight[ids], linear.scale[ids], bias)
    return Linear(linear.weight[ids], bias)


def invert(to_target: torch.Tensor, vocab_size: int, name: str) -> torch.Tensor:
    """`to_draft` int64 [vocab_size] of a `to_target` int64 [Vd]: -1 where there is no draft id. At load time only.

    Raises:
        ConfigError: an id is outside the vocabulary or comes twice; `name` says in what.
    """
    ids = to_target.cpu()
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ConfigError(f"{name} names token ids outside 0..{vocab_size - 1}, or none")
    if len(ids.unique()) != len(ids):
        raise ConfigError(f"{name} names some token ids twice")
    to_draft = torch.full((vocab_size,), -1, dtype=torch.int64)
    to_draft[ids] = torch.arange(len(ids))
    return to_draft.to(to_target.device)


def load_token_map(path: str | Path) -> torch.Tensor:
    """The hot tokens of a `--speculative-token-map` file: int64 [n] target ids, saved by `torch.save`.

    Raises:
        ConfigError: the file is missing or holds something else.
    """
    flag = f"--speculative-token-map {str(path)!r}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about formats of its own
            ids = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{flag} cannot be read: {error.strerror or type(error).__name__}") from error
    except Exception as error:  # torch raises whatever the bytes lead it to, and advises to run the code in them
        raise ConfigError(f"{flag} holds no tensor or list that torch.save wrote; save the ids with it again") from error
    if isinstance(ids, list) and all(type(i) is int and abs(i) < 1 << 63 for i in ids):
        ids = torch.tensor(ids, dtype=torch.int64)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or ids.dtype not in ID_TYPES or ids.layout != torch.strided or ids.is_meta:
        raise ConfigError(f"{flag} must hold one list of token ids")
    return ids.to(torch.int64)
