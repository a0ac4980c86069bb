"""Copies between host and device that the host does not wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

DEPTH = 8
"""Most uploads in flight. A slot is reused after its copy has run. In practice that never waits: a step uploads at
most five times, and one step is queued ahead."""
ALIGNMENT = 4
"""Align arrays to 4 words, 16 bytes: Triton recompiles a kernel for a different pointer alignment."""
MOST_ARRAYS = 32
"""Most arrays per upload."""


class StagingRing:
    """Host to device: packs integer arrays, copies once, hands out device views.

    Owner of its pinned and device buffers. A view is valid until `DEPTH` further uploads; queue the work that reads it
    before then. On the CPU nothing is staged and views are new tensors.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """`capacity`: words of 4 bytes of the largest upload."""
        self.device = device
        self._next = 0
        if device.type == "cuda":
            capacity += MOST_ARRAYS * (ALIGNMENT - 1)
            self._pinned = [torch.empty(capacity, dtype=torch.int32, pin_memory=True) for _ in range(DEPTH)]
            self._host = [p.numpy() for p in self._pinned]
            self._on_device = [torch.empty(capacity, dtype=torch.int32, device=device) for _ in range(DEPTH)]
            self._copied: list[torch.cuda.Event | None] = [None] * DEPTH

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Device copies of 1-D `arrays` of int32 or int64, by one transfer, without a host wait."""
        assert all(a.dtype in (np.int32, np.int64) for a in arrays), f"upload of {[a.dtype.name for a in arrays]}"
        if self.device.type != "cuda":
            return [torch.from_numpy(a.copy()) for a in arrays]
        slot = self._next
        self._next = (slot + 1) % DEPTH
        done = self._copied[slot]
        if done is not None:
            done.synchronize()
        assert len(arrays) <= MOST_ARRAYS, f"{len(arrays)} arrays in one upload"
        total, places = 0, []
        for a in arrays:
            words = np.ascontiguousarray(a).view(np.int32)
            places.append(slice(total, total + len(words)))
            self._host[slot][places[-1]] = words
            total += -(-len(words) // ALIGNMENT) * ALIGNMENT
        target = self._on_device[slot][:total]
        target.copy_(self._pinned[slot][:total], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copied[slot] = event
        views = zip(places, arrays, strict=True)
        return [target[place].view(torch.int64) if a.dtype == np.int64 else target[place] for place, a in views]


class HostCopy:
    """Device to host: copies in flight, and the event that marks their end."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, source in zip(self._tensors, tensors, strict=True):
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
