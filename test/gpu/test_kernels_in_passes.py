"""GEMM kernels of almost equal speed are compared in passes before graphs are captured."""

from __future__ import annotations

import pytest
import torch

from runtime.config.device_tuning import H200
from runtime.layers.gemm.timings import GemmTimings
from unit.driver import Driver
from unit.tiny import tiny_model, tiny_runtime

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("backend", ["fa3", "flashinfer"])
def test_a_worker_times_passes_and_keeps_what_they_decide(backend: str) -> None:
    from runtime.layers.cuda_ops import CudaOps
    from runtime.model_executor.build import build_worker
    from runtime.model_executor.context import BuildOptions

    config = tiny_runtime(
        device="cuda", dtype="bfloat16", attention_backend=backend, sampling_backend="triton", page_size=16, max_total_tokens=8192
    )
    model = tiny_model(dtype="bfloat16", hidden_size=256, intermediate_size=512, head_dim=128, vocab_size=1000)
    timings = GemmTimings(H200)
    worker = build_worker(config, model, options=BuildOptions("cuda", [1, 4, 8], timings=timings))
    ops = worker.parts.target.runner.model.context.ops
    assert isinstance(ops, CudaOps)
    decided = [line for line in worker.info().gemms.values() if "; in a pass: " in line]
    assert decided, "random small GEMMs have kernels of almost equal speed"
    for key, choice in ops.choices.items():
        timed = timings.known(torch.bfloat16, key)
        assert timed is not None
        assert timed.choice == choice, "a second model with these timings uses the same kernels"
        assert not timed.in_pass or choice in timed.in_pass
    prompts = {1: [5, 6, 7], 2: [9, 8, 7, 6, 5]}
    first = Driver(worker).generate(prompts, 8)
    again = Driver(build_worker(config, model, options=BuildOptions("cuda", [1, 4, 8], timings=timings))).generate(prompts, 8)
    assert first == again
