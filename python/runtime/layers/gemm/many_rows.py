"""Chooses tilings of the WGMMA GEMM for more than 128 rows, by an estimate of its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.layers.gemm.wgmma_gemm import BLOCK_ROWS, COLUMNS, MAX_TILE, ROW_BYTES, WIDE_ROWS, WgmmaConfig

SHARED_RATE = 128
"""Shared-memory bandwidth per SM, in bytes per cycle."""
L2_RATE = 40
"""Bytes that an SM loads from L2 per cycle while all SMs load."""
TILE_CYCLES, STORE_RATE = 1000, 50
"""Fixed cycles per tile; bytes of float32 sums that the epilogue processes per cycle."""
SHARING = 2
"""Blocks per cluster, which share weight rows or rows of x and have neighbouring rows of the other. Larger clusters leave SMs idle."""
READ_AGAIN = 1.2
"""How much longer tiles of clusters that share rows of x take if several clusters read the same weight rows. Measured on an H200."""
SPLIT = 2
"""Blocks that split K. More leave SMs idle."""
NARROWEST, STEP = 32, 8
"""Weight rows of the narrowest tile, and the step between tile sizes. The rates and cycles above are per SM of a Hopper GPU, the only kind
that runs the kernel; they only select the tiling that is timed against cuBLAS."""


@dataclass(frozen=True, slots=True)
class GemmSize:
    """A GEMM of x [rows, columns] by a weight [weight_rows, columns]; `gated`: whether the weight has gate and up rows."""

    rows: int
    weight_rows: int
    columns: int
    gated: bool


def many_rows_config(size: GemmSize, num_sms: int) -> WgmmaConfig:
    """The tiling without split-K to time against cuBLAS: the one with the shortest estimated time."""
    tilings = (
        WgmmaConfig(tile, 1, *cluster, rows)
        for cluster in ((SHARING, 1), (1, SHARING))
        for rows in (BLOCK_ROWS, WIDE_ROWS)
        for tile in range(NARROWEST, MAX_TILE + 1, STEP)
    )
    return min((config for config in tilings if config.fits(size.gated)), key=lambda config: cycles(config, size, num_sms))


def split_config(size: GemmSize, clusters_at_once: Mapping[int, int]) -> WgmmaConfig | None:
    """The tiling with split-K to time as well: the narrowest one whose clusters all run concurrently. None if there is none.

    With few rows, tiles must be narrow to fill all SMs, which then wait for L2. Two blocks that split K of a tile twice as wide load fewer
    bytes in total.

    Args:
        clusters_at_once: number of clusters that run concurrently, by blocks per cluster.
    """
    row_groups = _ceil(size.rows, BLOCK_ROWS * SHARING)
    tiles = clusters_at_once[SHARING * SPLIT] // row_groups
    if size.gated or not tiles:
        return None
    tile = _ceil(_ceil(size.weight_rows, tiles), STEP * SPLIT) * STEP * SPLIT
    return WgmmaConfig(max(tile, NARROWEST), SPLIT, SHARING) if tile <= MAX_TILE else None


def cycles(config: WgmmaConfig, size: GemmSize, num_sms: int) -> float:
    """Estimated clock cycles of a GEMM."""
    rows, warpgroups, outputs = config.rows, config.rows // 64, config.tile // 2 if size.gated else config.tile
    columns = size.weight_rows // 2 if size.gated else size.weight_rows
    row_groups = _ceil(size.rows, rows * config.cluster_m)
    groups = row_groups * _ceil(columns, outputs * config.cluster_n)
    # wgmma multiplies 64 x tile x 16 in tile / 2 cycles, and reads both operands from shared memory.
    multiplied = warpgroups * config.tile * COLUMNS // 32
    touched = ((rows + config.tile) + warpgroups * (64 + config.tile)) * ROW_BYTES / SHARED_RATE
    loaded = (rows / config.cluster_n + config.tile / config.cluster_m) * ROW_BYTES / L2_RATE
    tile = _ceil(size.columns, COLUMNS) * max(multiplied, touched, loaded) + TILE_CYCLES + rows * config.tile * 4 / STORE_RATE
    again = READ_AGAIN if config.cluster_n > 1 and row_groups > 1 else 1.0
    return _ceil(groups, max(num_sms // config.cluster, 1)) * tile * again


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
