"""POST /v1/embeddings."""

from __future__ import annotations

import base64

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import until_gone
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.entrypoints.pooling.pooler import Pooler, usage
from runtime.entrypoints.pooling.protocol import EmbeddingBody
from runtime.errors import InvalidField
from runtime.pooling import Pooling, PoolingName


class EmbeddingApi:
    """Embeds prompts: pooled hidden states of the decoder, of length 1."""

    def __init__(self, pooler: Pooler, model: ServedModel, pooling: PoolingName, hidden_size: int) -> None:
        self._pooler = pooler
        self._model = model
        self._pooling = Pooling(kind=pooling)
        self._hidden_size = hidden_size

    async def create(self, request: Request, body: EmbeddingBody) -> Response:
        """Embed one input or several."""
        self._model.check(body.model)
        dimensions = self._hidden_size if body.dimensions is None else body.dimensions
        if dimensions > self._hidden_size:
            raise InvalidField("dimensions", dimensions, f"at most {self._hidden_size}, the size of the model's hidden states")
        pooled = await until_gone(request, self._pooler.run(body, body.prompts, self._pooling, "input"))
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
