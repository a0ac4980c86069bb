"""The device side of the KV cache: the slots, and which page holds which positions of a request."""

from __future__ import annotations

import math

import numpy as np
import torch


class KVPool:
    """Keys and values of every layer, by slot. Target and draft have one each, with the same slot numbers.

    Owner of the tensors: this pool. Written by the model's attention layers, read by the attention backend, until the pool dies.
    Page 0 belongs to nobody: padding reads and writes its slots.

    Attributes:
        k, v: per layer [num_pages + 1, page_size, G, head_dim].
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_pages + 1, page_size, num_kv_heads, head_dim)
        self.page_size = page_size
        self.num_slots = (num_pages + 1) * page_size
        self.k = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.v = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self._pointers = torch.tensor([t.data_ptr() for t in (*self.k, *self.v)], dtype=torch.int64, device=device)

    def flat(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer by slot: two views [num_slots, G, head_dim]."""
        return self.k[layer_id].flatten(0, 1), self.v[layer_id].flatten(0, 1)

    def move(self, source: torch.Tensor, target: torch.Tensor, group: int) -> None:
        """Copy slots `source` onto slots `target`, int64 [B * group], in every layer.

        Within each request's `group` sources rise and are nowhere below their targets, as an accepted tree path is.
        """
        if source.is_cuda:
            from runtime.mem_cache.kv_move import move_slots

            move_slots(self._pointers, source, target, group, self.k[0][0, 0].nbytes)
            return
        for pool in (*self.k, *self.v):
            flat = pool.flatten(0, 1)
            flat[target] = flat[source]

    @staticmethod
    def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """What one slot costs, in bytes."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU as memory that the kernel zeroes page by page when it is first touched, where torch would write 4 GiB at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)


class PageTable:
    """Which page holds positions [col * page_size, (col + 1) * page_size) of a row.

    Written by the worker from `ScheduleBatch.page_*`; read by slot computation and attention backends. Entries past a row's pages are
    stale, but always valid page numbers. Row 0 is padding and holds page 0 only.

    Attributes:
        pages: int32 [rows, max_pages].
    """

    def __init__(self, rows: int, max_positions: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.max_pages = -(-max_positions // page_size)
        self.pages = torch.zeros((rows, self.max_pages), dtype=torch.int32, device=device)

    def write(self, rows: torch.Tensor, cols: torch.Tensor, ids: torch.Tensor) -> None:
        """Set `pages[rows[i], cols[i]] = ids[i]`; int64 [P], int64 [P], int32 [P], on the device."""
        self.pages[rows, cols] = ids

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The slot of each (row, position); int64 of any one shape -> int64 of that shape."""
        page = self.pages[rows, positions // self.page_size].to(torch.int64)
        return page * self.page_size + positions % self.page_size
