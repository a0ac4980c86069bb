"""Splits the updates of an answer into updates of one token."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from runtime.managers.messages import TextOut, TokenLogprobs
from runtime.text.decode_stream import StreamDecoder
from runtime.text.stop_finder import StopFinder


class TokenSplitter:
    """Splits the updates of one answer, so that each log-probability comes with the text of its token.

    Args:
        decoder: decodes the tokens in the same way as their text was decoded.
        stops: strings that end the answer.
    """

    def __init__(self, decoder: StreamDecoder, stops: tuple[str, ...]) -> None:
        self._decoder, self._stops = decoder, StopFinder(stops)

    def split(self, update: TextOut) -> Iterator[TextOut]:
        """Yield one update per token. The last has the rest of the text, and the finish reason."""
        text, ids, last = update.text, update.token_ids, len(update.token_ids) - 1
        for i, token in enumerate(ids):
            shown = self._stops.push(self._decoder.step((token,)))
            if i < last:
                part, text = text[: len(shown)], text[len(shown) :]
                yield structs.replace(update, text=part, token_ids=[token], logprobs=_one(update.logprobs, i), finish=None)
        yield structs.replace(update, text=text, token_ids=ids[-1:], logprobs=_one(update.logprobs, last))


def _one(logprobs: TokenLogprobs | None, i: int) -> TokenLogprobs | None:
    return logprobs and TokenLogprobs(chosen=logprobs.chosen[i : i + 1], top=logprobs.top[i : i + 1])
