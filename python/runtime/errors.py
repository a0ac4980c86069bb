"""The error tree: every way a request or a start can fail, each with its HTTP status."""

from __future__ import annotations


class ServingError(Exception):
    """A failure with an answer for the person who caused or met it.

    Attributes:
        status: the HTTP status of the answer.
        kind: OpenAI's `error.type`.
        param: the request field at fault, if one is.
        retry_after: seconds for the `Retry-After` header, if waiting helps.
    """

    status = 500
    kind = "server_error"
    retry_after: int | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestError(ServingError):
    """The request can never succeed as it is."""

    status = 400
    kind = "invalid_request_error"


class InvalidField(RequestError):
    """One field's value is outside what the server accepts."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field} is {shown}; it must be {limit}", param=field)


class UnsupportedField(RequestError):
    """The field belongs to the protocol, and this server does not implement it."""

    def __init__(self, field: str, why: str = "this server does not support it") -> None:
        super().__init__(f"{field}: {why}; leave it out", param=field)


class ContextTooLong(RequestError):
    """The prompt leaves no room for one output token."""

    def __init__(self, prompt_len: int, max_context_len: int) -> None:
        super().__init__(f"prompt has {prompt_len} tokens; the most is {max_context_len - 1}", param="prompt")


class NeverFits(RequestError):
    """The request needs more KV cache than the server owns."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            f"the request needs {needed} KV slots and the server has {available}; "
            "shorten it, or start the server with a larger --mem-fraction-static or --max-total-tokens"
        )


class Unauthorized(ServingError):
    """No API key, or a wrong one."""

    status = 401
    kind = "authentication_error"

    def __init__(self) -> None:
        super().__init__("missing or wrong API key; send 'Authorization: Bearer KEY'")


class ModelNotFound(ServingError):
    """The request names a model that is not served here."""

    status = 404
    kind = "not_found_error"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"model {asked[:80]!r} is not served here; the model is {served!r}", param="model")


class BodyTooLarge(ServingError):
    """The request body is over the limit."""

    status = 413
    kind = "invalid_request_error"

    def __init__(self, limit_mib: int) -> None:
        super().__init__(f"the request body is larger than {limit_mib} MiB")


class CacheBusy(RequestError):
    """The prefix cache cannot be flushed while requests use it."""

    status = 409

    def __init__(self, requests: int) -> None:
        super().__init__(f"The cache cannot be flushed while requests are running ({requests} now). Try again when they have ended.")


class QueueFull(ServingError):
    """As many requests wait as the server admits."""

    status = 429
    kind = "rate_limit_error"
    retry_after = 1

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} requests are already waiting (--max-queued-requests); try again later")


class ServerDraining(ServingError):
    """The server is shutting down and takes no new work."""

    status = 503
    kind = "server_error"
    retry_after = 10

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class WorkerDied(ServingError):
    """A process of the server is gone; nothing can be answered any more."""

    status = 503
    kind = "server_error"

    def __init__(self, who: str) -> None:
        super().__init__(f"the {who} process died; the server is stopping")


class SlowReader(ServingError):
    """A client reads its stream so slowly that the server gave it up."""

    status = 408
    kind = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} parts of this stream wait to be read, the most the server keeps; the stream was ended")


class StepFailed(ServingError):
    """One forward step failed; its requests are lost, the server goes on."""

    status = 500
    kind = "server_error"

    def __init__(self, detail: str = "the forward step of this request failed") -> None:
        super().__init__(detail)


class ConfigError(ServingError):
    """What the user asked for at start cannot be done: one line, exit 2."""

    kind = "config_error"
