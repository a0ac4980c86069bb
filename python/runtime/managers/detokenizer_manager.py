"""Token ids to text: incremental decoding and stop strings of every open request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from runtime.managers.messages import (
    DrainReq,
    Finish,
    RequestInfo,
    StopReq,
    TextOut,
    TextOutBatch,
    ToDetokenizer,
    TokenLogprobs,
    TokensOut,
    TokensOutBatch,
    ToTokenizer,
)


class TextStream(Protocol):
    """Text of a growing run of tokens."""

    def step(self, token_ids: Sequence[int]) -> str:
        """Take tokens; return the text that is complete now, maybe none."""
        ...

    def finish(self) -> str:
        """Text still held back; an incomplete character is dropped."""
        ...


class StreamFactory(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """Begin the text of one request."""
        ...


@dataclass(slots=True)
class StopFinder:
    """Shows text up to the first stop string, holding back what may still become one."""

    stops: tuple[str, ...]
    held: str = ""
    matched: str | None = None

    def push(self, text: str) -> str:
        """Take new text and return what may be shown; after a match (`matched`) that is the text before the stop."""
        if not self.stops:
            return text
        text = self.held + text
        hits = [(at + len(stop), -len(stop), stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if hits:  # the one that is complete first, as if the text came letter by letter; of those the longest
            end, _, self.matched = min(hits)
            self.held = ""
            return text[: end - len(self.matched)]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back; none of it was a stop string."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


@dataclass(slots=True)
class _Open:
    """One request under way, and what a request that does not stream has gathered."""

    stream: bool
    text: TextStream
    stops: StopFinder
    gathered: list[TextOut] = field(default_factory=list)


class DetokenizerManager:
    """Turns each `TokensOut` into a `TextOut`; everything else passes through.

    A stop string never reaches the reader, nor does a part of one; on a match the text is cut, the request ends, and the scheduler is
    told to generate no further. What it still sends of that request is swallowed.
    """

    def __init__(
        self, tokenizer: StreamFactory, to_tokenizer: Callable[[ToTokenizer], None], to_scheduler: Callable[[StopReq], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._to_tokenizer = to_tokenizer
        self._to_scheduler = to_scheduler
        self._open: dict[str, _Open] = {}

    @property
    def open_requests(self) -> int:
        """Requests whose text is not complete."""
        return len(self._open)

    def handle(self, message: ToDetokenizer) -> None:
        """Take one message and send what follows from it."""
        if isinstance(message, RequestInfo):
            text = self._tokenizer.stream(skip_special_tokens=message.skip_special_tokens)
            self._open[message.rid] = _Open(message.stream, text, StopFinder(message.stop))
        elif isinstance(message, TokensOutBatch):
            outs = [shown for out in message.outs if (shown := self._advance(out)) is not None]
            if outs:
                self._to_tokenizer(TextOutBatch(outs=outs))
        elif not isinstance(message, DrainReq):
            self._to_tokenizer(message)

    def _advance(self, out: TokensOut) -> TextOut | None:
        request = self._open.get(out.rid)
        if request is None:
            # Stopped here and still on its way from there, or refused before it began; the reader knows which.
            return _with_text(out, "", len(out.token_ids), out.finish) if out.finish is not None else None
        text, used = self._decode(request, out)
        finish = out.finish
        if request.stops.matched is not None:
            finish = Finish(reason="stop", matched=request.stops.matched)
            if out.finish is None:
                self._to_scheduler(StopReq(rid=out.rid))
        shown = _with_text(out, text, used, finish)
        if finish is not None:
            del self._open[out.rid]
        if request.stream:
            return shown
        request.gathered.append(shown)
        return _joined(request.gathered) if finish is not None else None

    def _decode(self, request: _Open, out: TokensOut) -> tuple[str, int]:
        """The text to show and how many tokens of `out` it took to get there."""
        shown: list[str] = []
        for index, token in enumerate(out.token_ids):
            if out.finish is not None and out.finish.matched == token and out.finish.reason == "stop" and index == len(out.token_ids) - 1:
                break  # the stop token ends the text and is no part of it
            shown.append(request.stops.push(request.text.step((token,))))
            if request.stops.matched is not None:
                return "".join(shown), index + 1
        if out.finish is not None:
            shown.append(request.stops.push(request.text.finish()) + request.stops.flush())
        return "".join(shown), len(out.token_ids)


def _with_text(out: TokensOut, text: str, used: int, finish: Finish | None) -> TextOut:
    logprobs = out.logprobs
    if logprobs is not None and used < len(out.token_ids):
        logprobs = TokenLogprobs(chosen=logprobs.chosen[:used], top=logprobs.top[:used])
    return TextOut(
        rid=out.rid,
        text=text,
        token_ids=out.token_ids[:used],
        prompt_tokens=out.prompt_tokens,
        cached_tokens=out.cached_tokens,
        completion_tokens=out.completion_tokens - (len(out.token_ids) - used),
        finish=finish,
        logprobs=logprobs,
        prompt_logprobs=out.prompt_logprobs,
        spec=out.spec,
        steps=out.steps,
        queue_seconds=out.queue_seconds,
    )


def _joined(outs: list[TextOut]) -> TextOut:
    """All that one request said, as one message with the last one's counts."""
    last = outs[-1]
    return TextOut(
        rid=last.rid,
        text="".join(out.text for out in outs),
        token_ids=[token for out in outs for token in out.token_ids],
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        completion_tokens=last.completion_tokens,
        finish=last.finish,
        logprobs=_joined_logprobs([out.logprobs for out in outs]),
        prompt_logprobs=_joined_logprobs([out.prompt_logprobs for out in outs]),
        spec=last.spec,
        steps=last.steps,
        queue_seconds=max(out.queue_seconds for out in outs),
    )


def _joined_logprobs(parts: list[TokenLogprobs | None]) -> TokenLogprobs | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return TokenLogprobs(chosen=[value for part in present for value in part.chosen], top=[row for part in present for row in part.top])
