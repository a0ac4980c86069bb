"""Parts of a checkpoint's tensors on their way into a model: checked, brought to its device in batches, stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Protocol

import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.scheme import Index, WeightSlot

STAGE_BYTES = 16 << 20
"""Of a pinned buffer and of the device buffer beside it; each thread that loads has one of both."""
ALIGNMENT = 16


class Sliceable(Protocol):
    """A tensor, or one that still lies in a file and is read by slice."""

    @property
    def shape(self) -> Sequence[int]: ...  # noqa: D102

    def __getitem__(self, index: Index, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Part:
    """What a slot gets of the checkpoint's tensor `name`, on the host or on the model's device."""

    name: str
    values: torch.Tensor
    slot: WeightSlot

    @property
    def space(self) -> int:
        """Bytes that it takes in a buffer."""
        return -(-self.values.nbytes // ALIGNMENT) * ALIGNMENT

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
        if slot.dtype is not None and values.dtype is not slot.dtype:
            raise ConfigError(f"tensor {name} has dtype {values.dtype}; the model expects {slot.dtype}")
        yield Part(name, values, slot)


def wrong_shape(name: str, tensor: Sliceable, shape: Sequence[int]) -> ConfigError:
    """The error for a tensor of another shape than the model's."""
    return ConfigError(f"tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}")


class Staging:
    """Makes the calls that store parts in tensors of `device`. Owner of the buffers through which they get there.

    A copy from mapped memory to a GPU waits for the file's pages, then for the driver, whose one thread copies it in pieces; checking it
    waits for the GPU. So threads copy many parts into a pinned buffer, which goes to the device at once, where they are checked together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[tuple[torch.Tensor, torch.Tensor]] = []

    def stores(self, parts: Iterable[Part]) -> Iterator[Callable[[], None]]:
        """Calls that check and store all parts; threads may make several at once."""
        batch, size = list[Part](), 0
        for part in parts:
            if part.values.device.type == self._device.type:
                yield partial(_store, part)
                continue
            if not part.values.numel():  # another rank stores it
                continue
            if batch and size + part.space > STAGE_BYTES:
                yield partial(self.store, batch)
                batch, size = [], 0
            batch.append(part)
            size += part.space
        if batch:
            yield partial(self.store, batch)

    def store(self, parts: Sequence[Part]) -> None:
        """Bring parts from the host, which fit a buffer together or are one larger part; check and store them."""
        try:
            host, device = self._free.pop()
        except IndexError:
            host, device = self._buffer(pinned=True), self._buffer()
        if len(parts) == 1 and parts[0].space > STAGE_BYTES:
            _store(replace(parts[0], values=self._bring_large(parts[0].values, host)))
        else:
            moved = self._bring(parts, host, device)
            if _any_suspect(moved):
                for part in moved:
                    _check(part)
            for part in moved:
                part.slot.put(part.values)
        self._wait()  # the buffers will be filled anew
        self._free.append((host, device))

    def _bring(self, parts: Sequence[Part], host: torch.Tensor, device: torch.Tensor) -> list[Part]:
        """Views of the parts in `device`, in the order of their rules."""
        parts = sorted(parts, key=lambda part: part.rules)
        for part, place in zip(parts, _places(host, parts), strict=True):
            place.copy_(part.values)
        used = sum(part.space for part in parts)
        device[:used].copy_(host[:used], non_blocking=True)
        return [replace(part, values=place) for part, place in zip(parts, _places(device, parts), strict=True)]

    def _bring_large(self, values: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """A copy on the device, through the buffer piece by piece; at once where an entry of its first dimension exceeds the buffer."""
        rows = STAGE_BYTES // (values.nbytes // len(values))
        if not rows:
            return values.to(self._device)
        copy = torch.empty(values.shape, dtype=values.dtype, device=self._device)
        for start in range(0, len(values), rows):
            piece = values[start : start + rows]
            staged = _shaped(host[: piece.nbytes].view(piece.dtype), piece)
            copy[start : start + rows].copy_(staged.copy_(piece), non_blocking=True)
            self._wait()
        return copy

    def _buffer(self, *, pinned: bool = False) -> torch.Tensor:
        if pinned:
            return torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return torch.empty(STAGE_BYTES, dtype=torch.uint8, device=self._device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def holds_nan(values: torch.Tensor) -> bool:
    """Whether there is NaN among the numbers. 0.1 ms per MB on a CPU."""
    suspect = _suspects_nan(values)
    if suspect is None or not suspect:
        return False
    return values.dtype is torch.float8_e4m3fn or bool(values.isnan().any())


def _store(part: Part) -> None:
    _check(part)
    part.slot.put(part.values)


def _check(part: Part) -> None:
    """Raise `ConfigError` where the numbers break the slot's rules."""
    name, values, slot = part.name, part.values, part.slot
    # NaN anywhere would be in every answer; infinity may stand for an entry that is never chosen.
    if holds_nan(values):
        raise ConfigError(f"tensor {name} holds NaN; the checkpoint is damaged, download it again")
    if slot.finite and not _all_finite(values):
        raise ConfigError(f"tensor {name} holds infinity where numbers must be finite; the checkpoint is damaged, download it again")
    if slot.largest is not None and values.numel() and (largest := int(values.max())) > slot.largest:
        raise ConfigError(f"tensor {name} holds {largest}; at most {slot.largest} is supported")


def _any_suspect(parts: Sequence[Part]) -> bool:
    """Whether some of these parts, which lie in one buffer in the order of their rules, may break them: one wait for the device."""
    suspects = list[torch.Tensor | None]()
    for _, same in groupby(parts, key=lambda part: part.rules):
        group = list(same)
        first, last = group[0].values, group[-1].values
        start, end = first.storage_offset(), last.storage_offset() + last.numel()
        region, slot = first.as_strided((end - start,), (1,)), group[0].slot
        suspects.append(_suspects_nan(region))
        if slot.finite:
            suspects.append(region.sum(dtype=torch.float32).isfinite().logical_not())
        if slot.largest is not None:
            suspects.append(region.max() > slot.largest)
    found = [suspect for suspect in suspects if suspect is not None]
    return bool(found) and bool(torch.stack(found).any())


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


def _places(buffer: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    """Views of `buffer` [bytes] for parts in the order of their rules, one behind the other; what lies between them is zero."""
    places, start = list[torch.Tensor](), 0
    for _, same in groupby(parts, key=lambda part: part.rules):
        group = list(same)
        width, end = group[0].values.itemsize, start + sum(part.space for part in group)
        sizes = [count for part in group for count in (part.values.numel(), (part.space - part.values.nbytes) // width)]
        pieces = buffer[start:end].view(group[0].values.dtype).split(sizes)
        places += [_shaped(piece, part.values) for piece, part in zip(pieces[::2], group, strict=True)]
        if buffer.device.type == "cpu":
            for gap in pieces[1::2]:
                gap.zero_()
        start = end
    return places


def _shaped(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A row of numbers as a tensor of the shape of `like`; a transposed matrix is copied by its own rows, and stays transposed."""
    if like.dim() == 2 and like.stride(0) < like.stride(1):
        return numbers.view(like.shape[1], like.shape[0]).t()
    return numbers.view(like.shape)
