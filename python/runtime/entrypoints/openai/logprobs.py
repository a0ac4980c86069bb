"""Log-probabilities in the two forms of OpenAI: for chats and for completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from runtime.managers.messages import TokenLogprobs
from runtime.text.decode_stream import StreamDecoder
from runtime.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have."""

Top = Sequence[tuple[int, float]]


def finite(value: float) -> float:
    """`value`, but at least `LOWEST`."""
    return max(value, LOWEST)


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: TokenLogprobs, k: int) -> dict[str, Any]:
    """The `logprobs` of a chat choice: one entry per token, with the `k` most likely tokens at its position."""

    def entry(token: int, logprob: float | None) -> dict[str, object]:
        shown = LOWEST if logprob is None else finite(logprob)
        return {"token": tokenizer.token_text(token), "logprob": shown, "bytes": list(tokenizer.token_bytes(token))}

    tokens = zip(ids, logprobs.chosen, logprobs.top, strict=False)
    content = [{**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in top[:k]]} for token, logprob, top in tokens]
    return {"content": content, "refusal": None}


def prompt_offsets(ids: Sequence[int], decoder: StreamDecoder, hidden: int) -> Iterator[int]:
    """Yield the text offset of each token of an echoed prompt. Its first `hidden` tokens do not occur in the text."""
    offset = 0
    for place, token in enumerate(ids):
        yield offset
        offset += 0 if place < hidden else len(decoder.step((token,)))


class CompletionLogprobs:
    """The `logprobs` of a completion choice: parallel lists. A stream keeps one object per choice, for the text offsets.

    Args:
        tokenizer: gives the text of single tokens.
        k: how many of the most likely tokens to list.
        decoder: decodes the output in the same way as its text, so that offsets match.
        prompt: the text offsets of the tokens of an echoed prompt.
        prompt_chars: the length of its text.
    """

    def __init__(self, tokenizer: Tokenizer, k: int, decoder: StreamDecoder, prompt: Iterable[int] = (), prompt_chars: int = 0) -> None:
        self._tokenizer, self._k, self._decoder = tokenizer, k, decoder
        self._prompt, self._offset = iter(prompt), prompt_chars

    def take(self, ids: Sequence[int], logprobs: TokenLogprobs) -> dict[str, list[object]]:
        """The lists for the next tokens. A token without a value, such as the first of a prompt, has null."""
        lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprob, top in zip(ids, logprobs.chosen, logprobs.top, strict=False):
            text = self._tokenizer.token_text(token)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(None if logprob is None else finite(logprob))
            lists["top_logprobs"].append(None if logprob is None else self._likely(text, logprob, top))
            lists["text_offset"].append(self._take_offset(token))
        return lists

    def _take_offset(self, token: int) -> int:
        """The text offset of the next token."""
        if (offset := next(self._prompt, None)) is not None:
            return offset
        offset = self._offset
        self._offset += len(self._decoder.step((token,)))
        return offset

    def _likely(self, text: str, logprob: float, top: Top) -> dict[str, float]:
        likely: dict[str, float] = {}
        for token, value in top[: self._k]:
            likely.setdefault(self._tokenizer.token_text(token), finite(value))
        likely.setdefault(text, finite(logprob))
        return likely


def aligned(prompt_len: int, known: TokenLogprobs | None) -> TokenLogprobs:
    """Prompt log-probabilities with one entry per prompt token. The first token is not predicted and has None."""
    known = known or TokenLogprobs()
    missing = prompt_len - len(known.chosen)
    return TokenLogprobs(chosen=[*[None] * missing, *known.chosen], top=[*[[]] * missing, *known.top])
