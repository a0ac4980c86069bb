"""The scheduler's replies about a request."""

from __future__ import annotations

import numpy as np

from runtime.batch import BatchResult
from runtime.errors import ServingError
from runtime.managers.messages import Finish, GenerateReq, RequestInfo, TokenLogprobs, TokensOut
from runtime.managers.req import Req
from runtime.managers.step_plan import Chunk
from runtime.managers.telemetry.progress import Progress
from runtime.text.decode_stream import PROMPT_TAIL


def request_info(req: GenerateReq) -> RequestInfo:
    """What the detokenizer needs before the first tokens."""
    return RequestInfo(
        rid=req.rid,
        stop=req.sampling.stop,
        skip_special_tokens=req.sampling.skip_special_tokens,
        stream=req.stream,
        no_stop_trim=req.sampling.no_stop_trim,
        prompt_tail=req.input_ids[-PROMPT_TAIL:] if req.continues_prompt else [],
        shown_token_ids=req.sampling.shown_token_ids,
        header_begins=req.sampling.header_begins,
        header_ends=req.sampling.header_ends,
    )


def failure(error: ServingError) -> Finish:
    """`error` as the end of a request."""
    return Finish(reason="abort", message=error.message, status=error.status, param=error.param, code=error.code)


def refusal(req: GenerateReq, error: ServingError) -> TokensOut:
    """The only reply to a request that was refused."""
    return TokensOut(rid=req.rid, token_ids=[], progress=Progress(len(req.input_ids)), finish=failure(error))


def tokens_out(req: Req, finish: Finish | None) -> TokensOut:
    """All unsent tokens of `req`; none are unsent afterwards."""
    tokens, req.unsent, req.reply_at = req.unsent, [], req.reply_interval
    progress = req.progress
    if finish is not None or req.running_counts:
        req.counts.move_to(progress)
    progress.completion_tokens = req.length - req.prompt_len
    if finish is None and req.gives_tokens_only:
        return TokensOut(rid=req.rid, token_ids=tokens, progress=progress)
    logprobs = prompt_logprobs = None
    if req.top_logprobs >= 0:
        logprobs, req.logprobs = req.logprobs, TokenLogprobs()
    if req.prompt_logprobs is not None and len(req.prompt_logprobs.chosen) == req.prompt_len:
        prompt_logprobs, req.prompt_logprobs = req.prompt_logprobs, None
    return TokensOut(
        rid=req.rid,
        token_ids=tokens,
        progress=progress,
        finish=finish,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        pooled=_pooled(req),
    )


def _pooled(req: Req) -> list[float] | None:
    """The result of a pooling request whose prompt has run; None for other requests."""
    pooling = req.request.pooling
    if pooling is None or req.pooled is None or req.kv_len < req.prompt_len:
        return None
    return (req.pooled / req.prompt_len if pooling.whole_prompt else req.pooled).tolist()


def collect_pooled(chunk: Chunk, index: int, result: BatchResult) -> None:
    """Add the result of chunk `index` of a pooling request."""
    vector = result.pooled.get(index)
    if vector is not None:
        req = chunk.req
        req.pooled = vector.astype(np.float64) if req.pooled is None else req.pooled + vector


def collect_prompt_logprobs(chunk: Chunk, index: int, result: BatchResult) -> None:
    """Keep the prompt log-probabilities of chunk `index`. The worker's entry t belongs to prompt token t + 1."""
    req = chunk.req
    logprobs = result.prompt_logprobs.get(index)
    if logprobs is None or not req.wants_prompt_logprobs or req.prompt_logprobs is None:
        return
    if chunk.start == 0:  # the first token has no log-probability
        req.prompt_logprobs.chosen.append(None)
        req.prompt_logprobs.top.append([])
    known = min(chunk.end, req.prompt_len - 1) - chunk.start
    req.prompt_logprobs.add(logprobs, 0, known, max(0, req.top_logprobs))
