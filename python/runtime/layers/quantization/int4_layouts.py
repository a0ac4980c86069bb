"""The two layouts of int4 weights in memory: one for the kernels of a CPU, one for those of a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from runtime.layers.quantization.scheme import Joint, NewWeight, Storage

PACKED_ROWS = 64
"""Rows that are packed together in the CPU kernel's format. A part that starts within such a group cannot be packed separately."""
ROW_MULTIPLE = 16
"""The CPU kernel takes a multiple of this number of rows."""
STORED_AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
"""Weights that are unpacked or quantised at a time, by device: on a CPU they stay in the caches, on a GPU fewer would take more
launches."""
RUN = 16
"""Bytes of a run of 32 columns in the layout for GPUs."""
NUMBER_BYTES = 4
"""The scale and the minimum of a group, in float16."""
ZERO_POINT = 8
"""The zero point of codes without stored ones."""

Put = Callable[[torch.Tensor], object]
Convert = Callable[[torch.Tensor], torch.Tensor]


class Int4Layout(Protocol):
    """How codes, scales, and minima or zero points lie in a `Storage`. Codes and numbers may be stored in any order, for any rows.

    Attributes:
        zero_points: whether it stores integers in place of minima.
    """

    zero_points: bool

    def allocate(self, new: NewWeight) -> Storage:
        """Storage of a weight whose columns are whole groups, uninitialised."""
        ...

    def columns(self, storage: Storage) -> int:
        """Columns of a weight without a leading dimension."""
        ...

    def put_codes(self, storage: Storage, rows: slice, codes: torch.Tensor) -> None:
        """Store codes uint8 [rows, in], 0 to 15."""
        ...

    def joint(self, storage: Storage, rows: slice, unpack: Convert) -> Joint | None:
        """How to store codes of several weights: `unpack` returns them, uint8 [n, rows, in]. None if each is stored by `put_codes`."""
        ...

    def put_numbers(self, storage: Storage, rows: slice, scale: torch.Tensor, offset: torch.Tensor) -> None:
        """Store the scales, and the zero points or minima, of the groups: float16 [rows, in / group]."""
        ...

    def numbers(self, storage: Storage, rows: slice, zeros: bool) -> tuple[Put, Put]:
        """Calls that store scales [rows, in / group], and zero points 0 to 16, in any order, possibly from several threads.

        `zeros`: whether there are zero points; otherwise all of them are 8.
        """
        ...

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """The weights [..., out, in], computed in float32 and rounded to `dtype`."""
        ...

    def select_rows(self, storage: Storage, rows: torch.Tensor) -> Storage:
        """A copy of output rows int64 [n]."""
        ...


@dataclass(frozen=True, slots=True)
class CpuLayout(Int4Layout):
    """`weight` is uint8 [out, in / group * (group / 2 + 4)]: for each group its codes, two in a byte, the scale and the minimum. Groups of
    32 are those of llama.cpp's Q4_1.

    The other two tensors are derived for the kernel, if it supports the shape: `packed` uint8 [out, in / 2], the codes in its order, and
    `scale` bfloat16 [in / group, out, 2], the scales and the values of code 8.
    """

    group: int
    zero_points = False

    @property
    def group_bytes(self) -> int:
        """Bytes of a group in `weight`."""
        return self.group // 2 + NUMBER_BYTES

    def allocate(self, new: NewWeight) -> Storage:
        """With tensors for the kernel unless a part begins inside its `PACKED_ROWS`."""
        out, groups = new.out_features, new.in_features // self.group
        weight = new.empty(out, groups * self.group_bytes, dtype=torch.uint8)
        if out % ROW_MULTIPLE or any(part.start % PACKED_ROWS for part in new.parts):
            return Storage(weight)
        scale = new.empty(groups, out, 2, dtype=torch.bfloat16)
        return Storage(weight, scale, new.empty(out, new.in_features // 2, dtype=torch.uint8))

    def columns(self, storage: Storage) -> int:
        """As in `Int4Layout`."""
        return storage.weight.shape[1] // self.group_bytes * self.group

    def put_codes(self, storage: Storage, rows: slice, codes: torch.Tensor) -> None:
        """As in `Int4Layout`."""
        codes = codes.contiguous()
        both = codes.view(torch.int16)  # of two columns, the first in the low byte
        pairs = (both | both >> 4).to(torch.uint8)
        self._groups(storage)[rows, :, : self.group // 2] = pairs.unflatten(1, (-1, self.group // 2))
        if storage.packed is not None:
            storage.packed[rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)

    def joint(self, storage: Storage, rows: slice, unpack: Convert) -> Joint | None:
        """As in `Int4Layout`. The codes of one weight fill the caches."""
        return None

    def put_numbers(self, storage: Storage, rows: slice, scale: torch.Tensor, offset: torch.Tensor) -> None:
        """As in `Int4Layout`. The kernel computes `(code - 8) * scale + value of code 8`."""
        self._groups(storage)[rows, :, self.group // 2 :] = torch.stack((scale, offset), dim=2).view(torch.uint8)
        if storage.scale is not None:
            factors = torch.stack((scale.float(), offset.float() + 8 * scale.float()), dim=2)
            storage.scale[:, rows] = factors.to(torch.bfloat16).transpose(0, 1)

    def numbers(self, storage: Storage, rows: slice, zeros: bool) -> tuple[Put, Put]:
        """As in `Int4Layout`. A minimum needs both."""
        held, lock = dict[str, torch.Tensor](), threading.Lock()

        def put(name: str, values: torch.Tensor) -> None:
            with lock:
                held[name] = values.to(torch.float16, copy=True)  # its memory is reused
                if len(held) <= zeros:
                    return
                scale, zero = held.pop("scale"), held.pop("zero", ZERO_POINT)
            self.put_numbers(storage, rows, scale, (scale.float() * -zero).half())

        return partial(put, "scale"), partial(put, "zero")

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """As in `Int4Layout`."""
        groups = storage.weight.view(-1, self.group_bytes)
        return torch.ops.quantized.embedding_bag_4bit_unpack(groups).to(dtype).view(*storage.weight.shape[:-1], -1)

    def select_rows(self, storage: Storage, rows: torch.Tensor) -> Storage:
        """Packed if their number allows it."""
        weight = storage.weight[rows]
        if len(weight) % ROW_MULTIPLE:
            return Storage(weight)
        pairs, numbers = weight.unflatten(1, (-1, self.group_bytes)).split((self.group // 2, NUMBER_BYTES), dim=2)
        both, columns = pairs.to(torch.int16), self.columns(storage)
        scale, minimum = numbers.contiguous().view(torch.float16).unbind(2)
        new = NewWeight(len(weight), columns, torch.float32, weight.device)
        selected, every = self.allocate(new), slice(None)
        self.put_codes(selected, every, ((both | both << 4) & 0x0F0F).view(torch.uint8).flatten(1))
        self.put_numbers(selected, every, scale, minimum)
        return selected

    def _groups(self, storage: Storage) -> torch.Tensor:
        """A view of `weight` as uint8 [out, in / group, bytes of a group]."""
        return storage.weight.unflatten(1, (-1, self.group_bytes))


@dataclass(frozen=True, slots=True)
class GpuLayout(Int4Layout):
    """`weight` is uint8 [out, in / 2] and `scale` float16 [out, in / group, 2], the scales and the zero points.

    A weight is `(code - zero point) * scale`. Zero points are integers, so kernels compute the difference without rounding.

    Each 16 bytes of a row hold 32 columns: byte i has the code of column i in its low half and that of column 16 + i in its high half.
    """

    group: int
    zero_points = True

    def allocate(self, new: NewWeight) -> Storage:
        """As in `Int4Layout`."""
        weight = new.empty(new.out_features, new.in_features // 2, dtype=torch.uint8)
        return Storage(weight, new.empty(new.out_features, new.in_features // self.group, 2, dtype=torch.float16))

    def columns(self, storage: Storage) -> int:
        """As in `Int4Layout`."""
        return storage.weight.shape[1] * 2

    def put_codes(self, storage: Storage, rows: slice, codes: torch.Tensor) -> None:
        """As in `Int4Layout`."""
        storage.weight[rows] = in_runs(codes)

    def joint(self, storage: Storage, rows: slice, unpack: Convert) -> Joint | None:
        """As in `Int4Layout`."""
        return Joint(Repacking(unpack), storage.weight[rows].copy_)

    def put_numbers(self, storage: Storage, rows: slice, scale: torch.Tensor, offset: torch.Tensor) -> None:
        """As in `Int4Layout`."""
        storage.scales[rows] = torch.stack((scale, offset), dim=2)

    def numbers(self, storage: Storage, rows: slice, zeros: bool) -> tuple[Put, Put]:
        """As in `Int4Layout`."""
        scale, zero = storage.scales[rows].unbind(2)

        def put_scales(values: torch.Tensor) -> None:
            scale.copy_(values)
            zero.fill_(ZERO_POINT)

        return scale.copy_ if zeros else put_scales, zero.copy_

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """As in `Int4Layout`."""
        runs = storage.weight.unflatten(-1, (-1, RUN))
        codes = torch.cat((runs & 15, runs >> 4), dim=-1).flatten(-2).unflatten(-1, (-1, self.group))
        scale, zero = storage.scales.float()[..., None].unbind(-2)
        return ((codes.float() - zero) * scale).to(dtype).flatten(-2)

    def select_rows(self, storage: Storage, rows: torch.Tensor) -> Storage:
        """As in `Int4Layout`."""
        return storage.at(rows)


@dataclass(frozen=True, slots=True)
class Repacking:
    """Converts tensors of which `unpack` returns the codes [n, rows, in] to bytes in the layout for GPUs."""

    unpack: Convert

    def __call__(self, words: torch.Tensor) -> torch.Tensor:
        """Bytes [n, rows, in / 2]."""
        return in_runs(self.unpack(words))


def in_runs(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., in / 2] in the layout for GPUs of codes [..., in]."""
    low, high = codes.unflatten(-1, (-1, 2, RUN)).unbind(-2)
    return (low | high << 4).flatten(-2)


def layout_on(device: torch.device, group: int) -> Int4Layout:
    """The layout of new weights on `device`."""
    return CpuLayout(group) if device.type == "cpu" else GpuLayout(group)


def layout_of(storage: Storage, group: int) -> Int4Layout:
    """The layout that `storage` has."""
    return GpuLayout(group) if storage.scale is not None and storage.scale.dtype is torch.float16 else CpuLayout(group)


def row_blocks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of `rows` rows that are stored at a time; each but the last has a multiple of `PACKED_ROWS`."""
    step = max(1, STORED_AT_ONCE[device.type] // (max(1, columns) * PACKED_ROWS)) * PACKED_ROWS
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
