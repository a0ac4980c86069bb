"""Outputs of each tool format: text, and what the parser makes of it."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass, field
from typing import Any

from runtime.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from runtime.parsers.output_parser import OutputParser, TextParser
from runtime.parsers.registry import THINK_FORMATS, TOOL_FORMATS
from runtime.parsers.thinking import Opening

FUZZ_EXAMPLES = int(os.environ.get("TALON_FUZZ_EXAMPLES", "100"))
"""Outputs that a test of any text tries."""
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "rate": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "filter": {"$ref": "#/$defs/Filter"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"enum": ["C", "F"]},
            "free": {},
        },
        "$defs": {"Filter": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
    "ns.run-2": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CITY = 'Zürich "山" 😀 \\ a\tb </x> {[}'
"""A text with unicode, quotes, a backslash, and letters that formats use."""
BODY = {"city": CITY, "days": 3, "exact": True, "rate": -1.5, "tags": ["a, b", "]"], "filter": {"x": {"y": [1, None, "}"]}}}
"""Arguments with nested JSON."""


@dataclass
class Answer:
    """What the deltas of one output add up to."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: list[Delta]) -> Answer:
        answer, ids = cls(), []
        for delta in deltas:
            match delta:
                case Content(text):
                    answer.content += text
                case Reasoning(text):
                    answer.reasoning += text
                case CallStart(call, call_id, name):
                    assert call == len(answer.calls)
                    assert call_id not in ids
                    ids.append(call_id)
                    answer.calls.append((name, ""))
                case CallArguments(call, text):
                    assert call == len(answer.calls) - 1, "arguments belong to the latest call"
                    answer.calls[call] = (answer.calls[call][0], answer.calls[call][1] + text)
        return answer

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        """The calls, their arguments parsed."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def text_parser(calls: str | None, thinking: str | None = None, opening: Opening = "unknown", **changes: Any) -> TextParser:
    """A parser by the names of its formats."""
    count = itertools.count()
    think = THINK_FORMATS[thinking] if thinking else None
    tools = TOOL_FORMATS[calls] if calls else None
    options: dict[str, Any] = dict(new_id=lambda: f"call_{next(count)}", token_bytes=lambda token: 1)
    return TextParser(think, tools, TOOLS, opening, **{**options, **changes})


def read(parser: OutputParser, pieces: list[str], cut_off: bool = False) -> Answer:
    """Feed text in pieces, one token each."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece, [0] * len(piece.encode()))]
    return Answer.of([*deltas, *parser.finish(cut_off)])


def xml(name: str, arguments: dict[str, Any], function: str, end: str, parameter: str, parameter_end: str, line: str = "") -> str:
    """A call whose parameters stand between tags."""
    values = {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in arguments.items()}
    members = "".join(f"{parameter.format(key)}{line}{value}{line}{parameter_end}\n" for key, value in values.items())
    return f"{function.format(name)}\n{members}{end}"


def gemma(value: Any) -> str:
    """A value as Gemma 4 writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def write(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of format `name` writes them."""
    dump = lambda value: json.dumps(value, ensure_ascii=False)  # noqa: E731
    objects = [f'{{"name": "{call}", "arguments": {dump(arguments)}}}' for call, arguments in calls]
    match name:
        case "hermes" | "qwen25":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        case "llama3":
            return "<|python_tag|>" + "; ".join(each.replace('"arguments"', '"parameters"', 1) for each in objects)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case "deepseekv3" | "deepseekv31":
            fenced = name == "deepseekv3"
            each = [
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call}\n```json\n{dump(arguments)}\n```<｜tool▁call▁end｜>"
                if fenced
                else f"<｜tool▁call▁begin｜>{call}<｜tool▁sep｜>{dump(arguments)}<｜tool▁call▁end｜>"
                for call, arguments in calls
            ]
            return "<｜tool▁calls▁begin｜>" + ("\n" if fenced else "").join(each) + "<｜tool▁calls▁end｜>"
        case "phi4_mini_json":
            return f"<|tool_call|>[{', '.join(objects)}]<|/tool_call|>"
        case "kimi_k2":
            begin, middle, end = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
            each = [f"{begin}{call}:{i}{middle}{dump(arguments)}{end}" for i, (call, arguments) in enumerate(calls)]
            return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"
        case "qwen3_coder":
            form = ("<function={}>", "</function>", "<parameter={}>", "</parameter>", "\n")
            return "\n".join(f"<tool_call>\n{xml(call, arguments, *form)}\n</tool_call>" for call, arguments in calls)
        case "mimo":
            form = ("<function={}>", "</function>", "<parameter={}>", "</parameter>")
            escaped = [(call, {key: html_text(value) for key, value in arguments.items()}) for call, arguments in calls]
            return "\n".join(f"<tool_call>\n{xml(call, arguments, *form)}\n</tool_call>" for call, arguments in escaped)
        case "seed_oss":
            form = ("<function={}>", "</function>", "<parameter={}>", "</parameter>")
            return "\n".join(f"<seed:tool_call>\n{xml(*call, *form)}\n</seed:tool_call>" for call in calls)
        case "minimax-m2":
            form = ('<invoke name="{}">', "</invoke>", '<parameter name="{}">', "</parameter>")
            return "<minimax:tool_call>\n" + "\n".join(xml(*call, *form) for call in calls) + "\n</minimax:tool_call>"
        case "glm47":
            form = ("<tool_call>{}", "</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>")
            return "\n".join(xml(*call, *form) for call in calls)
        case "gemma4":
            return "".join(f"<|tool_call>call:{call}{gemma(arguments)}<tool_call|>" for call, arguments in calls)
        case "pythonic":
            each = [f"{call}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for call, arguments in calls]
            return f"[{', '.join(each)}]"
    raise AssertionError(name)


def html_text(value: Any) -> Any:
    """Texts with their markup escaped, as MiMo writes them."""
    return value.replace("&", "&amp;").replace("<", "&lt;") if isinstance(value, str) else value
