"""The pooling endpoints: /v1/embeddings, and /v1/score and /v1/rerank in SGLang's form.

/v1/rerank scores a document by the query's likelihood per token given the document (Sachan et al. 2022, arXiv:2204.07496). Any language
model can compute it without further training.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

import numpy as np
from starlette.responses import Response

from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.entrypoints.pooling.pooler import Pooled, Pooler
from runtime.entrypoints.pooling.protocol import EmbeddingBody, RerankBody, ScoreBody
from runtime.managers.tokenizer_manager import TokenizerManager

CONTEXT = "Passage: {document}\nA question that this passage answers:"


class PoolingApi:
    """Base of the pooling endpoints, which run prompts without generating text."""

    def __init__(self, manager: TokenizerManager, model: ServedModel) -> None:
        self._pooler, self._model = Pooler(manager), model


def usage(pooled: Sequence[Pooled]) -> dict[str, int]:
    """OpenAI's `usage` of a call without output."""
    tokens = sum(each.prompt_tokens for each in pooled)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


class EmbeddingApi(PoolingApi):
    """Embeds prompts: pooled hidden states of the decoder, scaled to length 1."""

    async def create(self, body: EmbeddingBody) -> Response:
        """Embed one input or several."""
        self._model.check(body.model)
        pooled = await self._pooler.embed(body)
        data = [
            {"object": "embedding", "index": index, "embedding": _shown(each.vector, body.encoding_format)}
            for index, each in enumerate(pooled)
        ]
        return json_response({"object": "list", "data": data, "model": self._model.name, "usage": usage(pooled)})


def _shown(vector: list[float], encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode()
    return vector


class ScoreApi(PoolingApi):
    """Scores items by the next-token probabilities of labels."""

    async def create(self, body: ScoreBody) -> Response:
        """Score every item."""
        self._model.check(body.model)
        pooled = await self._pooler.score(body)
        scores = [each.vector for each in pooled]
        return json_response({"object": "scoring", "scores": scores, "model": self._model.name, "usage": usage(pooled)})


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
        tokenize = self._pooler.manager.encoder.encode
        query = await tokenize(" " + body.query, add_special_tokens=False)
        self._pooler.manager.new_cost().check_tokens(len(query) * len(body.documents), "query")
        contexts = [await tokenize(CONTEXT.format(document=document)) for document in body.documents]
        return await self._pooler.run(body, [[*context, *query] for context in contexts], None, "documents"), len(query)


def likelihood(logprobs: list[float]) -> float:
    """The geometric mean of the probabilities, from 0 to 1."""
    return math.exp(sum(logprobs) / len(logprobs))
