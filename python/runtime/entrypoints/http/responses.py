"""JSON answers, and errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import BaseModel
from starlette.responses import Response

from runtime.errors import ServingError

KINDS_BY_STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    """One error. `param` names the request field at fault, `code` the error; `status` repeats the HTTP status for streams."""

    message: str
    type: str
    param: str | None
    code: str | None
    status: int


class ErrorBody(BaseModel):
    """The answer to a request that failed."""

    error: ErrorDetail


def error_form(message: str, kind: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An `ErrorBody`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "status": status}}


def error_object(error: ServingError) -> dict[str, Any]:
    """The `ErrorBody` of an error."""
    return error_form(str(error), error.kind, error.status, error.param, error.code)


def internal_error() -> dict[str, Any]:
    """The `ErrorBody` of a fault in the server, which only its log describes."""
    return error_form("The server failed to answer this request; see its log.", "server_error", 500, code="internal_error")


def error_response(error: ServingError) -> Response:
    """The answer to a request that failed before its first byte."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_object(error), error.status, headers)


def status_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """The answer to a request that no endpoint takes."""
    kind = KINDS_BY_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return json_response(error_form(message, kind, status), status, headers)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Any JSON value."""
    return Response(orjson.dumps(value), status, headers, "application/json")
