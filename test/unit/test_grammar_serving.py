"""Grammars under the real scheduler: the text of all drafters is the plain worker's, and what interrupts a request leaves no trace."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from msgspec import structs
from scipy import stats

from runtime.constrained.backends import make_backend
from runtime.constrained.compiler import GrammarCompiler
from runtime.constrained.grammar import Matcher
from runtime.distributed.parallel_group import ALONE
from runtime.managers.grammar_queue import GrammarQueue
from runtime.managers.messages import AbortReq, GenerateReq
from runtime.managers.req import Req
from runtime.managers.scheduler import Scheduler
from runtime.sampling_params import GrammarSpec, SamplingParams
from unit.grammars import Served, constrained_worker, json_tokenizer, make_compiler, serve, vocabulary
from unit.ranks import ranks
from unit.tiny import tiny_runtime

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["left", "right"]},
        "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FEW = 8
"""Of the requests of `mixed_asks`, where KV need not be short."""
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=120)
PENALISED = structs.replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3, min_new_tokens=30)
BIASED = structs.replace(GREEDY, logit_bias={5: 3.0, 97: 2.0}, presence_penalty=0.4, ignore_eos=True)
WORKERS: list[tuple[str, dict[str, Any]]] = [
    ("EAGLE", {}),
    ("EAGLE", {"num_steps": 1}),
    ("EAGLE", {"topk": 3, "num_draft_tokens": 7}),
    ("EAGLE3", {}),
    ("EAGLE3", {"head": {"draft_vocab_size": 150}}),
    ("EAGLE3", {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}),
    ("STANDALONE", {"num_steps": 2}),
    ("DFLASH", {"num_steps": 7}),
    ("DFLASH", {"num_steps": 7, "head": {"draft_vocab_size": 150}}),
    ("NGRAM", {}),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


def constrained(sampling: SamplingParams, schema: Any = SCHEMA) -> SamplingParams:
    return structs.replace(sampling, json_schema=json.dumps(schema))


def mixed_asks(count: int = 12) -> list[GenerateReq]:
    """Requests with all kinds of sampling; every fourth is free text."""
    rng = np.random.default_rng(3)
    samplings = [constrained(GREEDY), constrained(PENALISED), constrained(BIASED), structs.replace(GREEDY, max_new_tokens=50)]
    prompts = [rng.integers(3, 400, int(rng.integers(2, 40))).tolist() for _ in range(count)]
    return [GenerateReq(rid=str(i), input_ids=ids, sampling=samplings[i % 4], seed=i) for i, ids in enumerate(prompts)]


def first(served: Served, count: int = FEW) -> dict[str, list[int]]:
    """The tokens of the first requests."""
    return {str(i): served.tokens[str(i)] for i in range(count)}


def check_valid(served: Served, asks: list[GenerateReq]) -> int:
    """Validate the finished constrained texts; returns how many there are."""
    finished = [ask.rid for ask in asks if ask.sampling.grammar is not None and served.ends[ask.rid].reason == "stop"]
    for rid in finished:
        jsonschema.validate(json.loads(served.text(rid)), SCHEMA)
    return len(finished)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, compiler: GrammarCompiler) -> Served:
    worker = constrained_worker(tmp_path_factory.mktemp("plain"), None)
    served, _ = serve(worker, mixed_asks(), compiler, radix_cache=False)
    worker.close()
    return served


def test_the_plain_worker_follows_the_grammar_and_ends_with_it(expected: Served) -> None:
    assert check_valid(expected, mixed_asks()) == 9
    assert {end.reason for end in expected.ends.values()} == {"stop", "length"}


@pytest.mark.parametrize(("algorithm", "spec"), WORKERS)
def test_text_is_the_plain_workers(
    tmp_path: Path, compiler: GrammarCompiler, expected: Served, algorithm: str, spec: dict[str, Any]
) -> None:
    worker = constrained_worker(tmp_path, algorithm, "eager", [2, 4, 8], **spec)
    served, scheduler = serve(worker, mixed_asks(FEW), compiler, overlap=algorithm != "NGRAM")
    worker.close()
    assert served.tokens == first(expected)
    assert scheduler.stats.num_failed_steps_total == 0
    assert scheduler.stats.spec.accepted_tokens > 0


@pytest.mark.parametrize(
    ("algorithm", "spec", "mixed", "page"),  # both sizes of pages with passes that mix and with those that do not
    [(None, {}, True, 1), ("EAGLE", {}, True, 16), ("EAGLE3", {}, False, 16), ("NGRAM", {}, False, 1)],
)
def test_retraction_aborts_and_shared_prefixes_leave_no_trace(
    tmp_path: Path, compiler: GrammarCompiler, expected: Served, algorithm: str | None, spec: dict[str, Any], mixed: bool, page: int
) -> None:
    tight = {"page_size": page, "max_total_tokens": 288, "mixed_chunk": mixed}
    worker = constrained_worker(tmp_path, algorithm, runtime=tight, **spec)
    aborted = {12: "1", 17: "6"}

    def before(turn: int, inbox: list[Any]) -> None:
        if turn in aborted:
            inbox.append(AbortReq(rid=aborted[turn]))

    asks = mixed_asks()
    served, scheduler = serve(worker, asks, compiler, before, page_size=page, schedule_conservativeness=0.05, mixed_chunk=mixed)
    worker.close()
    for ask in asks:
        text = served.tokens[ask.rid]
        assert text == (expected.tokens[ask.rid][: len(text)] if ask.rid in aborted.values() else expected.tokens[ask.rid]), ask.rid
    assert scheduler.stats.num_retracted_requests_total > 0
    assert scheduler.stats.num_failed_steps_total == 0
    assert (scheduler.stats.mixed_steps > 0) == mixed


def test_log_probabilities_are_those_of_the_allowed_tokens(tmp_path: Path, compiler: GrammarCompiler) -> None:
    asks = [structs.replace(ask, top_logprobs=5) for ask in mixed_asks(FEW)]
    found = []
    for algorithm, spec in ((None, {}), ("EAGLE3", {}), ("EAGLE", {"topk": 3, "num_draft_tokens": 7})):
        worker = constrained_worker(tmp_path / str(len(found)), algorithm, **spec)
        served, _ = serve(worker, asks, compiler)
        worker.close()
        found.append({ask.rid: _rows(served, ask.rid) for ask in asks})
    for other in found[1:]:
        for rid, rows in found[0].items():
            assert len(rows) == len(other[rid])
            for (chosen, top), (chosen_too, top_too) in zip(rows, other[rid], strict=True):
                assert chosen == pytest.approx(chosen_too, abs=1e-4)
                assert [token for token, _ in top] == [token for token, _ in top_too]
    rows = found[0]["0"]
    forced = [(chosen, top) for chosen, top in rows if len(top) == 1]
    assert forced, "somewhere the grammar allows one token"
    assert all(chosen == pytest.approx(0.0, abs=1e-6) for chosen, _ in forced)


def _rows(served: Served, rid: str) -> list[tuple[float | None, list[tuple[int, float]]]]:
    parts = [out.logprobs for out in served.outs if out.rid == rid and out.logprobs is not None]
    return [row for part in parts for row in zip(part.chosen, part.top, strict=True)]


def test_a_grammar_starts_after_its_marker_in_the_output(tmp_path: Path, compiler: GrammarCompiler) -> None:
    free = structs.replace(GREEDY, max_new_tokens=30)
    prompt = json_tokenizer().encode("the prompt", False)
    texts = {}
    for algorithm in (None, "EAGLE3", "NGRAM"):
        worker = constrained_worker(tmp_path / str(algorithm), algorithm)
        (start, _) = serve(worker, [GenerateReq(rid="a", input_ids=prompt, sampling=free, seed=0)], compiler)
        marker = tuple(start.tokens["a"][7:9])
        sampling = structs.replace(constrained(GREEDY), grammar_after=marker)
        (served, _) = serve(worker, [GenerateReq(rid="a", input_ids=prompt, sampling=sampling, seed=0)], compiler)
        worker.close()
        tokens = served.tokens["a"]
        at = next(i for i in range(len(tokens)) if tuple(tokens[i : i + 2]) == marker) + 2
        assert tokens[:at] == start.tokens["a"][:at]
        assert served.ends["a"].reason == "stop"
        jsonschema.validate(json.loads(json_tokenizer().decode(tokens[at:])), SCHEMA)
        texts[algorithm] = tokens
    assert texts[None] == texts["EAGLE3"] == texts["NGRAM"]


def test_grammars_that_cannot_be_used_end_their_request_alone(tmp_path: Path, compiler: GrammarCompiler, expected: Served) -> None:
    worker = constrained_worker(tmp_path, "EAGLE")
    bad = structs.replace(GREEDY, json_schema='{"not": {}}')
    asks = [*mixed_asks(), GenerateReq(rid="bad", input_ids=[5, 6], sampling=bad, seed=1)]
    served, scheduler = serve(worker, asks, compiler)
    assert served.ends["bad"].status == 400
    assert "Unimplemented keys" in served.ends["bad"].message
    assert {rid: tokens for rid, tokens in served.tokens.items() if rid != "bad"} == expected.tokens
    assert scheduler.stats.num_failed_steps_total == 0
    worker.close()


def test_a_refused_grammar_keeps_none_of_its_requests(compiler: GrammarCompiler) -> None:
    queue, ended = GrammarQueue(compiler), list[weakref.ref[Req]]()
    for seq in range(3):
        request = GenerateReq(rid=str(seq), input_ids=[5, 6], sampling=GREEDY, seed=1)
        req = Req(request, np.array(request.input_ids, dtype=np.int32), seq, (0,), 256, 0.0)
        queue.add(req, GrammarSpec("json_schema", '{"not": {}}'))
        while len(queue):
            refused = queue.take()
        assert [each for each, error in refused if error is not None] == [req]
        ended.append(weakref.ref(req))
        del req, refused
    gc.collect()
    assert [kept() for kept in ended] == [None] * 3


def test_a_length_cut_inside_a_grammar_says_so(tmp_path: Path, compiler: GrammarCompiler) -> None:
    worker = constrained_worker(tmp_path, "EAGLE")
    ask = GenerateReq(rid="a", input_ids=[5, 6], sampling=structs.replace(constrained(GREEDY), max_new_tokens=5), seed=1)
    served, _ = serve(worker, [ask], compiler)
    assert served.ends["a"].reason == "length"
    worker.close()


@pytest.mark.parametrize("algorithm", [None, "EAGLE3"])
def test_a_finished_grammar_ends_before_the_minimum_length(tmp_path: Path, compiler: GrammarCompiler, algorithm: str | None) -> None:
    worker = constrained_worker(tmp_path, algorithm)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=64, min_new_tokens=40, regex="(left|right)", ignore_eos=True)
    served, _ = serve(worker, [GenerateReq(rid=str(i), input_ids=[5 + i], sampling=sampling, seed=i) for i in range(12)], compiler)
    assert {served.text(str(i)) for i in range(12)} == {"left", "right"}
    assert {end.reason for end in served.ends.values()} == {"stop"}
    worker.close()


@pytest.mark.parametrize(("algorithm", "spec"), WORKERS)
def test_drafts_of_a_forced_continuation_are_all_accepted(
    tmp_path: Path, compiler: GrammarCompiler, algorithm: str, spec: dict[str, Any]
) -> None:
    text = "QZJWKYVX" * 5
    sampling = SamplingParams(temperature=1.0, max_new_tokens=64, regex=text)
    worker = constrained_worker(tmp_path, algorithm, **spec)
    served, scheduler = serve(worker, [GenerateReq(rid="a", input_ids=[5, 6], sampling=sampling, seed=1)], compiler)
    worker.close()
    assert served.text("a") == text
    depth = worker.limits.max_accept_len
    tokens = len(json_tokenizer().encode(text, False))  # the first comes from the prompt, the end from the last window
    assert scheduler.stats.spec.verify_steps == -(-tokens // depth)


@pytest.mark.parametrize(("algorithm", "spec"), WORKERS[:2] + WORKERS[3:5])
def test_a_masked_draft_is_accepted_more_often_than_a_free_one(
    tmp_path: Path, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, algorithm: str, spec: dict[str, Any]
) -> None:
    rates = []
    for masked in (True, False):
        if not masked:
            monkeypatch.setattr("runtime.speculative.eagle_worker.restricting_grammar", lambda iteration: None)
        worker = constrained_worker(tmp_path / str(masked), algorithm, **spec)
        _, scheduler = serve(worker, mixed_asks(FEW), compiler)
        worker.close()
        rates.append(scheduler.stats.spec.accepted_tokens / scheduler.stats.spec.verify_steps)
    assert rates[0] > 1.2 * rates[1]


@pytest.mark.parametrize(("algorithm", "spec"), [WORKERS[0], WORKERS[2], WORKERS[4], WORKERS[7]])
def test_sampled_texts_have_the_plain_workers_distribution(
    tmp_path: Path, compiler: GrammarCompiler, plain_counts: Counter[str], algorithm: str, spec: dict[str, Any]
) -> None:
    worker = constrained_worker(tmp_path, algorithm, **spec)
    counts = sampled_texts(worker, compiler)
    worker.close()
    texts = sorted(plain_counts | counts)
    assert len(texts) == 14
    table = [[plain_counts[text] for text in texts], [counts[text] for text in texts]]
    assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.fixture(scope="module")
def plain_counts(tmp_path_factory: pytest.TempPathFactory, compiler: GrammarCompiler) -> Counter[str]:
    worker = constrained_worker(tmp_path_factory.mktemp("plain"), None)
    counts = sampled_texts(worker, compiler)
    worker.close()
    return counts


def sampled_texts(worker: Any, compiler: GrammarCompiler, count: int = 400) -> Counter[str]:
    """How often each of the texts of a small grammar is drawn."""
    sampling = SamplingParams(temperature=3.0, max_new_tokens=16, regex="(Q|Z(J|W|KK))(V|X)|Y(Q|ZZ)(J|W|K)")
    asks = [GenerateReq(rid=str(i), input_ids=[50, 60], sampling=sampling, seed=i) for i in range(count)]
    served, _ = serve(worker, asks, compiler, max_queued_requests=4096)
    assert {end.reason for end in served.ends.values()} == {"stop"}
    return Counter(served.text(ask.rid) for ask in asks)


@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
def test_all_ranks_follow_the_grammar(tmp_path: Path, compiler: GrammarCompiler, expected: Served, algorithm: str | None) -> None:
    def build(group: Any = ALONE, followers: Any = None) -> Any:
        return constrained_worker(tmp_path / str(group.rank), algorithm, runtime={"tp_size": group.size}, group=group, followers=followers)

    def follow(rank: int, worker: Any) -> None:
        worker.parts.grammars.compile = lambda spec: compiler.compile(spec).future.result()

    with ranks(2, build, follow) as worker:
        served, scheduler = serve(worker, mixed_asks(FEW), compiler)
    assert served.tokens == first(expected)
    assert scheduler.stats.num_failed_steps_total == 0


class Gate:
    """A grammar backend that compiles once it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._backend = make_backend("llguidance", vocabulary())

    def translate(self, spec: GrammarSpec) -> GrammarSpec:
        self.opened.wait(30)
        return self._backend.translate(spec)

    def compile(self, translated: GrammarSpec) -> Matcher:
        return self._backend.compile(translated)


def test_others_run_while_a_grammar_is_compiled(tmp_path: Path) -> None:
    gate, worker = Gate(), constrained_worker(tmp_path, "EAGLE")
    compiler = GrammarCompiler(lambda: gate, None, clock=lambda: 0.0)
    free = structs.replace(GREEDY, max_new_tokens=20)
    asks = [GenerateReq(rid=rid, input_ids=[5, 6], sampling=constrained(GREEDY), seed=1) for rid in ("first", "aborted")]
    served, ended = Served(), dict[int, set[str]]()

    def before(turn: int, inbox: list[Any]) -> None:
        ended[turn] = set(served.ends)
        if turn == 3:
            inbox.append(AbortReq(rid="aborted"))
        if "free" in served.ends and "aborted" in served.ends:
            gate.opened.set()

    asks.append(GenerateReq(rid="free", input_ids=[7, 8], sampling=free, seed=1))
    _, scheduler = serve(worker, asks, compiler, before, served=served)
    order = [frozenset(rids) for rids in ended.values()]
    assert frozenset({"free", "aborted"}) in order, "the constrained request waits for its grammar alone"
    assert served.ends["first"].reason == "stop"
    assert served.ends["aborted"].reason == "abort"
    assert scheduler.stats.num_aborted_requests_total == 1
    worker.close()
    compiler.close()


def test_a_server_without_a_backend_refuses_grammars(tmp_path: Path) -> None:
    worker, served = constrained_worker(tmp_path, None), Served()
    inbox: list[Any] = [GenerateReq(rid="a", input_ids=[5], sampling=constrained(GREEDY), seed=1)]
    config = tiny_runtime(context_length=256)
    scheduler = Scheduler(config.scheduler, config.cache, worker, (0,), lambda wait: inbox.pop(0) if inbox else None, served.take)
    scheduler.step()
    assert served.ends["a"].status == 400
    assert "--grammar-backend" in served.ends["a"].message
    worker.close()
