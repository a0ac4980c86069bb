"""The 8-bit copy of a draft's LM head: which tokens its scores select."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.layers.candidate_head import LEAST_BYTES, ROWS_AT_ONCE, CandidateHead, stride_of, takes_candidates
from runtime.layers.linear import Linear
from runtime.layers.torch_ops import TorchOps

TILE = 128


def head_of(tokens: int, hidden: int = 256) -> torch.Tensor:
    """A head like trained ones: all tokens have much in common, and neighbouring tokens more."""
    common = 3 * torch.randn(hidden) + torch.randn((-(-tokens // TILE), hidden)).repeat_interleave(TILE, 0)[:tokens]
    return ((torch.randn((tokens, hidden)) + common) / hidden**0.5).to(torch.bfloat16)


@pytest.mark.parametrize("count", [1, 2, 512, 32000, 49152, 128256, 151936, 262144])
def test_a_stride_reaches_every_token_and_separates_neighbours(count: int) -> None:
    stride = stride_of(count)
    assert math.gcd(stride, count) == 1
    if count > 20 * TILE:
        tokens = torch.arange(TILE) * stride % count
        apart = tokens.sort().values.diff().min()
        assert apart > count / TILE / 3


def test_scores_of_the_copy_select_the_best_token() -> None:
    """Each tile has one candidate, so the best token must be its tile's best, and one of the 16 best of all tiles."""
    torch.manual_seed(0)
    V = ROWS_AT_ONCE + 5000
    weight, x = head_of(V), torch.randn((500, 256)).to(torch.bfloat16)
    head = CandidateHead(Linear.dense(weight))
    assert head.narrow is not None
    assert head.narrow.nbytes == V * 256
    scores = x.float() @ head.narrow.float().T
    tiles = torch.nn.functional.pad(scores, (0, -V % TILE), value=float("-inf")).unflatten(1, (-1, TILE))
    largest, at = tiles.max(2)
    best = torch.topk(largest, 16).indices
    columns = (at + TILE * torch.arange(at.shape[1])).gather(1, best)
    wanted = (x.float() @ weight.float().T).argmax(1)
    missed = int((columns * head.stride % V != wanted[:, None]).all(1).sum())
    assert missed <= 4


def test_small_heads_and_other_dtypes_have_no_copy() -> None:
    rows = LEAST_BYTES // 2 // 256
    assert takes_candidates(Linear.dense(torch.empty((rows, 256), dtype=torch.bfloat16)))
    assert not takes_candidates(Linear.dense(torch.empty((rows - 1, 256), dtype=torch.bfloat16)))
    assert not takes_candidates(Linear.dense(torch.empty((rows, 256), dtype=torch.float16)))


def test_a_cpu_scores_every_token() -> None:
    ops, head = TorchOps(), Linear.dense(head_of(1000))
    assert ops.candidate_head(head) is None
    x, logits = torch.randn((5, 256)).to(torch.bfloat16), torch.empty((5, 1000))
    assert torch.equal(ops.greedy_by_copy(x, CandidateHead(head), None, logits), ops.greedy(x, head))
    assert torch.equal(logits, ops.logits(x, head))
