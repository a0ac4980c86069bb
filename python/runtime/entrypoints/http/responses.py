"""JSON answers, and errors in OpenAI's form or, on Anthropic's paths, in Anthropic's form."""

from __future__ import annotations

from typing import Any, Literal

import orjson
from pydantic import BaseModel
from starlette.responses import Response

from runtime.errors import ContextTooLong, ServingError

ANTHROPIC_PATH = "/v1/messages"
"""Paths with this prefix answer errors in Anthropic's form."""
INTERNAL = "The server failed to answer this request; see its log."
KINDS_BY_STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

ANTHROPIC_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error"}
ANTHROPIC_KINDS |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


class ErrorDetail(BaseModel):
    """One error. `param` names the request field at fault; `code` identifies the error; `status` repeats the HTTP status for streams."""

    message: str
    type: str
    param: str | None
    code: str | None
    status: int


class ErrorBody(BaseModel):
    """The answer to a request that failed."""

    error: ErrorDetail


class AnthropicDetail(BaseModel):
    """One error in Anthropic's form."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The answer to a request on Anthropic's paths that failed."""

    type: Literal["error"]
    error: AnthropicDetail


def error_form(message: str, kind: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An `ErrorBody`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "status": status}}


def error_object(error: ServingError) -> dict[str, Any]:
    """The `ErrorBody` of an error."""
    return error_form(str(error), error.kind, error.status, error.param, error.code)


def internal_error() -> dict[str, Any]:
    """The `ErrorBody` of a fault in the server. Only the log has details."""
    return error_form(INTERNAL, "server_error", 500, code="internal_error")


def anthropic_error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """An `AnthropicError`. Agents recognise the words "prompt is too long" and shorten the conversation."""
    kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if code == ContextTooLong.code:
        message = f"Prompt is too long. {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_body(form: dict[str, Any], path: str) -> dict[str, Any]:
    """Convert an `ErrorBody` to the error form of `path`."""
    detail = form["error"]
    return anthropic_error(detail["status"], detail["message"], detail["code"]) if path.startswith(ANTHROPIC_PATH) else form


def error_response(error: ServingError, path: str) -> Response:
    """The answer to a request for `path` that failed before its first byte."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error_object(error), path), error.status, headers)


def status_response(status: int, message: str, headers: dict[str, str] | None = None, path: str = "") -> Response:
    """The answer to a request that no endpoint handles."""
    kind = KINDS_BY_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return json_response(error_body(error_form(message, kind, status), path), status, headers)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer with a JSON value as its body."""
    return Response(orjson.dumps(value), status, headers, "application/json")
