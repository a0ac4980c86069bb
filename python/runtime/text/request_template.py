"""Renders a chat template from a request in a separate process with limits on memory and time."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from runtime.errors import ConfigError, RequestError
from runtime.text.chat_template import ChatTemplate, Rendered
from runtime.text.control_tokens import ControlTokens
from runtime.text.template_sandbox import MAX_SECONDS
from runtime.text.tool_prompt import Message

MAX_MIB = 512
"""Address space of the process."""
_FIELD = "chat_template"
_COMMAND = (sys.executable, "-m", "runtime.text.request_template")


class TemplateJob(msgspec.Struct, frozen=True):
    """The input of the process: the arguments of `ChatTemplate` and of its `render`."""

    source: str
    named_tokens: dict[str, str]
    special: frozenset[str]
    soft: frozenset[str]
    messages: list[Any]
    options: dict[str, Any]

    def run(self) -> Rendered:
        """Compile and render. Raises `RequestError` if the template fails."""
        try:
            template = ChatTemplate(self.source, self.named_tokens, ControlTokens(self.special, self.soft))
        except ConfigError as error:
            raise RequestError(str(error), _FIELD) from error
        return template.render(self.messages, **self.options)


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """The output of the process instead of a text: the error of the request."""

    message: str
    param: str | None


def render_isolated(
    source: str, named_tokens: Mapping[str, str], control: ControlTokens, messages: Sequence[Message], options: Mapping[str, Any]
) -> Rendered:
    """Compile `source` and render a conversation as `ChatTemplate` does. Blocks; call it from a thread.

    Raises:
        RequestError: the template fails, or exceeds the limits of memory or time.
    """
    job = TemplateJob(source, dict(named_tokens), control.special, control.soft, list(messages), dict(options))
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # nothing else, because variables may hold secrets
    seconds = MAX_SECONDS + 3.0
    try:
        done = subprocess.run(
            _COMMAND, input=msgspec.msgpack.encode(job), capture_output=True, env=environment, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RequestError(f"The chat template takes more than {MAX_SECONDS:.0f} s for these messages.", _FIELD) from error
    if done.returncode != 0:
        raise RequestError(f"The chat template needs more than {MAX_MIB} MiB or {MAX_SECONDS:.0f} s for these messages.", _FIELD)
    answer = msgspec.msgpack.decode(done.stdout, type=Rendered | Refusal)
    if isinstance(answer, Refusal):
        raise RequestError(answer.message, answer.param)
    return answer


def main() -> None:
    """Read a job from stdin, and write its text and mark to stdout. Exceeding a limit ends with a non-zero exit status."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MIB << 20, MAX_MIB << 20))
    seconds = int(MAX_SECONDS) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TemplateJob)
    try:
        answer: Rendered | Refusal = job.run()
    except RequestError as error:
        answer = Refusal(str(error), error.param)
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
