"""Masks of grammars on logits, against the definition bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.layers.logits_processors import GrammarEnd, GrammarMask, LogitsContext, process_logits
from runtime.layers.sampler import TorchSampling, sample
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.layers.token_mask import TokenMask, unpack
from runtime.model_executor.request_rows import RequestRows

VOCAB = 77
B, W = 5, 3
SELECTED = [1, 4]


@pytest.fixture
def mask() -> TokenMask:
    rng = np.random.default_rng(0)
    bits = rng.integers(-(1 << 31), 1 << 31, (len(SELECTED), W, -(-VOCAB // 32)), dtype=np.int64).astype(np.int32)
    index = torch.zeros(B, dtype=torch.int64)
    index[SELECTED] = torch.arange(len(SELECTED))
    return TokenMask(torch.from_numpy(bits), index, torch.tensor(SELECTED), SELECTED)


def bit(mask: TokenMask, request: int, position: int, token: int) -> bool:
    row = mask.bits[int(mask.index[request]), position]
    return bool((int(row[token // 32]) >> (token % 32)) & 1)


def context(mask: TokenMask) -> LogitsContext:
    tables = RequestRows(B, VOCAB, torch.device("cpu"), TorchSampling()).tables
    return LogitsContext(tables, torch.arange(B), torch.zeros((B, W), dtype=torch.int64), None, mask)


def needs(min_length: list[int]) -> SamplingNeeds:
    return SamplingNeeds(True, True, False, [], [], min_length, SELECTED)


def test_bits_are_unpacked_alike_everywhere(mask: TokenMask) -> None:
    allowed = mask.allowed(torch.tensor(SELECTED), VOCAB)
    assert torch.equal(allowed, unpack(mask.bits, VOCAB))
    expected = [[[bit(mask, request, w, token) for token in range(VOCAB)] for w in range(W)] for request in SELECTED]
    assert allowed.tolist() == expected


def test_forbidden_tokens_alone_change(mask: TokenMask) -> None:
    logits = torch.randn(B, W, VOCAB)
    found = process_logits(logits, context(mask), needs([]))
    for request in range(B):
        for w in range(W):
            free = torch.tensor([request not in SELECTED or bit(mask, request, w, token) for token in range(VOCAB)])
            assert torch.equal(found[request, w], torch.where(free, logits[request, w], -torch.inf))
    flat = mask.apply(logits.flatten(0, 1))
    assert torch.equal(flat.view_as(found), found)


def test_a_part_masks_its_own_requests(mask: TokenMask) -> None:
    part = mask.part(3, 5)
    assert part.selected == [1]
    assert torch.equal(part.allowed(torch.tensor([1]), VOCAB), mask.allowed(torch.tensor([4]), VOCAB))


def test_the_end_of_a_grammar_wins_over_the_minimum_length() -> None:
    bits = torch.zeros((1, 1, -(-VOCAB // 32)), dtype=torch.int32)
    bits[0, 0, 0] = 1 << 7
    mask = TokenMask(bits, *2 * [torch.zeros(1, dtype=torch.int64)], [0])
    logits = torch.randn(1, VOCAB)
    logits[0, 7] = -torch.inf  # as the minimum length leaves it
    rows = RequestRows(1, VOCAB, torch.device("cpu"), TorchSampling())
    wanted = SamplingNeeds(True, True, False, [], [], [0], [0])
    assert sample(logits, rows.tables, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), wanted, mask).tolist() == [7]
    assert GrammarEnd().selects(wanted) == [0]
    assert GrammarEnd().selects(SamplingNeeds(True, True, False, [], [], [], [0])) == []
    assert GrammarMask().selects(wanted) == [0]
