"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.text.decode_stream import StreamDecoder
from runtime.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have."""

Top = Sequence[tuple[int, float]]


def finite(value: float) -> float:
    """`value`, but at least `LOWEST`."""
    return max(value, LOWEST)


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], chosen: Sequence[float | None], top: Sequence[Top], k: int) -> dict[str, Any]:
    """The `logprobs` of a chat choice: one entry per token, with the `k` most likely tokens at its position."""

    def entry(token: int, logprob: float | None) -> dict[str, object]:
        shown = LOWEST if logprob is None else finite(logprob)
        return {"token": tokenizer.token_text(token), "logprob": shown, "bytes": list(tokenizer.token_bytes(token))}

    content = []
    for i, (token, logprob) in enumerate(zip(ids, chosen, strict=False)):
        likely = top[i][:k] if i < len(top) else ()
        content.append({**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in likely]})
    return {"content": content, "refusal": None}


@dataclass(slots=True)
class EchoedPrompt:
    """A prompt whose text precedes that of the output.

    Attributes:
        length: the length of its text, in characters.
        decoder: decodes all its tokens, including special tokens.
        left: how many of its tokens have no offset yet.
        hidden: how many of these, at the start, do not occur in the text.
    """

    length: int
    decoder: StreamDecoder
    left: int
    hidden: int = 0


class CompletionLogprobs:
    """The `logprobs` of a completion choice: parallel lists. A stream keeps one object per choice, for the text offsets.

    Args:
        tokenizer: gives the text of single tokens.
        k: how many of the most likely tokens to list.
        decoder: decodes the output in the same way as its text, so that offsets match.
        prompt: the echoed prompt, or None.
    """

    def __init__(self, tokenizer: Tokenizer, k: int, decoder: StreamDecoder, prompt: EchoedPrompt | None = None) -> None:
        self.tokenizer = tokenizer
        self.k = k
        self.offset = 0
        self._decoder = decoder
        self._prompt = prompt

    def take(self, ids: Sequence[int], chosen: Sequence[float | None], top: Sequence[Top]) -> dict[str, list[object]]:
        """The lists for the next tokens. A token without a value, such as the first of a prompt, has null."""
        lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for i, (token, logprob) in enumerate(zip(ids, chosen, strict=False)):
            text = self.tokenizer.token_text(token)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(None if logprob is None else finite(logprob))
            lists["top_logprobs"].append(None if logprob is None else self._likely(text, logprob, top[i] if i < len(top) else ()))
            lists["text_offset"].append(self.offset)
            self._advance(token)
        return lists

    def _advance(self, token: int) -> None:
        if self._prompt is not None:
            self._advance_prompt(token, self._prompt)
        else:
            self.offset += len(self._decoder.step((token,)))

    def _advance_prompt(self, token: int, prompt: EchoedPrompt) -> None:
        prompt.left -= 1
        if prompt.hidden:
            prompt.hidden -= 1
        else:
            self.offset += len(prompt.decoder.step((token,)))
        if not prompt.left:
            self.offset, self._prompt = prompt.length, None

    def _likely(self, text: str, logprob: float, top: Top) -> dict[str, float]:
        likely: dict[str, float] = {}
        for token, value in top[: self.k]:
            likely.setdefault(self.tokenizer.token_text(token), finite(value))
        likely.setdefault(text, finite(logprob))
        return likely


def aligned(prompt_len: int, chosen: Sequence[float | None], top: Sequence[Top]) -> tuple[list[float | None], list[Top]]:
    """Prompt log-probabilities with one entry per prompt token. The first token is not predicted and has None."""
    missing = prompt_len - len(chosen)
    tops: list[Top] = [*([()] * missing), *top]
    return [*([None] * missing), *chosen], tops
