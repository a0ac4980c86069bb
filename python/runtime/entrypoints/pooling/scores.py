"""POST /v1/score: probabilities of label tokens after query and item, as SGLang's."""

from __future__ import annotations

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import until_gone
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.entrypoints.pooling.pooler import Pooler, usage
from runtime.entrypoints.pooling.protocol import ScoreBody
from runtime.pooling import Pooling


class ScoreApi:
    """Scores items by the next-token probabilities of labels."""

    def __init__(self, pooler: Pooler, model: ServedModel) -> None:
        self._pooler = pooler
        self._model = model

    async def create(self, request: Request, body: ScoreBody) -> Response:
        """Score every item."""
        self._model.check(body.model)
        labels = Pooling(kind="labels", label_ids=tuple(body.label_token_ids))
        self._pooler.check_shared(body.query, 1 if isinstance(body.items, str) else len(body.items), "query")
        pooled = await until_gone(request, self._pooler.run(body, body.prompts, labels, "items"))
        scores = [probabilities(each.vector, body.temperature if body.apply_softmax else None) for each in pooled]
        return json_response({"object": "scoring", "scores": scores, "model": self._model.name, "usage": usage(pooled)})


def probabilities(logprobs: list[float], temperature: float | None) -> list[float]:
    """exp of each; with a temperature their softmax."""
    values = np.array(logprobs, dtype=np.float64)
    if temperature is None:
        return np.exp(values).tolist()
    with np.errstate(over="ignore"):  # the share of an unlikely label at a low temperature is 0
        shares = np.exp((values - values.max()) / temperature)
    return (shares / shares.sum()).tolist()
