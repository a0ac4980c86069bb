"""Text from tokens: stop strings are never shown, characters never split, requests that do not stream answered once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from llama_tokenizer import write_llama_tokenizer
from msgspec import structs

from runtime.entrypoints.openai.logprobs import CompletionLogprobs, prompt_offsets
from runtime.managers.detokenizer_manager import DetokenizerManager, StopFinder
from runtime.managers.messages import (
    CacheFlushed,
    ControlReply,
    DrainReq,
    Finish,
    GenerateReq,
    Heartbeat,
    RequestInfo,
    TextOut,
    TextOutBatch,
    TokenLogprobs,
    TokensOut,
    TokensOutBatch,
)
from runtime.managers.replies import request_info
from runtime.managers.telemetry.decode_stats import DecodeStats
from runtime.managers.telemetry.progress import Progress
from runtime.sampling_params import SamplingParams
from runtime.text.decode_stream import PROMPT_TAIL
from runtime.text.tokenizer import Tokenizer

SPECIAL = 999


class ByteStream:
    """A text whose tokens are bytes; SPECIAL is a control token."""

    def __init__(self, skip_special_tokens: bool) -> None:
        self.skip = skip_special_tokens
        self.rest = b""

    def step(self, token_ids: tuple[int, ...]) -> str:
        shown = ""
        for token in token_ids:
            if token == SPECIAL:
                shown += "" if self.skip else "<|special|>"
                continue
            self.rest += bytes([token])
            try:
                shown += self.rest.decode()
                self.rest = b""
            except UnicodeDecodeError:
                pass
        return shown

    def finish(self) -> str:
        return ""


class ByteTokenizer:
    def stream(self, skip_special_tokens: bool = True, prompt_tail: Sequence[int] = (), shown: Sequence[int] = ()) -> ByteStream:
        stream = ByteStream(skip_special_tokens and SPECIAL not in shown)
        stream.step(tuple(prompt_tail))
        return stream


class Bench:
    """A manager with its senders replaced by lists."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.stopped: list[str] = []
        self.manager = DetokenizerManager(ByteTokenizer(), self.sent.append, lambda message: self.stopped.append(message.rid))

    def begin(self, rid: str = "a", stop: tuple[str, ...] = (), stream: bool = True, skip: bool = True, keep: bool = False) -> None:
        self.manager.handle(RequestInfo(rid=rid, stop=stop, skip_special_tokens=skip, stream=stream, no_stop_trim=keep))

    def feed(self, *outs: TokensOut) -> list[TextOut]:
        before = len(self.sent)
        self.manager.handle(TokensOutBatch(outs=list(outs)))
        return [out for batch in self.sent[before:] if isinstance(batch, TextOutBatch) for out in batch.outs]


def out(tokens: bytes | list[int], total: int, finish: Finish | None = None, rid: str = "a", logprobs: bool = False) -> TokensOut:
    ids = list(tokens)
    return TokensOut(
        rid=rid,
        token_ids=ids,
        progress=Progress(3, 1, total),
        finish=finish,
        logprobs=TokenLogprobs(chosen=[-0.5] * len(ids), top=[[(token, -0.5)] for token in ids]) if logprobs else None,
    )


def slow_stop(text: str, stops: tuple[str, ...]) -> str:
    """The definition: the text before the stop string that comes to its end first."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


@pytest.mark.parametrize("seed", range(60))
def test_stop_strings_cut_where_the_definition_cuts(seed: int) -> None:
    g = random.Random(seed)
    text = "".join(g.choice("ab\n") for _ in range(60))
    stops = tuple({"".join(g.choice("ab\n") for _ in range(g.randint(2, 6))) for _ in range(g.randint(1, 3))})
    bench = Bench()
    bench.begin(stop=stops)
    shown, at = "", 0
    while at < len(text):
        size = g.randint(1, 5)
        piece = text[at : at + size]
        at += len(piece)
        finish = Finish(reason="length") if at == len(text) else None
        (update,) = bench.feed(out(piece.encode(), at, finish))
        shown += update.text
        assert text.startswith(shown)
        if update.finish is not None:
            break
    assert shown == slow_stop(text, stops)
    assert not any(stop in shown for stop in stops)
    assert bench.manager.open_requests == 0


@pytest.mark.parametrize("seed", range(40))
def test_cut_does_not_depend_on_chunking(seed: int) -> None:
    g = random.Random(seed)
    text = "".join(g.choice("abc") for _ in range(40))
    stops = ("abca", "c", "bb", "cab")[seed % 3 :]
    finder, shown, at = StopFinder(stops), "", 0
    while at < len(text) and finder.matched is None:
        size = g.randint(1, 12)
        shown += finder.push(text[at : at + size])
        at += size
    if finder.matched is None:
        shown += finder.flush()
    assert shown == slow_stop(text, stops)


def test_partial_stop_strings_are_held_back() -> None:
    bench = Bench()
    bench.begin(stop=("STOP",))
    assert [bench.feed(out(piece, 0))[0].text for piece in (b"a S", b"T", b"O", b"x")] == ["a ", "", "", "STOx"]


def test_held_text_is_released_at_the_end() -> None:
    bench = Bench()
    bench.begin(stop=("STOP",))
    (update,) = bench.feed(out(b"the STO", 7, Finish(reason="length")))
    assert update.text == "the STO"


def test_a_stop_string_ends_the_request_and_drops_later_tokens() -> None:
    bench = Bench()
    bench.begin(stop=("end",))
    (update,) = bench.feed(out(b"the end of", 10, logprobs=True))
    assert update.text == "the "
    assert update.finish == Finish(reason="stop", matched="end")
    assert update.token_ids == list(b"the end")
    assert update.progress.completion_tokens == 7
    assert update.logprobs is not None
    assert len(update.logprobs.chosen) == len(update.logprobs.top) == 7
    assert bench.stopped == ["a"]
    assert bench.feed(out(b" it all", 17)) == []


def test_stop_string_in_the_last_tokens_sends_no_stop_request() -> None:
    bench = Bench()
    bench.begin(stop=("end",))
    (update,) = bench.feed(out(b"the end", 7, Finish(reason="length")))
    assert (update.text, update.finish) == ("the ", Finish(reason="stop", matched="end"))
    assert bench.stopped == []


def test_stop_token_is_counted_but_not_shown() -> None:
    bench = Bench()
    bench.begin()
    (update,) = bench.feed(out(b"ok.", 3, Finish(reason="stop", matched=ord("."))))
    assert (update.text, update.token_ids, update.progress.completion_tokens) == ("ok", list(b"ok."), 3)


def test_no_stop_trim_shows_the_stop_but_nothing_after_it() -> None:
    bench = Bench()
    bench.begin(stop=("end", "nd o"), keep=True)
    assert [bench.feed(out(piece, 0))[0].text for piece in (b"the e", b"nd of")] == ["the ", "end"]
    assert bench.stopped == ["a"]
    bench.begin(rid="b", keep=True)
    (update,) = bench.feed(out(b"ok.", 3, Finish(reason="stop", matched=ord(".")), rid="b"))
    assert update.text == "ok."


@pytest.mark.parametrize(("keep", "text"), [(False, "ok"), (True, "ok.")])
def test_a_stop_token_is_the_reason_even_if_its_text_ends_a_stop_string(keep: bool, text: str) -> None:
    bench = Bench()
    bench.begin(stop=("k.", "."), keep=keep)
    (update,) = bench.feed(out(b"ok.", 3, finish := Finish(reason="stop", matched=ord("."))))
    assert (update.text, update.finish) == (text, finish)


def test_split_characters_are_never_shown_in_parts() -> None:
    bench = Bench()
    bench.begin()
    euro = "€".encode()
    assert [bench.feed(out(euro[i : i + 1], i + 1))[0].text for i in range(3)] == ["", "", "€"]
    (update,) = bench.feed(out(euro[:2], 5, Finish(reason="length")))
    assert update.text == ""


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|special|>b")])
def test_special_tokens_are_shown_only_on_request(skip: bool, text: str) -> None:
    bench = Bench()
    bench.begin(skip=skip)
    (update,) = bench.feed(out([ord("a"), SPECIAL, ord("b")], 3))
    assert update.text == text


def test_named_control_tokens_are_part_of_the_text() -> None:
    bench = Bench()
    sampling = SamplingParams(shown_token_ids=(SPECIAL,))
    bench.manager.handle(request_info(GenerateReq(rid="a", input_ids=[1], sampling=sampling, seed=0, stream=True)))
    (update,) = bench.feed(out([ord("a"), SPECIAL, ord("b")], 3))
    assert update.text == "a<|special|>b"


def test_non_streaming_request_gets_one_reply() -> None:
    bench = Bench()
    bench.begin(stream=False)
    assert bench.feed(out(b"one ", 4, logprobs=True)) == []
    (update,) = bench.feed(out(b"two", 7, Finish(reason="length"), logprobs=True))
    assert (update.text, update.token_ids, update.progress.completion_tokens) == ("one two", list(b"one two"), 7)
    assert update.logprobs is not None
    assert [row[0][0] for row in update.logprobs.top] == list(b"one two")


@pytest.mark.parametrize("stream", [True, False])
def test_progress_is_that_of_the_last_message(stream: bool) -> None:
    bench = Bench()
    bench.begin(stop=("d",), stream=stream)
    first = structs.replace(out(b"ab", 2), progress=Progress(3, 0, 2))
    last = structs.replace(out(b"cde", 5), progress=Progress(3, 0, 5, 0.25, decode=DecodeStats(2, 1, 6, 2)))
    *_, shown = [*bench.feed(first), *bench.feed(last)]
    assert shown.finish == Finish(reason="stop", matched="d")
    assert shown.progress == structs.replace(last.progress, completion_tokens=4)
    assert shown.progress.decode.shares() == {"graph_hit_rate": 0.5, "padding_waste": 0.25}


def test_a_reply_with_many_log_probabilities_is_a_message_of_its_own() -> None:
    bench = Bench()
    for rid in "abc":
        bench.begin(rid)
    long = b"x" * 3000
    bench.feed(out(long, 3000, rid="a", logprobs=True), out(b"y", 1, rid="b", logprobs=True), out(long, 3000, rid="c", logprobs=True))
    assert [[one.rid for one in batch.outs] for batch in bench.sent if isinstance(batch, TextOutBatch)] == [["a"], ["c"], ["b"]]


def test_requests_of_one_batch_do_not_mix() -> None:
    bench = Bench()
    bench.begin("a", stop=("x",))
    bench.begin("b")
    updates = bench.feed(out(b"1x2", 3, rid="a"), out(b"1x2", 3, rid="b"))
    assert [(update.rid, update.text) for update in updates] == [("a", "1"), ("b", "1x2")]
    assert [update.text for update in bench.feed(out(b"3", 4, rid="a"), out(b"3", 4, rid="b"))] == ["3"]


def test_a_refusal_before_the_first_token_passes() -> None:
    bench = Bench()
    refusal = Finish(reason="abort", message="no room", status=400)
    (update,) = bench.feed(out([], 0, refusal, rid="unknown"))
    assert update.finish == refusal


def test_other_messages_are_forwarded_except_a_drain() -> None:
    bench = Bench()
    messages = [Heartbeat(who="scheduler"), ControlReply(call_id="1", result=CacheFlushed(pages=3))]
    for message in messages:
        bench.manager.handle(message)
    bench.manager.handle(DrainReq())
    assert bench.sent == messages


def test_looking_for_stops_is_linear_in_the_text() -> None:
    finder = StopFinder(("ab" * 128,) * 4)
    shown = sum(len(finder.push("ab" * 50 + "c")) for _ in range(2000))
    assert shown + len(finder.held) == 2000 * 101
    assert len(finder.held) < 256


def test_text_continues_the_tail_of_its_prompt() -> None:
    bench = Bench()
    first, *rest = "é".encode()
    bench.manager.handle(RequestInfo(rid="a", stop=(), skip_special_tokens=True, stream=True, prompt_tail=[ord("x"), first]))
    (shown,) = bench.feed(out([*rest, ord("y")], 2))
    assert shown.text == "éy"


def test_a_completion_keeps_its_leading_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_llama_tokenizer(tmp_path, "first"))
    prompt, the = tokenizer.encode("hello"), tokenizer.encode("the", add_special_tokens=False)
    request = GenerateReq(rid="a", input_ids=prompt, sampling=SamplingParams(), seed=0, stream=True)
    for continues_prompt, shown in ((True, " the the"), (False, "the the")):
        sent: list[object] = []
        manager = DetokenizerManager(tokenizer, sent.append, lambda message: None)
        manager.handle(request_info(structs.replace(request, continues_prompt=continues_prompt)))
        manager.handle(TokensOutBatch(outs=[out([*the, *the], 2, Finish(reason="length"))]))
        (batch,) = sent
        assert isinstance(batch, TextOutBatch)
        assert batch.outs[0].text == shown


@pytest.mark.parametrize("emojis", range(1, 5))
@pytest.mark.parametrize("breaks", range(4))
def test_a_tail_that_begins_inside_of_a_character_leaves_the_output_whole(tmp_path: Path, emojis: int, breaks: int) -> None:
    tokenizer = Tokenizer.load(write_llama_tokenizer(tmp_path, "never"))
    prompt, output = "😀" * emojis + "\n" * breaks, "\né the 山"
    ids = tokenizer.encode(output, add_special_tokens=False)
    assert tokenizer.stream(prompt_tail=tokenizer.encode(prompt)[-PROMPT_TAIL:]).step(ids) == output


@pytest.mark.parametrize("text", ["\ufffd", "\ufffd\ufffd山 the", "the\ufffd\ufffd\ufffd"])
def test_a_replacement_character_that_the_model_writes_is_a_whole_one(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(write_llama_tokenizer(tmp_path, "never"))
    assert tokenizer.stream().step(tokenizer.encode(text, add_special_tokens=False)) == text


def certain(tokens: int) -> TokenLogprobs:
    """Log-probabilities of tokens that the model was sure of."""
    return TokenLogprobs(chosen=[0.0] * tokens, top=[[] for _ in range(tokens)])


@pytest.mark.parametrize(("prompt", "text"), [("hello", "hello the the"), (None, "<s> hello the the")])
def test_text_offsets_are_places_in_the_text(tmp_path: Path, prompt: str | None, text: str) -> None:
    tokenizer = Tokenizer.load(write_llama_tokenizer(tmp_path, "first"))
    ids, the = tokenizer.encode("hello"), tokenizer.encode("the", add_special_tokens=False)
    echo = prompt_offsets(ids, tokenizer.stream(skip_special_tokens=False), hidden=int(prompt is not None))
    echoed = CompletionLogprobs(tokenizer, 0, tokenizer.stream(prompt_tail=ids), echo, len(text) - len(" the the"))
    offsets = echoed.take([*ids, *the, *the], certain(len(ids) + 2))["text_offset"]
    assert [text[at:] for at in offsets[-2:]] == [" the the", " the"]
    assert offsets[1] == text.index("hello") - (prompt is None), "the piece begins with its space, where it has one"
    alone = CompletionLogprobs(tokenizer, 0, tokenizer.stream(prompt_tail=ids))
    assert alone.take([*the, *the], certain(2))["text_offset"] == [0, 4]
