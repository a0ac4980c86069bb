"""The argmax by bounds of an int8 copy of the LM head, against the argmax of all logits."""

from __future__ import annotations

import pytest
import torch

from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import TritonConfig
from runtime.layers import bounded_head
from runtime.layers.bounded_head import BOUNDED_ROWS, BoundedHead, upper_bounds
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.linear import Linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16
ROWS = (1, 3, 8, 16, 32)
CONFIGS = sorted({config for rows in ROWS for config in H200.candidate_configs(2 * rows)}, key=str)


def head_of(vocab: int, hidden: int) -> BoundedHead:
    return BoundedHead(Linear.dense((torch.randn((vocab, hidden), device="cuda") / hidden**0.5).to(BF16)))


def states(rows: int, hidden: int) -> torch.Tensor:
    """Rows with one column that is much larger than the others, as the final norms of real models give."""
    x = torch.randn((rows, hidden), device="cuda")
    x[:, 7] *= 30
    return x.to(BF16)


def exact_argmax(x: torch.Tensor, head: BoundedHead) -> list[int]:
    return (x.double() @ head.own.weight.double().T).argmax(1).tolist()


@pytest.mark.parametrize("hidden", [64, 576, 2880, 4096])
def test_halves_of_rows_are_those_of_torch(hidden: int) -> None:
    from runtime.layers.kernels.split_rows import split_rows

    torch.manual_seed(hidden)
    x = states(33, hidden)
    x[4] = 0
    for pdl in (False, True):
        got, want = split_rows(x, 2.0, pdl=pdl), bounded_head.split_rows(x, 2.0)
        whole = [254 * halves[0::2].int() + halves[1::2].int() for halves in (got.halves, want.halves)]
        assert int((whole[0] - whole[1]).abs().max()) <= 1
        assert int(got.halves.int().abs().max()) <= 127
        for name in ("step", "norm", "error"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0.05 if name == "error" else 1e-5, atol=0.0)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("vocab", "hidden"), [(5000, 256), (4096, 576), (3001, 2880)])
def test_each_tile_keeps_its_largest_bounds(vocab: int, hidden: int, rows: int, config: TritonConfig) -> None:
    from runtime.layers.gemm.bound_gemm import tile_bounds
    from runtime.layers.kernels.split_rows import split_rows

    torch.manual_seed(rows)
    head, x = head_of(vocab, hidden), states(rows, hidden)
    split = split_rows(x, head.largest)
    bounds = torch.nn.functional.pad(upper_bounds(split, head), (0, -vocab % config.block_n), value=float("-inf"))
    want = bounds.unflatten(1, (-1, config.block_n)).topk(3, 2).values
    for pdl in (False, True):
        got = tile_bounds(split, head, config, pdl)
        torch.testing.assert_close(got.bounds, want[..., :2], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(got.rest, want[..., 2], rtol=1e-5, atol=1e-4)
        inside = got.bounds.isfinite()
        chosen = bounds.gather(1, got.columns.flatten(1).long().clamp(max=vocab - 1)).view_as(got.bounds)
        torch.testing.assert_close(chosen[inside], got.bounds[inside], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("vocab", "hidden"), [(40000, 1024), (9000, 2880), (3001, 64)])
def test_the_token_is_the_argmax_of_all_logits(vocab: int, hidden: int, rows: int) -> None:
    from runtime.layers.gemm.head_trial import best_token

    torch.manual_seed(rows)
    head, x = head_of(vocab, hidden), states(rows, hidden)
    want = exact_argmax(x, head)
    config = H200.candidate_configs(2 * rows)[0]
    for pdl in (False, True):
        out = torch.full((rows + 1,), -1, dtype=torch.int64, device="cuda")
        logits = torch.full((rows, vocab), float("nan"), device="cuda")
        assert best_token(x, head, config, pdl, out[:rows], logits).tolist() == want
        assert out[rows] == -1
        assert logits.isfinite().sum(1).tolist() == [1] * rows
        chosen = torch.tensor(want, device="cuda")[:, None]
        torch.testing.assert_close(
            logits.gather(1, chosen), (x.float() @ head.own.weight.float().T).gather(1, chosen), rtol=1e-4, atol=1e-3
        )


def test_a_row_without_a_proof_scores_all_tokens_and_changes_no_other() -> None:
    """Bounds that prove nothing, for one row of three."""
    from runtime.layers.kernels.bounds import proved_argmax

    torch.manual_seed(0)
    head, x = head_of(5000, 256), states(3, 256)
    want = exact_argmax(x, head)
    logits = (x.float() @ head.own.weight.float().T)[:, torch.arange(5000, device="cuda") * head.stride % 5000]
    tiles = torch.nn.functional.pad(logits, (0, -5000 % 128), value=float("-inf")).unflatten(1, (-1, 128))
    best = tiles.topk(3, 2)
    columns = best.indices[..., :2] + 128 * torch.arange(tiles.shape[1], device="cuda")[:, None]
    bounds, rest = best.values[..., :2].contiguous(), best.values[..., 2].contiguous()
    error, out = torch.zeros(3, device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda")
    given = (x, head.own.weight, head.stride, out, False)
    scores = torch.full((3, 5000), float("nan"), device="cuda")
    assert proved_argmax(bounds, columns.int().contiguous(), rest, error + 1e-3, *given, scores).tolist() == want
    rest[1, 0] = 1e9
    again = torch.full((3, 5000), float("nan"), device="cuda")
    assert proved_argmax(bounds, columns.int().contiguous(), rest, error + 1e-3, *given, again).tolist() == want
    assert torch.equal(scores.nan_to_num(), again.nan_to_num()), "a logit has the same bits with and without a proof"


def test_equal_logits_give_the_lowest_token() -> None:
    from runtime.layers.gemm.head_trial import best_token

    weight = torch.ones((5000, 256), device="cuda", dtype=BF16)
    head, x = BoundedHead(Linear.dense(weight)), torch.ones((3, 256), device="cuda", dtype=BF16)
    config = H200.candidate_configs(2)[0]
    assert best_token(x, head, config, False).tolist() == [0, 0, 0]
    weight[[77, 1234, 4999]] = 2.0
    assert best_token(x, BoundedHead(Linear.dense(weight)), config, False).tolist() == [77, 77, 77]
    assert best_token(torch.zeros_like(x), head, config, False).tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_numbers_gets_the_token_of_all_logits(value: float) -> None:
    from runtime.layers.gemm.head_trial import best_token

    torch.manual_seed(0)
    head, x = head_of(5000, 256), states(3, 256)
    x[1, 7] = value
    got = best_token(x, head, H200.candidate_configs(6)[0], False).tolist()
    assert got == (x.float() @ head.own.weight.float().T).argmax(1).tolist()


def wide_head() -> Linear:
    return Linear.dense((torch.randn((64000, 2048), device="cuda") / 2048**0.5).to(BF16))


def test_greedy_tokens_are_those_of_the_whole_head() -> None:
    from runtime.layers.cuda_ops import CudaOps

    torch.manual_seed(0)
    head, ops = wide_head(), CudaOps(GemmTimings(H200))
    bounded = ops.bounded_head(head)
    if bounded is None:
        pytest.skip("needs a Hopper GPU")
    for rows in ROWS:
        for config in H200.candidate_configs(2 * rows):
            bounded.choices = dict.fromkeys((1, 4, 8, 16, 32), config)
            x = torch.randn((rows, 2048), device="cuda").to(BF16)
            tokens = torch.empty(rows, dtype=torch.int64, device="cuda")
            assert ops.greedy_by_copy(x, bounded, tokens) is tokens
            assert tokens.tolist() == exact_argmax(x, bounded)


def test_the_trial_of_bounds_covers_few_rows_and_keeps_what_is_faster() -> None:
    from runtime.layers.gemm.head_trial import choose_copy, copy_runs

    head, slow = BoundedHead(wide_head()), torch.empty(1 << 28, device="cuda")
    for run in copy_runs([head], [1, BOUNDED_ROWS, 64], GemmTimings(H200), pdl=True):
        run(0)
    report = choose_copy(head, [1, BOUNDED_ROWS, 64], GemmTimings(H200), lambda x, own: slow.fill_(1), pdl=True)
    assert set(head.choices) == {1, BOUNDED_ROWS}
    assert all(name.startswith("int8 head 64000x2048 rows ") for name in report)
    choose_copy(head, [1], GemmTimings(H200), lambda x, own: x, pdl=True)
    assert head.narrow is not None
    head.choices.clear()
    choose_copy(head, [1], GemmTimings(H200), lambda x, own: x, pdl=True)
    assert head.narrow is None


def test_weights_that_are_not_finite_have_no_bounds() -> None:
    from runtime.layers.cuda_ops import CudaOps

    head = wide_head()
    head.weight[5, 5] = float("inf")
    assert CudaOps(GemmTimings(H200)).bounded_head(head) is None
