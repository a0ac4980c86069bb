"""The formats by name, and the choice of a model's formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runtime.parsers.calls import ToolFormat
from runtime.parsers.gemma4 import Gemma4
from runtime.parsers.json_formats import DeepSeek, Hermes, KimiK2, Llama3, Mistral, Phi4Mini
from runtime.parsers.pythonic import Pythonic
from runtime.parsers.tagged_formats import GLM47, MIMO, MINIMAX_M2, QWEN3_CODER, SEED_OSS
from runtime.parsers.thinking import ThinkFormat

HARMONY = "gpt-oss"
"""The only format that is parsed from token ids; it covers both thinking and calls."""

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": Hermes(),
    "qwen25": Hermes(),
    "qwen3_coder": QWEN3_CODER,
    "llama3": Llama3(),
    "mistral": Mistral(named=False),
    "deepseekv3": DeepSeek(fenced=True),
    "deepseekv31": DeepSeek(fenced=False),
    "kimi_k2": KimiK2(),
    "glm47": GLM47,
    "mimo": MIMO,
    "seed_oss": SEED_OSS,
    "minimax-m2": MINIMAX_M2,
    "phi4_mini_json": Phi4Mini(),
    "gemma4": Gemma4(),
    "pythonic": Pythonic(),
}
"""The tool formats that are parsed from text."""

THINK_FORMATS: Mapping[str, ThinkFormat] = {
    "deepseek-r1": ThinkFormat(forced=True),
    "qwen3": ThinkFormat(ended_by=("<tool_call>",)),
    "glm45": ThinkFormat(ended_by=("<tool_call>",)),
    "mimo": ThinkFormat(ended_by=("<tool_call>",)),
    "kimi_k2": ThinkFormat(ended_by=("<|tool_calls_section_begin|>", "<|tool_call_begin|>")),
    "seed_oss": ThinkFormat(begin="<seed:think>", end="</seed:think>", ended_by=("<seed:tool_call>",)),
    "mistral": ThinkFormat(begin="[THINK]", end="[/THINK]", anywhere=True, ended_by=("[TOOL_CALLS]",)),
    "minimax": ThinkFormat(forced=True, ended_by=("<minimax:tool_call>",)),
    "gemma4": ThinkFormat(begin="<|channel>thought\n", end="<channel|>", anywhere=True, ended_by=("<|tool_call>",)),
}
"""The thinking formats that are parsed from text."""

_TOOL_MARKS = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("deepseekv3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|im_system|>tool_declare",)),
    ("phi4_mini_json", ("<|/tool|>",)),
    ("phi4_mini_json", ("functools[",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ('"parameters":',)),
)
"""A text that the chat templates of each format contain; the first match counts."""
_TOOLS_BY_ARCHITECTURE = {
    "GptOss": HARMONY, "MiniMaxM2": "minimax-m2", "Glm4Moe": "glm47", "Gemma4": "gemma4", "MiMoV2": "mimo", "Llama4": "pythonic",
}  # fmt: skip
_THINKING_BY_ARCHITECTURE = {"GptOss": HARMONY, "MiniMaxM2": "minimax", "Glm4": "glm45", "Gemma4": "gemma4", "MiMo": "mimo"}


def tool_format(name: str, has_token: Callable[[str], bool]) -> ToolFormat | None:
    """The tool format of this name that is parsed from text. Mistral's later form has a token of its own before the arguments.

    Args:
        has_token: whether the vocabulary has a token with this text.
    """
    return Mistral(named=True) if name == "mistral" and has_token("[ARGS]") else TOOL_FORMATS.get(name)


def pick_tool_format(asked: str, architecture: str, template: str, described: bool) -> str:
    """The name of the tool format: `asked`, or the model's format for "auto".

    Args:
        asked: a name or "auto".
        architecture: the architecture in config.json.
        template: the model's chat template; "" if there is none.
        described: whether the template describes tools. If not, an unknown model gets Hermes' format.
    """
    if asked != "auto":
        return asked
    by_mark = next((name for name, marks in _TOOL_MARKS if all(mark in template for mark in marks)), "hermes")
    if by_mark == "llama3" and not described:
        by_mark = "hermes"
    return _by_prefix(_TOOLS_BY_ARCHITECTURE, architecture) or by_mark


def pick_think_format(asked: str, architecture: str, template: str, short_chat: str) -> str | None:
    """The name of the thinking format, or None. For "auto", the model's format if its chat template supports thinking.

    Args:
        asked: a name, "auto" or "none".
        architecture: the architecture in config.json.
        template: the model's chat template; "" if there is none.
        short_chat: a conversation rendered with it. If it ends with a thinking tag, the prompt determines whether the model thinks. A
            DeepSeek model without such a tag is R1.
    """
    if asked != "auto":
        return None if asked == "none" else asked
    if "<|channel|>analysis" in template:
        return HARMONY
    if "<|channel>" in template:
        return "gemma4"
    if "</seed:think>" in template:
        return "seed_oss"
    if "[/THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return None
    if "<|tool_calls_section_begin|>" in template:
        return "kimi_k2"
    if "<｜Assistant｜>" in template and THINK_FORMATS["qwen3"].opening(short_chat) == "unknown":
        return "deepseek-r1"
    return _by_prefix(_THINKING_BY_ARCHITECTURE, architecture) or "qwen3"


def _by_prefix(names: Mapping[str, str], architecture: str) -> str | None:
    return next((name for prefix, name in names.items() if architecture.startswith(prefix)), None)
