"""Greedy drafts among the candidates of an 8-bit copy of the LM head, against the argmax of all 16-bit scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runtime.config.device_tuning import H200
from runtime.distributed.parallel_group import ParallelGroup
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
    """The search in torch: the tokens of the best tiles, of which each group has two."""
    keys, tokens = (t.long() for t in partial)
    groups = max(-(-keys.shape[1] // 32), -(-count // 2))
    group = torch.arange(keys.shape[1], device=keys.device) % groups
    best = [torch.topk(keys.masked_fill(group != g, -(1 << 40)), 2).indices for g in range(groups)]
    found = torch.cat(best, 1)
    return tokens.gather(1, found.gather(1, torch.topk(keys.gather(1, found), min(count, 2 * groups)).indices))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("shape", "tile"), [((128256, 4096), 128), ((40000, 2880), 64), ((33000, 576), 128), ((9000, 5136), 64)])
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


@pytest.mark.parametrize(("V", "found"), [(64, 1), (64 * 5, 5), (64 * 8, 8), (64 * 33, 16), (64 * 300, 16)])
def test_every_head_of_enough_tiles_has_as_many_candidates_as_asked_for(V: int, found: int) -> None:
    from runtime.layers.kernels.candidates import best_of_tiles

    torch.manual_seed(V)
    weight, x = torch.randn((V, 256), device="cuda").to(BF16), torch.randn((3, 256), device="cuda").to(BF16)
    exact, logits = x.float() @ weight.float().T, torch.full((3, V), float("nan"), device="cuda")
    token = best_of_tiles(tile_bests(exact, 64), x, weight, 1, 16, torch.empty(3, dtype=torch.int64, device="cuda"), False, logits)
    assert token.tolist() == exact.argmax(1).tolist()
    assert logits.isfinite().sum(1).tolist() == [found] * 3


@pytest.mark.parametrize(("V", "K"), [(5000, 256), (262144, 32)])
def test_columns_are_tokens_at_multiples_of_the_stride(V: int, K: int) -> None:
    from runtime.layers.kernels.candidates import best_of_tiles

    torch.manual_seed(V)
    stride = stride_of(V)
    weight, x = torch.randn((V, K), device="cuda").to(BF16), torch.randn((3, K), device="cuda").to(BF16)
    exact = x.float() @ weight.float().T
    columns = exact[:, torch.arange(V, device="cuda") * stride % V]
    found = best_of_tiles(tile_bests(columns, 64), x, weight, stride, 16, torch.empty(3, dtype=torch.int64, device="cuda"), False)
    assert found.tolist() == exact.argmax(1).tolist()


def test_negative_scores_are_larger_than_missing_tiles() -> None:
    """33 tiles are two groups, of which neither is full."""
    from runtime.layers.kernels.candidates import best_of_tiles

    torch.manual_seed(0)
    weight, x = -torch.rand((33 * 64, 256), device="cuda").to(BF16), torch.rand((3, 256), device="cuda").to(BF16)
    exact = x.float() @ weight.float().T
    found = best_of_tiles(tile_bests(exact, 64), x, weight, 1, 2, torch.empty(3, dtype=torch.int64, device="cuda"), False)
    assert found.tolist() == exact.argmax(1).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_numbers_gets_a_token_and_changes_no_other(value: float) -> None:
    from runtime.layers.kernels.candidates import best_of_tiles

    torch.manual_seed(0)
    weight, x = torch.randn((5000, 256), device="cuda").to(BF16), torch.randn((3, 256), device="cuda").to(BF16)
    tiles = tile_bests(x.float() @ weight.float().T, 64)
    want = best_of_tiles(tiles, x, weight, 1, 16, torch.empty(3, dtype=torch.int64, device="cuda"), False)
    x[1, 7] = value
    tiles[:, 1] = torch.stack([torch.full_like(tiles[0, 1], 0x7FFFFFFF), 64 * torch.arange(tiles.shape[2], device="cuda").int()])
    found = best_of_tiles(tiles, x, weight, 1, 16, torch.full((3,), -1, dtype=torch.int64, device="cuda"), False)
    assert found[[0, 2]].tolist() == want[[0, 2]].tolist()
    assert 0 <= int(found[1]) < 5000


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
            missed += int((ops.greedy_by_copy(x, candidates) != ops.greedy(x, head)).sum())
    assert missed <= rows * 8 // 250


def test_a_head_that_is_never_faster_loses_its_copy() -> None:
    from runtime.layers.gemm.head_trial import choose_copy

    head = CandidateHead(wide_head())
    report = choose_copy(head, [1, 4], GemmTimings(H200), lambda x, own: x, pdl=True)
    assert head.narrow is None
    assert not head.choices
    assert all(line.startswith("all tokens (") for line in report.values())


def test_a_faster_search_is_kept() -> None:
    from runtime.layers.gemm.head_trial import choose_copy

    head, slow = CandidateHead(wide_head()), torch.empty(1 << 28, device="cuda")
    choose_copy(head, [1, 4], GemmTimings(H200), lambda x, own: slow.fill_(1), pdl=True)
    assert set(head.choices) == {1, 4}
    assert head.narrow is not None
    assert head.narrow.nbytes == 64000 * 2048


def test_every_kernel_has_run_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing captures a graph, in which nothing can be compiled safely."""
    from runtime.layers.gemm import head_trial

    head, ran = CandidateHead(wide_head(1000, 64)), list[str]()

    def median(run: Callable[[], object], replays: int) -> float:
        assert ran, "nothing ran"
        ran.clear()
        return 1.0

    monkeypatch.setattr(head_trial, "best_token", lambda *given: ran.append("candidates"))
    monkeypatch.setattr(head_trial, "median_micros", median)
    head_trial.choose_copy(head, [1], GemmTimings(H200), lambda x, own: ran.append("all tokens"), pdl=False)


def test_warmup_compiles_what_the_passes_of_a_head_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a head that is sharded over ranks also write logits; a head without its copy has no run."""
    from runtime.layers.gemm import head_trial

    wrote = list[tuple[int, ...] | None]()
    whole, shard = (CandidateHead(Linear.sharded(wide_head(1000, 64).weight, ParallelGroup(0, ranks))) for ranks in (1, 2))

    def best_token(
        x: torch.Tensor, head: CandidateHead, config: object, pdl: bool, tokens: None = None, logits: torch.Tensor | None = None
    ) -> None:
        wrote.append(None if logits is None else tuple(logits.shape))

    monkeypatch.setattr(head_trial, "best_token", best_token)
    for head, wanted in ((whole, {None}), (shard, {None, (4, 500)})):
        wrote.clear()
        for run in head_trial.copy_runs([head], [4], GemmTimings(H200), pdl=False):
            run(0)
        assert set(wrote) == wanted
    whole.narrow = None
    assert not list(head_trial.copy_runs([whole], [4], GemmTimings(H200), pdl=False))
