"""The ring of pinned buffers through which host arrays reach the device without a wait, and results come back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

DEPTH = 6
"""Uploads in flight at most. A slot is reused only after the copy out of it has run; with one step queued ahead it always has: a step
uploads three times at most."""
ALIGNMENT = 4
"""Arrays start at multiples of so many values, 16 bytes: Triton compiles a kernel anew for pointers of another alignment, in the middle of
serving."""
MOST_ARRAYS = 32
"""Of one upload."""


class StagingRing:
    """Host to device: pack int32 arrays, copy once, hand out device views.

    Owner of its pinned and device buffers. A view is valid until `DEPTH` further uploads; work that reads it is queued before that.
    On the CPU there is nothing to stage: views are fresh tensors.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """`capacity`: int32 values of the largest upload."""
        self.device = device
        self._turn = 0
        if device.type == "cuda":
            capacity += MOST_ARRAYS * (ALIGNMENT - 1)
            self._pinned = [torch.empty(capacity, dtype=torch.int32, pin_memory=True) for _ in range(DEPTH)]
            self._host = [p.numpy() for p in self._pinned]
            self._on_device = [torch.empty(capacity, dtype=torch.int32, device=device) for _ in range(DEPTH)]
            self._copied: list[torch.cuda.Event | None] = [None] * DEPTH

    def upload(self, *arrays: npt.NDArray[np.int32]) -> list[torch.Tensor]:
        """Device copies (int32, same lengths) of 1-D int32 `arrays`, by one transfer that the host does not wait for."""
        if self.device.type != "cuda":
            return [torch.from_numpy(a.astype(np.int32)) for a in arrays]
        turn = self._turn
        self._turn = (turn + 1) % DEPTH
        done = self._copied[turn]
        if done is not None:
            done.synchronize()
        assert len(arrays) <= MOST_ARRAYS, f"{len(arrays)} arrays in one upload"
        total, starts = 0, []
        for a in arrays:
            self._host[turn][total : total + len(a)] = a
            starts.append(total)
            total += -(-len(a) // ALIGNMENT) * ALIGNMENT
        target = self._on_device[turn][:total]
        target.copy_(self._pinned[turn][:total], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copied[turn] = event
        return [target[start : start + len(a)] for start, a in zip(starts, arrays, strict=True)]


class HostCopy:
    """Device to host: tensors on their way to the host, and the event that tells when they are there."""

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
        """Block until the copies are there."""
        if self._event is not None:
            self._event.synchronize()
        return [t.numpy() for t in self._tensors]
