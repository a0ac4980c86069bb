"""The contract of a quantisation scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch.nn import functional as F

from runtime.errors import ConfigError
from runtime.layers.quantization.column_order import ColumnOrder

Index = tuple[slice, ...]


class Rule(Protocol):
    """What the numbers of a tensor must be like. Parts whose slots have equal rules are checked together."""

    def is_broken(self, parts: torch.Tensor) -> torch.Tensor:
        """One bool on the device: whether any of the parts [n, *shape], none of them empty, breaks the rule."""
        ...

    def error(self, name: str, part: torch.Tensor) -> ConfigError:
        """The error for a part of tensor `name` that breaks it."""
        ...


@dataclass(frozen=True, slots=True)
class AtMost(Rule):
    """No number exceeds `largest`."""

    largest: int

    def is_broken(self, parts: torch.Tensor) -> torch.Tensor:
        """As in `Rule`."""
        return parts.max() > self.largest

    def error(self, name: str, part: torch.Tensor) -> ConfigError:
        """As in `Rule`."""
        most = part.max().item()
        return ConfigError(f"tensor {name} holds {most}; at most {self.largest} is supported")


@dataclass(frozen=True, slots=True)
class Joint:
    """How small parts of one shape are stored together: with fewer torch operations than by `WeightSlot.put` for each of them.

    Attributes:
        convert: converts parts [n, *shape], of slots whose `convert` compares equal, to [n, ...].
        put: stores one of the converted parts.
    """

    convert: Callable[[torch.Tensor], torch.Tensor]
    put: Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one checkpoint tensor.

    Attributes:
        shape: shape of the whole tensor in the checkpoint.
        index: the part of it that this process loads.
        put: stores that part, given as a tensor of `dtype` on any device.
        joint: stores several parts; None to store each with `put`.
        dtype: required dtype of the tensor; None for any floating-point dtype.
        broadcast: whether one number may be broadcast to all, and dimensions of 1 may be missing.
        finite: whether all numbers must be finite.
        rule: what else is required of the numbers.
        optional: whether the checkpoint may lack the tensor.
        in_check: whether the numbers are read even on the meta device: few numbers that others depend on.
        groups: the dimension that counts groups of columns, and the checkpoint's `group_size`; None without such a dimension.
    """

    shape: tuple[int, ...]
    index: Index
    put: Callable[[torch.Tensor], object]
    dtype: torch.dtype | None = None
    joint: Joint | None = None
    broadcast: bool = False
    finite: bool = False
    rule: Rule | None = None
    optional: bool = False
    in_check: bool = False
    groups: tuple[int, int] | None = None

    def index_of(self, shape: tuple[int, ...]) -> Index | None:
        """The part to read of a tensor of `shape`; None if the shape is wrong."""
        if shape == self.shape:
            return self.index
        if self.broadcast and math.prod(shape) == 1:
            return (slice(None),) * len(shape)
        return self.index[: len(shape)] if self.broadcast and shape == self.shape[: len(shape)] else None


def ignore(part: torch.Tensor) -> None:
    """Store nothing."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The tensors that a scheme stores for a weight [out, in]: the matrix in the scheme's format, scales if it has any, and the matrix in a
    kernel's format if that differs.
    The weights of a layer's experts are one storage, whose tensors have a leading dimension E.

    Attributes:
        order: the order of the columns of an int4 weight in activation order; None for weights that cannot have one.
        orders: the same for each weight of a stack; empty for stacks that cannot have one.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    order: ColumnOrder | None = field(default=None, kw_only=True)
    orders: tuple[ColumnOrder, ...] = field(default=(), kw_only=True)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors."""
        return tuple(tensor for tensor in (self.weight, self.scale, self.packed) if tensor is not None)

    @property
    def scales(self) -> torch.Tensor:
        """The scales of a scheme that has them."""
        assert self.scale is not None
        return self.scale

    def at(self, index: int | slice | torch.Tensor) -> Storage:
        """Views of one weight of a stack (int) or of several (slice), or a copy of rows int64 [n] of a weight with scales by row."""
        views = Storage(*(tensor[index] for tensor in self.tensors))
        if not self.orders or isinstance(index, torch.Tensor):
            return views
        return replace(views, orders=self.orders[index]) if isinstance(index, slice) else replace(views, order=self.orders[index])

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, in] with their columns in the order of the weight's; those of a weight that ranks share have it already, from
        `Linear.own_columns`. Can be captured.
        """
        order = self.order
        return x if order is None or order.columns is None or order.shared else x.index_select(1, order.columns)

    def restored(self, value: torch.Tensor) -> torch.Tensor:
        """The value [out, in] of the weight with its columns in their own order, unless ranks share them."""
        order = self.order
        if order is None or order.columns is None or order.shared:
            return value
        return torch.empty_like(value).index_copy_(1, order.columns, value)


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One of the checkpoint's linear layers within a fused one.

    Attributes:
        prefix: its name, without `.weight`.
        shape: [out, in] in the checkpoint.
        index: the rows and columns that this process loads.
        start: the row of the fused layer at which they start.
    """

    prefix: str
    shape: tuple[int, int]
    index: tuple[slice, slice]
    start: int

    @property
    def rows(self) -> slice:
        """Rows of the fused layer that this part fills."""
        return slice(self.start, self.start + self.index[0].stop - self.index[0].start)


@dataclass(frozen=True, slots=True)
class NewWeight:
    """A weight [out, in] to allocate.

    Attributes:
        dtype: dtype of the activations.
        count: number of weights in one storage; None for one weight without a leading dimension.
        parts: the layers that will fill it; a part may start at any row.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype
    device: torch.device
    count: int | None = None
    parts: Sequence[LinearPart] = ()

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """An empty tensor of `shape` for one weight, or of [count, *shape] for all."""
        return torch.empty(shape if self.count is None else (self.count, *shape), dtype=dtype, device=self.device)


class QuantScheme(Protocol):
    """How the weight of a linear layer is stored, filled and multiplied by. Stateless; one scheme serves all layers of
    a model. Subclass it explicitly.

    Attributes:
        gemm_format: the format of `storage` for GEMM kernels on a GPU. With "dense", the skinny GEMM kernels, and cuBLAS with float32
            output, can read `storage.weight`; with "fp8" and "int4" the kernels for these formats can read `storage`. None if only the
            scheme's own `matmul` can.
    """

    name: str
    gemm_format: Literal["dense", "fp8", "int4"] | None

    def heads(self, device: torch.device) -> QuantScheme:
        """The scheme of the LM head and of draft models on `device`; by default this one."""
        return self

    def shared_columns(self) -> int | None:
        """Columns that share a scale, if their number depends on the checkpoint; else None."""
        return None

    def allocate(self, new: NewWeight) -> Storage:
        """Storage of a weight, uninitialised."""
        ...

    def in_features(self, storage: Storage) -> int:
        """Columns of the weight; by default those of the stored matrix."""
        return storage.weight.shape[1]

    def places(self, part: LinearPart, storage: Storage) -> Mapping[str, WeightSlot]:
        """The checkpoint tensors that the scheme needs for one part, by name, and their destinations in `storage`."""
        ...

    def matmul(self, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None, in_prompt: bool = False) -> torch.Tensor:
        """`x @ weight.T + bias`: [T, in] -> [T, out], the dtype of `x`; by default with the dequantised weight.

        `in_prompt`: rows of a prompt pass.
        """
        return F.linear(x, self.dequantize(storage, x.dtype), bias)

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """The value of the weight, [out, in] or [E, out, in], in `dtype`."""
        ...

    def select_rows(self, storage: Storage, rows: torch.Tensor) -> Storage:
        """A copy of output rows int64 [n], as the weight of a smaller layer; by default for schemes with scales by row."""
        return storage.at(rows)
