"""The form in which the served model writes thinking and tool calls."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from msgspec import structs

from runtime.constrained.structural_tag import Format, Tag
from runtime.errors import ConfigError
from runtime.parsers import harmony, registry
from runtime.parsers.call_grammar import ANY_TEXT, one_of, sequence
from runtime.parsers.harmony import HarmonyParser, HarmonyTokens
from runtime.parsers.output_grammar import LINE_BREAKS, CallRule, after_thinking, answer_part, with_part
from runtime.parsers.output_parser import OutputParser, TextParser
from runtime.parsers.registry import HARMONY, THINK_FORMATS
from runtime.parsers.thinking import Opening, ThinkFormat
from runtime.sampling_params import SamplingParams
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_prompt import FUNCTION, HERMES_FORM

MAX_PROMPT_END = 4096
"""Number of tokens at the end of a prompt that are searched for an open thinking tag."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters."""


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """The options of a request that its parser needs.

    Attributes:
        tools: the functions that may be called.
        stops: strings that end the answer.
        separate: whether thinking is emitted as reasoning; otherwise it stays in the content.
        rule: how strictly the grammar constrains calls.
        parallel: whether the answer may have several calls.
        continues: whether the output continues a message of the prompt, which then determines whether the model thinks.
        thinks: whether the model may think if the prompt does not determine it; false if the request switches reasoning off, which models
            that always think ignore.
    """

    tools: Schemas
    stops: tuple[str, ...] = ()
    separate: bool = True
    rule: CallRule = "free"
    parallel: bool = True
    continues: bool = False
    thinks: bool = True


class OutputFormat:
    """Creates the parsers of answers.

    Args:
        tokenizer: the model's tokenizer.
        tool_format: a name in the registry.
        think_format: a name in the registry, or None for a model that does not think.

    Raises:
        ConfigError: the vocabulary lacks the format's control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: str, think_format: str | None) -> None:
        self._tokenizer = tokenizer
        self._harmony = HarmonyTokens.find(tokenizer.token_id) if HARMONY in (tool_format, think_format) else None
        if self._harmony is None and HARMONY in (tool_format, think_format):
            raise ConfigError(f"The {HARMONY} parsers need the control tokens of gpt-oss, which this model's tokenizer lacks.")
        self._calls = registry.tool_format(tool_format, lambda text: tokenizer.token_id(text) is not None)
        self._thinking = THINK_FORMATS.get(think_format or "")
        self._short_ids = tool_format == "mistral"  # its templates accept no other ids
        self.thinks = think_format is not None

    @cached_property
    def call_form(self) -> str:
        """An example of a call, for models whose chat template does not describe tools."""
        if self._calls is None:
            return HERMES_FORM
        parameter = {"properties": {"<parameter-name>": {"type": "string"}}, "required": ["<parameter-name>"]}
        return self._calls.grammar({FUNCTION: parameter}).example()

    def shown_ids(self, request: OutputRequest) -> tuple[int, ...]:
        """The ids of control tokens that the parser needs in the text."""
        tags = [*(self._thinking.tags if self._thinking else ()), *(self._calls.tags if self._calls and request.tools else ())]
        ids = [self._tokenizer.token_id(each) for each in tags]
        return tuple(dict.fromkeys(token for token in ids if token in self._tokenizer.special_ids))

    def adapt(self, sampling: SamplingParams, request: OutputRequest, prompt_ids: Sequence[int]) -> SamplingParams:
        """`sampling` with the options that the parser needs, and with a grammar that allows for thinking and calls.

        Raises:
            GrammarError: the grammar of the request cannot be combined with its tools.
        """
        if self._harmony is not None:
            stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *self._harmony.stops)))
            begins, ends = self._harmony.header_begins, (self._harmony.message,)
            sampling = structs.replace(sampling, stop_token_ids=stops, header_begins=begins, header_ends=ends)
        elif shown := self.shown_ids(request):
            sampling = structs.replace(sampling, shown_token_ids=shown)
        if sampling.grammar is None and request.rule == "free":
            return sampling
        if self._harmony is not None:
            return _constrain_harmony(sampling, request)
        calls = self._calls.grammar(request.tools) if self._calls is not None and request.tools else None
        part = answer_part(sampling.grammar, calls, request.rule, request.parallel, lambda text: text)
        return sampling if part is None else self._after_thinking(sampling, part, request, prompt_ids)

    def _after_thinking(self, sampling: SamplingParams, part: Format, request: OutputRequest, prompt_ids: Sequence[int]) -> SamplingParams:
        """`sampling` with its grammar, or `part` instead, starting after the thinking."""
        thinking, opening = self._thinking_for(request), self.opening(prompt_ids)
        if thinking is None or opening == "closed" or (opening == "unknown" and not request.thinks and not thinking.forced):
            return with_part(sampling, part) if request.tools else sampling
        if opening != "open" and not thinking.forced:
            return with_part(sampling, after_thinking(part, thinking.begin, thinking.end))
        end = self._tokenizer.token_id(thinking.end)
        if end is None:  # the end tag is not one token, so the model may split it differently than the tokenizer
            return with_part(sampling, sequence(Tag("", ANY_TEXT, thinking.end), LINE_BREAKS, part))
        return with_part(sampling, sequence(LINE_BREAKS, part), (end,))

    def parser(self, request: OutputRequest, prompt_ids: Sequence[int]) -> OutputParser | None:
        """A parser for one answer to a prompt; None if the answer is plain text."""
        if self._harmony is not None:
            stream = self._tokenizer.stream
            return HarmonyParser(self._harmony, stream, request.tools, prompt_ids, self._new_id, request.stops, request.separate)
        calls = self._calls if request.tools else None
        if calls is None and self._thinking is None:
            return None
        thinking = self._thinking_for(request)
        hidden = self._tokenizer.special_ids.difference(self.shown_ids(request))

        def token_bytes(token: int) -> int:
            return 0 if token in hidden else len(self._tokenizer.token_bytes(token))

        return TextParser(thinking, calls, request.tools, self.opening(prompt_ids), self._new_id, token_bytes)

    def _thinking_for(self, request: OutputRequest) -> ThinkFormat | None:
        thinking = self._thinking
        return thinking and replace(thinking, separate=request.separate, forced=thinking.forced and not request.continues)

    def opening(self, prompt_ids: Sequence[int]) -> Opening:
        """Whether the prompt ends inside thinking, from the text after its last control token that is not a thinking tag."""
        if self._thinking is None:
            return "closed"
        end: list[int] = []
        for token in reversed(prompt_ids[-MAX_PROMPT_END:]):
            if token in self._tokenizer.control_ids and token not in self._think_ids:
                break
            end.append(token)
        return self._thinking.opening(self._tokenizer.decode(end[::-1], skip_special_tokens=False))

    @cached_property
    def _think_ids(self) -> frozenset[int | None]:
        return frozenset(self._tokenizer.token_id(each) for each in (self._thinking or ThinkFormat()).tags)

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(random.choices(string.ascii_letters + string.digits, k=9))
        return f"call_{uuid.uuid4().hex[:24]}"


def _constrain_harmony(sampling: SamplingParams, request: OutputRequest) -> SamplingParams:
    calls, spec = harmony.call_grammar(request.tools) if request.tools else None, sampling.grammar
    if spec is None and request.rule == "strict" and calls is not None:
        part = one_of(harmony.text_part(ANY_TEXT), calls.calls(parallel=False))
    else:
        part = answer_part(spec, calls, request.rule, request.parallel, harmony.text_part)
    return sampling if part is None else with_part(sampling, after_thinking(part, *harmony.THINKING))
