"""Maps parts of checkpoint tensors to a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from runtime.distributed.parallel_group import WHOLE, ParallelGroup, Shard
from runtime.errors import ConfigError
from runtime.layers.linear import Linear, Partition
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.scheme import LinearPart, NewWeight, QuantScheme, WeightSlot, ignore
from runtime.models.checkpoint_parts import Part, Sliceable, Staging, in_memory, parts_of, store_part
from runtime.models.context import ModelContext
from runtime.models.misfit import cure, wrong_shape
from runtime.models.packed_layer import Packable, PackedLayer
from runtime.models.parallel_store import store_in_threads

UNUSED_SCALES = (".input_scale", ".output_scale", "activation_scale", ".k_scale", ".v_scale", ".kv_scale")
"""Suffixes of activation and KV scales in quantised checkpoints. They are not read here: activations stay in 16 bits."""
REPEATED = (".weight_shape",)
"""Suffixes of tensors of compressed-tensors checkpoints with the shapes that config.json tells."""
SHOWN = 8
"""How many names an error lists; it only counts the others."""
SMALL_MODEL = 16 << 20
"""Bytes of parameters below which starting threads takes longer than they save."""


NamedTensors = Iterable[tuple[str, Sliceable]]


class LayerRows(NamedTuple):
    """Some output rows of a layer of the checkpoint: its name, without `.weight`, all of its rows, and which of them."""

    layer: str
    total: int
    rows: slice


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor that holds several of the tensors that a model expects, fused, in some checkpoints.

    Attributes:
        shapes: the shapes that it may have.
        parts: returns the name and a view of each tensor that it holds.
    """

    shapes: Sequence[tuple[int, ...]]
    parts: Callable[[Sliceable], NamedTensors]


class WeightTable:
    """Allocates this rank's part of a model's parameters and remembers which checkpoint tensors fill them."""

    def __init__(self, context: ModelContext) -> None:
        self.context, self.dtype, self.device, self.group = context, context.dtype, context.device, context.group
        self._head_group, self._quant = context.head_group or context.group, context.quant
        self._slots: dict[str, list[WeightSlot]] = {}
        self._optional: dict[str, list[WeightSlot]] = {}
        self._fused: dict[str, FusedTensor] = {}
        self._renamed: dict[str, str] = {}
        self._packable: dict[str, Packable] = {}
        self._tensors: list[torch.Tensor] = []

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name and unsharded shape of every tensor that the checkpoint must hold."""
        return {name: slots[0].shape for name, slots in self._slots.items()}

    def scheme_of(self, layers: Iterable[str]) -> QuantScheme:
        """The scheme of a layer that fuses the checkpoint's layers of these names.

        Raises:
            ConfigError: some of them are quantised and some are not.
        """
        if self._quant is None:
            return self.context.scheme
        kept = [name for name in layers if self._quant.keeps(name)]
        mixed = [name for name in layers if name not in kept]
        if kept and mixed:
            raise ConfigError(f"quantization_config keeps {kept[0]} in 16 bits and quantizes {mixed[0]}; layers that are fused must agree")
        return DENSE if kept else self.context.scheme

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, rows: slice | None = None, offset: float = 0.0
    ) -> torch.Tensor:
        """A parameter filled by one tensor, of which every rank holds all or `rows`; in `dtype`, by default the model's.

        `offset` is added to its values in float32, before they are rounded to that dtype.
        """
        rows = rows or slice(0, shape[0])
        target = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=dtype or self.dtype, device=self.device)
        self._tensors.append(target)
        put = (lambda values: target.copy_(values.float() + offset)) if offset else target.copy_
        self.add(name, WeightSlot(shape, (rows,), put))
        return target

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count, in `num_bytes`, tensors that the caller allocated for `add`."""
        self._tensors += tensors

    def add(self, name: str, slot: WeightSlot) -> None:
        """Let `slot` store tensor `name` of the checkpoint, or the slot's part of it; an optional slot's tensor may be missing."""
        slots = self._optional if slot.optional else self._slots
        slots.setdefault(name, []).append(slot)

    def add_bias(self, part: LinearPart, bias: torch.Tensor | None) -> None:
        """Let `bias` [rows of the layer] store the bias of `part`; None if only another rank reads it."""
        index, put = ((slice(0, 0),), ignore) if bias is None else (part.index[:1], bias[part.rows].copy_)
        self.add(part.prefix + ".bias", WeightSlot(part.shape[:1], index, put))

    def also(self, name: str, fused: FusedTensor) -> None:
        """Accept tensor `name` in place of the tensors that it fuses."""
        self._fused[name] = fused

    def may_be_packed(self, layer: str, target: Packable) -> None:
        """Accept the int4 tensors of `layer` in place of its weight, if the checkpoint is in such a format."""
        self._packable[layer] = target

    def rename(self, part: str, to: str) -> None:
        """Take tensors with `part` in their names for those with `to` there."""
        self._renamed[part] = to

    def linear(
        self,
        parts: Mapping[str, int],
        in_features: int,
        bias: bool = False,
        partition: Partition = Partition.REPLICATED,
        shards: Sequence[Shard] | None = None,
        group: ParallelGroup | None = None,
        scheme: QuantScheme | None = None,
        stored: str | None = None,
    ) -> Linear:
        """A linear layer that concatenates several parts along their output rows.

        Args:
            parts: name, without `.weight` or `.bias`, and unsharded number of output rows of each part.
            in_features: unsharded number of input columns of each part.
            bias: whether the parts have biases.
            partition: how the layer is sharded over the group's ranks.
            shards: this rank's rows of each part if `partition` is COLUMN; one entry, its columns of all parts, if it is
                ROW; equal shares by default.
            group: the ranks that share the layer; the model's by default.
            scheme: how the layer is stored; by default as the checkpoint stores its parts.
            stored: name of the checkpoint's layer that holds all parts; by default each part is a layer there.
        """
        group = group or self.group
        own = Shard(group.rank, group.size)
        rows = (shards or [own] * len(parts)) if partition is Partition.COLUMN else [WHOLE] * len(parts)
        columns = ((shards or [own])[0] if partition is Partition.ROW else WHOLE).of(in_features)
        total, first, start = sum(parts.values()), 0, 0
        pieces = list[LinearPart]()
        for (name, count), shard in zip(parts.items(), rows, strict=True):
            own = shard.of(count)
            if stored is None:
                piece = LinearPart(name, (count, in_features), (own, columns), start)
            else:
                piece = LinearPart(stored, (total, in_features), (slice(first + own.start, first + own.stop), columns), start)
            pieces.append(piece)
            first, start = first + count, piece.rows.stop
        return self._assembled(pieces, bias, partition, group, scheme, total)

    def rows_of(self, pieces: Sequence[LayerRows], in_features: int, bias: bool = False, keep: bool = False) -> Linear:
        """A linear layer of some rows of the checkpoint's layers, in this order: this rank's rows of a layer that is sharded by columns.

        `keep`: whether the layer stays in 16 bits unless the checkpoint has it in FP8; one in int4 is dequantised.
        """
        parts, start = list[LinearPart](), 0
        for layer, total, rows in pieces:
            parts.append(LinearPart(layer, (total, in_features), (rows, slice(0, in_features)), start))
            start = parts[-1].rows.stop
        in_fp8 = self._quant is not None and self._quant.stored and self._quant.int4 is None
        scheme = DENSE if keep and not in_fp8 else None
        linear = self._assembled(parts, bias, Partition.COLUMN, self.group, scheme, start * self.group.size)
        if scheme is not None:
            for name, shape in {part.prefix: part.shape for part in parts}.items():
                own = [part for part in parts if part.prefix == name]
                self.may_be_packed(name, Packable(shape, partial(_put_rows, linear.weight, own)))
        return linear

    def _assembled(
        self,
        pieces: Sequence[LinearPart],
        bias: bool,
        partition: Partition,
        group: ParallelGroup,
        scheme: QuantScheme | None,
        total: int,
    ) -> Linear:
        """The layer of these pieces, one below the other. `total`: its rows on all ranks."""
        start, columns, in_features = pieces[-1].rows.stop, pieces[0].index[1], pieces[0].shape[1]
        scheme = scheme or self.scheme_of(dict.fromkeys(piece.prefix for piece in pieces))
        storage = scheme.allocate(NewWeight(start, columns.stop - columns.start, self.dtype, self.device, parts=pieces))
        if storage.order is not None and storage.order.shared and columns != Shard(group.rank, group.size).of(in_features):
            raise ConfigError(
                f"{pieces[0].prefix} is in activation order, so ranks must have equally many of its columns, but --tp-size {group.size} "
                "does not divide them evenly. Use another --tp-size, or a checkpoint that was quantized with desc_act false."
            )
        fused_bias = self._bias(pieces, start, partition) if bias else None
        layer = Linear(storage, fused_bias, scheme, partition, group, total)
        for piece in pieces:
            for name, slot in scheme.places(piece, storage).items():
                self.add(name, slot)
        self._tensors += layer.tensors
        return layer

    def head(self, name: str, vocab: int, hidden: int) -> Linear:
        """The LM head `name` [vocab, hidden]: this rank's rows of it."""
        scheme = self.scheme_of([name]).heads(self.device)
        return self.linear({name: vocab}, hidden, partition=Partition.COLUMN, group=self._head_group, scheme=scheme)

    def tied_linear(self, name: str, embed: torch.Tensor) -> Linear:
        """The LM head of a model that ties it to its embedding `name` [vocab, hidden]: this rank's rows of the same
        tensor, or a quantised copy of them.
        """
        if self.scheme_of([name]).heads(self.device).gemm_format == "dense":
            return Linear.sharded(embed, self._head_group)
        layer = self.head(name, *embed.shape)
        slot = self._slots[name + ".weight"].pop()
        self.add(name + ".weight", replace(slot, put=lambda rows: slot.put(rows.to(self.dtype))))  # as the embedding holds them
        return layer

    def load(self, weights: NamedTensors, skip: tuple[str, ...] = (), unused: tuple[str, ...] = ()) -> None:
        """Fill every parameter; on the meta device, store nothing, and read only what slots with `in_check` do.

        Args:
            weights: (name, tensor) in any order; only this rank's part of each tensor is read.
            skip: suffixes of tensors that the checkpoint may hold and the model does not use.
            unused: prefixes of such tensors.

        Raises:
            ConfigError: tensors are missing, unexpected or of a wrong shape or dtype; or they hold NaN; or scales, or weights
                quantised as they are loaded, hold infinity.
        """
        missing, unexpected, packed = set(self._slots), [], dict[str, PackedLayer]()
        skip += UNUSED_SCALES + REPEATED

        def parts() -> Iterator[Part]:
            for name, tensor in self._single(weights):
                if slots := self._slots.get(name) or self._optional.get(name) or self._packed_slots(name, packed):
                    missing.discard(name)
                    yield from parts_of(name, tensor, slots)
                elif not name.endswith(skip) and not name.startswith(unused) and 0 not in tensor.shape:  # an empty one holds no weights
                    unexpected.append(name)

        if self.device.type == "meta":  # stores nothing: a comparison of names, shapes and dtypes
            for part in parts():
                if part.slot.in_check and part.values.nbytes:
                    store_part(part, in_memory(part.values))
        else:
            # For a GPU the host only copies parts. On a CPU the last threads, with large tensors, may use the cores of the others.
            threads = 1 if self.num_bytes < SMALL_MODEL else None
            store_in_threads(Staging(self.device).stores(parts()), threads, one_core_each=self.device.type == "cuda")
        unexpected += [name for layer, stored in packed.items() if layer + ".weight" not in missing for name in stored.given]
        packed = {layer: stored for layer, stored in packed.items() if layer + ".weight" in missing}
        missing -= {layer + ".weight" for layer in packed}
        missing |= {name for stored in packed.values() for name in stored.missing}
        problems = [f"{what} {_listed(names)}" for what, names in (("lacks", missing), ("has unexpected", unexpected)) if names]
        if problems:
            advice = cure(missing, unexpected, self._quant is not None)
            raise ConfigError(f"the checkpoint does not fit its config.json: it {' and '.join(problems)}. {advice}")
        for stored in packed.values() if self.device.type != "meta" else ():
            stored.fill()

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters; a shared storage counts once."""
        return sum({t.data_ptr(): t.nbytes for t in self._tensors}.values())

    def _bias(self, pieces: Sequence[LinearPart], rows: int, partition: Partition) -> torch.Tensor | None:
        """The fused bias. With row partition only rank 0 adds it, since outputs are summed over ranks."""
        adds = partition is not Partition.ROW or self.group.rank == 0
        bias = torch.empty(rows, dtype=self.dtype, device=self.device) if adds else None
        for piece in pieces:
            self.add_bias(piece, bias)
        return bias

    def _packed_slots(self, name: str, packed: dict[str, PackedLayer]) -> list[WeightSlot]:
        """The slots of a tensor of a layer that may be packed; the layer is added to `packed` with its first tensor."""
        layer = name.rpartition(".")[0]
        if layer not in self._packable or self._quant is None or self._quant.int4 is None:
            return []
        if layer not in packed:
            packed[layer] = PackedLayer(layer, self._packable[layer], self._quant.int4, self.dtype, self.device)
        return packed[layer].take(name)

    def _single(self, weights: NamedTensors) -> NamedTensors:
        """The tensors, renamed as their slots, with fused tensors replaced by their parts."""
        for stored, tensor in weights:
            name = self._slot_name(stored)
            fused = self._fused.get(name)
            if fused is None:
                yield name, tensor
                continue
            if tuple(tensor.shape) not in fused.shapes:
                raise wrong_shape(name, tensor.shape, fused.shapes[0])
            yield from fused.parts(tensor)

    def _slot_name(self, name: str) -> str:
        """The model's name of a tensor of the checkpoint."""
        for part, to in self._renamed.items():
            name = name.replace(part, to)
        if self._quant is None or not self._quant.other_scale_name or not name.endswith("." + self._quant.other_scale_name):
            return name
        return name.removesuffix(self._quant.other_scale_name) + self._quant.scale_name


def _put_rows(target: torch.Tensor, parts: Sequence[LinearPart], weight: torch.Tensor) -> None:
    """Store these parts of a layer's weight in the fused one."""
    for part in parts:
        target[part.rows].copy_(weight[part.index])


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more
