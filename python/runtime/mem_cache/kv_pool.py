"""The device side of the KV cache: the slots, and the table of each request's pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from runtime.mem_cache.kv_spec import KVSpec
from runtime.mem_cache.zeroed import zeros


class KVPool:
    """Keys and values of every layer, by slot. Target and draft have one pool each, with the same slot numbers.

    Owner of the tensors. The model's attention layers write them; the attention backend reads them. Page 0 is padding:
    padded tokens read and write its slots.

    Attributes:
        specs: the layout of each layer.
        k, v: per layer [num_pages + 1, page_size, G, key_dim] and [..., value_dim]. For "mla" `v` is a view of `k`.
    """

    def __init__(self, specs: Sequence[KVSpec], num_pages: int, page_size: int, device: torch.device) -> None:
        self.specs = tuple(specs)
        self.page_size = page_size
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self._flat: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stored: dict[int, list[torch.Tensor]] = {}
        for spec in self.specs:
            self._add_layer(spec, (num_pages + 1, page_size, spec.num_heads), device)
        self._pointers = {
            row_bytes: torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)
            for row_bytes, tensors in self._stored.items()
        }

    def _add_layer(self, spec: KVSpec, shape: tuple[int, ...], device: torch.device) -> None:
        keys = zeros((*shape, spec.key_dim), spec.dtype, device)
        latent = spec.kind == "mla"
        values = keys[..., : spec.value_dim] if latent else zeros((*shape, spec.value_dim), spec.dtype, device)
        self.k.append(keys)
        self.v.append(values)
        self._flat.append((keys.flatten(0, 1), values.flatten(0, 1)))
        for tensor in (keys,) if latent else (keys, values):
            self._stored.setdefault(tensor[0, 0].nbytes, []).append(tensor)

    def flat(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer by slot: views [num_slots, G, key_dim] and [num_slots, G, value_dim]."""
        return self._flat[layer_id]

    def move(self, source: torch.Tensor, target: torch.Tensor, group: int) -> None:
        """Copy slots `source` to slots `target`, int64 [B * group], in every layer.

        Within each request's `group`, sources increase and are never below their targets, as on an accepted tree path. Except for slot 0,
        no slot of one group is a source or target of another.
        """
        if not source.is_cuda:
            self.write(target, self.read(source))
            return
        from runtime.mem_cache.kv_move import move_slots

        for row_bytes in self._stored:
            move_slots(self._pointers[row_bytes], source, target, group, row_bytes)

    def read(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Copies of slots, int64 [n], one tensor per layer and kind, to be restored by `write`."""
        return [flat[slots] for flat in self._bytes()]

    def write(self, slots: torch.Tensor, contents: list[torch.Tensor]) -> None:
        """Restore slots from the result of `read`."""
        for flat, content in zip(self._bytes(), contents, strict=True):
            flat[slots] = content

    def _bytes(self) -> Iterator[torch.Tensor]:
        """The stored bytes as uint8 [num_slots, G, bytes], because torch cannot index 8-bit floats."""
        return (tensor.flatten(0, 1).view(torch.uint8) for tensors in self._stored.values() for tensor in tensors)


def front_slots(sources: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The arguments of `KVPool.move`, with groups of 1, that copy the first `counts` slots of pages `sources` to pages `targets`.

    Args:
        sources, targets, counts: int64 [C]. No page is both source and target.

    Returns:
        source, target: int64 [C * page_size] each; past the counts both are slot 0, the padding slot.
    """
    offsets = torch.arange(page_size, device=counts.device)
    live = offsets < counts[:, None]
    source, target = (torch.where(live, pages[:, None] * page_size + offsets, 0).flatten() for pages in (sources, targets))
    return source, target


class PageTable:
    """Maps positions [col * page_size, (col + 1) * page_size) of a row to a page. All layers share it.

    The worker writes it from `ScheduleBatch.page_*`; slot computation and attention backends read it. Entries beyond a row's pages are
    stale but always valid page numbers. Row 0 is padding and has only page 0.

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
        if self.page_size == 1:
            return self.pages[rows, positions].to(torch.int64)
        page = self.pages[rows, positions // self.page_size].to(torch.int64)
        return page * self.page_size + positions % self.page_size

    def slots_of(self, entries: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Like `slots`, int64 [n], from table entries and offsets that the host has computed.

        Args:
            entries: int64 [n]. `row * max_pages + position // page_size`.
            offsets: int64 [n]. `position % page_size`.
        """
        return torch.add(offsets, self.pages.flatten().index_select(0, entries), alpha=self.page_size)
