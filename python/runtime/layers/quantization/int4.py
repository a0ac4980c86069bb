"""Int4 weights: groups of columns with a scale and a minimum, from a quantised checkpoint or quantised while loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from runtime.config.quant_config import INT4_GROUP as GROUP
from runtime.config.quant_config import Int4Format
from runtime.errors import ConfigError
from runtime.layers.quantization.column_order import ColumnOrder
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.int4_checkpoint import stored_slots
from runtime.layers.quantization.int4_layouts import CpuLayout, Int4Layout, layout_of, layout_on, row_blocks
from runtime.layers.quantization.int8 import Int8, blocked_matmul, prompts_use_gemms
from runtime.layers.quantization.scheme import LinearPart, NewWeight, QuantScheme, Storage, WeightSlot

LARGEST_CODE = 15
LARGEST = 65504
"""The largest number of float16."""
_HEADS = Int8()


class Int4(QuantScheme):
    """Weights in 4 bits, with a float16 scale and minimum (on a GPU, zero point) for each 32 columns (64 or 128 in some checkpoints).

    A weight is `code * scale + minimum`, as in Q4_1 files, whose numbers are therefore kept on a CPU. On a GPU it is
    `(code - zero point) * scale`. `int4_layouts` describes the tensors.
    The LM head and draft models keep 16 bits; on a CPU they are int8 if weights are quantised while loading.

    On a CPU activations are rounded to bfloat16, as in `Int8`.

    Attributes:
        group: columns that share a scale, and a minimum or zero point.
    """

    name = "int4"
    gemm_format = "int4"

    def __init__(self, stored: Int4Format | None = None) -> None:
        """`stored`: the checkpoint's format; None to quantise weights of any float dtype while loading."""
        self._stored = stored
        self.group = GROUP if stored is None else stored.group

    def heads(self, device: torch.device) -> QuantScheme:
        """int8 on a CPU, which is more accurate, or unquantised."""
        return _HEADS if self._stored is None and device.type == "cpu" else DENSE

    def shared_columns(self) -> int:
        """`group`."""
        return self.group

    def allocate(self, new: NewWeight) -> Storage:
        """Empty groups in the layout of the device.

        Raises:
            ConfigError: the number of columns is not a multiple of the group.
        """
        if new.in_features % self.group:
            columns, other = new.in_features, self._other(new.device)
            if any(part.shape[1] % self.group == 0 for part in new.parts):
                other = f"another --tp-size, or {other}"
            raise ConfigError(f"an int4 weight has {columns} columns; only multiples of {self.group} are supported. Use {other}.")
        layout = layout_on(new.device, self.group)
        storage = layout.allocate(new)
        if self._stored is None or not self._stored.ordered or not new.parts:
            return storage
        width, own = new.parts[0].shape[1], new.parts[0].index[1]  # all parts have the same input
        if new.count is None:
            return replace(storage, order=ColumnOrder(width, own))
        # A GPU's kernels read the same row for all experts.
        if own != slice(0, width) or not (isinstance(layout, CpuLayout) or new.device.type == "meta"):
            return storage
        return replace(storage, orders=tuple(ColumnOrder(width, own) for _ in range(new.count)))

    def in_features(self, storage: Storage) -> int:
        """Columns of the weight."""
        return layout_of(storage, self.group).columns(storage)

    def places(self, part: LinearPart, storage: Storage) -> Mapping[str, WeightSlot]:
        """The tensors of the checkpoint's format; or one, `prefix.weight`, of any floating-point dtype, which is quantised."""
        columns, layout = part.index[1], layout_of(storage, self.group)
        if columns.start % self.group or columns.stop % self.group:
            other = self._other(storage.weight.device)
            raise ConfigError(
                f"{part.prefix}: columns {columns.start} to {columns.stop} of a rank cut an int4 group of {self.group}; "
                f"use another --tp-size, or {other}"
            )
        if self._stored is None:
            return {part.prefix + ".weight": self._quantized(part, storage, layout)}
        return stored_slots(part, self._stored, layout, storage)

    def matmul(self, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None, in_prompt: bool = False) -> torch.Tensor:
        """[T, in] -> [T, out], the dtype of `x`.

        On a CPU the bits of a row's result do not depend on the other rows, as in `Int8`.
        """
        if not x.is_cpu:
            return super().matmul(x, storage, bias, in_prompt)
        rows = storage.in_order(x).bfloat16()
        if storage.packed is not None and not (in_prompt and prompts_use_gemms()):
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), storage.packed, self.group, storage.scale)
        else:
            out = blocked_matmul(rows, layout_of(storage, self.group).dequantize(storage, torch.bfloat16))
        out = out.type_as(x)
        return out if bias is None else out.add_(bias)

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """The value, computed in float32 and rounded to `dtype`; columns that ranks share stay in the order in which they are stored."""
        if storage.orders:
            return torch.stack([self.dequantize(storage.at(i), dtype) for i in range(len(storage.orders))])
        return storage.restored(layout_of(storage, self.group).dequantize(storage, dtype))

    def select_rows(self, storage: Storage, rows: torch.Tensor) -> Storage:
        """A copy of output rows int64 [n]."""
        return replace(layout_of(storage, self.group).select_rows(storage, rows), order=storage.order)

    def _quantized(self, part: LinearPart, storage: Storage, layout: Int4Layout) -> WeightSlot:
        """The slot of a tensor that is quantised when it is stored."""

        def put(own: torch.Tensor) -> None:
            least, most = own.aminmax()
            if max(-least, most) > LARGEST:
                other = self._other(storage.weight.device)
                raise ConfigError(f"tensor {part.prefix}.weight holds numbers beyond {LARGEST}, too large for int4. Use {other}.")
            moved = own.to(storage.weight.device)
            for some in row_blocks(len(moved), moved.shape[1], moved.device):
                rows = slice(part.start + some.start, part.start + some.stop)
                codes, scale, offset = quantize(moved[some], layout.zero_points)
                layout.put_codes(storage, rows, codes)
                layout.put_numbers(storage, rows, scale, offset)

        return WeightSlot(part.shape, part.index, put, finite=True)

    def _other(self, device: torch.device) -> str:
        """What to use instead."""
        if self._stored is not None:
            return "another checkpoint"
        return f"--quantization {'int8' if device.type == 'cpu' else 'fp8'}"


def quantize(rows: torch.Tensor, zero_points: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise float `rows` [out, in] between the minimum and the maximum of each group of 32.

    Args:
        zero_points: minima are multiples of the scales, at most zero.

    Returns:
        Codes uint8 [out, in], and float16 [out, in / 32]: scales, and zero points if `zero_points` or else minima.
    """
    groups = rows.float().contiguous().unflatten(1, (-1, GROUP))  # gpt-oss stores its experts transposed
    minimum, maximum = groups.amin(dim=2, keepdim=True).half(), groups.amax(dim=2, keepdim=True)
    if zero_points:
        minimum, maximum = minimum.clamp(max=0), maximum.clamp(min=0)
    scale = ((maximum - minimum.float()) / LARGEST_CODE).half()
    offset = minimum
    if zero_points:
        offset = torch.where(scale == 0, 0.0, (minimum.float() / -scale.float()).round()).half()
        minimum = (offset * -scale.float()).half()
    smallest = torch.finfo(torch.float32).tiny  # all columns of a group may be equal
    codes = (groups - minimum.float()).div_(scale.float().clamp_(min=smallest)).round_().clamp_(0, LARGEST_CODE).to(torch.uint8)
    return codes.flatten(1), scale.squeeze(2), offset.squeeze(2)
