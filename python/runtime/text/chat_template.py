"""A chat template, which renders messages to the text that the model reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from runtime.errors import RequestError
from runtime.text.control_tokens import ControlTokens, escaped_mark, unused_noncharacters
from runtime.text.roles import RoleTraits, fit_roles, has_unusual_order
from runtime.text.template_sandbox import compile_template, render_bounded
from runtime.text.thoughts import takes_thoughts_as_parts, with_thought_parts
from runtime.text.tool_prompt import HERMES_FORM, PLAIN_TOOL, USER, Message, TemplateTraits, fit_tools, rendered, uses_tools

MAX_KWARGS_CHARS = 16384

_OPENING = re.compile(r"\s*(<[\w|:]+>)")
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
    | {"return_tensors", "return_dict", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"}
    | {"raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner", "self", "loop"}
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a chat. `mark` must be removed from it, and no control token may be matched across a mark."""

    text: str
    mark: str

    @property
    def plain(self) -> str:
        """The text without marks."""
        return self.text.replace(self.mark, "")


class ChatTemplate:
    """A compiled template. Thread-safe.

    Args:
        source: Jinja text.
        named_tokens: the variables `bos_token`, `eos_token` and so on.
        control: tokens that only the template may produce.

    Raises:
        ConfigError: the template has a syntax error.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str], control: ControlTokens) -> None:
        self._template = compile_template(source)
        self._source = source
        self._named_tokens = dict(named_tokens)
        self._control = control

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        call_form: str = HERMES_FORM,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> Rendered:
        """Render a conversation.

        Args:
            messages: JSON objects with a `role` and usually a `content`. With tools, contents are texts, and calls have JSON text as
                `arguments`.
            tools: descriptions of functions in OpenAI's form.
            call_form: the form of a call that the model is told to use if the template does not describe tools.
            add_generation_prompt: end with the header of the assistant's next message.
            continue_final_message: end inside the last message instead.
            template_kwargs: further variables: plain JSON values with names that are not reserved.

        Raises:
            RequestError: the template rejects the messages, or rendering exceeds its limits.
        """
        kwargs = template_kwargs or {}
        _check_kwargs(kwargs)
        _check_messages(messages)
        mark, tag = unused_noncharacters([messages, tools], kwargs)
        if uses_tools(messages, tools):
            messages = fit_tools(messages, tools, self.traits, call_form)
            tools = tools if self.traits.describes_tools else ()
        if has_unusual_order(messages):
            messages = fit_roles(messages, self._roles)
        if any(message.get("thinking") for message in messages) and self._takes_thoughts_as_parts:
            messages = with_thought_parts(messages)
        chat = [self._guarded(message, mark) for message in messages]
        variables = {**self._named_tokens, **{name: self._control.for_others(value, mark) for name, value in kwargs.items()}}
        variables["tools"] = self._control.for_others(tools, mark) or None
        if continue_final_message:
            assert not add_generation_prompt, "continue_final_message excludes add_generation_prompt"
            text = self._run_unfinished(chat, variables, tag + " ")
        else:
            text = self._run(chat, variables, add_generation_prompt)
        return Rendered(text.replace(escaped_mark(mark), mark), mark)

    def _guarded(self, message: Message, mark: str) -> dict[str, Any]:
        guards = {"content": self._control.for_assistant} if message["role"] == "assistant" else {}
        others = self._control.for_others
        return {str(key): value if key == "role" else guards.get(key, others)(value, mark) for key, value in message.items()}

    @cached_property
    def traits(self) -> TemplateTraits:
        """What the template does with tools."""
        return TemplateTraits.probe(self._run_plain)

    @cached_property
    def _roles(self) -> RoleTraits:
        """Which orders of messages the template accepts."""
        return RoleTraits.probe(self._run_plain, self.traits)

    @cached_property
    def _takes_thoughts_as_parts(self) -> bool:
        return takes_thoughts_as_parts(self._run_plain)

    def _run_plain(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        """Render messages without guards or role changes."""
        return self._run(messages, {**self._named_tokens, "tools": tools or self._least_tools}, True)

    @cached_property
    def _least_tools(self) -> Sequence[Message] | None:
        """None, or a tool if the template renders no chat without tools."""
        without_tools = rendered(lambda chat, _: self._run(chat, {**self._named_tokens, "tools": None}, True), [USER])
        return None if without_tools else [PLAIN_TOOL]

    def _run(self, chat: Sequence[Message], variables: Mapping[str, object], add_generation_prompt: bool) -> str:
        given = {"messages": chat, "documents": None, "add_generation_prompt": add_generation_prompt}
        chars = count_chars(chat) + count_chars(variables["tools"])
        return render_bounded(self._template, {**variables, **given}, input_chars=chars)

    def _run_unfinished(self, chat: list[dict[str, Any]], variables: Mapping[str, object], tag: str) -> str:
        """Render a chat up to the end of its last message. `tag` is appended to that message to find its end in the output.

        A template that edits thinking may remove the tag, or close thinking that the message leaves open. Then the last message is
        appended to the generation prompt unchanged, as if the model had just written it.
        """
        *earlier, last = chat
        text = _final_text(last)
        rendered = self._run([*earlier, _with_suffix(last, tag)], variables, add_generation_prompt=False)
        end = rendered.rfind(tag.strip())
        opening = _OPENING.match(text)
        thinks = opening is not None and opening[1] in self._source
        changed = thinks or not rendered[:end].rstrip().endswith(text.strip())
        if end < 0 or (changed and earlier):
            header = self._header(earlier, last["role"], variables, tag) if earlier else ""
            return _without_repeated_start(header, text) + text
        # If the template strips white space, it removed the space after the tag, and would have stripped the message too.
        return rendered[:end] if rendered.startswith(tag, end) else rendered[:end].rstrip()

    def _header(self, earlier: list[dict[str, Any]], role: str, variables: Mapping[str, object], tag: str) -> str:
        """Render the earlier messages and the header of the next one, whose content is at first only `tag`.

        A template that ignores `add_generation_prompt` writes the header only together with a message.
        """
        prompt = self._run(earlier, variables, add_generation_prompt=True)
        if prompt != self._run(earlier, variables, add_generation_prompt=False):
            return prompt
        whole = self._run([*earlier, {"role": role, "content": tag}], variables, add_generation_prompt=False)
        end = whole.rfind(tag.strip())
        return prompt if end < 0 else whole[:end]


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("messages must contain at least one message.", "messages")
    for message in messages:
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise RequestError("The role of a message must be a word such as system, user or assistant.", "messages.role")


def _check_kwargs(kwargs: Mapping[str, object]) -> None:
    field = "chat_template_kwargs"
    for name in kwargs:
        if name in RESERVED or name.startswith("_") or not (name.isascii() and name.isidentifier()):
            raise RequestError(f"{field} must not contain {name[:64]!r}: it is reserved, or not an identifier.", field)
    try:
        text = json.dumps(kwargs, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{field} must consist of plain JSON values.", field) from error
    if len(text) > MAX_KWARGS_CHARS:
        raise RequestError(f"{field} has {len(text):,} characters of JSON; the limit is {MAX_KWARGS_CHARS:,}.", field)


def count_chars(value: object) -> int:
    """Total number of characters of all strings in a JSON value; other values count as 8."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(count_chars(item) for item in value.values())
    return sum(map(count_chars, value)) if isinstance(value, (list, tuple)) else 8


def _text_parts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _final_text(message: Mapping[str, Any]) -> str:
    parts = _text_parts(message)
    if not parts:
        raise RequestError("continue_final_message requires text in the last message.", "continue_final_message")
    return "".join(parts)


def _with_suffix(message: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    """A message whose last text ends with `suffix`."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + suffix}
    at = max(i for i, part in enumerate(content) if isinstance(part, dict) and isinstance(part.get("text"), str))
    part = {**content[at], "text": content[at]["text"] + suffix}
    return {**message, "content": [*content[:at], part, *content[at + 1 :]]}


def _without_repeated_start(header: str, text: str) -> str:
    """Remove a tag such as `<think>`, or an empty thought, from the end of the generation prompt if the message begins with the tag."""
    opening = _OPENING.match(text)
    if opening is None:
        return header
    begin, end = re.escape(opening[1]), re.escape(f"</{opening[1][1:]}")
    return re.sub(rf"{begin}\s*(?:{end}\s*)?\Z", "", header)
