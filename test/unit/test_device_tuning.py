"""Device tuning: the table of measured values, and the rule for GPUs that are not listed."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable
from typing import get_args

import pytest

from runtime.config.device_tuning import H200, log_tuning, tuning_of
from runtime.config.expert_tuning import H100_EXPERTS, LITTLE_SHARED_EXPERTS, MID_ROUTER_ROWS, ExpertTuning, WeightFormat
from runtime.config.kernel_configs import ClusterConfig, SplitConfig
from runtime.config.machine import Gpu

H200_GPU = Gpu("NVIDIA H200", (9, 0), 141 << 30, 132, 4_800_000_000_000)
A100_GPU = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80 << 30, 108, 2_039_000_000_000)


def test_a_listed_gpu_gets_its_measured_values(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_tuning(H200_GPU)
    assert tuning_of(H200_GPU) is H200
    assert "measured values" in caplog.text


def test_an_unlisted_gpu_is_estimated_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_tuning(A100_GPU)
    tuning = tuning_of(A100_GPU)
    assert 2e14 < tuning.gemm_flops < 3.2e14, "an A100 peaks at 312 TFLOP/s"
    assert tuning.weight_read_tokens == 128
    assert "A100-SXM4-80GB is not listed" in caplog.text


def test_the_rule_reproduces_the_measured_device() -> None:
    unlisted = tuning_of(Gpu("GH900", H200_GPU.capability, H200_GPU.memory, H200_GPU.num_sms, H200_GPU.bandwidth))
    assert unlisted == H200


def test_experts_of_an_h100_are_widened_for_fewer_tokens() -> None:
    experts = tuning_of(Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30, 132, 3_350_000_000_000)).experts
    assert [experts.widened_pairs("mxfp4", count, 1 / 8) for count in (1, 32, 33, 64, 128)] == [0, 0, 16, 16, 32]
    assert [experts.few_rows("mxfp4", count) is None for count in (1, 8, 9, 32, 33)] == [False, False, False, False, True]
    assert 32 in experts.kernel_rows(2048, [1 / 8])
    for kind in ("dense", "fp8"):
        assert experts.few[kind] == H200.experts.few[kind]
        assert experts.widened.get(kind) == H200.experts.widened.get(kind)


@pytest.mark.parametrize("kind", get_args(WeightFormat))
def test_every_weight_format_has_tilings_of_experts(kind: WeightFormat) -> None:
    for experts in (H200.experts, H100_EXPERTS, LITTLE_SHARED_EXPERTS, H200.experts.without_fp8_rows()):
        assert [experts.few_rows(kind, rows) is not None for rows in (1, 16, 65)] == [True, True, False]
        assert all(experts.many_rows(kind, rows).block_k >= 64 for rows in (17, 1 << 20))
        assert {bound for bound, _ in experts.many[kind]} <= experts.kernel_rows(1 << 30)
        assert experts.most_streamed[kind] >= 64


@pytest.mark.parametrize(("capability", "tiles"), [((8, 0), False), ((8, 9), False), ((12, 0), False), ((9, 0), True), ((10, 0), True)])
def test_kernels_fit_the_shared_memory_of_other_gpus(capability: tuple[int, int], tiles: bool) -> None:
    """Tiles of 64 rows with deep pipelines, and of 128 x 256, need up to 217 KiB."""
    tuning = tuning_of(Gpu("a GPU", capability, 48 << 30, 128, 1_000_000_000_000))
    experts = tuning.experts
    assert (tuning.latent_config(64).block_m == 64) is (capability == (9, 0))
    assert [experts.few_rows("dense", count) is not None for count in (1, 16, 17, 64)] == [True, True, tiles, tiles]
    assert (experts.many_rows("dense", 4096).block_n == 256) is tiles


def test_a_gpu_of_unknown_size_takes_the_reference() -> None:
    assert tuning_of(Gpu("unknown", (9, 0), 1 << 30)) is H200
    assert tuning_of(None) is H200


@pytest.mark.parametrize("op", ["linear", "linear_add", "gate_up", "logits"])
def test_every_row_count_has_gemm_candidates(op: str) -> None:
    bounds = [max_rows for max_rows, _ in H200.gemm_candidates[op]]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == 128
    for rows in range(1, 129):
        assert len(set(H200.gemm_configs(op, rows))) == len(H200.gemm_configs(op, rows)) >= 2


def test_fragment_cuts_hold_for_up_to_sixteen_rows() -> None:
    assert [bool(H200.fragment_configs(rows)) for rows in (1, 8, 9, 16, 17, 128)] == [True, True, True, True, False, False]
    assert all(len(set(H200.fragment_configs(rows))) == len(H200.fragment_configs(rows)) for rows in (1, 16))


def test_experts_can_keep_activations_in_16_bits() -> None:
    exact = H200.without_fp8_activations()
    assert any(config.fp8_rows for _, config in H200.experts.many["fp8"])
    assert not any(config.fp8_rows for table in exact.experts.many.values() for _, config in table)
    assert exact.experts.wgmma_rows("fp8", 1 << 20) is None
    assert exact.experts.wgmma_rows("dense", 1 << 20) == H200.experts.wgmma_rows("dense", 1 << 20)
    assert exact.experts.few == H200.experts.few


def test_split_kv_cuts_by_batch_and_head_dimension() -> None:
    assert H200.split_config(128, 1) == SplitConfig(128, 4, 3, 1, alone=2, cluster=ClusterConfig(8, 2, 16))
    assert H200.split_config(256, 1).tile == 64
    programs = {4: 1, 5: 2, 8: 2, 9: 3, 16: 3, 17: 2, 32: 2, 33: 3, 48: 3, 49: 2, 300: 2}
    assert {batch: H200.split_config(64, batch).programs_per_sm for batch in programs} == programs
    assert [batch for batch in range(1, 301) if H200.split_config(64, batch).scheduled] == [*range(17, 49)]
    assert [batch for batch in range(1, 301) if H200.split_config(64, batch).whole] == [*range(49, 301)]
    no_cluster = [H200.split_config(64, batch).cluster is None for batch in (1, 4, 5, 8, 9, 300)]
    assert no_cluster == [False, False, False, False, True, True]


def test_split_kv_attention_runs_where_it_was_measured_to_be_faster() -> None:
    few = [*range(1, 17), *range(25, 33), *range(41, 100)]
    assert [batch for batch in range(1, 100) if H200.split_wins(batch, 4, 8)] == few
    assert [batch for batch in range(1, 100) if H200.split_wins(batch, 1, 8)] == few
    assert [batch for batch in range(1, 300) if H200.split_wins(batch, 16, 8)] == [1, 2, 3, 4]
    assert [batch for batch in range(1, 300) if H200.split_wins(batch, 5, 8)] == [*range(1, 13), *range(64, 300)]
    assert not H200.split_wins(64, 1, 4), "too few programs to read keys at the full rate"


def test_a_warm_up_reaches_the_kernels_on_both_sides_of_each_bound() -> None:
    experts = H200.experts
    for kind, (least, config) in experts.wgmma.items():
        assert experts.wgmma_rows(kind, least) == config
        assert experts.wgmma_rows(kind, least - 1) is None
        assert {least - 1, least} <= experts.kernel_rows(1 << 20)
    assert experts.wgmma_rows("mxfp4", 1 << 20) is None
    assert max(experts.kernel_rows(100)) == 100


@pytest.mark.parametrize("most", [1, 64, 100, 600, 1024, 8192])
def test_a_warm_up_reaches_every_tiling_of_the_router(most: int) -> None:
    """Triton has one up to 64 tokens, one up to `MID_ROUTER_ROWS` and one above; a CUDA kernel takes up to 512 where it can."""
    for largest_of_cuda in (0, 128, 256, 512):

        def tilings(counts: Iterable[int], largest: int = largest_of_cuda) -> set[int]:
            return {0 if rows <= largest else bisect_left((64, MID_ROUTER_ROWS), rows) + 1 for rows in counts}

        assert tilings(H200.experts.kernel_rows(most)) == tilings(range(1, most + 1))


def test_experts_that_are_widened_have_the_tiles_that_were_fastest() -> None:
    """A layer of gpt-oss-20b, where 32 experts share four pairs of each token, and one of Qwen3-30B-A3B, where 128 share eight."""
    experts = H200.experts
    fastest = {
        64: 0,
        80: 16,
        96: 32,
        192: 32,
        224: 48,
        320: 48,
        384: 64,
        512: 80,
        768: 80,
        896: 80,
        1024: 160,
        8192: 160,
    }
    assert {count: experts.widened_pairs("mxfp4", count, 4 / 32) for count in fastest} == fastest
    assert experts.widened_pairs("mxfp4", 512, 4 / 128) == 32, "of four times as many experts, each has a quarter of the pairs"
    of_qwen = {64: 0, 128: 16, 192: 32, 384: 32, 512: 48, 513: 0}
    assert {count: experts.widened_pairs("fp8", count, 8 / 128) for count in of_qwen} == of_qwen
    assert experts.widened_pairs("dense", 512, 1 / 8) == 0


@pytest.mark.parametrize("most", [64, 65, 300, 1024, 8192])
@pytest.mark.parametrize("share", [1 / 2, 1 / 8, 1 / 16, 9 / 129, 1 / 32, 1 / 100])
def test_a_warm_up_reaches_every_tile_of_experts_that_are_widened(share: float, most: int) -> None:
    for experts in (H200.experts, H100_EXPERTS):
        for kind in experts.widened:

            def tiles(counts: Iterable[int], tuning: ExpertTuning = experts, kind: WeightFormat = kind) -> set[int]:
                return {tuning.widened_pairs(kind, rows, share) for rows in counts}

            assert tiles(experts.kernel_rows(most, [share])) == tiles(range(1, most + 1)), kind
