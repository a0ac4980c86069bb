"""gpt-oss answers are read from token ids: text that spells a control token is text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from formats import FUZZ_EXAMPLES, TOOLS, Answer
from front import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.entrypoints.openai.answer_reader import AnswerReader
from runtime.errors import ConfigError
from runtime.managers.detokenizer_manager import DetokenizerManager
from runtime.managers.messages import Finish, GenerateReq, TextOut, TokensOut, TokensOutBatch
from runtime.managers.replies import request_info
from runtime.managers.telemetry.progress import Progress
from runtime.parsers.harmony import HarmonyParser, HarmonyTokens
from runtime.parsers.output_format import OutputFormat, OutputRequest
from runtime.sampling_params import SamplingParams

HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
TOKENIZER = byte_tokenizer(more=HARMONY_TOKENS)
TOKENS = HarmonyTokens.find(TOKENIZER.token_id)
assert TOKENS is not None
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ünï\\n", "tags": [{"a": null}]}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>Let me - see.<|end|><|start|>assistant"


def encode(text: str) -> list[int]:
    """Token ids, control tokens by their spelling."""
    return TOKENIZER.encode(text, add_special_tokens=False)


def parser(prompt: str = PROMPT, **options: Any) -> HarmonyParser:
    count = itertools.count()
    assert TOKENS is not None
    return HarmonyParser(TOKENS, TOKENIZER.stream, TOOLS, encode(prompt), lambda: f"call_{next(count)}", **options)


def answer(ids: list[int], prompt: str = PROMPT, **options: Any) -> Answer:
    """The answer to tokens at once, one by one, and cut in two at every place."""
    one = parser(prompt, **options)
    whole = Answer.of([*one.feed("", ids), *one.finish()])
    for pieces in ([[token] for token in ids], *([ids[:cut], ids[cut:]] for cut in range(len(ids)))):
        other = parser(prompt, **options)
        assert Answer.of([*(delta for piece in pieces for delta in other.feed("", piece)), *other.finish()]) == whole
        assert other.reasoning_tokens == one.reasoning_tokens
    return whole


def test_thinking_text_and_calls_are_told_apart() -> None:
    text = f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}"
    read = answer(encode(text))
    assert (read.reasoning, read.content) == ("Let me - see.", "I look.")
    assert read.parsed == [("get_weather", {"city": "Ünï\n", "tags": [{"a": None}]})]
    assert answer(encode(f"{THOUGHT}<|channel|>final<|message|>Yes.<|return|>")) == Answer("Yes.", "Let me - see.")


def test_the_recipient_may_stand_before_the_channel() -> None:
    text = " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    assert answer(encode(text)).parsed == [("now", {})]


def test_several_messages_of_a_kind_are_lines() -> None:
    text = f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert answer(encode(text)) == Answer("a\nb", "Let me - see.\nLet me - see.")


def test_spelled_control_tokens_are_text() -> None:
    spelled = TOKENIZER.encode_plain("a <|end|><|channel|>analysis<|message|> b")
    read = answer([*encode("<|channel|>final<|message|>"), *spelled, *encode("<|return|>")])
    assert read == Answer("a <|end|><|channel|>analysis<|message|> b")


@pytest.mark.parametrize(
    "call",
    [
        CALL.replace("get_weather", "drop_tables"),
        CALL.replace('{"city"', '["city"'),
        "<|channel|>commentary to=functions.now<|message|>no json",
        "<|channel|>commentary to=browser.search<|message|>{}",
    ],
)
def test_malformed_calls_are_text(call: str) -> None:
    read = answer(encode(call))
    assert read == Answer(call.removesuffix("<|call|>"))


def test_unfinished_calls_keep_their_arguments() -> None:
    for cut in range(1, 30):
        read = answer(encode(CALL)[: len(encode(CALL)) - cut])
        assert '{"city": "Ünï\\n", "tags": [{"a": null}]}'.startswith(read.calls[0][1])
        assert len(read.content) < 4, "part of an escape or a word"


def test_stop_strings_are_cut_from_the_text() -> None:
    read = answer(encode("<|channel|>final<|message|>Hello STOP"), stops=("STOP",))
    assert read == Answer("Hello ")
    assert answer(encode("<|channel|>final<|message|>Hello ST"), stops=("STOP",)) == Answer("Hello ST")


def ended_by(stop: str, text: str, prompt: str = PROMPT) -> tuple[Answer, str | int | None]:
    """The answer of a request with a stop string, and what ended it."""
    form, request = OutputFormat(TOKENIZER, "gpt-oss", "gpt-oss"), OutputRequest(TOOLS, (stop,))
    ids, shown = encode(prompt), list[TextOut]()
    sampling = form.adapt(SamplingParams(stop=(stop,)), request, ids)
    manager = DetokenizerManager(TOKENIZER, lambda message: shown.extend(message.outs), lambda message: None)  # type: ignore[union-attr]
    manager.handle(request_info(GenerateReq(rid="r", input_ids=ids, sampling=sampling, seed=0)))
    pieces = [encode(text)[at : at + 5] for at in range(0, len(encode(text)), 5)]
    for at, piece in enumerate(pieces, 1):
        finish = Finish(reason="length") if at == len(pieces) else None
        manager.handle(TokensOutBatch(outs=[TokensOut(rid="r", token_ids=piece, progress=Progress(1), finish=finish)]))
        if shown:
            break
    update = AnswerReader(form.parser(request, ids)).read(shown[0])
    assert update.finish is not None
    return Answer.of(list(update.deltas)), update.finish.matched


def test_stop_strings_are_not_searched_in_headers() -> None:
    text = f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>The final answer."
    whole = Answer("I look.\nThe final answer.", "Let me - see.")
    for stop in ("analysis", "assistant", "commentary", "see.I", "look.The"):
        assert ended_by(stop, text) == (whole, None)
    assert ended_by("final", text) == (Answer("I look.\nThe ", "Let me - see."), "final")
    assert ended_by("- s", text) == (Answer("", "Let me "), "- s")
    assert ended_by("functions", CALL)[1] is None
    assert ended_by("tags", CALL)[1] == "tags"
    assert ended_by("STOP", "plain STOP text") == (Answer("plain "), "STOP")
    assert ended_by("STOP", " STOP text<|return|>", f"{PROMPT}<|channel|>final<|message|>I") == (Answer(" "), "STOP")


def test_plain_text_and_long_headers_are_content() -> None:
    assert answer(encode("plain")) == Answer("plain")
    assert answer(encode("plain<|return|>")) == Answer("plain")
    assert answer(encode("plain<|end|><|start|>assistant<|channel|>final<|message|>Yes")) == Answer("plain\nYes")
    assert answer(encode("assistant" * 20)) == Answer("assistant" * 20)
    for begun in ("<|channel|>final It is so.", "<|channel|>finalYes", "<|channel|>analysis<|constrain|> Hm, so", "<|constrain|>a b"):
        assert answer(encode(f"{begun}<|return|>")) == Answer(begun), "the token before the text is missing"
    for cut in (
        "<|channel|>ana",
        "assistant",
        " to=functions.no",
        f"{THOUGHT} to=",
        CALL[: CALL.index("<|message|>")],
        " to=functions.now<|channel|>commentary json",
    ):
        assert answer(encode(cut)).content == ""


def test_a_message_of_the_prompt_goes_on() -> None:
    prompt = f"{PROMPT}<|channel|>analysis<|message|>I think"
    assert answer(encode(" so.<|end|><|start|>assistant<|channel|>final<|message|>Yes"), prompt) == Answer("Yes", " so.")


def test_thinking_can_stay_in_the_content() -> None:
    assert answer(encode(f"{THOUGHT}<|channel|>final<|message|>Yes"), separate=False) == Answer("Let me - see.\nYes")


def test_reasoning_tokens_are_those_of_the_analysis() -> None:
    one = parser()
    one.feed("", encode(f"{THOUGHT}<|channel|>final<|message|>Yes"))
    assert one.reasoning_tokens == len(encode("Let me - see.<|end|>"))


def test_answers_end_at_the_formats_own_tokens() -> None:
    form = OutputFormat(TOKENIZER, "gpt-oss", "gpt-oss")
    sampling = form.adapt(SamplingParams(stop_token_ids=(5,)), OutputRequest({}), encode(PROMPT))
    assert sampling.stop_token_ids == (5, *encode("<|return|><|call|>"))
    assert form.parser(OutputRequest({}), encode(PROMPT)) is not None


def test_a_stop_token_is_not_part_of_the_text() -> None:
    ids = encode("<|channel|>final<|message|>Yes.")
    reader = AnswerReader(parser())
    finish = Finish(reason="stop", matched=ids[-1])
    update = reader.read(TextOut(rid="r", text="", token_ids=ids, progress=Progress(1), finish=finish))
    assert Answer.of(list(update.deltas)) == Answer("Yes")
    assert update.token_ids == ids


def test_a_model_without_the_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="control tokens of gpt-oss"):
        OutputFormat(byte_tokenizer(), "gpt-oss", None)


PIECES = [
    *HARMONY_TOKENS,
    "assistant",
    "analysis",
    "final",
    "commentary",
    " to=functions.now",
    " json",
    "{",
    "}",
    '"a"',
    ":",
    "1",
    "é",
    "\n",
    "x" * 70,
]


@settings(max_examples=FUZZ_EXAMPLES)
@given(st.lists(st.sampled_from(PIECES), max_size=25), st.booleans())
def test_any_tokens_are_read_the_same_in_any_pieces(pieces: list[str], separate: bool) -> None:
    ids = encode("".join(pieces))
    one, other = parser(separate=separate), parser(separate=separate)
    whole = Answer.of([*one.feed("", ids), *one.finish()])
    assert Answer.of([*(delta for token in ids for delta in other.feed("", [token])), *other.finish()]) == whole
