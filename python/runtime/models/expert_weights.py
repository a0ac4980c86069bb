"""Maps checkpoint tensors, one per expert or fused, to the stacked weights of a layer's experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from runtime.config.quant_config import BLOCK
from runtime.distributed.parallel_group import Shard
from runtime.layers.moe.experts import Experts
from runtime.layers.quantization.fp8 import BlockFp8, RowFp8
from runtime.layers.quantization.mxfp4 import GROUP, Mxfp4
from runtime.layers.quantization.scheme import LinearPart, NewWeight, WeightSlot, ignore
from runtime.models.checkpoint_parts import Sliceable
from runtime.models.sharing import expert_unit
from runtime.models.weights import FusedTensor, NamedTensors, WeightTable


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family names the tensors of a layer's experts.

    Attributes:
        prefix: common prefix, such as `model.layers.0.mlp.experts.`; an expert's number follows.
        gate, up, down: the projections of one expert.
        interleaved: fused gate and up rows alternate, instead of all of the gate before all of the up projection.
        transposed: fused matrices are [in, out].
    """

    prefix: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """What one rank holds of a layer's experts.

    Attributes:
        total: number of experts in the layer.
        held: the experts that this rank holds.
        shard: the part that it holds of each of them, along the intermediate size.
    """

    total: int
    held: range
    shard: Shard

    @classmethod
    def of(cls, total: int, rank: int, ranks: int, ep_size: int = 1) -> ExpertPlacement:
        """The placement on `rank`: `ep_size` equal groups of consecutive ranks hold the experts, and each group shards its own evenly."""
        sharing, each = ranks // ep_size, total // ep_size
        first = rank // sharing * each
        return cls(total, range(first, first + each), Shard(rank % sharing, sharing))


@dataclass(frozen=True, slots=True)
class FusedForm:
    """One format of fused tensors.

    Attributes:
        suffix: suffix of its name.
        kind: suffix of the names of the per-expert tensors that it replaces.
        trailing: its dimensions after the rows, as a function of the matrix' columns.
        transposed: whether the rows are the last dimension.
        block: rows of the matrix that one of its rows covers.
    """

    suffix: str
    kind: str
    trailing: Callable[[int], tuple[int, ...]]
    transposed: bool = False
    block: int = 1


GATE_UP_FUSED, DOWN_FUSED = "gate_up_proj", "down_proj"
"""Fused tensors [E, ...] that some checkpoints hold instead of one per expert, without `.weight`."""
FUSED_SCALES = "_scale_inv"
"""Suffix of the fused scales that transformers writes, even where the matrices are not fused."""
MXFP4_FORMS = (
    FusedForm("_blocks", "weight_blocks", lambda columns: (columns // GROUP, GROUP // 2)),
    FusedForm("_scales", "weight_scales", lambda columns: (columns // GROUP,)),
)


def stacked_weights(
    table: WeightTable,
    names: ExpertNames,
    placement: ExpertPlacement,
    hidden: int,
    inner: int,
    bias: bool = False,
    shared: str | None = None,
) -> Experts:
    """Allocate this rank's part of a layer's experts, with SiLU, and register the tensors that fill it.

    Args:
        shared: prefix of a shared expert's tensors, which becomes the last expert of the stack.

    Raises:
        ConfigError: an expert cannot be sharded over the ranks.
    """
    held = placement.held
    prefixes = [f"{names.prefix}{expert}." for expert in range(placement.total)]
    if shared is not None:
        assert len(held) == placement.total, "the shared expert follows all of the routed ones"
        prefixes, held = [*prefixes, shared], range(placement.total + 1)
    scheme = table.scheme_of([prefix + part for prefix in prefixes for part in (names.gate, names.up, names.down)])
    shard = placement.shard
    unit = expert_unit(inner, shard.count, scheme.name, scheme.shared_columns())
    cut = replace(shard, unit=unit).of(inner)
    width, count = cut.stop - cut.start, len(held)
    of_expert = [_parts_of(names, prefix, hidden, inner, cut) for prefix in prefixes]
    gate_up = scheme.allocate(NewWeight(2 * width, hidden, table.dtype, table.device, count, of_expert[0][:2]))
    down = scheme.allocate(NewWeight(hidden, width, table.dtype, table.device, count, of_expert[0][2:]))
    gate_up_bias = torch.empty((count, 2 * width), dtype=table.dtype, device=table.device) if bias else None
    down_bias = torch.empty((count, hidden), dtype=table.dtype, device=table.device) if bias and placement.shard.index == 0 else None
    for expert, parts in enumerate(of_expert):
        own = expert - held.start if expert in held else None
        for part, storage, biases in zip(parts, (gate_up, gate_up, down), (gate_up_bias, gate_up_bias, down_bias), strict=True):
            for name, slot in scheme.places(part, storage.at(own or 0)).items():
                table.add(name, slot if own is not None else _unread(slot))
            if bias:
                table.add_bias(part, None if own is None or biases is None else biases[own])
    forms = [FusedForm("", "weight", lambda columns: (columns,), names.transposed)]
    forms += MXFP4_FORMS if isinstance(scheme, Mxfp4) else ()
    forms += [FusedForm("_bias", "bias", lambda columns: ())] if bias else []
    if isinstance(scheme, BlockFp8) and inner % BLOCK == 0:  # otherwise a block would hold rows of gate and up
        forms.append(FusedForm(FUSED_SCALES, scheme.scale_name, lambda columns: (-(-columns // BLOCK),), block=BLOCK))
    _accept_fused(table, names, placement.total, hidden, inner, forms)
    if isinstance(scheme, RowFp8):
        _accept_fused_numbers(table, names, placement.total, scheme.scale_name)
    experts = Experts(
        gate_up=gate_up,
        down=down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        count=count,
        first=held.start,
        total=len(prefixes),
        size=(hidden, width),
        scheme=scheme,
        group=table.group,
    )
    table.hold(experts.tensors)
    return experts


def _parts_of(names: ExpertNames, prefix: str, hidden: int, inner: int, cut: slice) -> tuple[LinearPart, LinearPart, LinearPart]:
    """The gate, up and down projections of tensors `prefix`*, of which the rank holds `cut` of the intermediate size."""
    whole, width = slice(0, hidden), cut.stop - cut.start
    return (
        LinearPart(prefix + names.gate, (inner, hidden), (cut, whole), 0),
        LinearPart(prefix + names.up, (inner, hidden), (cut, whole), width),
        LinearPart(prefix + names.down, (hidden, inner), (whole, cut), 0),
    )


def _unread(slot: WeightSlot) -> WeightSlot:
    """The slot of a tensor that must be in the checkpoint but that only another rank reads."""
    return replace(slot, index=tuple(slice(0, 0) for _ in slot.index), put=ignore, joint=None)


def _accept_fused(table: WeightTable, names: ExpertNames, total: int, hidden: int, inner: int, forms: Iterable[FusedForm]) -> None:
    """Accept fused tensors in place of the per-expert ones."""

    def split(parts: Iterable[tuple[str, int, int]], height: int, form: FusedForm, tensor: Sliceable) -> NamedTensors:
        for expert in range(total):
            for name, start, step in parts:
                first = start // form.block
                rows = slice(first, first + step * height, step)
                part = tensor[expert, :, rows].t() if form.transposed else tensor[expert, rows]
                yield f"{names.prefix}{expert}.{name}.{form.kind}", part

    up_start, step = (1, 2) if names.interleaved else (inner, 1)
    for fused, parts, rows, columns in (
        (GATE_UP_FUSED, ((names.gate, 0, step), (names.up, up_start, step)), inner, hidden),
        (DOWN_FUSED, ((names.down, 0, 1),), hidden, inner),
    ):
        for form in forms:
            each, trailing = -(-rows // form.block), form.trailing(columns)
            height = each * len(parts)
            whole = (*trailing, height) if form.transposed else (height, *trailing)
            table.also(names.prefix + fused + form.suffix, FusedTensor([(total, *whole)], partial(split, parts, each, form)))


def _accept_fused_numbers(table: WeightTable, names: ExpertNames, total: int, kind: str) -> None:
    """Accept fused scales, one per matrix or one for gate and up together, in place of the per-expert ones."""

    def split(parts: Sequence[str], tensor: Sliceable) -> NamedTensors:
        last = tensor.shape[1] - 1
        for expert in range(total):
            for i, part in enumerate(parts):
                row = min(i, last)
                yield f"{names.prefix}{expert}.{part}.{kind}", tensor[expert : expert + 1, row : row + 1]

    for fused, parts in ((GATE_UP_FUSED, (names.gate, names.up)), (DOWN_FUSED, (names.down,))):
        shapes = [(total, count, 1) for count in range(1, len(parts) + 1)]
        table.also(names.prefix + fused + FUSED_SCALES, FusedTensor(shapes, partial(split, parts)))
