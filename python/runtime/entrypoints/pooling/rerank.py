"""POST /v1/rerank: documents in the order of how well they answer a query.

A score is the query's likelihood given the document, per token: Sachan et al. 2022, arXiv:2204.07496. It needs no training
beyond language modelling, so any decoder can do it.
"""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import Response

from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import until_gone
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.entrypoints.pooling.pooler import Pooled, Pooler
from runtime.entrypoints.pooling.protocol import RerankBody
from runtime.managers.tokenizer_manager import TokenizerManager

CONTEXT = "Passage: {document}\nA question that this passage answers:"


class RerankApi:
    """Ranks documents by the likelihood of the query after each."""

    def __init__(self, pooler: Pooler, manager: TokenizerManager, model: ServedModel) -> None:
        self._pooler = pooler
        self._manager = manager
        self._model = model

    async def create(self, request: Request, body: RerankBody) -> Response:
        """Rank the documents, the likeliest first."""
        self._model.check(body.model)
        pooled, length = await until_gone(request, self._run(body))
        ranks = [
            {"index": index, "score": likelihood(each.vector[-length:]), "meta_info": {"prompt_tokens": each.prompt_tokens}}
            | ({"document": body.documents[index]} if body.return_documents else {})
            for index, each in enumerate(pooled)
        ]
        ranks.sort(key=lambda rank: rank["score"], reverse=True)
        return json_response(ranks[: body.top_n])

    async def _run(self, body: RerankBody) -> tuple[list[Pooled], int]:
        """The prompts' log-probabilities, and how many of the last ones belong to the query."""
        tokenize = self._manager.encoder.encode
        query = await tokenize(" " + body.query, add_special_tokens=False)
        self._manager.new_cost().check_tokens(len(query) * len(body.documents), "query")
        contexts = [await tokenize(CONTEXT.format(document=document)) for document in body.documents]
        return await self._pooler.run(body, [[*context, *query] for context in contexts], None, "documents"), len(query)


def likelihood(logprobs: list[float]) -> float:
    """The geometric mean of the probabilities, between 0 and 1."""
    return math.exp(sum(logprobs) / len(logprobs))
