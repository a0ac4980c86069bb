"""What a request's reader is told, and when."""

from __future__ import annotations

from copy import copy

from runtime.batch import BatchResult
from runtime.errors import ServingError
from runtime.managers.batching import Chunk
from runtime.managers.messages import Finish, GenerateReq, RequestInfo, TokensOut
from runtime.managers.req import Req


def request_info(req: GenerateReq) -> RequestInfo:
    """What the detokenizer must know before the first tokens."""
    sampling = req.sampling
    return RequestInfo(rid=req.rid, stop=sampling.stop, skip_special_tokens=sampling.skip_special_tokens, stream=req.stream)


def failure(error: ServingError) -> Finish:
    """An error as the end of a request."""
    return Finish(reason="abort", message=str(error), status=error.status)


def refusal(req: GenerateReq, finish: Finish) -> TokensOut:
    """The only answer to a request that never ran."""
    return TokensOut(rid=req.rid, token_ids=[], prompt_tokens=len(req.input_ids), cached_tokens=0, completion_tokens=0, finish=finish)


def is_due(req: Req, stream_interval: int) -> bool:
    """Whether the tokens that are not sent yet should go out now.

    Someone who streams gets the first at once and then every `stream_interval`; stop strings are looked for in every token; all others
    wait for the end.
    """
    if req.source.sampling.stop:
        return True
    if not req.source.stream:
        return False
    return req.sent == req.prompt_len or req.length - req.sent >= stream_interval


def token_out(req: Req, finish: Finish | None) -> TokensOut:
    """All that was not sent yet; from then on it is."""
    fresh = req.ids[req.sent :].tolist()
    req.sent = req.length
    prompt_logprobs = None
    if req.prompt_logprobs is not None and len(req.prompt_logprobs.chosen) == req.prompt_len:
        prompt_logprobs, req.prompt_logprobs = req.prompt_logprobs.take(), None
    return TokensOut(
        rid=req.rid,
        token_ids=fresh,
        prompt_tokens=req.prompt_len,
        cached_tokens=req.cached_tokens,
        completion_tokens=req.completion_tokens,
        finish=finish,
        logprobs=req.logprobs.take() if req.source.top_logprobs >= 0 else None,
        prompt_logprobs=prompt_logprobs,
        spec=req.spec.stats() if req.spec is not None else None,
        steps=copy(req.steps),
        queue_seconds=req.queue_seconds or 0.0,
    )


def collect_prompt_logprobs(chunk: Chunk, index: int, result: BatchResult) -> None:
    """Keep the prompt log-probabilities of entry `index` of a batch. Entry t of the worker's speaks of prompt token t + 1."""
    req = chunk.req
    logprobs = result.prompt_logprobs.get(index)
    if logprobs is None or not req.wants_prompt_logprobs or req.prompt_logprobs is None:
        return
    if chunk.start == 0:  # nothing comes before the first token
        req.prompt_logprobs.chosen.append(None)
        req.prompt_logprobs.top.append([])
    known = min(chunk.end, req.prompt_len - 1) - chunk.start
    req.prompt_logprobs.add(logprobs, 0, known, max(0, req.source.top_logprobs))
