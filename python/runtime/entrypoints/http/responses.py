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


def error_body(error: ServingError, path: str = "") -> dict[str, Any]:
    """The error in the form of `path`."""
    if path.startswith(ANTHROPIC_PATH):
        return anthropic_error(error)
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code, "status": error.status}}


def anthropic_error(error: ServingError) -> dict[str, Any]:
    """An `AnthropicError`. Agents recognise the words "prompt is too long" and shorten the conversation."""
    kind = ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = f"Prompt is too long. {error}" if error.code == ContextTooLong.code else str(error)
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: ServingError, path: str, headers: dict[str, str] | None = None, form: type[Response] = Response) -> Response:
    """The answer to a request for `path` that failed before its first byte."""
    headers = headers or {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return form(orjson.dumps(error_body(error, path)), error.status, headers, "application/json")


def json_response(value: object) -> Response:
    """An answer with a JSON value as its body."""
    return Response(orjson.dumps(value), media_type="application/json")
