"""Applies a model's chat template in the client, for endpoints that take plain text."""

from __future__ import annotations

from collections.abc import Callable

from runtime.bench.vocabulary import LocalVocabulary, Vocabulary


def chat_template(vocabulary: Vocabulary) -> Callable[[str], str]:
    """Return a function that converts a user message to the model's chat prompt. Only this needs the server's tokenizer code.

    Raises:
        ValueError: the tokenizer is not local, or has no chat template that renders a user message.
    """
    if not isinstance(vocabulary, LocalVocabulary):
        raise ValueError("--apply-chat-template requires --tokenizer FOLDER; --backend sglang-oai-chat requires neither")
    from runtime.errors import ServingError
    from runtime.text.tokenizer import Tokenizer

    folder = vocabulary.folder

    def fails(error: ServingError) -> ValueError:
        return ValueError(f"{folder}: the chat template fails ({error}); remove --apply-chat-template")

    try:
        tokenizer = Tokenizer.load(folder)
    except ServingError as error:
        raise fails(error) from error
    if tokenizer.chat_template is None:
        raise ValueError(f"{folder}: the tokenizer has no chat template; remove --apply-chat-template")

    def apply(text: str) -> str:
        try:
            prompt = tokenizer.render_chat([{"role": "user", "content": text}])
        except ServingError as error:
            raise fails(error) from error
        return prompt.removeprefix(tokenizer.named_tokens.get("bos_token", ""))  # the server adds the BOS token

    return apply
