"""Which formats fit a model, and that the flags and the documentation list all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from front import IM_START, TEMPLATE, byte_tokenizer

from runtime.config.server_args import ReasoningParserChoice, ToolParserChoice
from runtime.parsers.deltas import CallStart, Content, Reasoning
from runtime.parsers.output_format import OutputFormat, OutputRequest
from runtime.parsers.registry import HARMONY, THINK_FORMATS, TOOL_FORMATS, pick_think_format, pick_tool_format
from runtime.sampling_params import SamplingParams
from runtime.text.tool_prompt import ARGUMENTS, FUNCTION, HERMES_FORM

PAGE = Path(__file__).parents[2] / "docs" / "tools_and_reasoning.md"


def test_the_flags_and_the_page_list_every_format() -> None:
    assert set(get_args(ToolParserChoice)) == {"auto", HARMONY, *TOOL_FORMATS}
    assert set(get_args(ReasoningParserChoice)) == {"auto", "none", HARMONY, *THINK_FORMATS}
    tables = PAGE.read_text(encoding="utf-8").split("| `--")[1:]
    listed = [set(re.findall(r"^\| `([a-z0-9_-]+)`", table.split("\n\n")[0], re.MULTILINE)) for table in tables]
    assert listed == [{HARMONY, *TOOL_FORMATS}, {HARMONY, *THINK_FORMATS}]


@pytest.mark.parametrize(
    ("architecture", "template", "described", "name"),
    [
        ("LlamaForCausalLM", TEMPLATE, False, "hermes"),
        ("Qwen3ForCausalLM", "<tool_call>", True, "hermes"),
        ("Qwen3MoeForCausalLM", "<tool_call><function=x><parameter=y>", True, "qwen3_coder"),
        ("LlamaForCausalLM", '{"name": name, "parameters": {}}', True, "llama3"),
        ("LlamaForCausalLM", '{"name": name, "parameters": {}}', False, "hermes"),
        ("MistralForCausalLM", "[TOOL_CALLS]", True, "mistral"),
        ("DeepseekV3ForCausalLM", "<｜tool▁calls▁begin｜>```json", True, "deepseekv3"),
        ("DeepseekV3ForCausalLM", "<｜tool▁calls▁begin｜>", False, "deepseekv31"),
        ("DeepseekV3ForCausalLM", "<|im_system|>tool_declare<|im_middle|>", True, "kimi_k2"),
        ("Phi3ForCausalLM", "<|tool|>' + message['tools'] + '<|/tool|>", False, "phi4_mini_json"),
        ("Phi3ForCausalLM", 'functools[{"name": [function name], "arguments": []}]', True, "phi4_mini_json"),
        ("Phi3ForCausalLM", "<|system|>", False, "hermes"),
        ("GptOssForCausalLM", "<|channel|><|message|>", True, "gpt-oss"),
        ("Glm4MoeLiteForCausalLM", "<tool_call><arg_key>", True, "glm47"),
        ("Glm4MoeForCausalLM", "<tool_call>\n<arg_key>", True, "glm47"),
        ("MiMoForCausalLM", "<tool_call>", True, "hermes"),
        ("MiMoV2FlashForCausalLM", "<tool_call><function=x><parameter=y>", True, "mimo"),
        ("MiniMaxM2ForCausalLM", "<minimax:tool_call>", True, "minimax-m2"),
        ("SeedOssForCausalLM", "<seed:tool_call><function=x><parameter=y>", True, "seed_oss"),
        ("Gemma4ForConditionalGeneration", "<|tool_call>", True, "gemma4"),
        ("Llama4ForConditionalGeneration", "", True, "pythonic"),
        ("LlamaForCausalLM", "", False, "hermes"),
    ],
)
def test_auto_picks_the_tool_format_of_the_model(architecture: str, template: str, described: bool, name: str) -> None:
    assert pick_tool_format("auto", architecture, template, described) == name
    assert pick_tool_format("pythonic", architecture, template, described) == "pythonic"


@pytest.mark.parametrize(
    ("architecture", "template", "chat", "name"),
    [
        ("LlamaForCausalLM", TEMPLATE, "", None),
        ("Qwen3ForCausalLM", "<think></think>", "", "qwen3"),
        ("DeepseekV3ForCausalLM", "<｜Assistant｜></think>", "<｜User｜><｜Assistant｜>", "deepseek-r1"),
        ("Qwen2ForCausalLM", "<｜Assistant｜></think>", "<｜User｜><｜Assistant｜>", "deepseek-r1"),
        ("DeepseekV3ForCausalLM", "<｜Assistant｜></think>", "<｜User｜><｜Assistant｜></think>", "qwen3"),
        ("DeepseekV3ForCausalLM", "<|tool_calls_section_begin|>", "", None),
        ("DeepseekV3ForCausalLM", "<think></think><|tool_calls_section_begin|>", "", "kimi_k2"),
        ("Glm4MoeLiteForCausalLM", "</think>", "", "glm45"),
        ("Glm4MoeForCausalLM", "</think>", "", "glm45"),
        ("MiMoForCausalLM", "</think>", "", "mimo"),
        ("SeedOssForCausalLM", "</seed:think>", "", "seed_oss"),
        ("Mistral3ForConditionalGeneration", "[THINK]Your thoughts[/THINK]", "", "mistral"),
        ("MistralForCausalLM", "[TOOL_CALLS]", "", None),
        ("MiniMaxM2ForCausalLM", "</think>", "", "minimax"),
        ("GptOssForCausalLM", "<|channel|>analysis", "", "gpt-oss"),
        ("Gemma4ForConditionalGeneration", "<|channel>", "", "gemma4"),
    ],
)
def test_auto_picks_the_format_of_thinking(architecture: str, template: str, chat: str, name: str | None) -> None:
    assert pick_think_format("auto", architecture, template, chat) == name
    assert pick_think_format("none", architecture, template, chat) is None
    assert pick_think_format("qwen3", architecture, template, chat) == "qwen3"


def test_only_the_control_tokens_of_the_format_are_shown() -> None:
    tokenizer = byte_tokenizer(more=["<|tool_call>", "<|channel>", "<channel|>", "<|python_tag|>"])
    form = OutputFormat(tokenizer, "gemma4", "gemma4")
    ids = [tokenizer.token_id(tag) for tag in ("<|channel>", "<channel|>", "<|tool_call>")]
    shown = form.adapt(SamplingParams(), OutputRequest({"f": {}}), []).shown_token_ids
    assert set(shown) == {*ids}
    assert set(form.adapt(SamplingParams(), OutputRequest({}), []).shown_token_ids) == set(ids[:2])
    assert OutputFormat(tokenizer, "hermes", None).adapt(SamplingParams(), OutputRequest({"f": {}}), []) == SamplingParams()
    tokenizer = byte_tokenizer(more=["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"])
    form = OutputFormat(tokenizer, "mistral", "mistral")
    assert set(form.shown_ids(OutputRequest({"f": {}}))) == {
        tokenizer.token_id(f"[{tag}]") for tag in ("THINK", "/THINK", "TOOL_CALLS", "ARGS")
    }


def test_plain_text_needs_no_parser() -> None:
    tokenizer = byte_tokenizer()
    assert OutputFormat(tokenizer, "hermes", None).parser(OutputRequest({}), []) is None
    assert OutputFormat(tokenizer, "hermes", None).parser(OutputRequest({"f": {}}), []) is not None
    assert OutputFormat(tokenizer, "hermes", "qwen3").parser(OutputRequest({}), []) is not None


def test_the_prompt_says_whether_the_model_thinks() -> None:
    form = OutputFormat(byte_tokenizer(), "hermes", "qwen3")
    user = [IM_START, *b"user <think>", IM_START]
    assert form.opening([*user, *b"assistant\n"]) == "unknown"
    assert form.opening([*user, *b"assistant\n<think>\n"]) == "open"
    assert form.opening([*user, *b"assistant\n<think>\n\n</think>\n\n"]) == "closed"
    tokenizer = byte_tokenizer(more=["[THINK]", "[/THINK]", "[/SYSTEM_PROMPT]", "[/INST]"])
    form = OutputFormat(tokenizer, "mistral", "mistral")
    prompt = "Think first: [THINK]your draft[/THINK][/SYSTEM_PROMPT]q[/INST]"
    assert form.opening(tokenizer.encode(prompt)) == "unknown"
    assert form.opening(tokenizer.encode(f"{prompt}[THINK]Let me")) == "open"


@pytest.mark.parametrize("name", ["deepseek-r1", "minimax"])
def test_a_message_that_is_continued_need_not_think(name: str) -> None:
    form = OutputFormat(byte_tokenizer(), "hermes", name)
    prompt = [IM_START, *b"assistant\nSo"]
    for continues, text, delta in ((True, "a", Content("a")), (True, "<think>a", Reasoning("a")), (False, "a", Reasoning("a"))):
        parser = form.parser(OutputRequest({}, continues=continues), prompt)
        assert parser is not None
        assert [*parser.feed(text, []), *parser.finish()] == [delta]


@pytest.mark.parametrize(("name", "untagged"), [("qwen3", Content("a")), ("deepseek-r1", Reasoning("a")), ("minimax", Reasoning("a"))])
def test_text_without_reasoning_is_content_unless_the_model_always_thinks(name: str, untagged: object) -> None:
    form = OutputFormat(byte_tokenizer(), "hermes", name)
    for text, delta in (("a", untagged), ("<think>a", Reasoning("a"))):
        parser = form.parser(OutputRequest({}, thinks=False), [IM_START, *b"assistant\n"])
        assert parser is not None
        assert [*parser.feed(text, []), *parser.finish()] == [delta]


def test_mistral_ids_have_nine_letters() -> None:
    parser = OutputFormat(byte_tokenizer(), "mistral", None).parser(OutputRequest({"f": {}}), [])
    assert parser is not None
    start, _ = parser.feed('[TOOL_CALLS][{"name": "f", "arguments": {}}]', [])
    assert re.fullmatch("[A-Za-z0-9]{9}", start.id)  # type: ignore[union-attr]


def test_mistral_keeps_the_ids_that_its_templates_accept() -> None:
    for written, kept in (("abc123XYZ", ["abc123XYZ"]), ("call_1", []), ("", [])):
        parser = OutputFormat(byte_tokenizer(), "mistral", None).parser(OutputRequest({"f": {}}), [])
        assert parser is not None
        deltas = parser.feed(f"[TOOL_CALLS]f[CALL_ID]{written}[ARGS]{{}}" * 2, [])
        ids = [delta.id for delta in deltas if isinstance(delta, CallStart)]
        assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)
        assert len(set(ids)) == 2, "a repeated id is replaced"
        assert ids[: len(kept)] == kept


def test_mistral_is_told_the_form_that_its_vocabulary_has() -> None:
    for more, form in (([], '[TOOL_CALLS] [{"name": "F", "arguments": A}]'), (["[ARGS]"], "[TOOL_CALLS]F[ARGS]A")):
        told = OutputFormat(byte_tokenizer(more=more), "mistral", None).call_form
        assert told.replace(FUNCTION, "F").replace(ARGUMENTS, "A") == form


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_the_form_of_a_call_can_be_told_to_the_model(name: str) -> None:
    form = OutputFormat(byte_tokenizer(), name, None).call_form
    assert FUNCTION in form
    assert (form == HERMES_FORM) == (name in ("hermes", "qwen25"))
    call = form.replace(FUNCTION, "f").replace(ARGUMENTS, "{}" if name != "pythonic" else "1")
    parser = OutputFormat(byte_tokenizer(), name, None).parser(OutputRequest({"f": {}}), [])
    assert parser is not None
    assert parser.feed(call, [])[0].name == "f"  # type: ignore[union-attr]
