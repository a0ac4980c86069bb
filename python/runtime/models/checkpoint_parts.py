"""Copies the parts of a checkpoint's tensors into a model: reads and uploads them in batches, checks and stores them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby

import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.scheme import WeightSlot
from runtime.models.file_tensor import FileTensor, UnreadableTensor, read_packed

STAGE_BYTES = 16 << 20
"""Size of a pinned buffer and of its device buffer; each loading thread has one pair."""
ALIGNMENT = 16


Values = torch.Tensor | FileTensor
Sliceable = Values | UnreadableTensor
"""A tensor in memory, or one in a file, which is sliced before it is read."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the checkpoint's tensor `name` that fills one slot, in memory or in a file."""

    name: str
    values: Values
    slot: WeightSlot

    @property
    def rules(self) -> tuple[str, bool, int]:
        """The checks of its values: dtype, whether they must be finite, and the largest allowed value or -1."""
        return str(self.values.dtype), self.slot.finite, -1 if self.slot.largest is None else self.slot.largest


def parts_of(name: str, tensor: Sliceable, slots: Iterable[WeightSlot]) -> Iterator[Part]:
    """The parts of a tensor; those in a file are not read yet. Raises `ConfigError` for an unexpected shape or dtype."""
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
    """The values as a tensor; a file is memory-mapped, so its pages are read on first use."""
    return values.mapped() if isinstance(values, FileTensor) else values


def wrong_shape(name: str, tensor: Sliceable, shape: Sequence[int]) -> ConfigError:
    """The error for a tensor whose shape is not the model's."""
    return ConfigError(f"tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}")


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers through which a batch is copied, uint8 [STAGE_BYTES]: `host` (pinned for a GPU; `memory` views it), then `device`."""

    host: torch.Tensor
    memory: memoryview
    device: torch.Tensor


class Staging:
    """Makes the calls that store parts in tensors on `device`. Owns the buffers through which parts are copied from files.

    Each torch operation releases Python's GIL, for which many threads then compete: with operations on each of 10,000 small tensors, they
    mostly wait for it. So a batch of parts is read with one system call per contiguous range of a file, uploaded in one copy and
    checked on the device together; only taking views of parts, and storing them in their slots, is done part by part.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Buffers] = []

    def stores(self, parts: Iterable[Part]) -> Iterator[Callable[[], None]]:
        """Calls that together check and store all parts; threads may run them concurrently."""
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
        """Upload, check and store parts from files: either several that fit in a buffer together, or one larger part."""
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
            suspects = _suspects(moved)
            if suspects and bool(torch.stack(suspects).any()):
                for part, values in moved:
                    _check(part, values)
            self._wait()
        self._free.append(buffers)  # the device has read them

    def _bring(self, tensors: Sequence[FileTensor], buffers: Buffers) -> list[torch.Tensor]:
        """Copies of the tensors, packed one after another in the device buffer."""
        starts = list(accumulate(map(_space, tensors), initial=0))
        _read(tensors, starts, buffers)
        if buffers.device is not buffers.host:
            buffers.device[: starts[-1]].copy_(buffers.host[: starts[-1]], non_blocking=True)
        return _places(tensors, starts, buffers.device)

    def _bring_large(self, tensor: FileTensor, buffers: Buffers) -> torch.Tensor:
        """A copy on the device, made piece by piece through the buffer, or directly from mapped memory if a row exceeds it."""
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

    def _wait(self) -> None:
        """Wait for the work that this thread has launched."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def holds_nan(values: torch.Tensor) -> bool:
    """Whether any value is NaN. 0.1 ms per MB on a CPU."""
    suspect = _suspects_nan(values)
    if suspect is None or not suspect:
        return False
    return values.dtype is torch.float8_e4m3fn or bool(values.isnan().any())


def _store(part: Part, values: torch.Tensor) -> None:
    _check(part, values)
    part.slot.put(values)


def _check(part: Part, values: torch.Tensor) -> None:
    """Raise `ConfigError` if the values break the slot's rules."""
    name, slot = part.name, part.slot
    # A NaN anywhere would spoil every answer; an infinity may mark an entry that is never chosen.
    if holds_nan(values):
        raise ConfigError(f"tensor {name} holds NaN; the checkpoint is damaged, download it again")
    if slot.finite and not _all_finite(values):
        raise ConfigError(f"tensor {name} holds infinity where numbers must be finite; the checkpoint is damaged, download it again")
    if slot.largest is not None and values.numel() and (largest := int(values.max())) > slot.largest:
        raise ConfigError(f"tensor {name} holds {largest}; at most {slot.largest} is supported")


def _suspects(moved: Sequence[tuple[Part, torch.Tensor]]) -> list[torch.Tensor]:
    """Bools on the device; one is true if a part may break its rules. The parts lie in one buffer, sorted by their rules."""
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
    """One bool on the device: whether any value may be NaN; None if none can be."""
    if not values.numel():
        return None
    if values.dtype is torch.float8_e4m3fn:  # its two NaNs are the largest bit patterns, with and without the sign
        return (values.view(torch.int8).max() == 0x7F) | (values.view(torch.uint8).max() == 0xFF)
    if not values.is_floating_point() or values.element_size() == 1:
        return None
    # The sum may also be NaN because of infinities of both signs, or because large values overflow.
    return values.sum(dtype=torch.float32).isnan()


def _all_finite(values: torch.Tensor) -> bool:
    """Whether all values, of a 16-bit or 32-bit dtype, are finite. 0.1 ms per MB on a CPU."""
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())  # a sum of large numbers may be infinite


def _space(tensor: FileTensor) -> int:
    """Bytes that the tensor takes in a buffer, padding included."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _read(tensors: Sequence[FileTensor], starts: Sequence[int], buffers: Buffers) -> None:
    """Read tensors into the host buffer at byte offsets `starts`; the gaps between them are zeroed."""
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
    """Views of the tensors in `buffer` [bytes], at byte offsets `starts`."""
    typed = {dtype: buffer.view(dtype) for dtype in {tensor.dtype for tensor in tensors}}
    return [
        typed[tensor.dtype].as_strided(tensor.shape, tensor.packed_strides, start // tensor.dtype.itemsize)
        for tensor, start in zip(tensors, starts, strict=False)
    ]
