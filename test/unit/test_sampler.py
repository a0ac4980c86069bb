"""The sampler against its definitions, written out token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from runtime.batch import RowInit
from runtime.layers import logits_processors
from runtime.layers.kernels.argmax import BLOCK, argmax
from runtime.layers.logits_processors import LOGITS_PROCESSORS, LogitsContext, LogitsProcessor, process_logits
from runtime.layers.random_streams import RandomStream, uniforms
from runtime.layers.sampler import draw, filter_probs, sample, target_probs, top_logprobs
from runtime.layers.sampling_tables import ROWS_AT_ONCE
from runtime.model_executor.request_rows import RequestRows
from runtime.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB = 97


def rows_of(
    *params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None, eos: tuple[int, ...] = (1, 5)
) -> Any:
    """Rows 1..n with these parameters, each with the same text so far, and what the sampler needs for them."""
    rows = RequestRows(len(params) + 1, VOCAB, CPU)
    prompt, output = prompt or [2, 3, 4], output or []
    history = np.array([*prompt, *output], dtype=np.int32)
    inits = [
        RowInit(i + 1, len(prompt), p, p.seed if p.seed is not None else i, np.array(eos, dtype=np.int32), history)
        for i, p in enumerate(params)
    ]
    rows.admit(inits)
    index = np.arange(1, len(params) + 1, dtype=np.int32)
    return rows, torch.from_numpy(index).to(torch.int64), rows.needs(index)


def logits_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


# ---- argmax


@pytest.mark.parametrize("vocab", [BLOCK, 8 * BLOCK, 8 * BLOCK + 1])
def test_argmax_takes_the_first_of_the_largest_entries(vocab: int) -> None:
    rows = torch.randint(0, 3, (9, vocab), generator=torch.Generator().manual_seed(0)).float()
    rows[0], rows[1], rows[2, 5:] = -0.0, -math.inf, 7.0
    rows[3, -1], rows[4, [7, -1]], rows[5, -3:], rows[6, 2] = 9.0, math.inf, math.nan, math.nan
    rows[7, ::2] = 0.0
    largest = [row.isnan() if row.isnan().any() else row == row.max() for row in rows]
    expected = [int(found.nonzero()[0]) for found in largest]
    assert argmax(rows).tolist() == expected
    out = torch.zeros(9, dtype=torch.int64)
    assert argmax(rows, out) is out
    assert out.tolist() == expected


# ---- filters


def slow_filter(probs: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    order = sorted(range(len(probs)), key=lambda t: (-probs[t], t))[:top_k]
    head = sum(probs[t] for t in order)
    kept, mass = [], 0.0
    for token in order:
        if kept and mass / head >= top_p:
            break
        kept.append(token)
        mass += probs[token]
    kept = [t for t in kept if probs[t] >= min_p * probs[order[0]]]
    total = sum(probs[t] for t in kept)
    return [probs[t] / total if t in kept else 0.0 for t in range(len(probs))]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1 << 30),
    top_k=st.one_of(st.integers(1, 12), st.just(1 << 30)),
    top_p=st.one_of(st.floats(1e-6, 0.999), st.just(1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    ties=st.booleans(),
)
def test_filters_follow_the_definition(seed: int, top_k: int, top_p: float, min_p: float, ties: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 3, (1, 10), generator=g).float() if ties else torch.randn(1, 10, generator=g)
    probs = x.softmax(-1)
    got = filter_probs(probs, torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p]))[0]
    expected = slow_filter(probs[0].double().tolist(), top_k, float(torch.tensor(top_p)), float(torch.tensor(min_p)))
    borders = _near_a_border(probs[0].double().tolist(), top_k, top_p, min_p)
    if not borders:
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-6)
    assert float(got.sum()) == pytest.approx(1.0, abs=1e-5)


def _near_a_border(probs: list[float], top_k: int, top_p: float, min_p: float) -> bool:
    """Whether float32 may rightly decide otherwise: a running sum or a ratio lies on the limit itself."""
    ranked = sorted(probs, reverse=True)[:top_k]
    sums = np.cumsum(ranked) / sum(ranked)
    return bool(np.any(np.abs(sums - top_p) < 1e-5) or np.any(np.abs(np.array(ranked) - min_p * ranked[0]) < 1e-6))


def test_exactly_top_k_tokens_stay_where_all_are_alike() -> None:
    got = filter_probs(torch.full((1, 10), 0.1), torch.tensor([3], dtype=torch.int32), torch.ones(1), torch.zeros(1))
    assert got[0].tolist() == pytest.approx([1 / 3] * 3 + [0.0] * 7)


def test_many_rows_are_the_same_as_few() -> None:
    count = 2 * ROWS_AT_ONCE + 5
    rows, index, _ = rows_of(*(SamplingParams(top_k=1 + i % 7, top_p=0.5 + i % 5 / 10) for i in range(count)))
    logits = logits_of(count)
    together = target_probs(logits, rows.tables, index, True)
    for i in (0, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, count - 1):
        assert torch.equal(together[i], target_probs(logits[i : i + 1], rows.tables, index[i : i + 1], True)[0])


@pytest.mark.parametrize("neighbour", [SamplingParams(top_k=3), SamplingParams(top_p=0.3), SamplingParams(min_p=0.5)])
def test_a_neighbours_filter_does_not_change_a_bit_of_ones_own_distribution(neighbour: SamplingParams) -> None:
    mine = [SamplingParams(temperature=0.7), SamplingParams(temperature=0.0), SamplingParams(temperature=3.0)]
    logits = logits_of(4)
    rows, index, needs = rows_of(*mine, neighbour)
    assert needs.filtered
    beside = target_probs(logits, rows.tables, index, needs.filtered)
    alone = target_probs(logits[:3], rows.tables, index[:3], False)
    assert torch.equal(beside[:3], alone)


def test_greedy_is_one_hot_and_temperature_is_a_division() -> None:
    rows, index, _ = rows_of(SamplingParams(temperature=0.0), SamplingParams(temperature=2.0), SamplingParams(temperature=1.5, top_k=1))
    logits = logits_of(3)
    probs = target_probs(logits, rows.tables, index, False)
    assert probs[0].argmax() == logits[0].argmax()
    assert probs[0].sum() == probs[0].max() == 1
    torch.testing.assert_close(probs[1], (logits[1] / 2).softmax(-1))
    assert probs[2].max() == 1, "top_k 1 is greedy"


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-10])
def test_no_temperature_is_too_small(temperature: float) -> None:
    rows, index, needs = rows_of(SamplingParams(temperature=temperature))
    logits = logits_of(1) * 10
    assert sample(logits, rows.tables, index, torch.tensor([7]), needs).tolist() == [int(logits[0].argmax())]
    assert torch.isfinite(target_probs(logits, rows.tables, index, False)).all()


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-38, 1e-20])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0])
def test_no_repetition_penalty_is_too_small(penalty: float, temperature: float) -> None:
    rows, index, needs = rows_of(SamplingParams(temperature=temperature, repetition_penalty=penalty), prompt=[2, 3, 4])
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, 2:5] = torch.tensor([1e-3, 2e4, 1e4])
    assert sample(logits, rows.tables, index, torch.tensor([7]), needs).tolist() == [3]


# ---- logits processors


def slow_processed(
    logits: list[float], p: SamplingParams, prompt: list[int], output: list[int], eos: tuple[int, ...], generated: int
) -> list[float]:
    out = list(logits)
    for token in range(len(out)):
        count = output.count(token)
        if p.penalised and (count or token in prompt):
            out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
        out[token] -= p.frequency_penalty * count + (p.presence_penalty if count else 0.0)
        out[token] += (p.logit_bias or {}).get(token, 0.0)
        if token in eos and generated < p.min_new_tokens:
            out[token] = -math.inf
    return out


PROCESSED = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.5, presence_penalty=-1.0),
    SamplingParams(frequency_penalty=0.8, presence_penalty=0.4),
    SamplingParams(logit_bias={0: 3.0, 5: -100.0, VOCAB - 1: 1.5}),
    SamplingParams(min_new_tokens=6),
    SamplingParams(min_new_tokens=3, logit_bias={1: 50.0}, repetition_penalty=1.2, frequency_penalty=-0.5),
    SamplingParams(),
]


def test_logits_processors_follow_the_definition() -> None:
    prompt, output, eos = [2, 3, 3, 90], [3, 7, 7, 7], (1, 5, VOCAB - 1)
    rows, index, needs = rows_of(*PROCESSED, prompt=prompt, output=output, eos=eos)
    logits = logits_of(len(PROCESSED))
    before = logits.clone()
    at = torch.full((len(PROCESSED), 1), len(prompt) + len(output))
    got = process_logits(logits[:, None], LogitsContext(rows.tables, index, at), needs)[:, 0]
    assert torch.equal(logits, before), "the input logits belong to the runner"
    for i, params in enumerate(PROCESSED):
        expected = slow_processed(before[i].tolist(), params, prompt, output, eos, len(output))
        np.testing.assert_allclose(got[i].numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[-1], before[-1])


def test_penalties_count_drafts_before_each_position() -> None:
    prompt, output, drafts = [2, 3], [4], [9, 9, 4]
    rows, index, needs = rows_of(*PROCESSED, prompt=prompt, output=output)
    width = len(drafts) + 1
    path = torch.full((len(PROCESSED), width, width), -1)
    for i in range(width):
        path[:, i, 1 : i + 1] = torch.tensor(drafts[:i])
    logits = torch.randn(len(PROCESSED), width, VOCAB, generator=torch.Generator().manual_seed(4))
    at = len(prompt) + len(output) + torch.arange(width).expand(len(PROCESSED), width)
    got = process_logits(logits, LogitsContext(rows.tables, index, at, path), needs)
    for i, params in enumerate(PROCESSED):
        for j in range(width):
            said = [*output, *drafts[:j]]
            expected = slow_processed(logits[i, j].tolist(), params, prompt, said, (1, 5), len(said))
            np.testing.assert_allclose(got[i, j].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_processors_take_more_requests_than_fit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [PROCESSED[i % len(PROCESSED)] for i in range(20)]
    rows, index, needs = rows_of(*params, prompt=[2, 3], output=[4, 4])
    logits = torch.randn(20, 3, VOCAB, generator=torch.Generator().manual_seed(1))
    context = LogitsContext(rows.tables, index, 4 + torch.arange(3).expand(20, 3))
    together = process_logits(logits, context, needs)
    monkeypatch.setattr(logits_processors, "ROWS_AT_ONCE", 7)
    assert torch.equal(process_logits(logits, context, needs), together)


def test_an_added_processor_masks_tokens_after_all_others() -> None:
    def only_token(logits: torch.Tensor, selected: torch.Tensor, context: LogitsContext) -> None:
        """A stand-in for a grammar: request 1 may say token 9 and nothing else."""
        mask = torch.full((VOCAB,), -torch.inf)
        mask[9] = 0.0
        logits[selected] += mask

    rows, index, needs = rows_of(SamplingParams(logit_bias={3: 90.0}), SamplingParams(logit_bias={3: 90.0}))
    context = LogitsContext(rows.tables, index, torch.full((2, 4), 5))
    got = process_logits(torch.zeros(2, 4, VOCAB), context, needs, [*LOGITS_PROCESSORS, LogitsProcessor(lambda needs: [1], only_token)])
    assert got.argmax(-1).tolist() == [[3] * 4, [9] * 4]


# ---- draws


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    probs = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25, 0.0])
    u = uniforms(torch.arange(count), torch.full((count,), 12), RandomStream.TARGET)
    drawn = np.bincount(draw(probs.expand(count, -1), u).numpy(), minlength=6)
    assert drawn[[1, 5]].tolist() == [0, 0]
    live = [0, 2, 3, 4]
    assert stats.chisquare(drawn[live], probs[live].numpy() * count).pvalue > 1e-4


def test_a_draw_never_hits_probability_zero_not_even_at_the_ends() -> None:
    probs = torch.tensor([[0.0, 0.0, 1e-30, 0.0], [0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]])
    for u in (0.0, 0.5, 1.0 - 2.0**-24, 1.0):
        drawn = draw(probs, torch.full((3,), u))
        assert (probs.gather(1, drawn[:, None]) > 0).all()


def test_a_seed_draws_the_same_whatever_else_is_in_the_batch() -> None:
    mine = SamplingParams(temperature=0.9, seed=77)
    logits, position = logits_of(1, 5), torch.tensor([31])
    rows, index, needs = rows_of(mine)
    alone = sample(logits, rows.tables, index, position, needs).item()
    for others in ([SamplingParams(top_k=2)] * 3, [SamplingParams(temperature=0.0)], [SamplingParams(repetition_penalty=1.5)] * 8):
        rows, index, needs = rows_of(*others, mine)
        batch = torch.cat([logits_of(len(others), 9), logits])
        at = torch.arange(len(others) + 1)
        at[-1] = 31
        assert sample(batch, rows.tables, index, at, needs)[-1].item() == alone


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    u = uniforms(torch.arange(-2000, 2000)[:, None], torch.arange(50), RandomStream.ACCEPT).flatten().numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    assert stats.chisquare(np.histogram(u, bins=256, range=(0, 1))[0]).pvalue > 1e-4


def test_the_largest_uniform_number_is_the_float_before_one() -> None:
    """This seed draws it at this position: a hash that ends in 24 ones."""
    assert uniforms(torch.tensor(0), torch.tensor(39827229), RandomStream.TARGET).item() == 1.0 - 2.0**-24


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda s, p: uniforms(s, p, RandomStream.TARGET), lambda s, p: uniforms(s + 1, p, RandomStream.TARGET)),
        (lambda s, p: uniforms(s, p, RandomStream.TARGET), lambda s, p: uniforms(s, p + 1, RandomStream.TARGET)),
        (lambda s, p: uniforms(s, p, RandomStream.DRAFT), lambda s, p: uniforms(s, p, RandomStream.ACCEPT)),
        (lambda s, p: uniforms(s, p, RandomStream.TARGET), lambda s, p: uniforms(s, p, RandomStream.DRAFT)),
        (lambda s, p: uniforms(s, p, RandomStream.ACCEPT), lambda s, p: uniforms(s, p, RandomStream.SYNTHETIC)),
    ],
    ids=["next seed", "next position", "draft and accept", "target and draft", "accept and synthetic"],
)
def test_neighbouring_streams_have_nothing_to_do_with_each_other(one: Any, other: Any) -> None:
    seeds, positions = torch.arange(400)[:, None], torch.arange(100)
    a, b = one(seeds, positions).flatten().numpy(), other(seeds, positions).flatten().numpy()
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(a))
    table = np.histogram2d(a, b, bins=8, range=((0, 1), (0, 1)))[0]
    assert stats.chi2_contingency(table).pvalue > 1e-4
    assert (a == b).mean() < 1e-4


def test_the_largest_seeds_and_positions_are_numbers_like_any_other() -> None:
    seeds = torch.tensor([-(1 << 63), (1 << 63) - 1, 0, -1])
    u = uniforms(seeds, torch.full((4,), 1 << 40), RandomStream.TARGET)
    assert len(set(u.tolist())) == 4


# ---- log-probabilities


@pytest.mark.parametrize("k", [0, 1, 7])
def test_log_probabilities_are_the_models_own(k: int) -> None:
    logits, chosen = logits_of(5), torch.tensor([0, 96, 3, 3, 50])
    own, ids, top = top_logprobs(logits, chosen, k)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(own.double(), expected.gather(1, chosen[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    assert ids.shape == top.shape == (5, k)
    assert ids.dtype == torch.int32
    for row in range(5):
        best = sorted(expected[row].tolist(), reverse=True)[:k]
        np.testing.assert_allclose(top[row].numpy(), best, rtol=1e-5, atol=1e-5)
        assert [float(expected[row, t]) for t in ids[row].tolist()] == best
