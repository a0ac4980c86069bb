"""Parts of a checkpoint's tensors on their way into a model: checked, brought to its device in batches, stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Protocol

import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.scheme import Index, WeightSlot
from runtime.models.file_tensor import FileTensor, read_packed

STAGE_BYTES = 16 << 20
"""Of a pinned buffer and of the device buffer beside it; each thread that loads has one of both."""
ALIGNMENT = 16


Values = torch.Tensor | FileTensor


class Sliceable(Protocol):
    """A tensor, or one that still lies in a file and is cut before it is read."""

    @property
    def shape(self) -> Sequence[int]: ...  # noqa: D102

    def __getitem__(self, index: Index, /) -> Values: ...


@dataclass(frozen=True, slots=True)
class Part:
    """What a slot gets of the checkpoint's tensor `name`, in memory or in a file."""

    name: str
    values: Values
    slot: WeightSlot

    @property
    def rules(self) -> tuple[str, bool, int]:
        """What its numbers are checked for."""
        return str(self.values.dtype), self.slot.finite, -1 if self.slot.largest is None else self.slot.largest


def parts_of(name: str, tensor: Sliceable, slots: Iterable[WeightSlot]) -> Iterator[Part]:
    """The parts of a tensor, not yet read where they lie in a file. Raises `ConfigError` for another shape or dtype."""
    for slot in slots:
        index = slot.index_of(tuple(tensor.shape))
        if index is None:
            raise wrong_shape(name, tensor, slot.shape)
        values = tensor[index]
        if not (values.dtype.is_floating_point if slot.dtype is None else values.dtype is slot.dtype):
            expected = "floating-point numbers" if slot.dtype is None else slot.dtype
            raise ConfigError(f"tensor {name} has dtype {values.dtype}; the model expects {expected}")
        yield Part(name, values, slot)


def in_memory(values: Values) -> torch.Tensor:
    """The numbers; those of a file in mapped memory, which is read where they are used."""
    return values.mapped() if isinstance(values, FileTensor) else values


def wrong_shape(name: str, tensor: Sliceable, shape: Sequence[int]) -> ConfigError:
    """The error for a tensor of another shape than the model's."""
    return ConfigError(f"tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}")


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a batch of parts passes, uint8 [STAGE_BYTES]: `host`, pinned for a GPU, whose bytes `memory` is, then `device`."""

    host: torch.Tensor
    memory: memoryview
    device: torch.Tensor


class Staging:
    """Makes the calls that store parts in tensors of `device`. Owner of the buffers through which they get there from files.

    Each operation of torch on a tensor gives Python's lock away, which many threads then wait for: with operations on each of 10,000 small
    tensors they do little else. So a batch of parts is read by one system call for each piece of a file, goes to the device at once and is
    checked there together; only views of parts, and what their slots do, are single operations.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Buffers] = []

    def stores(self, parts: Iterable[Part]) -> Iterator[Callable[[], None]]:
        """Calls that check and store all parts; threads may make several at once."""
        batch, size = list[tuple[Part, FileTensor]](), 0
        for part in parts:
            if isinstance(part.values, torch.Tensor):
                yield partial(_store, part, part.values)
                continue
            space = _space(part.values)
            if not space:  # another rank stores it
                continue
            if batch and size + space > STAGE_BYTES:
                yield partial(self.store, batch)
                batch, size = [], 0
            batch.append((part, part.values))
            size += space
        if batch:
            yield partial(self.store, batch)

    def store(self, batch: Sequence[tuple[Part, FileTensor]]) -> None:
        """Bring parts from files, which fit a buffer together or are one larger part; check and store them."""
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = self._new_buffers()
        if len(batch) == 1 and _space(batch[0][1]) > STAGE_BYTES:
            _store(batch[0][0], self._bring_large(batch[0][1], buffers))
            self._wait()
        else:
            batch = sorted(batch, key=lambda each: each[0].rules)
            moved = list(zip((part for part, _ in batch), self._bring([values for _, values in batch], buffers), strict=True))
            for part, values in moved:
                part.slot.put(values)
            if self._wait(_suspects(moved)):
                for part, values in moved:
                    _check(part, values)
        self._free.append(buffers)  # the device has read them

    def _bring(self, tensors: Sequence[FileTensor], buffers: Buffers) -> list[torch.Tensor]:
        """Copies in the buffer of the device, one behind the other."""
        starts = list(accumulate(map(_space, tensors), initial=0))
        _read(tensors, starts, buffers)
        if buffers.device is not buffers.host:
            buffers.device[: starts[-1]].copy_(buffers.host[: starts[-1]], non_blocking=True)
        return _places(tensors, starts, buffers.device)

    def _bring_large(self, tensor: FileTensor, buffers: Buffers) -> torch.Tensor:
        """A copy on the device, through the buffer piece by piece; at once where an entry of its first dimension exceeds the buffer."""
        rows = STAGE_BYTES // (tensor.nbytes // tensor.shape[0])
        if self._device.type == "cpu" or not rows:
            return tensor.mapped().to(self._device)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        for start in range(0, tensor.shape[0], rows):
            piece = tensor[start : start + rows]
            _read([piece], [0], buffers)
            copy[start : start + rows].copy_(_places([piece], [0], buffers.host)[0], non_blocking=True)
            self._wait()
        return copy

    def _new_buffers(self) -> Buffers:
        on_gpu = self._device.type == "cuda"
        host = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        device = torch.empty(STAGE_BYTES, dtype=torch.uint8, device=self._device) if on_gpu else host
        return Buffers(host, host.numpy().data, device)

    def _wait(self, suspects: Sequence[torch.Tensor] = ()) -> bool:
        """Wait for what this thread has launched; whether one of these bools on the device is true."""
        if suspects:
            return bool(torch.stack(list(suspects)).any())
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return False


def holds_nan(values: torch.Tensor) -> bool:
    """Whether there is NaN among the numbers. 0.1 ms per MB on a CPU."""
    suspect = _suspects_nan(values)
    if suspect is None or not suspect:
        return False
    return values.dtype is torch.float8_e4m3fn or bool(values.isnan().any())


def _store(part: Part, values: torch.Tensor) -> None:
    _check(part, values)
    part.slot.put(values)


def _check(part: Part, values: torch.Tensor) -> None:
    """Raise `ConfigError` where the numbers break the slot's rules."""
    name, slot = part.name, part.slot
    # NaN anywhere would be in every answer; infinity may stand for an entry that is never chosen.
    if holds_nan(values):
        raise ConfigError(f"tensor {name} holds NaN; the checkpoint is damaged, download it again")
    if slot.finite and not _all_finite(values):
        raise ConfigError(f"tensor {name} holds infinity where numbers must be finite; the checkpoint is damaged, download it again")
    if slot.largest is not None and values.numel() and (largest := int(values.max())) > slot.largest:
        raise ConfigError(f"tensor {name} holds {largest}; at most {slot.largest} is supported")


def _suspects(moved: Sequence[tuple[Part, torch.Tensor]]) -> list[torch.Tensor]:
    """Bools on the device, one of which is true where some of these parts, in one buffer in the order of their rules, may break them."""
    suspects = list[torch.Tensor | None]()
    for _, same in groupby(moved, key=lambda each: each[0].rules):
        group = list(same)
        first, last, slot = group[0][1], group[-1][1], group[0][0].slot
        start, end = first.storage_offset(), last.storage_offset() + last.numel()
        region = first.as_strided((end - start,), (1,))
        suspects.append(_suspects_nan(region))
        if slot.finite:
            suspects.append(region.sum(dtype=torch.float32).isfinite().logical_not())
        if slot.largest is not None:
            suspects.append(region.max() > slot.largest)
    return [suspect for suspect in suspects if suspect is not None]


def _suspects_nan(values: torch.Tensor) -> torch.Tensor | None:
    """One bool on the device: whether there may be NaN among the numbers; None where there is none."""
    if not values.numel():
        return None
    if values.dtype is torch.float8_e4m3fn:  # its two NaNs are the largest numbers of bits with a sign and without
        return (values.view(torch.int8).max() == 0x7F) | (values.view(torch.uint8).max() == 0xFF)
    if not values.is_floating_point() or values.element_size() == 1:
        return None
    # Infinities of both signs sum up to NaN too, and so may large numbers.
    return values.sum(dtype=torch.float32).isnan()


def _all_finite(values: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity among numbers of 16 or 32 bits. 0.1 ms per MB on a CPU."""
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())  # a sum of large numbers may be infinite


def _space(tensor: FileTensor) -> int:
    """Bytes that it takes in a buffer."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _read(tensors: Sequence[FileTensor], starts: Sequence[int], buffers: Buffers) -> None:
    """Read tensors to these bytes of the host's buffer; what lies between them becomes zero."""
    packed = list[tuple[FileTensor, memoryview]]()
    for tensor, start in zip(tensors, starts, strict=False):
        end = start + tensor.nbytes
        if gap := -end % ALIGNMENT:
            buffers.memory[end : end + gap] = bytes(gap)
        if tensor.is_packed:
            packed.append((tensor, buffers.memory[start:end]))
        else:
            _places([tensor], [start], buffers.host)[0].copy_(tensor.mapped())
    read_packed(packed)


def _places(tensors: Sequence[FileTensor], starts: Sequence[int], buffer: torch.Tensor) -> list[torch.Tensor]:
    """Views of `buffer` [bytes] for tensors that start at these bytes of it."""
    typed = {dtype: buffer.view(dtype) for dtype in {tensor.dtype for tensor in tensors}}
    return [
        typed[tensor.dtype].as_strided(tensor.shape, tensor.packed_strides, start // tensor.dtype.itemsize)
        for tensor, start in zip(tensors, starts, strict=False)
    ]
