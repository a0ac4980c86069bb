"""Linear layers: storage × quantisation scheme × shard."""

from __future__ import annotations

from enum import Enum

import torch

from runtime.distributed.parallel_group import ALONE, ParallelGroup, Shard
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.scheme import QuantScheme, Storage


class Partition(Enum):
    """How a linear layer is sharded over the ranks of a group."""

    REPLICATED = "every rank holds the whole weight"
    COLUMN = "each rank holds some output rows; outputs stay sharded"
    ROW = "each rank holds some input columns; outputs are partial sums until `reduce`"


class Linear:
    """`x @ weight.T + bias`, or this rank's part of it. Owner of its tensors.

    Attributes:
        storage: the weight [out, in] of this rank, in the scheme's format.
        bias: [out] in the model's dtype, or None.
        scheme: the quantisation scheme.
        partition, group: how the layer is sharded.
        whole: number of outputs of all ranks together.
    """

    def __init__(
        self,
        storage: Storage,
        bias: torch.Tensor | None = None,
        scheme: QuantScheme = DENSE,
        partition: Partition = Partition.REPLICATED,
        group: ParallelGroup = ALONE,
        whole: int | None = None,
    ) -> None:
        self.storage, self.bias, self.scheme = storage, bias, scheme
        self.partition, self.group = partition, group
        self.whole = self.out_features if whole is None else whole

    @classmethod
    def dense(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """An unquantised layer of the given tensors."""
        return cls(Storage(weight), bias)

    @classmethod
    def sharded(cls, weight: torch.Tensor, group: ParallelGroup) -> Linear:
        """This rank's rows of a whole unquantised weight [out, in], without a copy."""
        rows = Shard(group.rank, group.size).of(len(weight))
        return cls(Storage(weight[rows]), None, DENSE, Partition.COLUMN, group, len(weight))

    def with_weight(self, weight: torch.Tensor) -> Linear:
        """An unquantised layer without a bias, sharded like this one."""
        return Linear(Storage(weight), None, DENSE, self.partition, self.group, self.whole)

    @property
    def weight(self) -> torch.Tensor:
        """The stored matrix, in the scheme's format."""
        return self.storage.weight

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.storage.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.scheme.in_features(self.storage)

    @property
    def num_parameters(self) -> int:
        """Entries of the weight."""
        return self.out_features * self.in_features

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the layer."""
        return [*self.storage.tensors, *([] if self.bias is None else [self.bias])]

    @property
    def is_dense(self) -> bool:
        """Whether GEMM kernels can read `weight` directly."""
        return self.scheme.gemm_format == "dense"

    @property
    def is_scaled(self) -> bool:
        """Whether `weight` is e4m3 with scales that GEMM kernels can read."""
        return self.scheme.gemm_format == "fp8"

    @property
    def is_int4(self) -> bool:
        """Whether `weight` is int4 with groups that GEMM kernels can read."""
        return self.scheme.gemm_format == "int4"

    @property
    def is_partial(self) -> bool:
        """Whether outputs are partial sums until `reduce`; no epilogue can be fused then."""
        return self.partition is Partition.ROW and self.group.size > 1

    @property
    def is_sharded(self) -> bool:
        """Whether this rank computes only some of the outputs."""
        return self.partition is Partition.COLUMN and self.group.size > 1

    @property
    def own_rows(self) -> slice:
        """The slice of the `whole` outputs that this rank computes, in a layer that is not fused from several."""
        return Shard(self.group.rank, self.group.size).of(self.whole) if self.is_sharded else slice(0, self.whole)

    def own_columns(self, x: torch.Tensor) -> torch.Tensor:
        """The inputs [T, in] that this rank multiplies, from its columns of the layer's input, [T, in].

        They are the same columns, except for an int4 weight in activation order that ranks share: its input is gathered from all ranks.
        """
        order = self.storage.order
        if order is None or order.columns is None or not order.shared:
            return x
        return self.group.gather_columns(x, order.width).index_select(1, order.columns)

    def reduce(self, out: torch.Tensor) -> torch.Tensor:
        """All-reduce the outputs if they are partial."""
        return self.group.all_reduce(out) if self.is_partial else out

    def gather(self, out: torch.Tensor) -> torch.Tensor:
        """The outputs of all ranks, [T, whole], from this rank's [T, out]."""
        return self.group.gather_columns(out, self.whole) if self.is_sharded else out

    def tail(self, start: int) -> Linear:
        """A layer of this rank's outputs from `start` on: a view of the weight if it is unquantised, else a copy. At load time only."""
        own = slice(start, self.out_features)
        rows = torch.arange(start, self.out_features, device=self.weight.device)
        storage = Storage(self.weight[own]) if self.is_dense else self.scheme.select_rows(self.storage, rows)
        return Linear(storage, None if self.bias is None else self.bias[own], self.scheme)

    def select_rows(self, rows: torch.Tensor) -> Linear:
        """A layer of the outputs int64 [n] of this one, copied, and sharded like this one. At load time only."""
        if self.is_sharded:
            return self._select_sharded(rows)
        bias = None if self.bias is None else self.bias[rows]
        return Linear(self.scheme.select_rows(self.storage, rows), bias, self.scheme, self.partition, self.group)

    def _select_sharded(self, rows: torch.Tensor) -> Linear:
        """`select_rows` for a sharded layer: an all-reduce, with zeros on the ranks without a row, distributes the rows."""
        assert self.bias is None, "an LM head has no bias"
        own = self.own_rows
        held = (rows >= own.start) & (rows < own.stop)
        part = self.scheme.select_rows(self.storage, torch.where(held, rows - own.start, 0))
        keep = Shard(self.group.rank, self.group.size).of(len(rows))
        found = [self.group.all_reduce(t.float().mul_(held.view(-1, *[1] * (t.dim() - 1))))[keep].to(t.dtype) for t in part.tensors]
        return Linear(Storage(*found), None, self.scheme, self.partition, self.group, len(rows))

    def __call__(self, x: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
        """[T, in] -> [T, out], the dtype of `x`; without `reduce`. `in_prompt`: rows of a prompt pass."""
        return self.scheme.matmul(x, self.storage, self.bias, in_prompt)
