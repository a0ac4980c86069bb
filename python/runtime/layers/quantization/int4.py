"""Weight-only int4 for the CPU: groups of 32 columns with a scale and a minimum, as llama.cpp's Q4_1 stores them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.int8 import QUANTIZED_AT_ONCE, Int8, blocked_matmul, prompts_use_gemms
from runtime.layers.quantization.scheme import GemmCaps, LinearPart, NewWeight, QuantScheme, Storage, WeightSlot

GROUP = 32
"""Columns that share a scale and a minimum."""
GROUP_BYTES = GROUP // 2 + 4
"""Two codes in a byte, then the scale and the minimum in float16."""
LARGEST_CODE = 15
PACKED_ROWS = 64
"""Rows that are packed together in the kernel's format. A part that starts within such a group cannot be packed separately."""
ROW_MULTIPLE = 16
"""The kernel takes a multiple of this number of rows."""
LARGEST = 65504
"""The largest number of float16."""
_HEADS = Int8()


class Int4(QuantScheme):
    """Weights in 4 bits, with a float16 scale and minimum for each 32 columns; the LM head and drafts in int8.

    `weight` is uint8 [out, in / 32 * 20]: for each group the codes 0 to 15, the scale and the minimum. A weight is `code * scale +
    minimum`, as in Q4_1 files, whose numbers are therefore kept. The other two tensors are derived for the kernel, if it supports the
    shape: `packed` uint8 [out, in / 2], the codes in its order, and `scale` bfloat16 [in / 32, out, 2], the scales and the values of code
    8.

    Activations are rounded to bfloat16, as in `Int8`.
    """

    name = "int4"
    gemm_caps = GemmCaps("int4")

    @property
    def heads(self) -> QuantScheme:
        """int8, which is more accurate."""
        return _HEADS

    def allocate(self, new: NewWeight) -> Storage:
        """Empty groups, and tensors for the kernel unless a part begins inside its `PACKED_ROWS`.

        Raises:
            ConfigError: the number of columns is not a multiple of `GROUP`.
        """
        out, columns = new.out_features, new.in_features
        if columns % GROUP:
            raise ConfigError(f"an int4 weight has {columns} columns; only multiples of {GROUP} are supported. Use --quantization int8.")
        weight = new.empty(out, columns // GROUP * GROUP_BYTES, dtype=torch.uint8)
        if out % ROW_MULTIPLE or any(part.start % PACKED_ROWS for part in new.parts):
            return Storage(weight)
        scale = new.empty(columns // GROUP, out, 2, dtype=torch.bfloat16)
        return Storage(weight, scale, new.empty(out, columns // 2, dtype=torch.uint8))

    def in_features(self, storage: Storage) -> int:
        """Columns of the weight."""
        return storage.weight.shape[1] // GROUP_BYTES * GROUP

    def places(self, part: LinearPart, storage: Storage) -> Mapping[str, WeightSlot]:
        """One tensor, `prefix.weight`, of any floating-point dtype; it is quantised when it is stored."""
        columns = part.index[1]
        if columns.start % GROUP or columns.stop % GROUP:
            raise ConfigError(
                f"{part.prefix}: columns {columns.start} to {columns.stop} of a rank cut an int4 group of {GROUP}; "
                "use another --tp-size, or --quantization int8"
            )

        def put(own: torch.Tensor) -> None:
            least, most = own.aminmax()
            if max(-least, most) > LARGEST:
                raise ConfigError(
                    f"tensor {part.prefix}.weight holds numbers beyond {LARGEST}, too large for int4. Use --quantization int8."
                )
            count = max(1, QUANTIZED_AT_ONCE // (own.shape[1] * PACKED_ROWS)) * PACKED_ROWS
            for start, some in enumerate(own.to(storage.weight.device).split(count)):
                rows = slice(part.start + start * count, part.start + start * count + len(some))
                storage.weight[rows] = groups = quantize_groups(some)
                if storage.scale is not None and storage.packed is not None:
                    storage.scale[:, rows], storage.packed[rows] = kernel_form(groups)

        return {part.prefix + ".weight": WeightSlot(part.shape, part.index, put, finite=True)}

    def matmul(self, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None, in_prompt: bool = False) -> torch.Tensor:
        """[T, in] -> [T, out], the dtype of `x`.

        The bits of a row's result do not depend on the other rows, as in `Int8`.
        """
        rows = x.bfloat16()
        if storage.packed is not None and not (in_prompt and prompts_use_gemms()):
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), storage.packed, GROUP, storage.scale)
        else:
            out = blocked_matmul(rows, self.dequantize(storage, torch.bfloat16))
        out = out.type_as(x)
        return out if bias is None else out.add_(bias)

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """Codes times scales plus minima, computed in float32 and rounded to `dtype`."""
        groups = storage.weight.view(-1, GROUP_BYTES)
        return torch.ops.quantized.embedding_bag_4bit_unpack(groups).to(dtype).view(*storage.weight.shape[:-1], -1)

    def select_rows(self, storage: Storage, rows: torch.Tensor) -> Storage:
        """A copy of output rows int64 [n], packed if their number allows it."""
        return storage_of(storage.weight[rows])


def storage_of(groups: torch.Tensor) -> Storage:
    """The storage of a whole weight of these groups, packed if its number of rows allows it."""
    return Storage(groups) if len(groups) % ROW_MULTIPLE else Storage(groups, *kernel_form(groups))


def quantize_groups(rows: torch.Tensor) -> torch.Tensor:
    """Quantise float `rows` [out, in] between the minimum and the maximum of each group: uint8 [out, in / 32 * 20]."""
    groups = rows.float().contiguous().unflatten(1, (-1, GROUP))  # gpt-oss stores its experts transposed
    minimum = groups.amin(dim=2, keepdim=True).half()
    scale = ((groups.amax(dim=2, keepdim=True) - minimum.float()) / LARGEST_CODE).half()
    smallest = torch.finfo(torch.float32).tiny  # all columns of a group may be equal
    codes = (groups - minimum.float()).div_(scale.float().clamp_(min=smallest)).round_().clamp_(0, LARGEST_CODE).to(torch.uint8)
    both = codes.view(torch.int16)  # of two columns, the first in the low byte
    pairs = (both | both >> 4).to(torch.uint8)
    return torch.cat((pairs, scale.view(torch.uint8), minimum.view(torch.uint8)), dim=2).flatten(1)


def kernel_form(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors `scale` and `packed` for the kernel. They must be contiguous, which the kernel does not check.

    The kernel computes `(code - 8) * scale + value of code 8`.
    """
    pairs, numbers = groups.unflatten(1, (-1, GROUP_BYTES)).split((GROUP // 2, 4), dim=2)
    both = pairs.to(torch.int16)
    codes = ((both | both << 4) & 0x0F0F).view(torch.uint8).flatten(1).to(torch.int32)
    scale, minimum = numbers.contiguous().view(torch.float16).float().unbind(2)
    factors = torch.stack((scale, minimum + 8 * scale), dim=2).to(torch.bfloat16)
    return factors.transpose(0, 1).contiguous(), torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
