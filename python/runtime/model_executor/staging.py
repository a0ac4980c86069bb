"""Asynchronous copies between host and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

DEPTH = 8
"""Maximum uploads in flight. A slot is reused after its copy has run, for which the host hardly ever waits: a step uploads at most five
times, and one step is queued ahead."""
ALIGNMENT = 4
"""Align arrays to 4 words, 16 bytes: Triton recompiles a kernel for a different pointer alignment."""
MAX_ARRAYS = 32
"""Maximum arrays per upload."""
MAX_LAYOUTS = 64
"""Maximum cached layouts per slot."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The division of a slot among arrays of certain sizes: their `places` in pinned memory and `views` on the device, and the regions that
    are copied, `host` to `device`.
    """

    places: list[npt.NDArray[np.int32]]
    host: torch.Tensor
    device: torch.Tensor
    views: list[torch.Tensor]


class _Slot:
    """Pinned memory, memory of the same size on the device, and the event after the last copy."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._pinned = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        self._on_device = torch.empty(capacity, dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event()
        self._layouts: dict[tuple[tuple[int, bool], ...], _Layout] = {}

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """As `StagingRing.upload`."""
        layout = self._layout(tuple((array.nbytes // 4, array.dtype == np.int64) for array in arrays))
        self._copied.synchronize()
        for place, array in zip(layout.places, arrays, strict=True):
            place[:] = np.ascontiguousarray(array).view(np.int32)
        layout.device.copy_(layout.host, non_blocking=True)
        self._copied.record()
        return layout.views

    def _layout(self, sizes: tuple[tuple[int, bool], ...]) -> _Layout:
        """The layout for arrays of these numbers of words, each with whether its numbers have 64 bits. Layouts are cached because creating
        views takes the host longer than the copy, and steps have few layouts.
        """
        if sizes in self._layouts:
            return self._layouts[sizes]
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        ends = list(accumulate((-(-words // ALIGNMENT) * ALIGNMENT for words, _ in sizes), initial=0))
        places = [slice(start, start + words) for start, (words, _) in zip(ends, sizes, strict=False)]
        views = [self._on_device[place] for place in places]
        self._layouts[sizes] = _Layout(
            [self._pinned[place].numpy() for place in places],
            self._pinned[: ends[-1]],
            self._on_device[: ends[-1]],
            [view.view(torch.int64) if wide else view for view, (_, wide) in zip(views, sizes, strict=True)],
        )
        return self._layouts[sizes]


class StagingRing:
    """Host to device: packs integer arrays, copies once, returns device views.

    Owner of its pinned and device buffers. A view is valid until `DEPTH` further uploads; queue the work that reads it
    before then. On the CPU nothing is staged and views are new tensors.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """`capacity`: 4-byte words of the largest upload."""
        self._next, self._capacity = 0, capacity
        aligned = capacity + MAX_ARRAYS * (ALIGNMENT - 1)
        self._slots = [_Slot(aligned, device) for _ in range(DEPTH)] if device.type == "cuda" else []

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Device copies of 1-D `arrays` of int32 or int64, by one asynchronous transfer."""
        assert all(a.dtype in (np.int32, np.int64) for a in arrays), f"upload of {[a.dtype.name for a in arrays]}"
        assert len(arrays) <= MAX_ARRAYS, f"{len(arrays)} arrays in one upload"
        assert sum(a.nbytes for a in arrays) <= 4 * self._capacity, f"upload of {[len(a) for a in arrays]} numbers"
        if not self._slots:
            return [torch.from_numpy(a.copy()) for a in arrays]
        slot = self._slots[self._next]
        self._next = (self._next + 1) % DEPTH
        return slot.upload(arrays)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An asynchronous copy on `device` of a host tensor; on the CPU the tensor itself."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class HostCopy:
    """Device to host: copies in flight, and the event that marks their end."""

    def __init__(self, *tensors: torch.Tensor, by_kernel: bool = False) -> None:
        """`by_kernel`: whether a kernel writes to the host's memory. Between two graphs it takes less time than a copy engine. The caller
        must wait for the copies, because torch does not know that the memory is still being written.
        """
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, source in zip(self._tensors, tensors, strict=True):
                if by_kernel and source.numel():
                    from runtime.model_executor.host_copy_kernel import copy_to_pinned

                    copy_to_pinned(source.contiguous(), host)
                else:
                    host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._tensors = [t.clone() for t in tensors]

    def wait(self) -> list[npt.NDArray[np.generic]]:
        """Wait for the copies."""
        if self._event is not None:
            self._event.synchronize()
        return [t.numpy() for t in self._tensors]
