"""Captures that fail for lack of memory: a warning names the dropped sizes, and answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.test_worker import BACKENDS, PROMPTS, build, speculation
from runtime.model_executor.graph_capture import GraphKey, GraphPool, Replay
from runtime.model_executor.graph_runner import RunMode
from runtime.sampling_params import SamplingParams
from unit.driver import Driver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FITS = 2
"""The largest batch size whose capture succeeds."""


def fail_above(monkeypatch: pytest.MonkeyPatch, most: int, error: type[RuntimeError]) -> None:
    """Make captures of more than `most` requests raise after the pass is recorded, as a failed allocation would."""
    capture = GraphPool.capture

    def starve(self: GraphPool, key: GraphKey, function: Callable[[], None]) -> Replay:
        calls = 0

        def starving() -> None:
            nonlocal calls
            function()
            calls += 1
            if key[0] > most and calls > 1:  # the first is the eager run
                raise error("nothing is left")

        return capture(self, key, starving)

    monkeypatch.setattr(GraphPool, "capture", starve)


def generate(worker: Any) -> dict[int, list[int]]:
    sampling = {r: SamplingParams(temperature=0.0 if r % 2 else 1.0, max_new_tokens=1 << 20) for r in PROMPTS}
    return Driver(worker).generate(PROMPTS, 24, sampling=sampling)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
def test_sizes_without_a_graph_give_the_same_answers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: str,
    error: type[RuntimeError],
    algorithm: str | None,
) -> None:
    fail_above(monkeypatch, FITS, error)
    with caplog.at_level("WARNING"):
        worker: Any = build(backend, "cuda", speculation(tmp_path, algorithm, backend, 1) if algorithm else None)
    assert all(runner.sizes == [1, FITS] for runner in worker.runners)
    assert (
        f"no graph for batch sizes [4, 8]; they run eagerly and slower. Lower --mem-fraction-static or --cuda-graph-max-bs to {FITS}."
        in (caplog.text)
    )
    if error is RuntimeError:
        assert "graph capture failed at size 8 (nothing is left)" in caplog.text
    answers = generate(worker)
    assert all(runner.ran_eagerly for runner in worker.parts.runners(worker.parts.depths.deepest)), "five requests have no graph"
    worker.parts.target.reset()
    for runner in worker.runners:
        runner.mode = RunMode.EAGER
    assert generate(worker) == answers
