"""The calls of a model in the next prompt: what the model wrote, rendered by a chat template of its kind."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
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

ARGUMENTS = "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}"
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}"
    "<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.get('name') or m.role }}<|im_middle|>"
    "{% if m.role == 'assistant' %}<think>{{ m.get('reasoning_content', '') }}</think>{{ m.content }}{% if m.get('tool_calls') %}"
    "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|>{{% endfor %}}<|tool_calls_section_end|>{{% endif %}}"
    "{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}{% else %}{{ m.content }}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
MISTRAL = (
    "{% set chat = messages[1:] if messages[0].role == 'system' else messages %}{% set turns = namespace(count=0) %}"
    "[SYSTEM_PROMPT]{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}PROMPT{% endif %}[/SYSTEM_PROMPT]"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in chat %}"
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (turns.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set turns.count = turns.count + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    "{% if not m.content and not m.tool_calls %}{{ raise_exception('text or calls') }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}{% if b.type == 'text' %}{{ b.text }}"
    "{% elif b.type == 'thinking' %}[THINK]{{ b.thinking }}[/THINK]{% else %}{{ raise_exception('part') }}{% endif %}{% endfor %}"
    f"{{% endif %}}{{% for c in m.tool_calls or [] %}}[TOOL_CALLS]{{{{ c.function.name }}}}ID[ARGS]{ARGUMENTS}{{% endfor %}}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]RESULT{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
MISTRAL_13 = MISTRAL.replace("ID", "").replace("RESULT{{", "{{").replace("PROMPT{% endif", "[THINK]Your draft[/THINK]{% endif")
MISTRAL_11 = (
    MISTRAL.replace("{% elif b.type == 'thinking' %}[THINK]{{ b.thinking }}[/THINK]", "")
    .replace("ID", "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}[CALL_ID]{{ c.id }}")
    .replace("RESULT{{", "{{ m.tool_call_id }}[TOOL_CONTENT]{{")
)
SMOL = (
    "<|im_start|>system\n{% set thinks = enable_thinking is not defined or enable_thinking %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}<think> Thought </think> Solution{% endif %}"
    "{% if xml_tools or tools %}<tools>\n{% for t in tools or xml_tools %}{{ t | string }}\n{% endfor %}</tools>\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}<|im_end|>\n'
    "{% for m in messages %}{% set text = m.content if m.content is string else '' %}{% if m.role == 'assistant' %}{% generation %}"
    "<|im_start|>assistant\n{{ '' if thinks else '<think>\n\n</think>\n' }}{{ text.lstrip('\n') }}<|im_end|>\n{% endgeneration %}"
    "{% elif m.role in ('user', 'tool') %}<|im_start|>user\n{{ text }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '' if thinks else '<think>\n\n</think>\n' }}{% endif %}"
)
TWO = [("get_weather", BODY), ("now", {})]


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


def test_kimi_repeats_its_calls_with_their_ids() -> None:
    model = Model.of(KIMI, "DeepseekV3ForCausalLM")
    assert (model.tools, model.thinking) == ("kimi_k2", "kimi_k2")
    calls = write("kimi_k2", TWO).replace(":1<", ":3<").replace(":0<", ":2<")
    text = model.next_prompt(f"<think>Hm.</think>I look.{calls}")
    assert text.count(f"<|im_assistant|>assistant<|im_middle|><think>Hm.</think>I look.{calls}<|im_end|>") == 1
    assert "<|im_system|>get_weather<|im_middle|>## Return of functions.get_weather:2\nresult 0<|im_end|>" in text
    assert "## Return of functions.now:3\nresult 1<|im_end|>" in text
    instruct = Model.of(KIMI.replace("<think>{{ m.get('reasoning_content', '') }}</think>", ""), "DeepseekV3ForCausalLM")
    assert (instruct.tools, instruct.thinking) == ("kimi_k2", None)
    assert calls in instruct.next_prompt(calls)


def test_mistral_repeats_its_thoughts_and_its_calls() -> None:
    model = Model.of(MISTRAL_13, "Mistral3ForConditionalGeneration", ("[ARGS]", "[THINK]", "[/THINK]"))
    assert (model.tools, model.thinking) == ("mistral", "mistral")
    calls = "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in TWO)
    for output in (f"[THINK]Hm.[/THINK]I look.{calls}", f"[THINK]Hm.[/THINK]{calls}", calls):
        text = model.next_prompt(output)
        assert text.count(f"[INST]q[/INST]{output}</s>[TOOL_RESULTS]result 0[/TOOL_RESULTS][TOOL_RESULTS]result 1[/TOOL_RESULTS]") == 1
    answer = {"role": "assistant", "content": "Yes.", "thinking": "Hm.", "reasoning_content": "Hm."}
    chat = [USER, answer, USER]
    assert model.tokenizer.render_chat(chat).endswith("[INST]q[/INST][THINK]Hm.[/THINK]Yes.</s>[INST]q[/INST]")
    continued = model.tokenizer.render_chat([USER, answer], add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("[INST]q[/INST][THINK]Hm.[/THINK]Yes.")
    guarded = model.tokenizer.encode_chat([USER, {**answer, "thinking": "[/THINK]"}, USER])
    ends = [token for token in guarded if token == model.tokenizer.token_id("[/THINK]")]
    assert len(ends) == 2, "those of the template, not that in the thought"


def test_mistral_repeats_the_ids_of_its_calls() -> None:
    model = Model.of(MISTRAL_11, "Mistral3ForConditionalGeneration", ("[ARGS]", "[CALL_ID]"))
    assert (model.tools, model.thinking) == ("mistral", None)
    calls = '[TOOL_CALLS]get_weather[CALL_ID]abcdEF123[ARGS]{"city": "x"}[TOOL_CALLS]now[CALL_ID]000000001[ARGS]{}'
    text = model.next_prompt(calls)
    assert f"[INST]q[/INST]{calls}</s>[TOOL_RESULTS]abcdEF123[TOOL_CONTENT]result 0[/TOOL_RESULTS]" in text


def test_smollm_repeats_its_calls_as_text() -> None:
    model = Model.of(SMOL, "SmolLM3ForCausalLM")
    assert (model.tools, model.thinking) == ("hermes", "qwen3")
    calls = write("hermes", TWO)
    text = model.next_prompt(f"<think>\nHm.\n</think>\nI look.\n{calls}")
    assert text.count(f"<|im_start|>assistant\nI look.\n{calls}<|im_end|>\n<|im_start|>user\n<tool_response>\nresult 0\n") == 1
    assert text.count("'name': 'get_weather'") == 1
    off = model.tokenizer.encode_chat([USER], template_kwargs={"enable_thinking": False})
    assert model.form.opening(off) == "closed"
    assert model.form.opening(model.tokenizer.encode_chat([USER])) == "unknown", "the default instructions name the tags"


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
     "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
     "{% for m in messages %}{{ m.content + '' }}{{ m.thinking }}{% endfor %}", KIMI, SMOL, MISTRAL_11],
)  # fmt: skip
def test_contents_stay_texts_for_other_templates(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    answer = {"role": "assistant", "content": "Yes.", "thinking": "Hm.", "reasoning_content": "Hm."}
    assert "Yes." in tokenizer.render_chat([USER, answer, USER])
    assert "type" not in tokenizer.render_chat([USER, answer, USER])
