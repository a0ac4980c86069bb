"""Linear layers: storage × quantisation scheme × shard."""

from __future__ import annotations

from enum import Enum

import torch

from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.scheme import QuantScheme, Storage


class Partition(Enum):
    """How the ranks of a group share a linear layer."""

    REPLICATED = "every rank holds the whole weight"
    COLUMN = "each rank holds some output rows; outputs stay sharded"
    ROW = "each rank holds some input columns; outputs are partial sums until `reduce`"


class Linear:
    """`x @ weight.T + bias`, or this rank's part of it. Owner of its tensors.

    Attributes:
        storage: the weight [out, in] of this rank, in the scheme's format.
        bias: [out] in the model's dtype, or None.
        scheme: how the weight is stored and multiplied by.
        partition, group: how the layer is shared.
    """

    def __init__(
        self,
        storage: Storage,
        bias: torch.Tensor | None = None,
        scheme: QuantScheme = DENSE,
        partition: Partition = Partition.REPLICATED,
        group: ParallelGroup = ALONE,
    ) -> None:
        self.storage, self.bias, self.scheme = storage, bias, scheme
        self.partition, self.group = partition, group

    @classmethod
    def dense(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """An unquantised layer of the given tensors."""
        return cls(Storage(weight), bias)

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
        return self.storage.weight.shape[1]

    @property
    def num_parameters(self) -> int:
        """Entries of the weight."""
        return self.out_features * self.in_features

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that the layer holds."""
        return [*self.storage.tensors, *([] if self.bias is None else [self.bias])]

    @property
    def is_dense(self) -> bool:
        """Whether GEMM kernels can read `weight` directly."""
        return self.scheme.gemm_caps.dense

    @property
    def is_partial(self) -> bool:
        """Whether outputs are partial sums, so that nothing may be fused behind the GEMM before `reduce`."""
        return self.partition is Partition.ROW and self.group.size > 1

    def reduce(self, out: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' outputs where they are partial."""
        return self.group.all_reduce(out) if self.is_partial else out

    def select_rows(self, rows: torch.Tensor) -> Linear:
        """A layer of the outputs int64 [n] of this one, copied."""
        bias = None if self.bias is None else self.bias[rows]
        return Linear(self.scheme.select_rows(self.storage, rows), bias, self.scheme, self.partition, self.group)

    def __call__(self, x: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
        """[T, in] -> [T, out], the dtype of `x`; without `reduce`. `in_prompt`: rows of a prompt pass."""
        return self.scheme.matmul(x, self.storage, self.bias, in_prompt)
