"""Tensors in a file, as strided views that can be sliced without reading."""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.errors import ConfigError

MAX_BUFFERS = 1024
"""The maximum that one system call fills: Linux' IOV_MAX."""


class WeightFile:
    """A file of tensors. Reading it makes no second copy of the model in memory: the system may drop cached pages at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    @functools.cached_property
    def mapped(self) -> torch.Tensor:
        """The file as uint8 [file size], memory-mapped: only pages that are used take memory."""
        return torch.from_file(str(self.path), shared=False, size=self.path.stat().st_size, dtype=torch.uint8)

    def read(self, offset: int, buffers: Iterable[memoryview]) -> None:
        """Fill non-empty buffers one after another with the bytes from `offset` on.

        Raises:
            ConfigError: the file is too short or cannot be read.
        """
        left = list(buffers)[::-1]
        while left:
            try:
                count = os.preadv(self._descriptor, left[: -MAX_BUFFERS - 1 : -1], offset)
            except OSError as error:
                raise ConfigError(f"{self.path} cannot be read: {error}") from error
            if not count:
                raise damaged(self.path, f"it ends before byte {offset + 1}")
            offset += count
            while left and count >= len(left[-1]):
                count -= len(left.pop())
            if count:
                left[-1] = left[-1][count:]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file. Indexing works as for `torch.Tensor` and reads nothing.

    Attributes:
        offset: byte offset of its first element.
        strides: in elements.
    """

    file: WeightFile
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def packed_strides(self) -> tuple[int, ...]:
        """The strides, in elements, of a copy without gaps; a transposed matrix stays transposed."""
        is_transposed = len(self.shape) == 2 and self.strides[0] < self.strides[1]
        return (1, self.shape[0]) if is_transposed else row_major(self.shape)

    @property
    def is_packed(self) -> bool:
        """Whether its elements lie in the file without gaps, with `packed_strides`."""
        return all(size < 2 or own == packed for size, own, packed in zip(self.shape, self.strides, self.packed_strides, strict=True))

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> FileTensor:
        """The part `index`. Raises `IndexError` if an integer is out of range."""
        places = index if isinstance(index, tuple) else (index,)
        assert len(places) <= len(self.shape), f"expected at most {len(self.shape)} indices; got {len(places)}"
        offset, shape, strides = self.offset, self.shape[len(places) :], self.strides[len(places) :]
        for place, size, stride in reversed([*zip(places, self.shape, self.strides, strict=False)]):
            if isinstance(place, slice):
                start, stop, step = place.indices(size)
                shape, strides = (len(range(start, stop, step)), *shape), (stride * step, *strides)
            else:
                start = range(size)[place]
            offset += start * stride * self.dtype.itemsize
        return FileTensor(self.file, self.dtype, offset, shape, strides)

    def t(self) -> FileTensor:
        """The transposed matrix."""
        return FileTensor(self.file, self.dtype, self.offset, self.shape[::-1], self.strides[::-1])

    def mapped(self) -> torch.Tensor:
        """The tensor in mapped memory, whose pages are read on first use."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) if self.nbytes else -1
        numbers = self.file.mapped[self.offset : self.offset + (last + 1) * self.dtype.itemsize]
        if self.offset % self.dtype.itemsize:  # views of other dtypes must be aligned
            numbers = numbers.clone()
        return numbers.view(self.dtype).as_strided(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class UnreadableTensor:
    """A tensor in a file whose dtype torch does not have. Loading fails only if the model uses the tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __getitem__(self, index: object) -> FileTensor:
        """Raises `ConfigError`."""
        raise ConfigError(f"tensor {self.name} has dtype {self.dtype}, which is not supported")


def read_packed(tensors: Sequence[tuple[FileTensor, memoryview]]) -> None:
    """Read non-empty packed tensors into their buffers, with one system call for tensors that are contiguous in a file."""
    file, start, end, run = None, 0, 0, list[memoryview]()
    for tensor, buffer in sorted(tensors, key=lambda each: (id(each[0].file), each[0].offset)):
        if tensor.file is not file or tensor.offset != end:
            if file is not None:
                file.read(start, run)
            file, start, run = tensor.file, tensor.offset, []
        run.append(buffer)
        end = tensor.offset + len(buffer)
    if file is not None:
        file.read(start, run)


@functools.lru_cache
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous row-major tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def damaged(file: Path, why: object) -> ConfigError:
    """The error for a file that cannot be read."""
    return ConfigError(f"{file} is damaged or truncated: {why}; download it again")
