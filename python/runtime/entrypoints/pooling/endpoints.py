"""The pooling endpoints: /v1/embeddings, and /v1/score and /v1/rerank in SGLang's form.

/v1/rerank scores a document by the query's likelihood per token given the document (Sachan et al. 2022, arXiv:2204.07496). Any language
model can compute it without further training.
"""

from __future__ import annotations

import base64
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from runtime.entrypoints.generations import Call, Generations
from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.entrypoints.pooling.protocol import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from runtime.errors import InvalidField, RequestAborted
from runtime.managers.generation import RequestOptions
from runtime.managers.messages import TextOut
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.pooling import Pooling
from runtime.sampling_params import SamplingParams

CONTEXT = "Passage: {document}\nA question that this passage answers:"
MAX_OPEN = 64
"""Most prompts of one call that are submitted at the same time; the others wait here, not in the scheduler's queue."""
NO_OUTPUT = SamplingParams(max_new_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of one prompt: its vector or the log-probabilities of its tokens, and its length in tokens."""

    vector: list[float]
    prompt_tokens: int

    @classmethod
    def of(cls, out: TextOut, prompt_tokens: int) -> Pooled:
        """Read the result from a finished request. The first token of a prompt has no log-probability; it counts as 0.

        Raises:
            RequestAborted: the request has no result.
        """
        if out.finish is not None and out.finish.reason == "abort":
            raise RequestAborted
        known = out.prompt_logprobs
        return cls([value or 0.0 for value in known.chosen] if known is not None else out.pooled or [], prompt_tokens)


class PoolingApi:
    """Base of the pooling endpoints, which run prompts without generating text."""

    def __init__(self, manager: TokenizerManager, model: ServedModel) -> None:
        self._manager, self._model = manager, model

    async def _run(self, body: PoolingBody, prompts: Sequence[str | list[int]], pooling: Pooling | None, param: str) -> list[Pooled]:
        """Return the results of all prompts in order. Cancelling this aborts running prompts.

        Args:
            pooling: how each prompt is pooled; None for the log-probabilities of its tokens.
            param: the field name of the prompts, for errors.
        """
        manager, name = self._manager, f"pool-{uuid.uuid4().hex}"
        step = min(MAX_OPEN, manager.config.scheduler.max_queued_requests + manager.limits.max_running_requests)
        options = RequestOptions(
            top_logprobs=0 if pooling is None else -1,
            prompt_logprobs=pooling is None,
            priority=body.priority,
            cache_salt=body.cache_salt,
            pooling=pooling,
        )
        done: list[Pooled] = []
        for start in range(0, len(prompts), step):
            part = prompts[start : start + step]
            rids = [f"{name}-{start + index}" for index in range(len(part))]
            params = {"prompt": param, "input_ids": param}
            call = Call(name=name, prompts=part, sampling=[NO_OUTPUT] * len(part), rids=rids, options=options, params=params)
            async with await Generations.start(manager, call) as group:
                for generation, (out,) in zip(group.each, await group.texts(), strict=True):
                    done.append(Pooled.of(out, len(generation.prompt_ids)))
        return done


def usage(pooled: Sequence[Pooled]) -> dict[str, int]:
    """OpenAI's `usage` of a call without output."""
    tokens = sum(each.prompt_tokens for each in pooled)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


class EmbeddingApi(PoolingApi):
    """Embeds prompts: pooled hidden states of the decoder, scaled to length 1."""

    async def create(self, body: EmbeddingBody) -> Response:
        """Embed one input or several."""
        self._model.check(body.model)
        size, pooling = self._manager.model_config.hidden_size, Pooling(kind=self._manager.config.server.embedding_pooling)
        dimensions = size if body.dimensions is None else body.dimensions
        if dimensions > size:
            raise InvalidField("dimensions", dimensions, f"at most {size}, the size of the model's hidden states")
        pooled = await self._run(body, body.prompts, pooling, "input")
        data = [
            {"object": "embedding", "index": index, "embedding": _shown(unit(each.vector[:dimensions]), body.encoding_format)}
            for index, each in enumerate(pooled)
        ]
        return json_response({"object": "list", "data": data, "model": self._model.name, "usage": usage(pooled)})


def unit(vector: list[float]) -> npt.NDArray[np.float64]:
    """`vector` scaled to length 1; zeros stay zeros."""
    values = np.array(vector, dtype=np.float64)
    return values / max(float(np.linalg.norm(values)), np.finfo(np.float64).tiny)


def _shown(vector: npt.NDArray[np.float64], encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


class ScoreApi(PoolingApi):
    """Scores items by the next-token probabilities of labels."""

    async def create(self, body: ScoreBody) -> Response:
        """Score every item."""
        self._model.check(body.model)
        labels = Pooling(kind="labels", label_ids=tuple(body.label_token_ids))
        # All prompts contain the query, so its length is checked before they are built.
        tokens = len(body.query) // self._manager.tokenizer.longest_token if isinstance(body.query, str) else len(body.query)
        self._manager.new_cost().check_tokens(tokens * (1 if isinstance(body.items, str) else len(body.items)), "query")
        pooled = await self._run(body, body.prompts, labels, "items")
        scores = [probabilities(each.vector, body.temperature if body.apply_softmax else None) for each in pooled]
        return json_response({"object": "scoring", "scores": scores, "model": self._model.name, "usage": usage(pooled)})


def probabilities(logprobs: list[float], temperature: float | None) -> list[float]:
    """The probabilities, or with a temperature the softmax over the labels."""
    values = np.array(logprobs, dtype=np.float64)
    if temperature is None:
        return np.exp(values).tolist()
    with np.errstate(over="ignore"):  # at a low temperature the probability of an unlikely label becomes 0
        shares = np.exp((values - values.max()) / temperature)
    return (shares / shares.sum()).tolist()


class RerankApi(PoolingApi):
    """Ranks documents by the likelihood of the query given each document."""

    async def create(self, body: RerankBody) -> Response:
        """Rank the documents, best first."""
        self._model.check(body.model)
        pooled, length = await self._likelihoods(body)
        ranks = [
            {"index": index, "score": likelihood(each.vector[-length:]), "meta_info": {"prompt_tokens": each.prompt_tokens}}
            | ({"document": body.documents[index]} if body.return_documents else {})
            for index, each in enumerate(pooled)
        ]
        ranks.sort(key=lambda rank: rank["score"], reverse=True)
        return json_response(ranks[: body.top_n])

    async def _likelihoods(self, body: RerankBody) -> tuple[list[Pooled], int]:
        """Return the log-probabilities of every prompt, and the number of query tokens at the end of each."""
        tokenize = self._manager.encoder.encode
        query = await tokenize(" " + body.query, add_special_tokens=False)
        self._manager.new_cost().check_tokens(len(query) * len(body.documents), "query")
        contexts = [await tokenize(CONTEXT.format(document=document)) for document in body.documents]
        return await self._run(body, [[*context, *query] for context in contexts], None, "documents"), len(query)


def likelihood(logprobs: list[float]) -> float:
    """The geometric mean of the probabilities, from 0 to 1."""
    return math.exp(sum(logprobs) / len(logprobs))
