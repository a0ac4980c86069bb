"""A layer that a model holds in its own dtype and a checkpoint in int4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from runtime.config.quant_config import Int4Format
from runtime.layers.quantization.column_order import ColumnOrder
from runtime.layers.quantization.int4_checkpoint import stored_slots
from runtime.layers.quantization.int4_layouts import GpuLayout
from runtime.layers.quantization.scheme import LinearPart, NewWeight, WeightSlot


class Packable(NamedTuple):
    """A layer that a checkpoint may hold in int4: the shape of its weight, [out, in], and what stores the whole value."""

    shape: tuple[int, int]
    put: Callable[[torch.Tensor], object]


class PackedLayer:
    """Stores the int4 tensors of a layer, then dequantises them.

    Attributes:
        missing: names of the tensors that it still needs.
        given: names of those that it needed and got.
    """

    def __init__(self, layer: str, target: Packable, form: Int4Format, dtype: torch.dtype, device: torch.device) -> None:
        """`target`: receives, in `dtype`, the value of the layer of this name, whose columns are whole groups.

        Raises:
            ConfigError: the rows are no whole words.
        """
        out, columns = target.shape
        self._put, self._dtype, self._layout = target.put, dtype, GpuLayout(form.group)  # on a CPU too: it keeps zero points exactly
        whole = LinearPart(layer, (out, columns), (slice(0, out), slice(0, columns)), 0)
        storage = self._layout.allocate(NewWeight(out, columns, dtype, device))
        self._storage = replace(storage, order=ColumnOrder(columns, slice(0, columns))) if form.ordered else storage
        self._slots = stored_slots(whole, form, self._layout, self._storage)
        self.missing = {name for name, slot in self._slots.items() if not slot.optional}
        self.given = set[str]()

    def take(self, name: str) -> list[WeightSlot]:
        """The slot of tensor `name`, which the checkpoint holds; empty for other tensors."""
        if name in self.missing:
            self.missing.remove(name)
            self.given.add(name)
        return [self._slots[name]] if name in self._slots else []

    def fill(self) -> None:
        """Store the value of the weight, once all tensors are stored."""
        self._put(self._storage.restored(self._layout.dequantize(self._storage, self._dtype)))
