"""The argmax kernels against torch, with ties, infinities and NaN, eager and in graphs."""

from __future__ import annotations

import pytest
import torch

from runtime.layers.argmax import argmax

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("rows", [1, 4, 40, 128])
@pytest.mark.parametrize("vocab", [17, 2048, 32001, 128256])
def test_the_argmax_of_random_rows_is_that_of_torch(rows: int, vocab: int) -> None:
    logits = torch.randn((rows, vocab), device="cuda")
    assert torch.equal(argmax(logits), logits.argmax(-1))
    wide = torch.randn((rows, vocab + 3), device="cuda")
    out = torch.empty(rows, dtype=torch.int64, device="cuda")
    assert argmax(wide[:, :vocab], out) is out
    assert torch.equal(out, wide[:, :vocab].argmax(-1)), "rows at a distance that is not their length"


def test_the_first_of_equal_entries_wins_and_nan_is_the_largest() -> None:
    inf, nan, V = float("inf"), float("nan"), 20000
    logits = torch.full((9, V), -3.0, device="cuda")
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
