"""Grammars that fail or are slow while their requests run: errors after rejected drafts, masks that take too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from runtime.constrained.compiler import GrammarCompiler
from runtime.constrained.grammar import GrammarBackend, Matcher
from runtime.constrained.llguidance_backend import LlguidanceMatcher
from runtime.managers.grammar_queue import GrammarQueue
from runtime.managers.messages import GenerateReq
from runtime.managers.scheduler import Scheduler
from unit.grammars import Served, constrained_worker, make_compiler, serve
from unit.test_grammar_serving import FEW, GREEDY, WORKERS, constrained, first, mixed_asks

Answer = Callable[..., tuple[Served, Scheduler]]
Drafts = tuple[str | None, dict[str, Any]]
"""An algorithm, None for plain decoding, and the settings of its worker."""
PLAIN: Drafts = (None, {})
IN_TURN = [(each, i % 2 == 1) for i, each in enumerate(WORKERS)] + [(WORKERS[6], True), (WORKERS[9], False)]
"""`WORKERS` with False and True in turn; every algorithm has both."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


@pytest.fixture
def answer(tmp_path: Path, compiler: GrammarCompiler) -> Answer:
    """Serves requests with a worker of its own."""

    def answer(asks: list[GenerateReq], drafts: Drafts = ("EAGLE", {}), **settings: Any) -> tuple[Served, Scheduler]:
        algorithm, spec = drafts
        worker = constrained_worker(tmp_path, algorithm, **spec)
        found = serve(worker, asks, compiler, **settings)
        worker.close()
        return found

    return answer


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, compiler: GrammarCompiler) -> Served:
    worker = constrained_worker(tmp_path_factory.mktemp("plain"), None)
    served, _ = serve(worker, mixed_asks(FEW), compiler)
    worker.close()
    return served


def test_a_grammar_that_fails_on_its_way_ends_its_request_alone(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, calls = LlguidanceMatcher.fill, Counter[str]()

    def failing(self: LlguidanceMatcher, row: Any) -> str:
        calls["fill"] += 1
        return "the parser gave up" if calls["fill"] > 40 and calls["fill"] < 42 else fill(self, row)

    monkeypatch.setattr(LlguidanceMatcher, "fill", failing)
    served, scheduler = answer([GenerateReq(rid=str(i), input_ids=[5 + i], sampling=constrained(GREEDY), seed=i) for i in range(4)])
    failed = [end for end in served.ends.values() if end.reason == "abort"]
    assert [(end.status, "the parser gave up" in end.message) for end in failed] == [(400, True)]
    assert sum(end.reason == "stop" for end in served.ends.values()) == 3
    assert scheduler.stats.num_failed_steps_total == 0


def test_a_backend_that_cannot_be_loaded_fails_requests_with_a_grammar_alone(tmp_path: Path) -> None:
    def fail() -> GrammarBackend:
        raise ZeroDivisionError

    worker = constrained_worker(tmp_path, None)
    served, scheduler = serve(worker, mixed_asks(FEW), GrammarCompiler(fail, None))
    worker.close()
    for ask in mixed_asks(FEW):
        end, failed = served.ends[ask.rid], ask.sampling.grammar is not None
        assert (end.status, end.param, "grammar backend" in end.message) == ((500, None, True) if failed else (0, None, False))
    assert scheduler.stats.num_failed_steps_total == 0


def test_a_grammar_that_slows_others_down_ends_its_request_alone(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.constrained.constraint.SLOW", -1.0)
    monkeypatch.setattr("runtime.constrained.constraint.PER_MASK", -1.0)
    served, scheduler = answer(mixed_asks(FEW))
    for ask in mixed_asks(FEW):
        end, slow = served.ends[ask.rid], ask.sampling.grammar is not None
        assert (end.status, "takes too long" in end.message) == ((400, True) if slow else (0, False))
    assert scheduler.stats.num_failed_steps_total == 0


class OnlyAlong:
    """A grammar that can be followed along the texts `known` only: elsewhere masks give a reason or raise."""

    def __init__(self, matcher: Matcher, known: set[tuple[int, ...]], raises: bool, path: tuple[int, ...] = ()) -> None:
        self._matcher, self._known, self._raises, self._path = matcher, known, raises, path

    def push(self, token: int) -> bool:
        self._path = (*self._path, token)
        return self._matcher.push(token)

    def fork(self) -> Matcher:
        return OnlyAlong(self._matcher.fork(), self._known, self._raises, self._path)

    def fill(self, row: Any) -> str:
        reason = self._matcher.fill(row)
        if self._path not in self._known and self._raises:
            raise ZeroDivisionError
        return reason if self._path in self._known else "the parser gave up"


def follow_only(known: set[tuple[int, ...]], raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all requests follow `OnlyAlong`."""
    take_compiled = GrammarQueue.take

    def take(self: GrammarQueue) -> Any:
        for req, _ in (done := take_compiled(self)):
            req.grammar = OnlyAlong(req.grammar, known, raises)  # type: ignore[arg-type]
        return done

    monkeypatch.setattr(GrammarQueue, "take", take)


def prefixes(served: Served) -> set[tuple[int, ...]]:
    """The texts before each token."""
    return {tuple(tokens[:n]) for tokens in served.tokens.values() for n in range(len(tokens))}


@pytest.mark.parametrize(("drafts", "odd"), IN_TURN)
def test_a_grammar_that_fails_after_a_rejected_draft_goes_on(
    answer: Answer, expected: Served, monkeypatch: pytest.MonkeyPatch, drafts: Drafts, odd: bool
) -> None:
    """Masks that give a reason with full windows, and masks that raise with ragged ones."""
    follow_only(prefixes(expected), odd, monkeypatch)
    asks = mixed_asks(FEW)
    if odd:
        asks = [structs.replace(ask, sampling=structs.replace(ask.sampling, speculative_num_steps=i % 4)) for i, ask in enumerate(asks)]
    served, scheduler = answer(asks, drafts)
    assert served.tokens == first(expected)
    assert {end.reason for end in served.ends.values()} == {"stop", "length"}
    assert scheduler.stats.num_failed_steps_total == 0


@pytest.mark.parametrize(("drafts", "raises"), [(PLAIN, False), (PLAIN, True), *((each, True) for each in WORKERS)])
def test_a_grammar_that_fails_after_a_committed_token_ends_its_request(
    answer: Answer, expected: Served, monkeypatch: pytest.MonkeyPatch, drafts: Drafts, raises: bool
) -> None:
    follow_only({path for path in prefixes(expected) if len(path) != 17}, raises, monkeypatch)
    served, scheduler = answer(mixed_asks(FEW), drafts)
    for ask in mixed_asks(FEW):
        end, tokens = served.ends[ask.rid], expected.tokens[ask.rid]
        assert end.status == (400 if ask.sampling.grammar is not None and len(tokens) > 17 else 0)
        if end.status:
            assert len(served.tokens[ask.rid]) <= 17
        assert served.tokens[ask.rid] == tokens[: len(served.tokens[ask.rid])]
    assert scheduler.stats.num_failed_steps_total == 0


@pytest.mark.parametrize(("drafts", "overlap"), IN_TURN)
def test_a_grammar_that_fails_after_the_end_of_its_text_has_not_failed(
    answer: Answer, expected: Served, monkeypatch: pytest.MonkeyPatch, drafts: Drafts, overlap: bool
) -> None:
    follow_only({path for path in prefixes(expected) if len(path) < 17}, False, monkeypatch)
    asks = [structs.replace(ask, sampling=structs.replace(ask.sampling, max_new_tokens=17)) for ask in mixed_asks(FEW)]
    served, _ = answer(asks, drafts, overlap=overlap)
    assert {end.reason for end in served.ends.values()} == {"stop", "length"}
    assert served.tokens == {rid: tokens[:17] for rid, tokens in first(expected).items()}


@pytest.mark.parametrize("drafts", [PLAIN, *WORKERS])
def test_masks_of_drafts_do_not_end_a_request_that_is_served_without_drafts(
    answer: Answer, expected: Served, monkeypatch: pytest.MonkeyPatch, drafts: Drafts
) -> None:
    fill, seconds = LlguidanceMatcher.fill, [0.0]

    def slow(self: LlguidanceMatcher, row: Any) -> str:
        seconds[0] += 0.024  # 0.47 s above the limit for 34 masks
        return fill(self, row)

    monkeypatch.setattr(LlguidanceMatcher, "fill", slow)
    monkeypatch.setattr("runtime.constrained.constraint.perf_counter", lambda: seconds[0])
    monkeypatch.setattr("runtime.constrained.constraint.thread_time", lambda: seconds[0])
    served, _ = answer(mixed_asks(1), drafts)
    assert served.tokens == first(expected, 1)
    assert served.ends["0"].reason == "stop"
