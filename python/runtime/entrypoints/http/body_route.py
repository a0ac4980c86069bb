"""A FastAPI route that reads its JSON body within the server's limits and words validation errors as sentences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from runtime.entrypoints.http.body_schema import BodySchema
from runtime.entrypoints.http.limits import read_json
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
    """A route with one parameter `body`, a pydantic model that FastAPI validates.

    The answer lists unknown fields in a header; with --strict-request-fields they are refused.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handle = super().get_route_handler()
        schema = BodySchema(get_type_hints(self.endpoint)["body"])
        logged: set[str] = set()

        async def route(request: Request) -> Response:
            value = await read_json(request, request.app.state.body_limits)
            if request.app.state.strict_request_fields and (names := _unknown(schema, value)):
                raise UnknownFields(names)
            try:
                try:
                    response = await handle(_ParsedRequest(request, value))
                except RequestValidationError as error:
                    if not any(isinstance(one["input"], float) for one in error.errors()):
                        raise
                    response = await handle(_ParsedRequest(request, whole_numbers(value)))
            except RequestValidationError as error:
                raise schema.refusal([{**one, "loc": one["loc"][1:]} for one in error.errors()]) from None
            if names := _unknown(schema, value):
                response.headers[IGNORED_HEADER] = ", ".join(names)[:MAX_HEADER_CHARS].rstrip(", ")  # a header must not end with a space
                _log_once(self.path, names, logged)
            return response

        return route


class _ParsedRequest(Request):
    """A request whose body is already parsed; FastAPI treats it as JSON whatever its Content-Type says."""

    def __init__(self, request: Request, value: object) -> None:
        headers = [(name, text) for name, text in request.scope["headers"] if name != b"content-type"]
        super().__init__({**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}, request.receive)
        self._value = value

    async def body(self) -> bytes:
        """Return a non-empty body, so that FastAPI calls `json`."""
        return b"parsed"

    async def json(self) -> Any:
        """Return the parsed value."""
        return self._value


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
