"""The detokenizer manager: incremental decoding and stop strings of every open request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

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
from runtime.text.decode_stream import StreamDecoder
from runtime.text.stop_finder import StopFinder
from runtime.text.tokenizer import Tokenizer

MAX_CELLS = 4096
"""A reply with more log-probabilities is sent as a separate message: decoding it takes the HTTP process milliseconds."""


@dataclass(slots=True)
class _Open:
    """One open request, and the replies collected for it if it does not stream."""

    info: RequestInfo
    text: StreamDecoder
    stops: StopFinder
    in_header: bool = False
    collected: list[TextOut] = field(default_factory=list)
    seconds: float = 0.0

    def searched(self, token: int) -> str:
        """The text to show with this token. Sets `stops.matched` if it ends with a stop string."""
        text = self.text.step((token,))
        if token in self.info.header_begins:
            self.in_header, text = True, self.stops.flush() + text
        shown = text if self.in_header else self.stops.push(text)
        self.in_header = self.in_header and token not in self.info.header_ends
        return shown


class DetokenizerManager:
    """Turns each `TokensOut` into a `TextOut`; forwards everything else.

    No stop string, and no part of one, reaches the client, unless `no_stop_trim` keeps it. On a match the text is cut, the request
    ends, and the scheduler is told to stop it. Tokens that the scheduler still sends for it are dropped.

    Args:
        timed: measure the time spent on each request, for traces.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        to_tokenizer: Callable[[ToTokenizer], None],
        to_scheduler: Callable[[StopReq], None],
        timed: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._to_tokenizer = to_tokenizer
        self._to_scheduler = to_scheduler
        self._step = self._advance_timed if timed else self._advance
        self._open: dict[str, _Open] = {}

    @property
    def open_requests(self) -> int:
        """Requests whose text has not ended."""
        return len(self._open)

    def handle(self, message: ToDetokenizer) -> None:
        """Process one message, and send the results."""
        if isinstance(message, RequestInfo):
            text = self._tokenizer.stream(message.skip_special_tokens, message.prompt_tail, message.shown_token_ids)
            self._open[message.rid] = _Open(message, text, StopFinder(message.stop, message.no_stop_trim))
        elif isinstance(message, TokensOutBatch):
            outs = [shown for out in message.outs if (shown := self._step(out)) is not None]
            large = [out for out in outs if (out.logprobs or out.prompt_logprobs) is not None and _cells(out) > MAX_CELLS]
            for out in large:
                self._to_tokenizer(TextOutBatch(outs=[out]))
            if outs := [out for out in outs if _cells(out) <= MAX_CELLS] if large else outs:
                self._to_tokenizer(TextOutBatch(outs=outs))
        elif not isinstance(message, DrainReq):
            self._to_tokenizer(message)

    def _advance_timed(self, out: TokensOut) -> TextOut | None:
        """`_advance`, with the total time spent on the request so far."""
        began, request = time.perf_counter(), self._open.get(out.rid)
        shown = self._advance(out)
        if request is None:
            return shown
        request.seconds += time.perf_counter() - began
        return shown and structs.replace(shown, progress=structs.replace(shown.progress, detokenize_seconds=request.seconds))

    def _advance(self, out: TokensOut) -> TextOut | None:
        request = self._open.get(out.rid)
        if request is None:
            # The request matched a stop string while tokens were in flight, or it was refused before it began.
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
        if request.info.stream:
            return shown
        request.collected.append(shown)
        return TextOut.joined(request.collected) if finish is not None else None

    def _decode(self, request: _Open, out: TokensOut) -> tuple[str, int]:
        """The text to send, and how many tokens of `out` it includes."""
        tokens = out.token_ids
        if out.finish is None and not request.stops.stops:
            return request.text.step(tokens), len(tokens)
        shown: list[str] = []
        stop_token = out.finish.matched if out.finish is not None and out.finish.reason == "stop" else None
        for index, token in enumerate(tokens):
            if token == stop_token and index == len(tokens) - 1:
                # The stop token is not searched for stop strings, and is part of the text only on request.
                shown.append(request.stops.flush() + (request.text.step((token,)) if request.info.no_stop_trim else ""))
                break
            shown.append(request.searched(token))
            if request.stops.matched is not None:
                return "".join(shown), index + 1
        if out.finish is not None:
            shown.append(request.stops.flush())
        return "".join(shown), len(tokens)


def _cells(out: TextOut) -> int:
    """Approximate number of log-probabilities in one reply."""
    return sum(len(part.top) * (1 + len(part.top[-1])) for part in (out.logprobs, out.prompt_logprobs) if part is not None and part.top)


def _with_text(out: TokensOut, text: str, used: int, finish: Finish | None) -> TextOut:
    """`out` truncated to its first `used` tokens, with their text."""
    logprobs, progress, tokens = out.logprobs, out.progress, out.token_ids
    if cut := len(tokens) - used:
        tokens = tokens[:used]
        progress = structs.replace(progress, completion_tokens=progress.completion_tokens - cut)
        if logprobs is not None:
            logprobs = TokenLogprobs(chosen=logprobs.chosen[:used], top=logprobs.top[:used])
    return TextOut(
        rid=out.rid,
        text=text,
        token_ids=tokens,
        progress=progress,
        finish=finish,
        logprobs=logprobs,
        prompt_logprobs=out.prompt_logprobs,
        pooled=out.pooled,
    )
