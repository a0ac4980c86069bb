"""Structural tags: text in which some parts follow a grammar, in SGLang's older form or in xgrammar's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from runtime.constrained.json_schema import load_for_llguidance, load_json
from runtime.errors import GrammarError

KIND = "structural_tag"
TEXT = r"/(.|\n)*/"
MAX_RULES = 4096


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of the formats that a structural tag is made of."""


class ConstString(Part, frozen=True, tag="const_string"):
    """This text."""

    value: str


class JsonSchema(Part, frozen=True, tag="json_schema"):
    """JSON that satisfies a schema."""

    json_schema: dict[str, Any] | bool


class Regex(Part, frozen=True, tag="regex"):
    """Text that matches a regular expression."""

    pattern: str


class Ebnf(Part, frozen=True, tag="grammar"):
    """Text of an EBNF grammar."""

    grammar: str


class AnyText(Part, frozen=True, tag="any_text"):
    """Any text, up to the text that follows it in the format."""


class Sequenced(Part, frozen=True, tag="sequence"):
    """One element after the other."""

    elements: list[Format]


class Or(Part, frozen=True, tag="or"):
    """One of the elements."""

    elements: list[Format]


class Tag(Part, frozen=True, tag="tag"):
    """Content between two texts; with a list as `end`, any of them ends it."""

    begin: str
    content: Format
    end: str | list[str]

    @property
    def ends(self) -> list[str]:
        """The texts that may end it."""
        return [self.end] if isinstance(self.end, str) else self.end


class TriggeredTags(Part, frozen=True, tag="triggered_tags"):
    """Any text, in which a trigger is always the beginning of a tag.

    With `at_least_one` the text begins with a tag; with `stop_after_first` it ends after the first one.
    """

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(Part, frozen=True, tag="tags_with_separator"):
    """Only tags, with the separator between them."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = ConstString | JsonSchema | Regex | Ebnf | AnyText | Sequenced | Or | Tag | TriggeredTags | TagsWithSeparator


class _Structure(msgspec.Struct, frozen=True):
    begin: str
    end: str
    schema: dict[str, Any] | bool = True


class _OlderForm(msgspec.Struct, frozen=True):
    structures: list[_Structure]
    triggers: list[str]

    def format(self) -> Format:
        tags = [Tag(one.begin, JsonSchema(one.schema), one.end) for one in self.structures]
        return TriggeredTags(self.triggers, tags)


class _CurrentForm(msgspec.Struct, frozen=True):
    format: Format


def parse_structural_tag(text: str) -> Format:
    """The format that JSON text in one of the two forms describes.

    Raises:
        GrammarError: it describes none.
    """
    value = load_json(KIND, text)
    older = isinstance(value, dict) and "structures" in value
    try:
        return msgspec.convert(value, _OlderForm).format() if older else msgspec.convert(value, _CurrentForm).format
    except msgspec.ValidationError as error:
        raise GrammarError(KIND, f"{error}.") from error


class LarkWriter:
    """Writes one format as a Lark grammar of llguidance, with a rule for each part.

    Args:
        special: the text of each control token and its id. Free text never contains one, so the grammar names them by id.
        whitespace: a regular expression for the white space between the parts of JSON.
        ebnf_to_lark: converts a grammar.
    """

    def __init__(self, special: dict[str, int], whitespace: str, ebnf_to_lark: Callable[[str], str]) -> None:
        self._special, self._whitespace, self._ebnf_to_lark = special, whitespace, ebnf_to_lark
        spellings = sorted(special, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self._rules: list[str] = []

    def grammar(self, format: Format) -> str:
        """The grammar.

        Raises:
            GrammarError: a part contradicts another, or text is followed by something that cannot end it.
        """
        try:
            start = self._part(format)
        except GrammarError as error:  # of a part, which has a kind of its own
            raise GrammarError(KIND, error.message) from error
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"

    def _part(self, part: Format) -> str:
        """The terms of a part in a rule."""
        match part:
            case ConstString():
                return self._literal(part.value)
            case JsonSchema():
                return self._json(part.json_schema)
            case Regex(""):
                return '""'  # two slashes would begin a comment
            case Regex():
                return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", part.pattern) + "/"
            case Ebnf():
                return self._rule(f"%lark {{\n{self._ebnf_to_lark(part.grammar)}\n}}")
            case AnyText():
                return self._rule(TEXT)
            case Sequenced():
                return self._sequence(part.elements)
            case Or():
                return self._any([self._part(element) for element in part.elements])
            case Tag():
                return self._tag(part, part.begin)
            case TriggeredTags():
                return self._triggered(part)
            case TagsWithSeparator():
                return self._separated(part)

    def _sequence(self, elements: Sequence[Format]) -> str:
        terms = []
        for element, following in zip(elements, [*elements[1:], None], strict=False):
            previous_is_text = terms and terms[-1] == "any"
            if isinstance(element, AnyText) and following is not None:
                if not isinstance(following, ConstString | Tag):
                    raise GrammarError(KIND, "any_text in a sequence is followed by a const_string or a tag.")
                terms.append("any")
                continue
            if not previous_is_text:
                terms.append(self._part(element))
            elif isinstance(element, ConstString):
                terms[-1] = self._text_until(element.value)
            else:
                assert isinstance(element, Tag)
                terms[-1] = f"{self._text_until(element.begin)} {self._tag(element, '')}"
        return self._rule(" ".join(terms) or '""')

    def _tag(self, tag: Tag, begin: str) -> str:
        """A tag from `begin` on; the text before `begin` was written already."""
        if isinstance(tag.content, AnyText):
            if not all(tag.ends):
                return self._rule(f"{self._literal(begin)} {TEXT}")
            return self._rule(f"{self._literal(begin)} {self._any([self._text_until(end) for end in tag.ends])}")
        ends = self._any([self._literal(end) for end in tag.ends])
        return self._rule(f"{self._literal(begin)} {self._part(tag.content)} {ends}")

    def _triggered(self, part: TriggeredTags) -> str:
        by_trigger: dict[str, list[Tag]] = {}
        for tag in part.tags:
            matching = [trigger for trigger in part.triggers if trigger and tag.begin.startswith(trigger)]
            if not matching:
                raise GrammarError(KIND, f"The tag {json.dumps(tag.begin[:80])} begins with none of the triggers.")
            by_trigger.setdefault(matching[0], []).append(tag)
        called = self._any([f"{self._text_until(trigger)} {self._rests(trigger, tags)}" for trigger, tags in by_trigger.items()])
        first = self._any([self._tag(tag, tag.begin) for tag in part.tags])
        tail = '""' if part.stop_after_first else f"({called})* {self._rule(TEXT)}"
        if part.at_least_one:
            return self._rule(f"{first} {tail}")
        return self._rule(f"{called} | {self._rule(TEXT)}" if part.stop_after_first else tail)

    def _rests(self, trigger: str, tags: Sequence[Tag]) -> str:
        return self._any([self._tag(tag, tag.begin[len(trigger) :]) for tag in tags])

    def _separated(self, part: TagsWithSeparator) -> str:
        tag = self._any([self._tag(tag, tag.begin) for tag in part.tags])
        more = "" if part.stop_after_first else f" ({self._literal(part.separator)} {tag})*"
        return self._rule(f"{tag}{more}" if part.at_least_one else f"({tag}{more})?")

    # ---- terms

    def _text_until(self, end: str) -> str:
        """Any text up to and including the first `end`."""
        if not end:
            raise GrammarError(KIND, "any_text in a sequence is followed by an empty text.")
        following = self._spelled.search(end)
        if following is not None and following.start() == 0:  # free text contains no control token
            return self._rule(f"{TEXT} {self._literal(end)}")
        plain = end if following is None else end[: following.start()]
        return f"{self._rule(f'{TEXT} {json.dumps(plain)}', lazy=True)} {self._literal(end[len(plain) :])}"

    def _literal(self, text: str) -> str:
        """A text, with its control tokens by id."""
        terms, start = [], 0
        for match in self._spelled.finditer(text):
            terms += [json.dumps(text[start : match.start()])] * (match.start() > start) + [f"<[{self._special[match[0]]}]>"]
            start = match.end()
        if start < len(text) or not terms:
            terms.append(json.dumps(text[start:]))
        return " ".join(terms)

    def _json(self, schema: dict[str, Any] | bool) -> str:
        checked = load_for_llguidance(json.dumps(schema))
        options = {"x-guidance": {"whitespace_pattern": self._whitespace}}
        return self._rule(f"%json {json.dumps(checked | options)}")

    def _any(self, terms: Sequence[str]) -> str:
        if not terms:
            raise GrammarError(KIND, "A list of formats is empty.")
        return terms[0] if len(terms) == 1 else "(" + " | ".join(terms) + ")"

    def _rule(self, body: str, lazy: bool = False) -> str:
        """A new rule; returns its name."""
        if len(self._rules) >= MAX_RULES:
            raise GrammarError(KIND, f"It has more than {MAX_RULES} parts.")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name
