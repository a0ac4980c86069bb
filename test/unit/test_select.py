"""Which implementation of the block operations and of sampling a machine runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from runtime.config.device_tuning import H200
from runtime.layers import random_streams, sampler
from runtime.layers.backend_selection import select_ops, select_sampling
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.sampler import TorchSampling
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor import build
from runtime.sampling_params import SamplingParams
from unit.driver import Driver
from unit.predicting import plain, speculating


def test_a_gpu_without_the_fused_kernels_runs_plain_torch_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    monkeypatch.delitem(sys.modules, "runtime.layers.cuda_ops", raising=False)
    ops, why = select_ops(torch.device("cuda"), torch.bfloat16, GemmTimings(H200))
    assert isinstance(ops, TorchOps)
    assert "sgl_kernel" in why
    assert "'cuda' extra" in why


def test_a_gpu_without_triton_samples_with_torch_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "runtime.layers.kernels.sampling", raising=False)
    ops, why = select_sampling(torch.device("cuda"), "triton")
    assert isinstance(ops, TorchSampling)
    assert "triton" in why
    assert "'cuda' extra" in why


@pytest.mark.parametrize(("device", "reason"), [("cpu", "the device is a CPU"), ("cuda", "--sampling-backend pytorch")])
def test_torch_samples_on_a_cpu_and_where_it_is_asked_for(device: str, reason: str) -> None:
    backend: Literal["pytorch"] = "pytorch"
    ops, why = select_sampling(torch.device(device), backend)
    assert isinstance(ops, TorchSampling)
    assert reason in why


class MostLikely:
    """Sampling operations without randomness that count their calls."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = dict.fromkeys(("filter", "draw", "uniforms"), 0)

    def filter(self, probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
        """Leave all."""
        self.calls["filter"] += 1
        return probs

    def draw(self, probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """The most likely."""
        self.calls["draw"] += 1
        return probs.argmax(-1)

    def uniforms(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """A half."""
        self.calls["uniforms"] += 1
        return torch.full(torch.broadcast_shapes(seeds.shape, positions.shape), 0.5)


@pytest.mark.parametrize("kind", ["plain", "chain", "tree", "NGRAM"])
def test_every_worker_samples_with_what_was_chosen_at_start_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def forbidden(*_: object, **__: object) -> Any:
        raise AssertionError("other operations were chosen")

    chosen = MostLikely()
    monkeypatch.setattr(build, "select_sampling", lambda *_: (chosen, "for a test"))
    monkeypatch.setattr(torch, "searchsorted", forbidden)
    monkeypatch.setattr(random_streams, "_mix", forbidden)
    monkeypatch.setattr(sampler, "filter_probs", forbidden)
    spec: dict[str, Any] = {"topk": 3, "num_draft_tokens": 7} if kind == "tree" else {}
    with caplog.at_level("INFO"):
        worker = plain() if kind == "plain" else speculating(tmp_path, "NGRAM" if kind == "NGRAM" else "EAGLE", **spec)
    assert "sampling: for a test" in caplog.text
    sampling = SamplingParams(temperature=1.0, top_k=9, max_new_tokens=1 << 20)
    drawn = Driver(worker).generate({1: [5, 6, 7], 2: [9, 8]}, 12, sampling=sampling)
    assert min(chosen.calls.values()) >= 3
    if kind != "chain":  # a chain accepts by chance, whatever it draws
        assert drawn == Driver(plain()).generate({1: [5, 6, 7], 2: [9, 8]}, 12)
