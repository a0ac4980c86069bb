"""The model that this server serves, in OpenAI's form."""

from __future__ import annotations

import time
from typing import Any

from starlette.responses import Response

from runtime.entrypoints.http.responses import json_response
from runtime.errors import ModelNotFound
from runtime.managers.tokenizer_manager import TokenizerManager


class ServedModel:
    """Answers /v1/models and gives the first fields of every answer.

    Attributes:
        name: the name of the model in the API.
        sampling: the defaults of requests to OpenAI's endpoints.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self.name = manager.config.model.served_model_name
        self._names = {self.name, *manager.config.model.aliases}
        self.sampling = manager.config.model.default_sampling_params
        self._card = {
            "id": self.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "talon",
            "root": self.name,
            "max_model_len": manager.max_context_len,
            "weights": manager.config.weights,
            "default_sampling_params": self.sampling.complete(),
        }

    async def models(self) -> Response:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [self._card]})

    async def one_model(self, model: str) -> Response:
        """GET /v1/models/{model}; 404 for any other model."""
        self.check(model)
        return json_response(self._card)

    def check(self, asked: str | None) -> None:
        """Raise `ModelNotFound` unless `asked` is a name of this model, empty or None."""
        if asked and asked.rstrip("/") not in self._names:
            raise ModelNotFound(asked, self.name)

    def head(self, call: str, kind: str) -> dict[str, Any]:
        """The first fields of an answer or a chunk."""
        return {"id": call, "object": kind, "created": int(time.time()), "model": self.name}
