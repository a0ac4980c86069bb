"""Rows of requests: what is written on admission is all of the new one and nothing of the old one."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from runtime.batch import RowInit
from runtime.model_executor.request_rows import MAX_COUNT, MAX_EOS, RequestRows
from runtime.sampling_params import MAX_LOGIT_BIAS, TOP_K_ALL, SamplingParams

CPU = torch.device("cpu")
VOCAB = 50


def init(row: int, sampling: SamplingParams, history: list[int] | None = None, prompt_len: int = 3, seed: int = 9) -> RowInit:
    text = None if history is None else np.array(history, dtype=np.int32)
    return RowInit(row, prompt_len, sampling, seed, np.array([1, 4], dtype=np.int32), text)


FULL = SamplingParams(
    temperature=0.5, top_k=7, top_p=0.8, min_p=0.1, presence_penalty=0.2, frequency_penalty=0.3, repetition_penalty=1.4,
    logit_bias={2: 1.0, 3: -4.0}, min_new_tokens=6,
)  # fmt: skip


def snapshot(rows: RequestRows) -> dict[str, torch.Tensor]:
    return {f.name: getattr(rows.tables, f.name).clone() for f in dataclasses.fields(rows.tables) if f.name != "ops"}


def test_admission_writes_one_row_and_no_other() -> None:
    rows = RequestRows(5, VOCAB, CPU)
    before = snapshot(rows)
    rows.admit([init(2, FULL, [5, 6, 7, 9, 9])])
    for name, tensor in snapshot(rows).items():
        untouched = [0, 1, 3, 4]
        assert torch.equal(tensor[untouched], before[name][untouched]), name
    t = rows.tables
    assert t.floats[2].tolist() == pytest.approx([0.5, 0.8, 0.1, 0.2, 0.3, 1.4])
    assert t.top_k[2] == 7
    assert t.seeds[2] == 9
    assert t.min_positions[2] == 3 + 6
    assert t.eos_ids[2, :3].tolist() == [1, 4, -1]
    assert {2: 1.0, 3: -4.0}.items() <= dict(zip(t.bias_ids[2].tolist(), t.bias_values[2].tolist(), strict=True)).items()
    assert Counter({9: 2}) == Counter({i: int(n) for i, n in enumerate(t.output_counts[2]) if n})
    assert t.in_prompt[2].nonzero().flatten().tolist() == [5, 6, 7]


def test_a_reused_row_needs_nothing_of_its_last_owner() -> None:
    rows, fresh = RequestRows(3, VOCAB, CPU), RequestRows(3, VOCAB, CPU)
    rows.admit([init(1, FULL, [5, 6, 7, 9, 9])])
    for later in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.5), SamplingParams(repetition_penalty=2.0)):
        for target in (rows, fresh):
            target.admit([init(1, later, [8, 8, 8, 3])])
        index = np.array([1], dtype=np.int32)
        needs = rows.needs(index)
        assert needs == fresh.needs(index)
        read = {"floats", "top_k", "seeds", "min_positions"} | ({"output_counts", "in_prompt"} if needs.penalised else set())
        for name in read:
            assert torch.equal(getattr(rows.tables, name)[1], getattr(fresh.tables, name)[1]), name
        assert not needs.biased
        assert not needs.min_length


def test_needs_name_the_requests_of_the_batch_in_its_order() -> None:
    rows = RequestRows(6, VOCAB, CPU)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, frequency_penalty=0.1),
        SamplingParams(top_k=4),
        SamplingParams(logit_bias={1: 1.0}, temperature=0.0),
        SamplingParams(min_new_tokens=2, temperature=0.0),
    ]
    rows.admit([init(i + 1, p, [1, 2, 3]) for i, p in enumerate(kinds)])
    needs = rows.needs(np.array([5, 2, 4, 1], dtype=np.int32))
    assert needs.all_greedy
    assert (needs.filtered, needs.penalised, needs.biased, needs.min_length) == (False, [1], [2], [0])
    sampled = rows.needs(np.array([3, 1], dtype=np.int32))
    assert not sampled.all_greedy
    assert sampled.filtered
    assert not sampled.adjusts


def test_needs_change_with_the_owner_of_a_row() -> None:
    rows, index = RequestRows(3, VOCAB, CPU), np.array([1, 2], dtype=np.int32)
    assert rows.needs(index).all_greedy
    rows.admit([init(2, SamplingParams(temperature=1.0))])
    assert not rows.needs(index).all_greedy
    rows.admit([init(2, SamplingParams(temperature=0.0))])
    assert rows.needs(index).all_greedy
    assert rows.needs(index[:1]) == rows.needs(np.array([1], dtype=np.int32))


def test_open_ends_are_filled_with_values_that_mean_all() -> None:
    rows = RequestRows(3, VOCAB, CPU)
    rows.admit([init(1, SamplingParams(top_k=-1)), init(2, SamplingParams(top_k=0))])
    assert rows.tables.top_k.tolist() == [TOP_K_ALL] * 3, "the padding row too: its fill value means all"
    assert rows.tables.floats[0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]


def test_the_most_of_everything_fits() -> None:
    rows = RequestRows(2, 2000, CPU)
    bias = {i: float(i % 7) for i in range(MAX_LOGIT_BIAS)}
    many = RowInit(1, 3, SamplingParams(logit_bias=bias, min_new_tokens=1), -(1 << 63), np.arange(MAX_EOS, dtype=np.int32))
    rows.admit([many])
    assert rows.tables.eos_ids[1].tolist() == list(range(MAX_EOS))
    assert rows.tables.bias_values[1].sum() == sum(bias.values())


def test_counting_adds_what_is_valid_and_repeats() -> None:
    rows = RequestRows(4, VOCAB, CPU)
    tokens = torch.tensor([[7, 7, 7, 1], [7, 2, 2, 2]])
    rows.count(torch.tensor([2, 3]), tokens, torch.tensor([[True, True, False, False], [True, True, True, False]]))
    assert rows.tables.output_counts[2, 7] == 2
    assert rows.tables.output_counts[3, [7, 2]].tolist() == [1, 2]
    assert rows.tables.output_counts.sum() == 5


def test_a_count_ends_where_its_number_does() -> None:
    rows = RequestRows(4, VOCAB, CPU)
    rows.tables.output_counts[2, 7] = MAX_COUNT - 2
    for _ in range(3):
        rows.count(torch.tensor([2]), torch.tensor([[7, 7, 1]]), torch.ones((1, 3), dtype=torch.bool))
    assert rows.tables.output_counts[2, [7, 1]].tolist() == [MAX_COUNT, 3]
    long = np.array([1, *[5] * (MAX_COUNT + 9)], dtype=np.int32)
    rows.admit([RowInit(1, 1, SamplingParams(frequency_penalty=0.1), 0, np.empty(0, dtype=np.int32), long)])
    assert rows.tables.output_counts[1, 5] == MAX_COUNT
