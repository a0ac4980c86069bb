"""Copies the parts of a checkpoint's tensors into a model: reads and uploads them in batches, checks and stores them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.scheme import WeightSlot
from runtime.models.file_tensor import FileTensor, UnreadableTensor, read_packed
from runtime.models.misfit import wrong_dtype, wrong_groups, wrong_shape

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


def parts_of(name: str, tensor: Sliceable, slots: Iterable[WeightSlot]) -> Iterator[Part]:
    """The parts of a tensor; those in a file are not read yet. Raises `ConfigError` for an unexpected shape or dtype."""
    for slot in slots:
        index = slot.index_of(tuple(tensor.shape))
        if index is None:
            raise wrong_groups(name, tuple(tensor.shape), slot) or wrong_shape(name, tensor.shape, slot.shape)
        values = tensor[index]
        if not (values.dtype.is_floating_point if slot.dtype is None else values.dtype is slot.dtype):
            raise wrong_dtype(name, values.dtype, slot.dtype)
        yield Part(name, values, slot)


def in_memory(values: Values) -> torch.Tensor:
    """The values as a tensor; a file is memory-mapped, so its pages are read on first use."""
    return values.mapped() if isinstance(values, FileTensor) else values


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers through which a batch is copied, uint8 [STAGE_BYTES]: `host` (pinned for a GPU; `memory` views it), then `device`."""

    host: torch.Tensor
    memory: memoryview
    device: torch.Tensor


class Staging:
    """Makes the calls that store parts in tensors on `device`. Owns the buffers through which parts are copied from files.

    Each torch operation releases Python's GIL, for which many threads then compete: with operations on each of 10,000 small tensors, they
    mostly wait for it. So a batch of parts is read with one system call per contiguous range of a file and uploaded in one copy. Its parts
    of one kind are checked on the device, and converted if their slots are `Joint`, together; only storing them is done part by part.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Buffers] = []

    def stores(self, parts: Iterable[Part]) -> Iterator[Callable[[], None]]:
        """Calls that together check and store all parts; threads may run them concurrently."""
        batch, size = list[tuple[Part, FileTensor]](), 0
        for part in parts:
            if not part.values.nbytes:  # another rank stores it
                continue
            if isinstance(part.values, torch.Tensor):
                yield partial(store_part, part, part.values)
                continue
            space = _space(part.values)
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
            store_part(batch[0][0], self._bring_large(batch[0][1], buffers))
            self._wait()
        else:
            kinds = defaultdict[Hashable, list[tuple[Part, FileTensor]]](list)
            for each in batch:
                kinds[_kind(*each)].append(each)
            stacks = self._bring([[values for _, values in kind] for kind in kinds.values()], buffers)
            moved = [([part for part, _ in kind], stack) for kind, stack in zip(kinds.values(), stacks, strict=True)]
            for parts, stack in moved:
                _put(parts, stack)
            suspects = [suspect for parts, stack in moved for suspect in _suspects(parts[0].slot, stack)]
            if suspects and bool(torch.stack(suspects).any()):
                for parts, stack in moved:
                    for part, values in zip(parts, stack, strict=True):
                        _check(part, values)
            self._wait()
        self._free.append(buffers)  # the device has read them

    def _bring(self, kinds: Sequence[Sequence[FileTensor]], buffers: Buffers) -> list[torch.Tensor]:
        """Copies in the device buffer of the tensors of each kind, as views [n, *shape]."""
        tensors = [tensor for kind in kinds for tensor in kind]
        starts = list(accumulate(map(_space, tensors), initial=0))
        _read(tensors, starts, buffers)
        if buffers.device is not buffers.host:
            buffers.device[: starts[-1]].copy_(buffers.host[: starts[-1]], non_blocking=True)
        firsts = accumulate(map(len, kinds), initial=0)
        return [_view(kind[0], len(kind), starts[first], buffers.device) for kind, first in zip(kinds, firsts, strict=False)]

    def _bring_large(self, tensor: FileTensor, buffers: Buffers) -> torch.Tensor:
        """A copy on the device, made piece by piece through the buffer, or directly from mapped memory if a row exceeds it."""
        rows = STAGE_BYTES // (tensor.nbytes // tensor.shape[0])
        if self._device.type == "cpu" or not rows:
            return tensor.mapped().to(self._device)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        for start in range(0, tensor.shape[0], rows):
            piece = tensor[start : start + rows]
            _read([piece], [0], buffers)
            copy[start : start + rows].copy_(_view(piece, 1, 0, buffers.host)[0], non_blocking=True)
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


def _kind(part: Part, values: FileTensor) -> Hashable:
    """Equal for parts that are checked, and converted, together."""
    slot = part.slot
    return values.dtype, values.shape, values.packed_strides, slot.finite, slot.rule, slot.joint and slot.joint.convert


def store_part(part: Part, values: torch.Tensor) -> None:
    """Check and store the values of one part."""
    _check(part, values)
    part.slot.put(values)


def _put(parts: Sequence[Part], stack: torch.Tensor) -> None:
    """Store parts of one kind, which are [n, *shape]."""
    joint = parts[0].slot.joint
    for part, values in zip(parts, stack if joint is None else joint.convert(stack), strict=True):
        (part.slot.joint or part.slot).put(values)


def _check(part: Part, values: torch.Tensor) -> None:
    """Raise `ConfigError` if the values break the slot's rules."""
    name, slot = part.name, part.slot
    # A NaN anywhere would spoil every answer; an infinity may mark an entry that is never chosen.
    if holds_nan(values):
        raise ConfigError(f"tensor {name} holds NaN; the checkpoint is damaged, download it again")
    if slot.finite and not _all_finite(values):
        raise ConfigError(f"tensor {name} holds infinity where numbers must be finite; the checkpoint is damaged, download it again")
    if slot.rule is not None and bool(slot.rule.is_broken(values[None])):
        raise slot.rule.error(name, values)


def _suspects(slot: WeightSlot, stack: torch.Tensor) -> Iterator[torch.Tensor]:
    """Bools on the device; one is true if a part of the stack [n, *shape] may break the rules of `slot`."""
    if slot.finite:
        yield stack.sum(dtype=torch.float32).isfinite().logical_not()
    elif (suspect := _suspects_nan(stack)) is not None:
        yield suspect
    if slot.rule is not None:
        yield slot.rule.is_broken(stack)


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
    """Read tensors into the host buffer at byte offsets `starts`."""
    packed = list[tuple[FileTensor, memoryview]]()
    for tensor, start in zip(tensors, starts, strict=False):
        if tensor.is_packed:
            packed.append((tensor, buffers.memory[start : start + tensor.nbytes]))
        else:
            _view(tensor, 1, start, buffers.host)[0].copy_(tensor.mapped())
    read_packed(packed)


def _view(tensor: FileTensor, count: int, start: int, buffer: torch.Tensor) -> torch.Tensor:
    """A view [count, *shape] of `buffer` [bytes]: the place of `tensor`, at byte offset `start`, and of others like it behind it."""
    size = tensor.dtype.itemsize
    strides = (_space(tensor) // size, *tensor.packed_strides)
    return buffer.view(tensor.dtype).as_strided((count, *tensor.shape), strides, start // size)
