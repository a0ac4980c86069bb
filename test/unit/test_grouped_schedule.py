"""Which program multiplies experts of many tokens: its schedule, its ring and what shared memory holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import WgmmaExpertsConfig
from runtime.layers.moe.kernels.grouped_gemm import BARRIER_BYTES, CLAIM_BYTES, SHARED_BYTES, _Variant, _variant, source

BF16 = torch.bfloat16
OVERLAPPED = WgmmaExpertsConfig(claim=True, overlap=True)


def variant(config: WgmmaExpertsConfig, steps: int, *, gated: bool = True, fp8: bool = False) -> _Variant:
    return _variant(config, BF16, steps, fp8=fp8, gated=gated, act=2, bias=False, early=True)


@pytest.mark.parametrize("gated", [False, True])
def test_a_tile_is_stored_within_the_steps_of_the_next_one(gated: bool) -> None:
    parts = variant(OVERLAPPED, 64, gated=gated).parts
    assert parts == 4
    for steps in range(1, 9):
        found = variant(OVERLAPPED, steps, gated=gated)
        assert found.overlap == (steps >= parts)
        assert found.claim
        assert not variant(WgmmaExpertsConfig(), steps, gated=gated).overlap


def test_the_second_gemm_has_no_activation() -> None:
    assert variant(OVERLAPPED, 12, gated=True).act == 2
    assert variant(OVERLAPPED, 12, gated=False).act == 0


@pytest.mark.parametrize("tile", [32, 64, 96, 192, 224, 256])
@pytest.mark.parametrize("gated", [False, True])
def test_ring_results_and_claims_fit_into_shared_memory(tile: int, gated: bool) -> None:
    for claim in (False, True):
        found = variant(replace(OVERLAPPED, gate_up_tile=tile, down_tile=tile, claim=claim), 64, gated=gated)
        results = found.rows * (found.stored * 2 + 16)
        used = found.stages * found.stage_bytes + results + BARRIER_BYTES + (CLAIM_BYTES if claim else 0)
        assert used <= SHARED_BYTES
        assert found.stages >= 4
        assert found.stages * 16 <= BARRIER_BYTES, "the claims lie behind the barriers of the ring"
        assert (found.stages + 1) * 24 <= CLAIM_BYTES
        assert found.outputs % found.stored == 0
        assert found.parts * (min(found.stored, 32) if gated else found.stored) == found.outputs


def test_sources_name_their_schedule() -> None:
    for claim in (False, True):
        for overlap in (False, True):
            text = source(variant(replace(OVERLAPPED, claim=claim, overlap=overlap), 32))
            assert f"#define CLAIM {int(claim)}\n" in text
            assert f"#define OVERLAP {int(overlap)}\n" in text


def test_overlap_without_registers_for_two_tiles_is_refused() -> None:
    with pytest.raises(AssertionError, match="registers"):
        source(variant(replace(OVERLAPPED, rows=192, gate_up_tile=192), 32))
    with pytest.raises(AssertionError, match="registers"):
        source(variant(OVERLAPPED, 32, fp8=True))


def test_long_prompts_on_an_h200_overlap_stores() -> None:
    config = H200.experts.wgmma_rows("dense", 8192)
    assert config is not None
    for gated, steps in ((True, 2048 // 64), (False, 768 // 64)):
        assert variant(config, steps, gated=gated).overlap
    fp8 = H200.experts.wgmma_rows("fp8", 8192)
    assert fp8 is not None
    assert not fp8.overlap
