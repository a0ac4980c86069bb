"""How passes over latent rows are cut into clusters of blocks, and what a block needs."""

from __future__ import annotations

import pytest

from runtime.layers.attention.kernels.latent_cluster import CUTS, MOST_TILES, SIZES, TILE_ROWS, ClusterCut, cut_of, source

SHARED_BYTES = 228 * 1024
"""Of a multiprocessor of Hopper; each block takes 1 KiB more than it asks for."""
AT_ONCE = {cut: {16: 7, 8: 16, 4: 33}[cut.blocks] for cut in CUTS}
"""Clusters that a device of 132 multiprocessors runs at once, one block on each."""


@pytest.mark.parametrize(
    ("batch", "rows", "cut"),
    [
        (1, 20, ClusterCut(16, 1)),
        (2, 20, ClusterCut(16, 1)),
        (3, 20, ClusterCut(16, 2)),
        (4, 20, ClusterCut(16, 3)),
        (1, 80, ClusterCut(16, 2)),
        (8, 20, ClusterCut(8, 2)),
        (4, 80, ClusterCut(8, 3)),
        (8, 80, ClusterCut(4, 3)),
        (1, 64, ClusterCut(16, 2)),
        (1, 128, ClusterCut(16, 3)),
        (16, 80, None),
        (4, 512, None),
    ],
)
def test_all_clusters_of_a_pass_run_at_once(batch: int, rows: int, cut: ClusterCut | None) -> None:
    assert cut_of(AT_ONCE, batch, rows) == cut


def test_a_kernel_for_a_size_takes_all_smaller_ones() -> None:
    """The sizes that are timed stand for those below them."""
    sizes = [(batch, rows) for batch in range(1, 20) for rows in range(5, 200, 15)]
    taken = {size for size in sizes if cut_of(AT_ONCE, *size) is not None}
    assert all((b, r) in taken for batch, rows in taken for b, r in sizes if b <= batch and r <= rows)


def test_a_device_without_large_clusters_runs_smaller_ones() -> None:
    none = {cut: 0 if cut.blocks > 8 else 16 for cut in CUTS}
    assert cut_of(none, 1, 20) == ClusterCut(8, 1)


def test_rows_are_covered() -> None:
    for tiles in range(1, MOST_TILES + 1):
        for rows in range(1, 130):
            assert 0 <= ClusterCut(16, tiles).row_blocks(rows) * TILE_ROWS * tiles - rows < TILE_ROWS * tiles


def test_a_block_fits_beside_two_of_the_kernel_before() -> None:
    """Blocks of absorbed queries of GLM-4.7-Flash: the copies of old keys begin while these run."""
    absorb = 192 * 128 + 8 * 64 * 7 + 1024
    assert all(cut.shared_bytes + 128 + 1024 + 2 * absorb <= SHARED_BYTES for cut in CUTS)


def test_programs_name_their_constants() -> None:
    for tiles in range(1, MOST_TILES + 1):
        text = source(tiles, early=True)
        assert all(f"#define {name} {value}\n" in text for name, value in (("TILES", tiles), ("MOST_BLOCKS", SIZES[0]), ("EARLY", 1)))
