"""How the kernels of sparse MLPs are cut, by format of the weights and number of tokens. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from runtime.config.kernel_configs import GroupedConfig, StepConfig, WgmmaExpertsConfig

WeightFormat = Literal["dense", "fp8", "mxfp4"]
"""Weights in the activations' dtype; e4m3 with float32 scales of blocks or rows; e2m1 with a scale for each 32 columns."""

FEW_BLOCKS = frozenset({1, 4, 8, 16, 32, 64})
"""Tokens that together need every kernel for few tokens."""

MID_ROUTER_ROWS = 1024
"""Up to this many tokens, programs of the router in Triton share the GEMM of 16 tokens; above, one computes 32 whole rows."""


@dataclass(frozen=True, slots=True)
class ExpertTuning:
    """Measured values of one GPU.

    Attributes:
        few: by format, (largest number of tokens, tilings of the two kernels for few tokens), ascending; above the last,
            `many` holds.
        many: by format, (largest number of tokens, tiling of the grouped GEMM), ascending; the last holds for any number.
        most_streamed: by format, the largest number of tokens for which the CUDA kernels for few tokens are faster than the grouped
            GEMM, where they serve the dtypes and shapes.
        wgmma: by format, the smallest number of tokens for which the grouped GEMMs by WGMMA are faster where the device, dtypes and shapes
            allow them, and their tiling; formats that are left out have none.
        widened: by format, (largest number of tokens, pairs of a tile) of the grouped GEMMs by WGMMA that widen weights in registers,
            ascending; 0 pairs where other kernels are faster. The last holds for any number.
    """

    few: Mapping[WeightFormat, tuple[tuple[int, tuple[StepConfig, StepConfig]], ...]]
    many: Mapping[WeightFormat, tuple[tuple[int, GroupedConfig], ...]]
    most_streamed: Mapping[WeightFormat, int]
    wgmma: Mapping[WeightFormat, tuple[int, WgmmaExpertsConfig]]
    widened: Mapping[WeightFormat, tuple[tuple[int, int], ...]]

    def few_rows(self, weights: WeightFormat, rows: int) -> tuple[StepConfig, StepConfig] | None:
        """Tilings of the kernels for few tokens, or None where the grouped GEMM is faster."""
        return next((configs for largest, configs in self.few[weights] if rows <= largest), None)

    def many_rows(self, weights: WeightFormat, rows: int) -> GroupedConfig:
        """The tiling of the grouped GEMM."""
        return next((config for largest, config in self.many[weights] if rows <= largest), self.many[weights][-1][1])

    def wgmma_rows(self, weights: WeightFormat, rows: int) -> WgmmaExpertsConfig | None:
        """The tiling of the grouped GEMMs by WGMMA, or None where `many_rows` is faster; of e4m3 weights they take e4m3 rows."""
        least, config = self.wgmma.get(weights, (rows + 1, None))
        return config if rows >= least else None

    def widened_pairs(self, weights: WeightFormat, rows: int) -> int:
        """Pairs of a tile of the grouped GEMMs that widen weights in registers; 0 where other kernels are faster, or for other formats."""
        return next((pairs for largest, pairs in self.widened.get(weights, ()) if rows <= largest), 0)

    def without_fp8_rows(self) -> ExpertTuning:
        """The same with activations in 16 bits for any number of tokens."""
        many = {
            kind: tuple((largest, dataclasses.replace(config, fp8_rows=False)) for largest, config in table)
            for kind, table in self.many.items()
        }
        wgmma = {kind: found for kind, found in self.wgmma.items() if kind != "fp8"}
        return dataclasses.replace(self, many=many, wgmma=wgmma)

    def kernel_rows(self, most: int) -> set[int]:
        """Numbers of tokens, up to `most`, that together need every kernel that passes of up to `most` tokens use."""
        bounds = {bound for table in self.many.values() for bound, _ in table}
        bounds |= {bound for least, _ in self.wgmma.values() for bound in (least - 1, least)}
        bounds |= {largest for table in self.widened.values() for largest, _ in table}
        return {min(bound, most) for bound in bounds | FEW_BLOCKS | {MID_ROUTER_ROWS}}


H200_EXPERTS = ExpertTuning(
    few={
        "dense": (
            (8, (StepConfig(32, 256, 1, 2, 4), StepConfig(16, 256, 1, 2, 6))),
            (64, (StepConfig(64, 128, 1, 4, 4), StepConfig(16, 256, 1, 2, 6))),
        ),
        "fp8": (
            (8, (StepConfig(32, 128, 4, 4, 4), StepConfig(16, 128, 4, 2, 4))),
            (64, (StepConfig(64, 128, 2, 4, 4), StepConfig(16, 128, 4, 2, 4))),
        ),
        "mxfp4": (
            (8, (StepConfig(32, 256, 1, 4, 4), StepConfig(16, 256, 2, 4, 4))),
            (64, (StepConfig(64, 128, 2, 4, 4), StepConfig(16, 256, 1, 4, 4))),
        ),
    },
    many={
        "dense": (
            (256, GroupedConfig(16, 128, 128, 4, 3)),
            (512, GroupedConfig(32, 128, 64, 4, 4)),
            (2048, GroupedConfig(64, 128, 64, 8, 4, 4)),
            (1 << 30, GroupedConfig(128, 256, 64, 8, 4, 8)),
        ),
        "fp8": (
            (256, GroupedConfig(16, 64, 128, 4, 4, fp8_rows=True)),
            (512, GroupedConfig(32, 128, 128, 4, 4, fp8_rows=True)),
            (2048, GroupedConfig(64, 128, 128, 4, 4, 4, fp8_rows=True)),
            (1 << 30, GroupedConfig(128, 64, 128, 4, 4, 4, fp8_rows=True)),
        ),
        "mxfp4": (
            (256, GroupedConfig(32, 128, 128, 4, 4)),
            (1 << 30, GroupedConfig(128, 128, 64, 8, 3, 4)),
        ),
    },
    most_streamed={"dense": 64, "fp8": 64, "mxfp4": 256},
    wgmma={"dense": (2048, WgmmaExpertsConfig(128, 256, 256, 2)), "fp8": (2048, WgmmaExpertsConfig(128, 256, 256, 2))},
    widened={"fp8": ((64, 0), (256, 32), (512, 48), (1 << 30, 0)), "mxfp4": ((96, 0), (192, 32), (384, 48), (1 << 30, 128))},
)

# With 64 tokens MXFP4 takes 187 us by WGMMA, 208 by the kernels for few tokens; with 40 both take as long. The latter gain more from the
# faster memory of an H200: there they take 163 us for 64 tokens, by WGMMA 174, and with 96 both take as long.
H100_EXPERTS = dataclasses.replace(
    H200_EXPERTS,
    few={**H200_EXPERTS.few, "mxfp4": tuple((min(largest, 32), configs) for largest, configs in H200_EXPERTS.few["mxfp4"])},
    widened={**H200_EXPERTS.widened, "mxfp4": ((32, 0), (192, 32), (384, 48), (1 << 30, 128))},
)
