"""Tilings of the WGMMA GEMM for more than 128 rows, by an estimate of their time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.layers.gemm.wgmma_gemm import COLUMNS, ROW_BYTES, WIDEST, WgmmaConfig

SHARED_RATE = 128
"""Bytes that a multiprocessor's shared memory takes or gives per cycle."""
L2_RATE = 40
"""Bytes that a multiprocessor loads from L2 per cycle, while all do."""
EXCHANGE_RATE = 14
"""Bytes that a multiprocessor writes to the shared memory of others per cycle, while all do."""
LAUNCH_CYCLES, TILE_CYCLES, EXCHANGE_CYCLES = 2500, 1000, 1500
"""Of a kernel until its first multiplication, and of a tile and of an exchange of sums beside their bytes."""
STORE_RATE = 50
"""Bytes of float32 sums that the epilogue takes per cycle."""
CROWDED_L2 = 1 / 8
"""Share of the time of loads that adds to the time of a step although other work hides loads."""
GPC_SMS = 16
"""Multiprocessors that clusters of four and more can count on in each of a GPU's groups."""
SHARING = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
"""Blocks of a cluster that share weight rows, and that share rows of x."""
SPLITS = (1, 2, 4)
NARROWEST, STEP = 32, 8
WORTH_TIMING = 1.12
"""How much longer than the best a tiling may take by the estimate."""


@dataclass(frozen=True, slots=True)
class GemmSize:
    """The GEMM of `rows` rows of x, `weight_rows` of the weight, and `columns` of both; `gated`: gate and up rows."""

    rows: int
    weight_rows: int
    columns: int
    gated: bool


def many_rows_configs(size: GemmSize, num_sms: int, splits: bool) -> tuple[WgmmaConfig, ...]:
    """The tilings worth timing: the best by the estimate, the same tile in another cluster, and the best with other rows or split.

    Args:
        splits: whether blocks may share the columns of a tile.
    """
    times = {config: cycles(config, size, num_sms) for config in _all(size.gated, SPLITS if splits else (1,))}
    best, *others = sorted(times, key=times.__getitem__)
    others = [config for config in others if times[config] <= WORTH_TIMING * times[best]]
    alike = next((config for config in others if (config.rows, config.tile, config.split) == (best.rows, best.tile, best.split)), None)
    unlike = next((config for config in others if (config.rows, config.split) != (best.rows, best.split)), None)
    return tuple(config for config in (best, alike, unlike) if config is not None)


def cycles(config: WgmmaConfig, size: GemmSize, num_sms: int) -> float:
    """Estimated clock cycles of a GEMM."""
    warpgroups, outputs = config.rows // 64, config.tile // 2 if size.gated else config.tile
    columns = size.weight_rows // 2 if size.gated else size.weight_rows
    groups = _ceil(size.rows, config.rows * config.cluster_m) * _ceil(columns, outputs * config.cluster_n)
    steps = _ceil(_ceil(size.columns, COLUMNS), config.split)
    # wgmma multiplies 64 x tile x 16 in tile / 2 cycles, and reads both operands from shared memory.
    multiplied = warpgroups * config.tile * COLUMNS // 32
    touched = ((config.rows + config.tile) + warpgroups * (64 + config.tile)) * ROW_BYTES / SHARED_RATE
    loaded = (config.rows / config.cluster_n + config.tile / config.cluster_m) * ROW_BYTES / L2_RATE
    step = max(multiplied, touched, loaded) + CROWDED_L2 * loaded
    sums = config.rows * config.tile * 4
    exchange = 0.0 if config.split == 1 else EXCHANGE_CYCLES + sums * (1 - 1 / config.split) / EXCHANGE_RATE
    return LAUNCH_CYCLES + _ceil(groups, _clusters(config.cluster, num_sms)) * (steps * step + TILE_CYCLES + sums / STORE_RATE + exchange)


def _all(gated: bool, splits: tuple[int, ...]) -> Iterator[WgmmaConfig]:
    for rows, widest in WIDEST.items():
        for cluster_m, cluster_n in SHARING:
            for split in splits:
                for tile in range(NARROWEST, widest + 1, STEP):
                    config = WgmmaConfig(tile, split, rows, cluster_m, cluster_n)
                    if config.fits(gated):
                        yield config


def _clusters(blocks: int, num_sms: int) -> int:
    """Clusters of so many blocks that run at once, about."""
    return max(num_sms // blocks if blocks <= 2 else num_sms // GPC_SMS * (GPC_SMS // blocks), 1)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
