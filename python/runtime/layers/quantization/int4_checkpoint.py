"""The int4 tensors of AWQ, GPTQ and compressed-tensors checkpoints: their shapes, and their codes, scales and zero points."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from runtime.config.quant_config import Int4Format
from runtime.errors import ConfigError
from runtime.layers.quantization.int4_layouts import row_blocks
from runtime.layers.quantization.scheme import Index, LinearPart, WeightSlot

WORD_CODES = 8
"""Codes of an int32 word."""
LARGEST_SCALE = 65504 // 16
"""The largest scale whose product with any zero point fits into float16."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight outputs, its place in AWQ's words, whose lowest bits are of outputs 0, 2, 4, 6, 1, 3, 5 and 7."""
IN_ORDER = tuple(range(WORD_CODES))


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Codes of a matrix [out, n] in int32 words, the first in the lowest bits.

    Attributes:
        name: suffix of the tensor's name.
        transposed: whether the tensor is [n, out].
        along_out: whether a word holds codes of eight outputs; otherwise of eight columns.
        places: the place of each of the eight codes in a word.
    """

    name: str
    transposed: bool
    along_out: bool
    places: tuple[int, ...] = IN_ORDER

    def shape(self, out: int, columns: int) -> tuple[int, ...]:
        """The tensor's shape."""
        packed = (out // WORD_CODES, columns) if self.along_out else (out, columns // WORD_CODES)
        return packed[::-1] if self.transposed else packed

    def index(self, rows: slice, columns: slice) -> Index:
        """The part of the tensor that holds these outputs and columns; they start and end at whole words."""
        packed = (_words(rows), columns) if self.along_out else (rows, _words(columns))
        return packed[::-1] if self.transposed else packed

    def codes(self, words: torch.Tensor) -> torch.Tensor:
        """The codes uint8 [out, n] of a part of the tensor."""
        lines = words.t() if self.transposed != self.along_out else words
        octets = lines.contiguous().view(torch.uint8)
        codes = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
        if self.places != IN_ORDER:
            codes = codes.unflatten(-1, (-1, WORD_CODES))[..., self.places].flatten(-2)
        return codes.t() if self.along_out else codes


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
    "awq": TensorForms(PackedForm("qweight", True, True, AWQ_PLACES), PackedForm("qzeros", True, True, AWQ_PLACES), "scales", "g_idx"),
    "gptq": TensorForms(PackedForm("qweight", True, False), PackedForm("qzeros", True, True), "scales", "g_idx"),
    "compressed-tensors": TensorForms(
        PackedForm("weight_packed", False, False), PackedForm("weight_zero_point", False, True), "weight_scale", "weight_g_idx"
    ),
}
"""By `Int4Format.name`. Sources: the packing code of AutoAWQ, GPTQModel and compressed-tensors."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Stores rows of a layer's part, counted from its first.

    Attributes:
        put_codes: takes codes uint8 [rows, in].
        put_numbers: takes scales and minima float16 [rows, in / group] of all rows.
    """

    put_codes: Callable[[slice, torch.Tensor], object]
    put_numbers: Callable[[torch.Tensor, torch.Tensor], object]


class _Numbers:
    """Stores scales and zero points when both have been read. They come in any order, possibly from several threads."""

    def __init__(self, count: int, store: Callable[[Mapping[str, torch.Tensor]], object]) -> None:
        self._count, self._store = count, store
        self._held: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def put(self, name: str, values: torch.Tensor) -> None:
        """Take one of them; it is copied, because its memory is reused."""
        with self._lock:
            self._held[name] = values.clone()
            if len(self._held) < self._count:
                return
            held, self._held = self._held, {}
        self._store(held)


def stored_slots(part: LinearPart, form: Int4Format, to: Destination) -> Mapping[str, WeightSlot]:
    """The slots of the tensors of one part; its columns are whole groups.

    Raises:
        ConfigError: the rows are no whole words.
    """
    forms, (out, width), (rows, columns) = FORMS[form.name], part.shape, part.index
    if form.zeros:
        _check_rows(part)
    groups = slice(columns.start // form.group, columns.stop // form.group)
    scales_name = f"{part.prefix}.{forms.scales}"
    numbers = _Numbers(1 + form.zeros, lambda held: to.put_numbers(*_factors(scales_name, held["scales"], held.get("zeros"), form)))

    def put_codes(words: torch.Tensor) -> None:
        for some in row_blocks(rows.stop - rows.start, columns.stop - columns.start, words.device):
            to.put_codes(some, forms.codes.codes(words[forms.codes.index(some, slice(None))]).contiguous())

    def put_scales(values: torch.Tensor) -> None:
        numbers.put("scales", values.t() if forms.zeros.transposed else values)

    swap = -1 if forms.zeros.transposed else 1
    slots = {
        f"{part.prefix}.{forms.codes.name}": WeightSlot(
            forms.codes.shape(out, width), forms.codes.index(rows, columns), put_codes, torch.int32
        ),
        scales_name: WeightSlot((out, width // form.group)[::swap], (rows, groups)[::swap], put_scales, finite=True),
        **_checked_slots(part, form, forms.order),
    }
    if form.zeros:
        slots[f"{part.prefix}.{forms.zeros.name}"] = WeightSlot(
            forms.zeros.shape(out, width // form.group),
            forms.zeros.index(rows, groups),
            lambda words: numbers.put("zeros", forms.zeros.codes(words)),
            torch.int32,
        )
    return slots


def _checked_slots(part: LinearPart, form: Int4Format, suffix: str) -> Mapping[str, WeightSlot]:
    """Slots of tensors that are only checked: the group of each column, and biases of zeros, which GPTQ tools add to all layers."""
    (rows, columns), name, bias = part.index, f"{part.prefix}.{suffix}", f"{part.prefix}.bias"

    def check(groups: torch.Tensor) -> None:
        if not torch.equal(groups, torch.arange(columns.start, columns.stop, dtype=groups.dtype, device=groups.device) // form.group):
            raise ConfigError(
                f"tensor {name} does not list the groups of columns in order: activation order is not supported. "
                "Use a checkpoint that was quantized with desc_act false."
            )

    def check_bias(values: torch.Tensor) -> None:
        if bool(values.any()):
            raise ConfigError(f"tensor {bias} is not zero, but the model has no bias there. Use another checkpoint.")

    slots = {name: WeightSlot(part.shape[1:], (columns,), check, torch.int32, optional=not form.ordered)}
    if form.name == "gptq":
        slots[bias] = WeightSlot(part.shape[:1], (rows,), check_bias, optional=True)
    return slots


def _factors(name: str, scales: torch.Tensor, zeros: torch.Tensor | None, form: Int4Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and the minima float16 [rows, in / group]: a weight is `code * scale + minimum`."""
    if scales.numel() and float(scales.abs().max()) > LARGEST_SCALE:
        raise ConfigError(f"tensor {name} holds numbers beyond {LARGEST_SCALE}, too large for int4. Use another checkpoint.")
    scale = scales.half()
    zero = 8.0 if zeros is None else zeros.float() + form.zero_offset
    return scale, (scale.float() * -zero).half()


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
