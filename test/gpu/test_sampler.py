"""The sampling kernels compared with their torch reference: eager, captured, in whole steps; most also run in Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from runtime.batch import RowInit, no_ints
from runtime.layers.backend_selection import select_sampling
from runtime.layers.kernels.sampling import MOST_LIKELY, PICKED, TritonSampling
from runtime.layers.random_streams import RandomStream, uniforms
from runtime.layers.sampler import TorchSampling, draw, filter_probs, sample, target_probs
from runtime.model_executor.request_rows import RequestRows
from runtime.sampling_params import TOP_K_ALL, SamplingParams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KERNELS, TWIN = TritonSampling(), TorchSampling()
SIZES = [(1, 1000), (7, 1000), (3, 5001)]
if not INTERPRETED:
    SIZES = [(rows, vocab) for rows in (1, 7, 33) for vocab in (1000, 5001, 49152, 128256)]
FILTERS = [(TOP_K_ALL, 1.0, 0.0), (50, 0.9, 0.0), (TOP_K_ALL, 0.9, 0.0), (20, 1.0, 0.1), (TOP_K_ALL, 1.0, 0.05), (1, 0.5, 0.0),
           (700, 0.999, 0.0), (TOP_K_ALL, 1e-6, 0.0), (PICKED + 100, 0.7, 0.001), (TOP_K_ALL, 0.3, 0.5),
           (MOST_LIKELY.value, 0.95, 1.0)]  # fmt: skip
"""top_k, top_p, min_p."""
BORDER = 1e-4
"""Largest probability mass of the tokens that rounding may keep or drop."""


def distributions(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Distributions from almost uniform to almost one token."""
    g = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-1, 1, rows)[torch.randperm(rows, generator=g)] if rows > 1 else torch.tensor([2.0])
    return (torch.randn((rows, vocab), generator=g) * scales[:, None]).softmax(-1).to(DEVICE)


def columns(filters: list[tuple[int, float, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors of some filters: columns of a wider tensor, as in the request tables."""
    top_k = torch.tensor([f[0] for f in filters], dtype=torch.int32, device=DEVICE)
    floats = torch.tensor([f[1:] for f in filters], dtype=torch.float32, device=DEVICE)
    return top_k, floats[:, 0], floats[:, 1]


def check_filter(probs: torch.Tensor, filters: list[tuple[int, float, float]]) -> None:
    """Check that the kernel keeps the same tokens as the reference, except tokens at a border."""
    expected = TWIN.filter(probs, *columns(filters))
    got = KERNELS.filter(probs.clone(), *columns(filters))
    off = (got - expected).abs().sum(-1)
    assert float(off.max()) < BORDER, [(f, o) for f, o in zip(filters, off.tolist(), strict=True) if o >= BORDER]
    torch.testing.assert_close(got.sum(-1), torch.ones(len(got), device=DEVICE), rtol=1e-5, atol=1e-5)
    for i, (top_k, top_p, min_p) in enumerate(filters):
        if (top_k, top_p, min_p) == (TOP_K_ALL, 1.0, 0.0):
            assert torch.equal(got[i], probs[i]), "a row without a filter keeps its bits"
        elif (top_p, min_p) == (1.0, 0.0):
            assert int((got[i] > 0).sum()) == min(top_k, int((probs[i] > 0).sum()))


def chi_square_p(seen: np.ndarray, wanted: np.ndarray) -> float:
    """The p-value of a chi-square test of the counts `seen`."""
    statistic, freedom = ((seen - wanted) ** 2 / wanted).sum(), len(seen) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


# ---- filters


@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_filters_leave_what_the_twin_leaves(rows: int, vocab: int) -> None:
    for shift in range(len(FILTERS) if rows == 1 else 2):
        filters = [FILTERS[(i + shift) % len(FILTERS)] for i in range(rows)]
        check_filter(distributions(rows, vocab, seed=shift), filters)


def test_every_filter_meets_peaked_and_flat_rows() -> None:
    vocab = 9000 if INTERPRETED else 128256
    g = torch.Generator().manual_seed(1)
    for scale in (0.05, 1.0, 2.5, 8.0):
        probs = (torch.randn((len(FILTERS), vocab), generator=g) * scale).softmax(-1).to(DEVICE)
        check_filter(probs, FILTERS)


@pytest.mark.parametrize("vocab", [10, 5000, 20000])
def test_of_ties_the_first_by_token_id_stay(vocab: int) -> None:
    flat = torch.full((4, vocab), 1 / vocab, device=DEVICE)
    got = KERNELS.filter(flat.clone(), *columns([(3, 1.0, 0.0), (vocab // 2 + 1, 1.0, 0.0), (5, 0.5, 0.0), (vocab - 1, 1.0, 1.0)]))
    for row, count in zip(got, (3, vocab // 2 + 1, 3, vocab - 1), strict=True):
        assert torch.equal(row > 0, torch.arange(vocab, device=DEVICE) < count)
    almost = KERNELS.filter(flat[:1].repeat(9, 1), *columns([(k, 1.0 - 2.0**-24, 0.0) for k in range(1, 10)]))
    assert (almost > 0).sum(-1).tolist() == list(range(1, 10)), "top_p adds nothing to top_k"
    steps = torch.randint(0, 3, (5, vocab), generator=torch.Generator().manual_seed(vocab)).float().softmax(-1).to(DEVICE)
    counts = [2, vocab // 3, vocab // 2, vocab * 2 // 3, vocab - 2]
    order = steps.sort(dim=-1, descending=True, stable=True).indices
    got = KERNELS.filter(steps.clone(), *columns([(count, 1.0, 0.0) for count in counts])) > 0
    for row, ids, count in zip(got, order, counts, strict=True):
        assert torch.equal(row.nonzero().flatten(), ids[:count].sort().values)


def test_the_likely_tokens_may_all_stand_in_the_same_groups_of_columns() -> None:
    """Groups are columns modulo 4096. Here a few groups have more likely tokens than a group can keep."""
    vocab = 5 * 4096 if INTERPRETED else 128256
    logits = torch.full((3, vocab), -9.0)
    logits[:, torch.arange(vocab) % 4096 < 1000] = torch.randn((3, int((torch.arange(vocab) % 4096 < 1000).sum())))
    check_filter(logits.softmax(-1).to(DEVICE), [(900, 1.0, 0.0), (1100, 0.9, 0.0), (TOP_K_ALL, 0.8, 0.0)])


def test_one_certain_token_and_rows_of_nan_end_like_any_other() -> None:
    probs = torch.zeros((4, 3000), device=DEVICE)
    probs[0, 7] = 1.0
    probs[1, 2999] = probs[1, 3] = 0.5
    probs[2] = float("nan")
    probs[3] = distributions(1, 3000)[0]
    filters = [(3, 0.5, 0.0), (1, 1.0, 0.0), (5, 0.5, 0.1), (TOP_K_ALL, 0.5, 0.0)]
    got = KERNELS.filter(probs.clone(), *columns(filters))
    assert got[0].nonzero().flatten().tolist() == [7]
    assert got[1].nonzero().flatten().tolist() == [3]
    torch.testing.assert_close(got[3:], filter_probs(probs[3:], *columns(filters[3:])), rtol=1e-5, atol=1e-7)


def test_a_row_is_filtered_alike_whatever_stands_beside_it() -> None:
    rows, vocab = (4, 3000) if INTERPRETED else (33, 128256)
    probs = distributions(rows, vocab)
    filters = [FILTERS[i % len(FILTERS)] for i in range(rows)]
    together = KERNELS.filter(probs.clone(), *columns(filters))
    for i in range(rows):
        assert torch.equal(KERNELS.filter(probs[i : i + 1].clone(), *columns(filters[i : i + 1]))[0], together[i])
    again = KERNELS.filter(probs.flip(0).contiguous(), *columns(filters[::-1]))
    assert torch.equal(again.flip(0), together)


# ---- draws


@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_draws_are_those_of_the_twin(rows: int, vocab: int) -> None:
    probs = distributions(rows, vocab)
    g = torch.Generator().manual_seed(rows)
    for _ in range(3):
        numbers = torch.rand(rows, generator=g).to(DEVICE)
        assert torch.equal(KERNELS.draw(probs, numbers), draw(probs, numbers))
    window = distributions(rows * 3, vocab).view(rows, 3, vocab)
    assert torch.equal(KERNELS.draw(window[:, 1], numbers), draw(window[:, 1], numbers)), "rows at a distance"
    cut = KERNELS.filter(probs.clone(), *columns([(5, 1.0, 0.0)] * rows))
    for number in (0.0, 0.5, 1.0 - 2.0**-24, 1.0):
        drawn = KERNELS.draw(cut, torch.full((rows,), number, device=DEVICE))
        assert (cut.gather(1, drawn[:, None]) > 0).all(), "never of probability 0"
    assert torch.equal(KERNELS.draw(7 * cut, numbers), draw(7 * cut, numbers)), "weights need not sum to 1"


def test_a_draw_is_a_token_even_where_nothing_is_left() -> None:
    probs = torch.zeros((3, 5001), device=DEVICE)
    probs[1] = float("nan")
    probs[2, 5000] = 1e-30
    drawn = KERNELS.draw(probs, torch.full((3,), 0.7, device=DEVICE)).tolist()
    assert all(0 <= token < 5001 for token in drawn)
    assert drawn[2] == 5000


@pytest.mark.parametrize("filters", [(TOP_K_ALL, 1.0, 0.0), (40, 0.95, 0.0), (TOP_K_ALL, 0.8, 0.01)])
def test_drawn_tokens_follow_the_twins_distribution(filters: tuple[int, float, float]) -> None:
    count, vocab = (400, 60) if INTERPRETED else (200_000, 60)
    probs = distributions(1, vocab)
    cut = KERNELS.filter(probs.clone(), *columns([filters]))
    numbers = KERNELS.uniforms(torch.arange(count, device=DEVICE), torch.full((count,), 12, device=DEVICE), RandomStream.TARGET)
    drawn = np.bincount(KERNELS.draw(cut.expand(count, -1), numbers).cpu().numpy(), minlength=vocab)
    expected = TWIN.filter(probs, *columns([filters]))[0].double().cpu().numpy()
    assert drawn[expected == 0].sum() == 0
    often = expected * count >= 5
    seen, wanted = np.append(drawn[often], drawn[~often].sum()), np.append(expected[often], expected[~often].sum()) * count
    alive = wanted > 0
    assert seen[alive].sum() == count
    assert chi_square_p(seen[alive], wanted[alive]) > 1e-4


def test_random_numbers_are_those_of_the_twin_bit_for_bit() -> None:
    g = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(1 << 62), 1 << 62, (33,), generator=g).to(DEVICE)
    positions = torch.randint(0, 1 << 40, (33, 5), generator=g).to(DEVICE)
    for stream in RandomStream:
        assert torch.equal(KERNELS.uniforms(seeds[:, None], positions, stream), uniforms(seeds[:, None], positions, stream))
        assert torch.equal(KERNELS.uniforms(seeds, positions[:, 1], stream), uniforms(seeds, positions[:, 1], stream))
    assert KERNELS.uniforms(seeds[:0], positions[:0, 0], 1).shape == (0,)


# ---- whole steps


def rows_of(ops: object, params: list[SamplingParams], vocab: int) -> tuple[RequestRows, torch.Tensor, object]:
    """Request rows 1..n with these parameters."""
    rows = RequestRows(len(params) + 1, vocab, DEVICE, ops)  # type: ignore[arg-type]
    rows.admit([RowInit(i + 1, 4, p, 77 + i, no_ints()) for i, p in enumerate(params)])
    index = np.arange(1, len(params) + 1, dtype=np.int32)
    return rows, torch.from_numpy(index).to(DEVICE, torch.int64), rows.needs(index)


MIXED = [SamplingParams(temperature=0.8, top_p=0.9, top_k=50), SamplingParams(temperature=0.0), SamplingParams(temperature=1.3),
         SamplingParams(temperature=1.0, min_p=0.1), SamplingParams(temperature=0.7, top_k=5)]  # fmt: skip


def test_a_step_chooses_the_twins_tokens_and_a_window_has_its_distributions() -> None:
    vocab, width = (2000, 2) if INTERPRETED else (128256, 4)
    logits = torch.randn((len(MIXED), vocab), generator=torch.Generator().manual_seed(3)).to(DEVICE) * 4
    window = torch.randn((len(MIXED), width, vocab), generator=torch.Generator().manual_seed(4)).to(DEVICE) * 4
    chosen, judged = [], []
    for ops in (KERNELS, TWIN):
        rows, index, needs = rows_of(ops, MIXED, vocab)
        chosen.append([sample(logits, rows.tables, index, torch.full_like(index, at), needs).tolist() for at in range(20)])  # type: ignore[arg-type]
        judged.append(target_probs(window.flatten(0, 1), rows.tables, index.repeat_interleave(width), True))
    same = np.mean(np.array(chosen[0]) == np.array(chosen[1]))
    assert same >= 0.98, "a number next to a border may fall to either side"
    torch.testing.assert_close(judged[0], judged[1], rtol=1e-4, atol=1e-6)


def test_a_seed_draws_the_same_whatever_else_is_in_the_batch() -> None:
    vocab = 2000 if INTERPRETED else 128256
    logits = torch.randn((len(MIXED), vocab), generator=torch.Generator().manual_seed(5)).to(DEVICE) * 4
    rows, index, needs = rows_of(KERNELS, MIXED, vocab)
    at = torch.arange(len(MIXED), device=DEVICE) + 9
    together = sample(logits, rows.tables, index, at, needs)  # type: ignore[arg-type]
    for i in range(len(MIXED)):
        alone = rows.needs(np.array([i + 1], dtype=np.int32))
        one = slice(i, i + 1)
        assert sample(logits[one], rows.tables, index[one], at[one], alone).item() == together[i].item()


@on_gpu
def test_a_captured_step_reads_what_its_replay_finds() -> None:
    vocab = 50000
    rows, index, needs = rows_of(KERNELS, MIXED, vocab)
    logits, at = torch.randn((len(MIXED), vocab), device="cuda"), torch.arange(len(MIXED), device="cuda")

    def step() -> torch.Tensor:
        return sample(logits, rows.tables, index, at, needs)  # type: ignore[arg-type]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = step()
    for _ in range(5):
        logits.normal_(std=3.0)
        at.add_(1)
        graph.replay()
        assert torch.equal(tokens, step())


@on_gpu
def test_a_step_never_waits_for_the_device() -> None:
    rows, index, needs = rows_of(KERNELS, MIXED, 128256)
    logits, at = torch.randn((len(MIXED), 128256), device="cuda"), torch.arange(len(MIXED), device="cuda")
    sample(logits, rows.tables, index, at, needs)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(logits, rows.tables, index, at, needs)  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_a_gpu_samples_with_the_kernels_unless_it_is_told_otherwise() -> None:
    assert isinstance(select_sampling(torch.device("cuda"), "triton")[0], TritonSampling)
    assert isinstance(select_sampling(torch.device("cuda"), "pytorch")[0], TorchSampling)
