"""Masks of grammars on logits, against the definition bit by bit."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest
import torch

from runtime.batch import RowInit
from runtime.layers.logits_processors import LOGITS_PROCESSORS, LogitsContext, process_logits
from runtime.layers.sampler import TorchSampling, sample
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.layers.token_mask import TokenMask, unpack
from runtime.model_executor import grammar_rows
from runtime.model_executor.draft_window import DraftWindow
from runtime.model_executor.grammar_rows import GrammarRows
from runtime.model_executor.request_rows import RequestRows
from runtime.model_executor.staging import HostCopy
from runtime.sampling_params import GrammarSpec, SamplingParams
from unit.grammars import VOCAB as JSON_VOCAB
from unit.grammars import json_tokenizer, make_compiler

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
    *_, by_mask, by_end = LOGITS_PROCESSORS
    assert by_end.selects(wanted) == [0]
    assert by_end.selects(SamplingNeeds(True, True, False, constrained=[0])) == []
    assert by_mask.selects(wanted) == [0]


@pytest.mark.parametrize("drafts", [0, 2])
def test_only_a_step_with_drafts_waits_for_the_step_before_it(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    compiler, waited = make_compiler(), list[bool]()
    grammar = compiler.compile(GrammarSpec("regex", "QZJ")).future.result()
    q, z, j = json_tokenizer().encode("QZJ", False)
    rows, row = GrammarRows(JSON_VOCAB, torch.device("cpu")), np.array([1], np.int32)
    rows.admit([RowInit(1, 1, SamplingParams(), 0, np.array([0, 1], np.int32), np.array([5], np.int32), grammar)])
    first = rows.step(row, 1, wanted=np.array([True]))
    assert first is not None
    rows.record(first, torch.tensor([[q]]))
    wait = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda copy: waited.append(threading.current_thread() is threading.main_thread()) or wait(copy))
    step = rows.step(row, 1, width=1 + drafts)
    assert step is not None
    assert waited == [True] * bool(drafts), "nothing is launched while the host waits"
    step.start_masks(DraftWindow(torch.tensor([[q, z, j][: 1 + drafts]])))
    mask = step.window_mask()
    assert mask is not None
    assert waited == [bool(drafts), False], "the tokens and the window"
    assert mask.allowed(torch.tensor([0]), JSON_VOCAB)[0, 0].nonzero().flatten().tolist() == [z]
    rows.close()
    compiler.close()


class GatedCopy(HostCopy):
    """A copy that arrives when the gate is opened."""

    gate: threading.Event

    def wait(self) -> list[npt.NDArray[np.generic]]:
        self.gate.wait()
        return super().wait()


@pytest.mark.parametrize("width", [1, 2])
def test_a_step_waits_for_the_tokens_that_a_failed_one_was_waiting_for(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    compiler = make_compiler()
    grammar = compiler.compile(GrammarSpec("regex", "QZJ")).future.result()
    q, z = json_tokenizer().encode("QZ", False)
    rows, row = GrammarRows(JSON_VOCAB, torch.device("cpu")), np.array([1], np.int32)
    rows.admit([RowInit(1, 1, SamplingParams(), 0, np.array([0, 1], np.int32), np.array([5], np.int32), grammar)])
    first = rows.step(row, 1, wanted=np.array([True]))
    assert first is not None
    monkeypatch.setattr(grammar_rows, "HostCopy", GatedCopy)
    monkeypatch.setattr(GatedCopy, "gate", gate := threading.Event(), raising=False)
    rows.record(first, torch.tensor([[q]]))
    failed = rows.step(row, 1)
    assert failed is not None
    failed.start_masks(DraftWindow(torch.tensor([[q]])))  # and then the pass raises, so its mask is not read
    threading.Timer(0.3, gate.set).start()
    step = rows.step(row, 1, width)
    assert step is not None
    mask = step.first()
    assert mask is not None
    assert mask.allowed(torch.tensor([0]), JSON_VOCAB)[0, 0].nonzero().flatten().tolist() == [z]
    rows.close()
    compiler.close()
