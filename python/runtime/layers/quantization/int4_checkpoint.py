"""The int4 tensors of AWQ, GPTQ and compressed-tensors checkpoints: their shapes, and their codes, scales and zero points."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from runtime.config.quant_config import Int4Format
from runtime.errors import ConfigError
from runtime.layers.quantization.column_order import ColumnOrder
from runtime.layers.quantization.int4_layouts import Int4Layout, row_blocks
from runtime.layers.quantization.scheme import Index, Joint, LinearPart, Rule, Storage, WeightSlot, ignore

WORD_CODES = 8
"""Codes of an int32 word."""
ONES = 0x11111111
"""A word whose codes are all 1."""
LARGEST_SCALE = 65504 // 16
"""The largest scale whose product with any zero point fits into float16."""


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Codes of a matrix [out, n] in int32 words, the first in the lowest bits. Calling it unpacks them.

    Attributes:
        name: suffix of the tensor's name.
        transposed: whether the tensor is [n, out].
        along_out: whether a word holds codes of eight outputs; otherwise of eight columns.
        interleaved: whether the codes in a word are of outputs 0, 2, 4, 6, 1, 3, 5 and 7, in this order.
        offset: added to the codes of each word as to one number, in which the carry of a code goes to the next one: GPTQModel subtracts 1
            in that way, and codes of 0 borrow.
    """

    name: str
    transposed: bool
    along_out: bool
    interleaved: bool = False
    offset: int = 0

    def shape(self, out: int, columns: int) -> tuple[int, ...]:
        """The tensor's shape."""
        packed = (out // WORD_CODES, columns) if self.along_out else (out, columns // WORD_CODES)
        return packed[::-1] if self.transposed else packed

    def index(self, rows: slice, columns: slice) -> Index:
        """The part of the tensor that holds these outputs and columns; they start and end at whole words."""
        packed = (_words(rows), columns) if self.along_out else (rows, _words(columns))
        return packed[::-1] if self.transposed else packed

    def __call__(self, words: torch.Tensor) -> torch.Tensor:
        """The codes uint8 [..., out, n] of parts [..., rows, columns] of the tensor."""
        if self.offset:
            words = words + self.offset * ONES
        lines = words.mT if self.transposed != self.along_out else words
        octets, last = lines.contiguous().view(torch.uint8), -1
        if self.interleaved:  # bytes 0 and 2 of a word hold outputs 0 to 3: the even ones and the odd ones
            octets, last = octets.unflatten(-1, (-1, 2, 2)).mT, -2
        codes = torch.stack((octets & 15, octets >> 4), dim=last).flatten(words.dim() - 1)
        return codes.mT if self.along_out else codes


@dataclass(frozen=True, slots=True)
class TensorForms:
    """The tensors of a layer in one format.

    Attributes:
        codes, zeros: the packed codes [out, in], and the zero points [out, in / group].
        scales: suffix of the scales' name; they are transposed like the zero points.
        order: suffix of the tensor with the group of each column.
    """

    codes: PackedForm
    zeros: PackedForm
    scales: str
    order: str


FORMS: Mapping[str, TensorForms] = {
    "awq": TensorForms(
        PackedForm("qweight", True, True, interleaved=True), PackedForm("qzeros", True, True, interleaved=True), "scales", "g_idx"
    ),
    "gptq": TensorForms(PackedForm("qweight", True, False), PackedForm("qzeros", True, True), "scales", "g_idx"),
    "compressed-tensors": TensorForms(
        PackedForm("weight_packed", False, False), PackedForm("weight_zero_point", False, True), "weight_scale", "weight_g_idx"
    ),
}
"""By `Int4Format.name`. Sources: the packing code of AutoAWQ, GPTQModel and compressed-tensors."""


@dataclass(frozen=True, slots=True)
class ScaleRule(Rule):
    """Products of scales and zero points fit into float16."""

    def is_broken(self, parts: torch.Tensor) -> torch.Tensor:
        """As in `Rule`."""
        return parts.abs().max() > LARGEST_SCALE

    def error(self, name: str, part: torch.Tensor) -> ConfigError:
        """As in `Rule`."""
        return ConfigError(f"tensor {name} holds numbers beyond {LARGEST_SCALE}, too large for int4. Use another checkpoint.")


@dataclass(frozen=True, slots=True)
class OrderRule(Rule):
    """The groups of the columns from `first` on are in order.

    Attributes:
        ordered: as in `Int4Format`.
        shared: whether ranks share the columns of an expert.
    """

    first: int
    group: int
    ordered: bool
    shared: bool

    def is_broken(self, parts: torch.Tensor) -> torch.Tensor:
        """As in `Rule`."""
        columns = torch.arange(self.first, self.first + parts.shape[1], dtype=parts.dtype, device=parts.device)
        return (parts != columns // self.group).any()

    def error(self, name: str, part: torch.Tensor) -> ConfigError:
        """As in `Rule`."""
        if not self.ordered:
            return ConfigError(
                f"tensor {name} does not list the groups of columns in order, but quantization_config names no activation order. "
                "Correct it, or use another checkpoint."
            )
        if self.shared:
            return ConfigError(
                f"tensor {name} does not list the groups of columns in order, which is not supported where ranks share an expert. "
                "Use an --ep-size equal to --tp-size, or a checkpoint that was quantized with desc_act false."
            )
        return ConfigError(
            f"tensor {name} does not list the groups of columns in order, which is not supported for experts on a GPU. "
            "Use a checkpoint that was quantized with desc_act false."
        )


@dataclass(frozen=True, slots=True)
class NoBiasRule(Rule):
    """All numbers are zero."""

    def is_broken(self, parts: torch.Tensor) -> torch.Tensor:
        """As in `Rule`."""
        return parts.any()

    def error(self, name: str, part: torch.Tensor) -> ConfigError:
        """As in `Rule`."""
        return ConfigError(f"tensor {name} is not zero, but the model has no bias there. Use another checkpoint.")


def stored_slots(part: LinearPart, form: Int4Format, layout: Int4Layout, storage: Storage) -> Mapping[str, WeightSlot]:
    """The slots of the tensors of one part; its columns are whole groups.

    Raises:
        ConfigError: the rows are no whole words.
    """
    forms, (out, width), (rows, columns) = FORMS[form.name], part.shape, part.index
    if form.zeros:
        _check_rows(part)
    groups, read = slice(columns.start // form.group, columns.stop // form.group), columns
    counted = (0 if forms.zeros.transposed else 1, form.group)
    put_scales, put_zeros = layout.numbers(storage, part.rows, form.zeros)

    def store(words: torch.Tensor, order: torch.Tensor | None = None) -> None:
        for some in row_blocks(rows.stop - rows.start, read.stop - read.start, words.device):
            own = slice(part.start + some.start, part.start + some.stop)
            codes = forms.codes(words[forms.codes.index(some, slice(None))])
            layout.put_codes(storage, own, codes if order is None else codes[:, order])

    put_codes, put_groups, joint = store, ignore, layout.joint(storage, part.rows, forms.codes)
    order_rule: Rule | None = OrderRule(columns.start, form.group, form.ordered, shared=columns != slice(0, width))
    if storage.order is not None:
        put_codes, put_groups = _in_order(storage.order, f"{part.prefix}.{forms.order}", form.group, store)
        joint, order_rule, read = None, None, slice(0, width)  # a group's columns may be anywhere
    swap, to_scales = (-1, lambda scales: put_scales(scales.t())) if forms.zeros.transposed else (1, put_scales)
    slots = {
        forms.codes.name: WeightSlot(
            forms.codes.shape(out, width),
            forms.codes.index(rows, read),
            put_codes,
            torch.int32,
            joint,
        ),
        forms.scales: WeightSlot(
            (out, width // form.group)[::swap], (rows, groups)[::swap], to_scales, finite=True, rule=ScaleRule(), groups=counted
        ),
        forms.order: WeightSlot((width,), (read,), put_groups, torch.int32, rule=order_rule, optional=not form.ordered, in_check=True),
    }
    if form.zeros:
        unpack = replace(forms.zeros, offset=form.zero_offset)
        slots[forms.zeros.name] = WeightSlot(
            forms.zeros.shape(out, width // form.group),
            forms.zeros.index(rows, groups),
            lambda words: put_zeros(unpack(words)),
            torch.int32,
            Joint(unpack, put_zeros),
            groups=counted,
        )
    if form.name == "gptq":  # its tools add biases of zeros to all layers
        slots["bias"] = WeightSlot((out,), (rows,), ignore, rule=NoBiasRule(), optional=True)
    return {f"{part.prefix}.{suffix}": slot for suffix, slot in slots.items()}


def _in_order(
    order: ColumnOrder, name: str, group: int, store: Callable[[torch.Tensor, torch.Tensor], None]
) -> tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]:
    """Calls that take the words of a part and its groups, in any order and possibly from several threads. The second one stores the words.

    Args:
        order: receives the order of the columns.
        name: of the tensor with the groups.
        group: columns of a group.
        store: stores words whose columns have the order int64 [in].
    """
    held, lock = dict[str, torch.Tensor](), threading.Lock()

    def put_codes(words: torch.Tensor) -> None:
        with lock:
            columns = held.get("order")
            if columns is None:
                held["words"] = words.clone()  # its memory is reused
                return
        store(words, columns)

    def put_groups(groups: torch.Tensor) -> None:
        columns = order.set(name, groups, group)
        with lock:
            held["order"] = columns
            words = held.pop("words", None)
        if words is not None:
            store(words, columns)

    return put_codes, put_groups


def _check_rows(part: LinearPart) -> None:
    (out, _), (rows, _) = part.shape, part.index
    if out % WORD_CODES:
        raise ConfigError(
            f"{part.prefix} has {out} rows; int4 checkpoints with zero points have multiples of {WORD_CODES}. Use another checkpoint."
        )
    if rows.start % WORD_CODES or rows.stop % WORD_CODES:
        raise ConfigError(
            f"{part.prefix}: rows {rows.start} to {rows.stop} of a rank cut a word of {WORD_CODES} int4 codes; use another --tp-size"
        )


def _words(codes: slice) -> slice:
    """The words of a slice of codes; of all, if it is open."""
    return codes if codes.start is None else slice(codes.start // WORD_CODES, codes.stop // WORD_CODES)
