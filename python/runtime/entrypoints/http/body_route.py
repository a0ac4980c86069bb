"""A FastAPI route that reads its JSON body within the server's limits and words validation errors as sentences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints
from urllib.parse import quote

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from runtime.entrypoints.http.body_schema import BodySchema, read_body
from runtime.entrypoints.http.limits import read_json
from runtime.entrypoints.http.sse import until_gone
from runtime.errors import UnknownFields

log = logging.getLogger(__name__)

IGNORED_HEADER = "X-Ignored-Fields"
"""Names the unknown fields of a request, percent-encoded and separated by commas."""
MAX_HEADER_CHARS = 1024
MAX_NAMED = 32
MAX_NAME_CHARS = 64
MAX_EXACT = 2**53
"""Below it, a float with an integer value is exact."""
MAX_LOGGED = 256
"""Most names of unknown fields that are logged; each is logged once."""


class BodyRoute(APIRoute):
    """A route whose only parameter is `body`, a pydantic model. FastAPI describes it, and takes no part in its calls.

    A call is cancelled if its client disconnects. The answer lists unknown fields in a header; with --strict-request-fields they are
    refused.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Read the body and call the endpoint."""
        model = get_type_hints(self.endpoint)["body"]
        schema, logged = BodySchema(model), set[str]()

        async def route(request: Request) -> Response:
            value = await read_json(request, request.app.state.body_limits)
            if request.app.state.strict_request_fields and (names := _unknown(schema, value)):
                raise UnknownFields(names)
            response = await until_gone(request, self.endpoint(_validated(model, value, request.app.state.max_context_len)))
            if names := _unknown(schema, value):
                response.headers[IGNORED_HEADER] = ", ".join(names)[:MAX_HEADER_CHARS].rstrip(", ")  # a header must not end with a space
                _log_once(self.path, names, logged)
            return response

        return route


def _validated(model: type[BaseModel], value: object, context: int) -> BaseModel:
    """The body. Floats are read as integers if one of them is refused."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors()
    if not any(isinstance(one["input"], float) for one in errors):
        raise BodySchema(model, context).refusal(errors)
    return read_body(model, whole_numbers(value), context)


def whole_numbers(value: Any) -> Any:
    """A JSON value with floats such as 3.0 replaced by 3: JSON and JSON schemas do not distinguish them.

    Floats from `MAX_EXACT` on stay, because the parser may have rounded them.
    """
    if isinstance(value, dict):
        return {name: whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and abs(value) < MAX_EXACT and value.is_integer() else value


def _unknown(schema: BodySchema, value: object) -> list[str]:
    """Names of unknown fields, percent-encoded for a header."""
    names: dict[str, None] = {}
    for name in schema.unknown(value):
        names[quote(name[:MAX_NAME_CHARS]) or '""'] = None
        if len(names) == MAX_NAMED:
            break
    return list(names)


def _log_once(path: str, names: list[str], logged: set[str]) -> None:
    new = [name for name in names if name not in logged][: MAX_LOGGED - len(logged)]
    if new:
        logged.update(new)
        log.warning("%s: ignoring unknown request fields: %s", path, ", ".join(new))
