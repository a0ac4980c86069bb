"""Applies a model's chat template in the client, for endpoints that take plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.bench.vocabulary import LocalVocabulary, Vocabulary


def chat_template(vocabulary: Vocabulary) -> Callable[[str], str]:
    """Return a function that converts a user message to the model's chat prompt.

    Raises:
        ValueError: the tokenizer is not local, or has no chat template that renders a user message.
    """
    if not isinstance(vocabulary, LocalVocabulary):
        raise ValueError("--apply-chat-template requires --tokenizer FOLDER; --backend sglang-oai-chat requires neither")
    config, source = _read(vocabulary.folder)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    with _template_errors(vocabulary.folder):
        template = environment.from_string(source)
    tokens = {name: _text(config.get(name)) for name in ("bos_token", "eos_token")}

    def apply(text: str) -> str:
        with _template_errors(vocabulary.folder):
            prompt = template.render(messages=[{"role": "user", "content": text}], add_generation_prompt=True, **tokens)
        # The server adds the BOS token when it tokenises the prompt.
        return prompt.removeprefix(tokens["bos_token"]) if tokens["bos_token"] else prompt

    return apply


@contextmanager
def _template_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (TemplateError, TypeError) as error:
        raise ValueError(f"{folder}: the chat template fails ({error}); remove --apply-chat-template") from error


def _read(folder: Path) -> tuple[dict[str, object], str]:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    source = config.get("chat_template")
    if source is None and (separate := folder / "chat_template.jinja").is_file():
        source = separate.read_text(encoding="utf-8")
    if not isinstance(source, str):
        raise ValueError(f"{folder}: the tokenizer has no chat template; remove --apply-chat-template")
    return config, source


def _text(token: object) -> str:
    return str(token["content"] if isinstance(token, dict) else token or "")
