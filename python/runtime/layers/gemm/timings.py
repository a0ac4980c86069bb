"""The fastest kernel of each GEMM, measured once and shared by every model that is handed this object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from runtime.config.device_tuning import H200, DeviceTuning
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.layers.gemm.gemm import GemmKey

if TYPE_CHECKING:  # it imports Triton, which the CPU build of torch does not have
    from runtime.layers.gemm.autotune import Timed


class GemmTimings:
    """Measured times. Two models with the same timings compute equal GEMMs with equal kernels and bits; so do the ranks of `group`.

    `tuning` has the device's measured values, which determine the candidates.
    """

    def __init__(self, tuning: DeviceTuning = H200, group: ParallelGroup = ALONE) -> None:
        self.tuning = tuning
        self._group = group
        self._measured: dict[tuple[torch.dtype, GemmKey], Timed] = {}
        self._quantized: dict[tuple[str, int, int], tuple[bool, str]] = {}

    def known(self, dtype: torch.dtype, key: GemmKey) -> Timed | None:
        """What was measured for a GEMM with weights of `dtype`."""
        return self._measured.get((dtype, key))

    def keep(self, dtype: torch.dtype, key: GemmKey, measure: Callable[[], Timed]) -> Timed:
        """The known value, or what `measure` finds on rank 0."""
        if (dtype, key) not in self._measured:
            self._measured[dtype, key] = self._group.agree(measure())
        return self._measured[dtype, key]

    def keep_quantized(self, key: tuple[str, int, int], measure: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
        """Whether prompts quantize their rows for weights of a scheme, rows and columns, and a line about it: known, or found on rank 0."""
        if key not in self._quantized:
            self._quantized[key] = self._group.agree(measure())
        return self._quantized[key]
