"""JSON answers, and failures in OpenAI's error form."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from runtime.errors import ServingError

KINDS_BY_STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_object(error: ServingError) -> dict[str, object]:
    """`{"error": {message, type, param, code}}`; `code` is the name of the failure."""
    return error_form(str(error), error.kind, error.status, error.param, type(error).__name__)


def error_form(message: str, kind: str, status: int, param: str | None = None, name: str | None = None) -> dict[str, object]:
    """The form itself, with the HTTP status for streams, where no status line can tell it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": name, "status": status}}


def internal_error() -> dict[str, object]:
    """A failure of the server's own; what happened is in its log, not in the answer."""
    return error_form("the server failed to answer this request; its log says why", "server_error", 500, name="InternalError")


def error_response(error: ServingError) -> Response:
    """The answer to a request that failed before its first byte."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_object(error), error.status, headers)


def status_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """The answer to a request that no route takes."""
    kind = KINDS_BY_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return json_response(error_form(message, kind, status), status, headers)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Any JSON value."""
    return Response(orjson.dumps(value), status, headers, "application/json")
