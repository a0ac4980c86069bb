"""Which GEMM kernels passes decide, and the passes that are timed."""

from __future__ import annotations

import pytest
import torch

from runtime.batch import PAD_ROW
from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import ResidentConfig
from runtime.layers.gemm.gemm import Gemm, GemmKey
from runtime.layers.gemm.pass_trial import GAIN, MOST_ROWS, NEAR, choose_within_passes, rivals
from runtime.layers.gemm.timings import GemmChoice, GemmTimings, Timed, fastest
from runtime.layers.gemm.wgmma_gemm import WgmmaConfig
from runtime.layers.linear import Linear
from runtime.layers.torch_ops import TorchOps
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.decode_timer import LAYERS, DecodeTimer
from runtime.model_executor.model_runner import ModelRunner
from runtime.models.registry import build_model
from unit.tiny import tiny_model

CPU = torch.device("cpu")
ALONE, OTHER, SLOW = WgmmaConfig(96), WgmmaConfig(48), ResidentConfig(8, 7, 1)
QKV, DOWN = (Gemm("linear", Linear.dense(torch.empty(rows, 32, dtype=torch.bfloat16)), None) for rows in (64, 48))


class FakeTimer:
    """Passes whose time is `base`, times a factor by choice."""

    gemms, most_rows = [QKV], 64

    def __init__(self, choices: dict[GemmKey, GemmChoice], factors: dict[GemmChoice, float]) -> None:
        self._choices, self._factors = choices, factors
        self.asked: list[tuple[int, GemmChoice]] = []

    def micros(self, rows: int) -> float:
        choice = self._choices[QKV.key(rows)]
        self.asked.append((rows, choice))
        return 1000 * self._factors[choice]


def decided(factors: dict[GemmChoice, float], gemm: Gemm = QKV, rows: int = 4) -> tuple[GemmTimings, FakeTimer, dict[GemmKey, GemmChoice]]:
    """Timings, timer and choices after passes were timed."""
    timings, key = GemmTimings(H200), gemm.key(rows)
    timings.keep(torch.bfloat16, key, lambda: Timed(ALONE, {None: 20.0, ALONE: 10.0, OTHER: 10.0 * NEAR, SLOW: 10.1 * NEAR}))
    choices: dict[GemmKey, GemmChoice] = {key: ALONE}
    timer = FakeTimer(choices, factors)
    near = rivals([(torch.bfloat16, key)], timings, timer)
    found = choose_within_passes(near, timings, choices, timer)
    assert {key: timed.choice for key, timed in found.items()} == {key: choices[key] for key in found}
    return timings, timer, choices


def test_a_kernel_that_makes_the_pass_faster_replaces_the_fastest_one_alone() -> None:
    timings, timer, choices = decided({ALONE: 1.0, OTHER: 1 - 2 * GAIN})
    key = QKV.key(4)
    assert timer.asked == [(4, ALONE), (4, OTHER)] * 2, "only kernels of almost equal speed are timed, in turn"
    assert choices[key] == OTHER
    known = timings.known(torch.bfloat16, key)
    assert known is not None
    assert known.choice == OTHER, "other models with the same GEMM use the same kernel"
    assert str(known).endswith(f"; in a pass: {ALONE} 1000.0 µs, {OTHER} {1000 * (1 - 2 * GAIN):.1f} µs)")


def test_noise_does_not_replace_the_fastest_kernel_alone() -> None:
    _, _, choices = decided({ALONE: 1.0, OTHER: 1 - GAIN / 2})
    assert choices == {QKV.key(4): ALONE}


def test_large_passes_and_other_layers_are_left_alone() -> None:
    for gemm, rows in ((QKV, 2 * MOST_ROWS), (DOWN, 4)):
        _, timer, choices = decided({ALONE: 1.0, OTHER: 0.5}, gemm, rows)
        assert not timer.asked
        assert choices == {gemm.key(rows): ALONE}


def test_the_timed_pass_runs_the_last_layers_over_keys_of_the_padding_row() -> None:
    torch.manual_seed(0)
    count = LAYERS + 2
    model = build_model(tiny_model(num_layers=count, window=(-1,) * count), TorchOps(), torch.float32, CPU, None)
    with torch.inference_mode():
        for weight in (model.embed, *(gemm.linear.weight for gemm in model.gemms())):
            weight.normal_(std=0.1)
        for norm in (model.final_norm, *(gemm.norm for gemm in model.gemms() if gemm.norm is not None)):
            norm.weight.fill_(1)
        runner = ModelRunner(model, "torch_native", torch.float32, CPU, tuning=H200)
        runner.allocate(1, PageTable(2, 256, 16, CPU), 4, 1)
        timer = DecodeTimer(runner, 4)
        assert len(timer.gemms) == LAYERS * len(list(model.layers[0].gemms()))
        batch = timer.plan(3)
        assert batch.req_pool_indices.tolist() == [PAD_ROW] * 3
        assert batch.seq_len_bounds.tolist() == [model.config.max_context_len] * 3
        keys = [pool.clone() for pool in runner.kv_pool.k]
        hidden = timer.run(batch)
        written = [bool((now != before).any()) for now, before in zip(runner.kv_pool.k, keys, strict=True)]
        assert written == [False] * 2 + [True] * LAYERS, "only the last layers ran"
        del model.layers[:2]
        torch.testing.assert_close(hidden, model.forward(timer.plan(3))[0], rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "micros", "expected"), [(512, 99.0, ALONE), (1024, 99.0, None), (2048, 96.0, ALONE), (1024, 101.0, None)])
def test_a_gemm_of_many_rows_leaves_cublas_only_for_a_clear_gain(rows: int, micros: float, expected: GemmChoice) -> None:
    assert fastest({None: 100.0, ALONE: micros, OTHER: 200.0}, rows) == expected
    assert fastest({ALONE: micros}, rows) == ALONE, "cuBLAS was no candidate"
