"""Greedy drafts among the candidates of an 8-bit copy of the LM head, against the argmax of all 16-bit scores."""

from __future__ import annotations

import pytest
import torch

from runtime.config.device_tuning import H200
from runtime.layers.candidate_head import CandidateHead, stride_of, takes_candidates
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.linear import Linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16
ROWS = (1, 3, 8, 16, 64, 128)


def tile_bests(scores: torch.Tensor, tile: int) -> torch.Tensor:
    """What the GEMM leaves for each tile of columns: int32 [2, M, tiles]."""
    padded = torch.nn.functional.pad(scores.float(), (0, -scores.shape[1] % tile), value=float("-inf"))
    largest, at = padded.unflatten(1, (-1, tile)).max(2)
    bits = largest.contiguous().view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.stack([keys, (at + tile * torch.arange(at.shape[1], device=at.device)).int()]).contiguous()


def rank_candidates(partial: torch.Tensor, count: int) -> torch.Tensor:
    """The slow twin of the search: the tokens of the best tiles, of which each group has two."""
    keys, tokens = (t.long() for t in partial)
    groups = -(-keys.shape[1] // 32)
    group = torch.arange(keys.shape[1], device=keys.device) % groups
    best = [torch.topk(keys.masked_fill(group != g, -(1 << 40)), 2).indices for g in range(groups)]
    found = torch.cat(best, 1)
    return tokens.gather(1, found.gather(1, torch.topk(keys.gather(1, found), min(count, 2 * groups)).indices))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("shape", "tile"), [((128256, 4096), 128), ((40000, 2880), 64), ((33000, 576), 128)])
def test_the_best_candidate_has_the_largest_exact_score(shape: tuple[int, int], tile: int, rows: int) -> None:
    from runtime.layers.kernels.candidates import best_of_tiles

    V, K = shape
    x, weight = (torch.randn((n, K), device="cuda").to(BF16) for n in (rows, V))
    # The noise makes the order of candidates differ much from that of exact scores.
    partial = tile_bests((x @ weight.T).float() + K**0.5 / 2 * torch.randn((rows, V), device="cuda"), tile)
    out = torch.full((rows + 1,), -1, dtype=torch.int64, device="cuda")
    candidates = rank_candidates(partial, 16)
    exact = torch.stack([weight[own].double() @ row.double() for own, row in zip(candidates, x, strict=True)])
    want = candidates.gather(1, exact.argmax(1, keepdim=True))[:, 0]
    for pdl in (False, True):
        logits = torch.full((rows, V), float("nan"), device="cuda")
        got = best_of_tiles(partial, x, weight, 1, 16, out[:rows], pdl, logits)
        assert got.tolist() == want.tolist()
        assert out[rows] == -1
        assert int(logits.isfinite().sum()) == candidates.numel()
        torch.testing.assert_close(logits.gather(1, candidates).double(), exact, rtol=1e-4, atol=1e-3)


def test_equal_scores_give_the_lowest_token() -> None:
    from runtime.layers.kernels.candidates import best_of_tiles

    weight, x = torch.ones((40000, 256), device="cuda", dtype=BF16), torch.ones((2, 256), device="cuda", dtype=BF16)
    scores = torch.zeros((2, 40000), device="cuda")
    scores[0, 777] = scores[0, 39999] = 1
    scores[1, 5] = scores[1, 4] = 2  # one tile has one candidate, the lowest
    found = best_of_tiles(tile_bests(scores, 64), x, weight, 1, 2, torch.empty(2, dtype=torch.int64, device="cuda"), False)
    assert found.tolist() == [777, 4]


def test_a_head_of_few_tiles_has_fewer_candidates() -> None:
    from runtime.layers.kernels.candidates import best_of_tiles

    weight, x = torch.randn((100, 256), device="cuda").to(BF16), torch.randn((3, 256), device="cuda").to(BF16)
    exact = x.float() @ weight.float().T
    found = best_of_tiles(tile_bests(exact, 128), x, weight, 1, 16, torch.empty(3, dtype=torch.int64, device="cuda"), False)
    assert found.tolist() == exact.argmax(1).tolist()


def test_columns_are_tokens_at_multiples_of_the_stride() -> None:
    from runtime.layers.kernels.candidates import best_of_tiles

    V, stride = 5000, stride_of(5000)
    weight, x = torch.randn((V, 256), device="cuda").to(BF16), torch.randn((3, 256), device="cuda").to(BF16)
    exact = x.float() @ weight.float().T
    columns = exact[:, torch.arange(V, device="cuda") * stride % V]
    found = best_of_tiles(tile_bests(columns, 64), x, weight, stride, 16, torch.empty(3, dtype=torch.int64, device="cuda"), False)
    assert found.tolist() == exact.argmax(1).tolist()


def wide_head(vocab: int = 64000, hidden: int = 2048) -> Linear:
    return Linear.dense((torch.randn((vocab, hidden), device="cuda") / hidden**0.5).to(BF16))


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_drafts_are_those_of_the_whole_head(rows: int, alike: bool) -> None:
    """With weights and states of normal distribution, where scores lie closest together; also if all tokens have much in common, and
    neighbouring tokens more, as in trained heads.
    """
    from runtime.layers.cuda_ops import CudaOps

    torch.manual_seed(rows)
    head, ops = wide_head(), CudaOps(GemmTimings(H200))
    if alike:
        common = 3 * torch.randn(2048, device="cuda") + torch.randn((500, 2048), device="cuda").repeat_interleave(128, 0)
        head.weight.add_(common / 2048**0.5)
    assert takes_candidates(head)
    candidates = ops.candidate_head(head)
    if candidates is None:
        pytest.skip("needs a Hopper GPU")
    missed = 0
    for config in H200.candidate_configs(rows):
        candidates.choices = dict.fromkeys((1, 4, 8, 16, 32, 64, 128), config)
        for _ in range(4):
            x = torch.randn((rows, 2048), device="cuda").to(BF16)
            missed += int((ops.greedy_draft(x, candidates) != ops.greedy(x, head)).sum())
    assert missed <= rows * 8 // 250


def test_a_head_that_is_never_faster_loses_its_copy() -> None:
    from runtime.layers.gemm.candidate_gemm import choose_candidates

    head = CandidateHead(wide_head())
    report = choose_candidates(head, [1, 4], GemmTimings(H200), lambda x, own: x, pdl=True)
    assert head.narrow is None
    assert not head.choices
    assert head.num_bytes == 0
    assert all(line.startswith("all tokens (") for line in report.values())


def test_a_faster_search_is_kept() -> None:
    from runtime.layers.gemm.candidate_gemm import choose_candidates

    head, slow = CandidateHead(wide_head()), torch.empty(1 << 28, device="cuda")
    choose_candidates(head, [1, 4], GemmTimings(H200), lambda x, own: slow.fill_(1), pdl=True)
    assert set(head.choices) == {1, 4}
    assert head.num_bytes == 64000 * 2048
