"""The argmax kernels against torch, with ties, infinities and NaN, eager and in graphs; most run under Triton's interpreter too."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from runtime.layers.kernels import argmax as dispatch
from runtime.layers.kernels.argmax_kernel import argmax_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
SIZES = [(1, 17), (4, 2048), (3, 4099)]
if not INTERPRETED:
    SIZES = [(rows, vocab) for rows in (1, 4, 40, 128) for vocab in (17, 2048, 32001, 128256)]


def argmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """By the kernels, wherever the logits are."""
    if not INTERPRETED:
        return dispatch.argmax(logits, out)
    return argmax_rows(logits, torch.empty(len(logits), dtype=torch.int64) if out is None else out, pdl=False)


@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_the_argmax_of_random_rows_is_that_of_torch(rows: int, vocab: int) -> None:
    logits = torch.randn((rows, vocab), device=DEVICE)
    assert torch.equal(argmax(logits), logits.argmax(-1))
    wide = torch.randn((rows, vocab + 3), device=DEVICE)
    out = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    assert argmax(wide[:, :vocab], out) is out
    assert torch.equal(out, wide[:, :vocab].argmax(-1)), "rows with a stride that is not their length"


def test_the_first_of_equal_entries_wins_and_nan_is_the_largest() -> None:
    inf, nan, V = float("inf"), float("nan"), 20000
    logits = torch.full((9, V), -3.0, device=DEVICE)
    logits[0, [7000, 19999, 12]] = 5.0
    logits[1, :] = -inf
    logits[2, [100, 15000]] = inf
    logits[3, [101, 15001]] = nan
    logits[3, [3, 19000]] = inf
    logits[4, 16000] = -0.0
    logits[4, 17000] = 0.0
    logits[5, 16000], logits[5, 15999] = 0.0, -0.0
    logits[6, :] = -0.5
    logits[7, 9000] = -2.5
    logits[8, 9001] = -nan
    assert argmax(logits).tolist() == [12, 0, 100, 101, 16000, 15999, 0, 9000, 9001]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_argmax_reads_the_logits_of_its_replay() -> None:
    logits, tokens = torch.randn((3, 50000), device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda")
    argmax(logits, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        argmax(logits, tokens)
    for _ in range(5):
        logits.normal_()
        graph.replay()
        assert torch.equal(tokens, logits.argmax(-1))
