"""Tilings of the kernels of sparse MLPs, by weight format and number of tokens. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from runtime.config.kernel_configs import GroupedConfig, StepConfig, WgmmaExpertsConfig

WeightFormat = Literal["dense", "fp8", "mxfp4", "int4"]
"""Weights in the activations' dtype; e4m3 with float32 scales of blocks or rows; e2m1 with one scale per 32 columns; 4-bit codes with a
scale and a zero point per group of columns."""
FEW_BLOCKS = frozenset({1, 4, 8, 16, 32, 64})
"""Token counts that together use every kernel for few tokens."""
WIDENED_TILES: Mapping[WeightFormat, Mapping[int, float]] = {
    "fp8": {16: 11, 32: 24, 48: math.inf},
    "mxfp4": {16: 11, 32: 24, 48: 40, 64: 50, 80: 112, 160: math.inf},
    "int4": {16: 11, 32: 24, 48: 40, 64: 50, 80: 112, 160: math.inf},
}
"""Pairs of the tiles of the grouped WGMMA GEMMs that convert weights in registers, and the largest mean number of pairs of an expert for
which they are chosen. Measured with uneven routing, where the numbers of pairs deviate from their mean by half of it; int4 with random
routing."""
MID_ROUTER_ROWS = 1024
"""Up to this many tokens, several programs of the Triton router split the GEMM of 16 tokens; above, one program computes 32 whole rows."""


@dataclass(frozen=True, slots=True)
class ExpertTuning:
    """Measured constants of one GPU, by weight format.

    Attributes:
        few: (largest number of tokens, tilings of the two kernels for few tokens), ascending; above the last, `many` applies.
        many: (largest number of tokens, tiling of the grouped GEMM), ascending; the last applies to any number.
        most_streamed: the largest number of tokens for which the CUDA kernels for few tokens are faster than the grouped GEMM, if they
            support the dtypes and shapes.
        wgmma: the smallest number of tokens for which the grouped WGMMA GEMMs are faster, if they support device, dtypes and shapes, and
            their tiling; missing formats have none.
        widened: with more tokens than the first number and at most the second, the grouped WGMMA GEMMs that convert weights in registers
            are faster, if they support the dtypes and shapes; missing formats have none.
    """

    few: Mapping[WeightFormat, tuple[tuple[int, tuple[StepConfig, StepConfig]], ...]]
    many: Mapping[WeightFormat, tuple[tuple[int, GroupedConfig], ...]]
    most_streamed: Mapping[WeightFormat, int]
    wgmma: Mapping[WeightFormat, tuple[int, WgmmaExpertsConfig]]
    widened: Mapping[WeightFormat, tuple[int, int]]

    def few_rows(self, weights: WeightFormat, rows: int) -> tuple[StepConfig, StepConfig] | None:
        """Tilings of the kernels for few tokens; None if the grouped GEMM is faster."""
        return next((configs for largest, configs in self.few[weights] if rows <= largest), None)

    def many_rows(self, weights: WeightFormat, rows: int) -> GroupedConfig:
        """The tiling of the grouped GEMM."""
        return next((config for largest, config in self.many[weights] if rows <= largest), self.many[weights][-1][1])

    def wgmma_rows(self, weights: WeightFormat, rows: int) -> WgmmaExpertsConfig | None:
        """The tiling of the grouped WGMMA GEMMs, which need e4m3 rows for e4m3 weights; None if `many_rows` is faster."""
        least, config = self.wgmma.get(weights, (rows + 1, None))
        return config if rows >= least else None

    def widened_pairs(self, weights: WeightFormat, rows: int, share: float) -> int:
        """Pairs per tile of the grouped GEMMs that convert weights in registers; 0 if other kernels are faster, and for other formats.

        Args:
            share: the fraction of tokens that choose an expert, on average.
        """
        above, most = self.widened.get(weights, (rows, rows))
        if not above < rows <= most:
            return 0
        return next(pairs for pairs, largest in WIDENED_TILES[weights].items() if rows * share <= largest)

    def without_fp8_rows(self) -> ExpertTuning:
        """The same, with 16-bit activations for any number of tokens."""
        many = {
            kind: tuple((largest, dataclasses.replace(config, fp8_rows=False)) for largest, config in table)
            for kind, table in self.many.items()
        }
        wgmma = {kind: found for kind, found in self.wgmma.items() if kind != "fp8"}
        return dataclasses.replace(self, many=many, wgmma=wgmma)

    def kernel_rows(self, most: int, shares: Iterable[float] = ()) -> set[int]:
        """Token counts up to `most` that together use every kernel for up to `most` tokens, for each `share` of `widened_pairs`."""
        bounds = {bound for table in self.many.values() for bound, _ in table}
        bounds |= {bound for least, _ in self.wgmma.values() for bound in (least - 1, least)}
        for share, (kind, (above, last)) in product(shares, self.widened.items()):
            means = WIDENED_TILES[kind].values()
            bounds |= {above, last, *(min(max(int(mean / share), above + 1), last) for mean in means if mean < math.inf)}
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
        "int4": (  # those of MXFP4, at most 128 columns at once; not measured
            (8, (StepConfig(32, 128, 2, 4, 4), StepConfig(16, 128, 4, 4, 4))),
            (64, (StepConfig(64, 128, 2, 4, 4), StepConfig(16, 128, 2, 4, 4))),
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
        "int4": (
            (256, GroupedConfig(32, 64, 128, 4, 4)),
            (512, GroupedConfig(64, 128, 64, 4, 3)),
            (1 << 30, GroupedConfig(128, 128, 64, 4, 3, 4)),
        ),
    },
    most_streamed={"dense": 64, "fp8": 64, "mxfp4": 256, "int4": 256},
    wgmma={"dense": (256, WgmmaExpertsConfig(128, 256, 256, 2)), "fp8": (513, WgmmaExpertsConfig(128, 256, 256, 2))},
    widened={"fp8": (64, 512), "mxfp4": (64, 1 << 30), "int4": (128, 1 << 30)},
)

# On an H100, MXFP4 with 64 tokens takes 187 us by WGMMA and 208 us by the kernels for few tokens; with 40 tokens both take equally long.
# The latter gain more from the faster memory of an H200: 163 us against 164 us by WGMMA with 64 tokens.
H100_EXPERTS = dataclasses.replace(
    H200_EXPERTS,
    few={**H200_EXPERTS.few, "mxfp4": tuple((min(largest, 32), configs) for largest, configs in H200_EXPERTS.few["mxfp4"])},
    widened={**H200_EXPERTS.widened, "mxfp4": (32, 1 << 30)},
)

LITTLE_SHARED_EXPERTS = dataclasses.replace(
    H200_EXPERTS,
    few={kind: tuple((min(largest, 16), configs) for largest, configs in table) for kind, table in H200_EXPERTS.few.items()},
    many={**H200_EXPERTS.many, "dense": H200_EXPERTS.many["dense"][:-1]},
)
"""Tilings that need at most 99 KiB of shared memory per block, as the compiler reports; not measured."""
