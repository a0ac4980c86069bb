"""The tiling of the WGMMA GEMM for many rows, by the estimate of its time, and the prompts that it is chosen for."""

from __future__ import annotations

import pytest

from runtime.config.device_tuning import H200
from runtime.layers.gemm.many_rows import GemmSize, cycles, many_rows_config, split_config
from runtime.layers.gemm.wgmma_gemm import BLOCK_ROWS, WIDE_ROWS, WgmmaConfig, _blocks, _boxes
from runtime.model_executor.build import prompt_rows

ROWS = (192, 256, 384, 512, 1024, 2048)
SHAPES = ((576, 576), (960, 576), (4096, 4096), (4096, 14336), (6144, 4096), (28672, 4096), (128256, 4096))
H200_SMS = 132


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("num_sms", [1, 78, 114, H200_SMS])
def test_the_tiling_offered_is_valid(num_sms: int, rows: int, shape: tuple[int, int], gated: bool) -> None:
    size = GemmSize(rows, *shape, gated)
    config = many_rows_config(size, num_sms)
    assert config.fits(gated)
    assert _boxes(config, config.rows, config.rows, gated).stages >= 4
    narrower = WgmmaConfig(config.tile // 2 // 16 * 16, cluster_m=2)
    assert narrower.tile < 32 or not narrower.fits(gated) or cycles(config, size, num_sms) <= cycles(narrower, size, num_sms)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_clusters_of_a_split_tiling_all_run_at_once(rows: int, shape: tuple[int, int]) -> None:
    config = split_config(GemmSize(rows, *shape, gated=False), H200.clusters_at_once)
    if config is None:
        assert -(-rows // 256) * -(-shape[0] // 256) > H200.clusters_at_once[4], "no tile is wide enough"
        return
    assert config.fits(gated=False)
    assert _boxes(config, BLOCK_ROWS, BLOCK_ROWS, gated=False).stages >= 4
    assert -(-rows // 256) * -(-shape[0] // config.tile) <= H200.clusters_at_once[config.cluster]
    assert split_config(GemmSize(rows, *shape, gated=True), H200.clusters_at_once) is None


@pytest.mark.parametrize("rows", ROWS)
def test_tiles_of_a_large_gemm_keep_nearly_all_multiprocessors_busy(rows: int) -> None:
    best = many_rows_config(GemmSize(rows, 28672, 4096, True), H200_SMS)
    blocks = -(-rows // (best.rows * best.cluster_m)) * best.cluster_m * -(-28672 // best.tile)
    assert blocks / (-(-blocks // H200_SMS) * H200_SMS) > 0.85, best


@pytest.mark.parametrize("rows", ROWS)
def test_tiles_of_a_large_gemm_compute_no_row_in_vain(rows: int) -> None:
    best = many_rows_config(GemmSize(rows, 28672, 4096, True), H200_SMS)
    computed = -(-rows // (best.rows * best.cluster_m)) * best.rows * best.cluster_m
    assert computed <= rows * 9 / 8, best


def test_clusters_that_share_rows_of_x_are_offered_where_each_weight_row_is_read_once() -> None:
    assert many_rows_config(GemmSize(192, 28672, 4096, True), H200_SMS) == WgmmaConfig(112, cluster_n=2, rows=WIDE_ROWS)
    assert many_rows_config(GemmSize(256, 28672, 4096, True), H200_SMS) == WgmmaConfig(224, cluster_m=2)


@pytest.mark.parametrize(
    ("config", "gated", "fits"),
    [
        (WgmmaConfig(256, 4, cluster_m=2), False, True),
        (WgmmaConfig(256, 8, cluster_m=2), False, False),  # 16 blocks
        (WgmmaConfig(224, cluster_m=2), True, True),
        (WgmmaConfig(216, cluster_m=2), True, False),  # slices of 108 rows would break the swizzle
        (WgmmaConfig(240, cluster_m=3), True, True),
        (WgmmaConfig(128, 2), True, False),
        (WgmmaConfig(264), False, False),
        (WgmmaConfig(192, cluster_n=2, rows=WIDE_ROWS), True, True),
        (WgmmaConfig(200, rows=WIDE_ROWS), False, False),  # more sums than its threads have registers for
        (WgmmaConfig(128, rows=160), False, False),
        (WgmmaConfig(128, 2, 2, 4), False, False),  # 16 blocks
        (WgmmaConfig(0), False, False),
    ],
)
def test_tilings_that_the_kernel_lacks_are_known(config: WgmmaConfig, gated: bool, fits: bool) -> None:
    assert config.fits(gated) is fits


def test_every_weight_row_of_a_tile_is_loaded_once() -> None:
    for gated in (False, True):
        for cluster_m in (1, 2, 3, 4):
            config = WgmmaConfig(192, cluster_m=cluster_m)
            boxes = _boxes(config, 128, 128, gated)
            per_block = 2 if gated and cluster_m % 2 else 1
            assert boxes.w_rows * per_block * cluster_m == config.tile
            assert boxes.w_rows % 8 == 0
            assert boxes.outputs % boxes.w_rows == 0, "no box holds gates and ups"


def test_clusters_walk_over_the_tiles_that_do_not_fit_at_once() -> None:
    assert _blocks(WgmmaConfig(256, cluster_m=2), 16, 112, 66) == 132
    assert _blocks(WgmmaConfig(256, cluster_m=2), 3, 3, 33) == 2 * 6
    assert _blocks(WgmmaConfig(224, cluster_n=2), 3, 128, 66) == 132
    assert _blocks(WgmmaConfig(96, cluster_n=2), 3, 43, 70) == 2 * 3 * 22
    assert _blocks(WgmmaConfig(256, 4, cluster_m=2), 16, 16, 16) == 8 * 16 * 8, "those that exchange sums do not walk"


def test_names_tell_tilings_apart() -> None:
    configs = WgmmaConfig(48), WgmmaConfig(64, 2), WgmmaConfig(256, 4, cluster_m=2), WgmmaConfig(96, cluster_m=2)
    assert [*map(str, configs)] == ["WGMMA 48", "WGMMA 64 split 2", "WGMMA 256 cluster 2 split 4", "WGMMA 96 cluster 2"]
    assert [str(WgmmaConfig(96, cluster_n=2)), str(WgmmaConfig(96, 1, 2, 2, WIDE_ROWS))] == [
        "WGMMA 96 cluster 1x2",
        "WGMMA 192x96 cluster 2x2",
    ]


def test_prompts_longer_than_the_graphs_are_tuned_up_to_a_chunk() -> None:
    rows = prompt_rows([32, 64, 128, 256, 384], 2048)
    assert {32, 256, 384, 448, 512, 1024, 2048} <= {*rows}
    assert max(rows) == 2048
    assert sorted(prompt_rows([], 512)) == [64, 128, 192, 256, 320, 384, 448, 512]
    assert prompt_rows([512, 2048], 2048) == [512, 2048]
