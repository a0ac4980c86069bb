"""The calls of a model in the next prompt: what the model wrote, rendered by a chat template of its kind."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from formats import BODY, write
from front import byte_tokenizer

from runtime.parsers.deltas import CallArguments, CallStart, Content, Reasoning
from runtime.parsers.output_format import OutputFormat, OutputRequest
from runtime.parsers.registry import pick_think_format, pick_tool_format
from runtime.text.tokenizer import Tokenizer

FUNCTION = {
    "name": "get_weather",
    "description": "Says the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOL = {"type": "function", "function": FUNCTION}
NOW = {"type": "function", "function": {"name": "now", "description": "Says the time", "parameters": {"type": "object", "properties": {}}}}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}

PHI_4_MINI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass
class Model:
    """A tokenizer and the formats that it implies."""

    tokenizer: Tokenizer
    tools: str
    thinking: str | None

    @classmethod
    def of(cls, template: str, architecture: str, more: tuple[str, ...] = ()) -> Model:
        tokenizer = byte_tokenizer(template, more)
        tools = pick_tool_format("auto", architecture, template, tokenizer.describes_tools)
        return cls(tokenizer, tools, pick_think_format("auto", architecture, template, tokenizer.short_chat))

    @property
    def form(self) -> OutputFormat:
        return OutputFormat(self.tokenizer, self.tools, self.thinking)

    def message(self, output: str) -> dict[str, Any]:
        """The assistant message that a client gets for an output, and sends back."""
        parser = self.form.parser(OutputRequest({"get_weather": FUNCTION["parameters"], "now": {}}), [])
        assert parser is not None
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        for delta in (*parser.feed(output, []), *parser.finish()):
            match delta:
                case Content(text):
                    message["content"] += text
                case Reasoning(text):
                    message["thinking"] = message["reasoning_content"] = message.get("thinking", "") + text
                case CallStart(_, call_id, name):
                    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                    message["tool_calls"].append(call)
                case CallArguments(call, text):
                    message["tool_calls"][call]["function"]["arguments"] += text
        return message

    def next_prompt(self, output: str, first: tuple[dict[str, Any], ...] = (SYSTEM, USER)) -> str:
        """The prompt after an output and the results of its calls, `result 0` and so on."""
        message = self.message(output)
        calls = message["tool_calls"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": f"result {i}"}
            for i, call in enumerate(calls)
        ]
        assert calls
        return self.tokenizer.render_chat([*first, message, *results], tools=[TOOL, NOW], call_form=self.form.call_form)


def test_phi_reads_the_functions_in_its_system_message() -> None:
    model = Model.of(PHI_4_MINI, "Phi3ForCausalLM")
    assert (model.tools, model.thinking) == ("phi4_mini_json", None)
    text = model.next_prompt(write("phi4_mini_json", [("get_weather", BODY)]))
    described = json.dumps([FUNCTION, NOW["function"]])
    assert text.startswith(f"<|system|>Be brief.<|tool|>{described}<|/tool|><|end|><|user|>q<|end|><|assistant|><|tool_call|>[")
    assert text.count(write("phi4_mini_json", [("get_weather", BODY)])) == 1
    assert re.search(r"<\|end\|><\|user\|><tool_response>\nresult 0\n</tool_response><\|end\|><\|assistant\|>\Z", text)
    alone = model.tokenizer.render_chat([USER], tools=[TOOL])
    assert alone.startswith("<|system|>You are a helpful assistant with some tools.<|tool|>[")
    assert "tool" not in model.tokenizer.render_chat([SYSTEM, USER])
