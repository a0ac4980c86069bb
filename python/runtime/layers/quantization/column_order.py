"""The order in which the columns of an int4 weight are stored, if it is not their own."""

from __future__ import annotations

import threading

import torch

from runtime.errors import ConfigError


class ColumnOrder:
    """GPTQ's activation order: in the checkpoint, columns with one scale are not neighbours. In memory they are.

    Loading sets it, once for each part of a fused layer and possibly from several threads. The parts must agree, because their input is
    reordered once.

    Attributes:
        width: columns of the whole weight.
        own: the places of the reordered weight that this rank stores: whole groups.
        columns: int64 [own], the column of the whole weight that is stored at each place; None if the whole weight keeps its own order, or
            before it is set.
    """

    def __init__(self, width: int, own: slice) -> None:
        self.width, self.own = width, own
        self.columns: torch.Tensor | None = None
        self._first: tuple[str, torch.Tensor] | None = None
        self._lock = threading.Lock()

    @property
    def shared(self) -> bool:
        """Whether ranks share the columns: one of them may then need any column of the input."""
        return self.own != slice(0, self.width)

    def set(self, name: str, groups: torch.Tensor, group: int) -> torch.Tensor:
        """The columns that this rank stores, by their groups int32 [width], which are tensor `name`: int64 [own].

        Args:
            group: columns of a group.

        Raises:
            ConfigError: groups differ in size, or another part has another order.
        """
        # Here and not by a `Rule`, which may be checked after parts are stored: the part that is wrong should be named, not its neighbour.
        sizes = torch.arange(self.width, dtype=groups.dtype, device=groups.device) // group
        if not torch.equal(groups.sort().values, sizes):
            raise ConfigError(
                f"tensor {name} does not have {group} columns in each group, which group_size in quantization_config asks for. "
                "Correct it, or use another checkpoint."
            )
        order = groups.argsort(stable=True)
        with self._lock:
            if self._first is None:
                self._first = name, order
                in_order = torch.equal(order, torch.arange(len(order), device=order.device))
                self.columns = None if in_order else order[self.own]
            elif not torch.equal(order, self._first[1]):
                raise ConfigError(
                    f"tensors {self._first[0]} and {name} have different groups of columns, but these layers are fused. "
                    "Use a checkpoint that was quantized with desc_act false."
                )
        return order[self.own]
