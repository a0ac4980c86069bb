"""The fastest kernel of each GEMM, measured once and shared by all models that use the same object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from runtime.config.device_tuning import DeviceTuning
from runtime.config.kernel_configs import FragmentConfig, FullyResidentConfig, ResidentConfig, TritonConfig, WideningConfig
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.layers.gemm.gemm import GemmKey
from runtime.layers.gemm.wgmma_gemm import WgmmaConfig

GemmKernel = TritonConfig | WgmmaConfig | FragmentConfig | ResidentConfig | FullyResidentConfig | WideningConfig
"""A kernel with its epilogue, by its tiling."""
GemmChoice = GemmKernel | None
"""How a GEMM is computed: by a kernel with a tiling, or cuBLAS (None) with separate kernels for the epilogue."""

MANY_ROWS, CLEARLY = 1024, 0.97
"""From this many rows on, a kernel replaces cuBLAS only if it takes less than this fraction of its time: long prompts are limited by the
card's power, and there the other kernels lose 2 to 3 % more than in the short runs that are timed."""


@dataclass(frozen=True, slots=True)
class Timed:
    """The fastest kernel of a GEMM.

    Attributes:
        micros: microseconds of each choice that ran.
        in_pass: microseconds of a pass over some layers with each choice that is almost as fast as the fastest; empty if the times of the
            GEMM alone decided.
    """

    choice: GemmChoice
    micros: Mapping[GemmChoice, float]
    in_pass: Mapping[GemmChoice, float] = field(default_factory=dict[GemmChoice, float])

    def __str__(self) -> str:
        times = _listed(self.micros) + (f"; in a pass: {_listed(self.in_pass)}" if self.in_pass else "")
        return f"{describe(self.choice)} ({times})"


def fastest(micros: Mapping[GemmChoice, float], rows: int) -> GemmChoice:
    """The choice for a GEMM of `rows` rows, by the microseconds of each."""
    best = min(micros, key=micros.__getitem__)
    return None if rows >= MANY_ROWS and None in micros and micros[best] > CLEARLY * micros[None] else best


class GemmTimings:
    """Measured times. Two models with the same timings compute equal GEMMs with equal kernels and bits; so do the ranks of `group`.

    `tuning`: the device's measured constants, which determine the candidates.
    """

    def __init__(self, tuning: DeviceTuning, group: ParallelGroup = ALONE) -> None:
        self.tuning = tuning
        self._group = group
        self._measured: dict[tuple[torch.dtype, GemmKey], Timed] = {}
        self._quantized: dict[tuple[str, int, int], tuple[bool, str]] = {}

    def known(self, dtype: torch.dtype, key: GemmKey) -> Timed | None:
        """The result for a GEMM with weights of `dtype`; None if it was not measured."""
        return self._measured.get((dtype, key))

    def keep(self, dtype: torch.dtype, key: GemmKey, measure: Callable[[], Timed]) -> Timed:
        """The known result, or that of `measure` on rank 0."""
        if (dtype, key) not in self._measured:
            self._measured[dtype, key] = self._group.agree(measure())
        return self._measured[dtype, key]

    def replace(self, dtype: torch.dtype, key: GemmKey, timed: Timed) -> None:
        """Replace a known result, on a single rank."""
        self._measured[dtype, key] = timed

    def keep_quantized(self, key: tuple[str, int, int], measure: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
        """Whether prompts quantize their rows for weights of a scheme, rows and columns, and a line for reports: known, or measured on rank
        0.
        """
        if key not in self._quantized:
            self._quantized[key] = self._group.agree(measure())
        return self._quantized[key]


def _listed(times: Mapping[GemmChoice, float]) -> str:
    return ", ".join(f"{describe(choice)} {micros:.1f} µs" for choice, micros in times.items())


def describe(choice: GemmChoice) -> str:
    """The name of a choice in the log and in tables."""
    return "cuBLAS" if choice is None else f"Triton {choice}" if isinstance(choice, TritonConfig) else str(choice)
