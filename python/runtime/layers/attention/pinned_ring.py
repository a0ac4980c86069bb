"""Pinned staging buffers, used round robin."""

from __future__ import annotations

import torch


class PinnedRing:
    """Owner of `count` pinned uint8 buffers. A buffer is reused only after its last upload has run.

    Attributes:
        size: bytes of each buffer.
    """

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._events: list[torch.cuda.Event | None] = [None] * count
        self._next = 0

    def take(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """A free buffer, and the event to record after its upload."""
        current, self._next = self._next, (self._next + 1) % len(self._buffers)
        event = self._events[current]
        if event is None:
            event = self._events[current] = torch.cuda.Event()
        else:
            event.synchronize()
        return self._buffers[current], event
