"""The errors that a request or a start can end with, each with its HTTP status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

MAX_SHOWN = 60
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's `error.type` by status, of those that have their own."""
FAILED, BAD_USE, INTERRUPTED = 1, 2, 130
"""Exit statuses of a command: after a failure, for a mistake in the flags or the model, and after Ctrl-C."""


class ServingError(Exception):
    """A failure that has an answer for the client.

    Attributes:
        status: the HTTP status of the answer.
        code: OpenAI's `error.code`; null where OpenAI has no word for the error.
        message: what is wrong.
        param: the request field at fault, if there is one.
        retry_after: seconds for the `Retry-After` header, if a retry can help.
    """

    status = 500
    code: str | None = "internal_error"
    retry_after: int | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def kind(self) -> str:
        """OpenAI's `error.type`."""
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


class StatusError(ServingError):
    """A failure that has nothing but its HTTP status and a message."""

    code = None

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestError(ServingError):
    """The request can never succeed as it is."""

    status = 400
    code = None


class InvalidField(RequestError):
    """The value of one field is outside its limits.

    Args:
        field: its name.
        value: what it holds.
        limit: completes the sentence "FIELD must be ...".
        subject: what the sentence calls the field, where the protocols have different names for it.
        at: where in the field `value` is, if that is not plain.
    """

    code = "invalid_value"

    def __init__(self, field: str, value: object, limit: str, *, subject: str | None = None, at: str = "") -> None:
        super().__init__(f"{subject or field} must be {limit}; got {shown(value)}{at and f' at {at}'}.", field)


class UnknownToken(InvalidField):
    """A token id is outside the model's vocabulary. `subject`: replaces "FIELD names"."""

    def __init__(self, field: str, token: int, vocab_size: int, subject: str | None = None) -> None:
        RequestError.__init__(self, f"{subject or f'{field} names'} the token id {shown(token)}; ids go from 0 to {vocab_size - 1}.", field)


class UnsupportedField(RequestError):
    """The field belongs to the protocol, but this server does not support it."""

    code = "unsupported_parameter"

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} is not supported: {why}. Leave it out.", field)


class UnsupportedType(UnsupportedField):
    """This server does not support a value of a field `type`. `why` says what it supports."""

    def __init__(self, field: str, kind: str, why: str) -> None:
        RequestError.__init__(self, f"{field} {shown(kind)} is not supported; {why}.", field)


class FieldNeedsFlag(UnsupportedField):
    """The server takes the field only if it was started with a flag."""

    def __init__(self, field: str, flag: str) -> None:
        RequestError.__init__(self, f"{field} requires a server started with {flag}.", field)


class GrammarError(RequestError):
    """The grammar of a request cannot be used.

    Args:
        kind: the field of `SamplingParams` that holds it; protocols with another name for it change `param`.
        reason: completes the sentence "The PARAM cannot be used: ...".
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason, kind)

    def __str__(self) -> str:
        return f"The {self.param} cannot be used: {self.message}"


class MissingField(RequestError):
    """A field that the protocol requires is not there."""

    code = "missing_required_parameter"

    def __init__(self, field: str, param: str) -> None:
        super().__init__(f"{field} is required.", param)


class UnknownFields(RequestError):
    """The request has fields that no protocol knows, and --strict-request-fields refuses them."""

    code = "unknown_parameter"

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"Unknown request fields: {', '.join(names)}. Correct or remove them.", names[0])


class ContextTooLong(RequestError):
    """The prompt leaves no room for an output token. `at_least`: its tokens were not all counted."""

    code = "context_length_exceeded"

    def __init__(self, prompt_len: int, max_context_len: int, at_least: bool = False, param: str = "prompt") -> None:
        super().__init__(
            f"This model's maximum context length is {max_context_len} tokens, prompt and output together; "
            f"the prompt has {'at least ' * at_least}{prompt_len}. "
            f"Shorten the prompt to at most {max_context_len - 1} tokens.",
            param,
        )


class TextTooLong(ContextTooLong):
    """The prompt has more characters than any prompt that fits in the context."""

    def __init__(self, characters: int, limit: int, max_context_len: int, param: str = "prompt") -> None:
        RequestError.__init__(
            self,
            f"This model's maximum context length is {max_context_len} tokens, which hold at most {limit} characters; "
            f"the prompt has {characters}. Shorten the prompt.",
            param,
        )


class NeverFits(RequestError):
    """The request needs more KV cache than the server has."""

    code = "context_length_exceeded"

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            f"The request needs {needed} KV slots; the server has {available}. "
            "Shorten it, or start the server with a larger --mem-fraction-static or --max-total-tokens."
        )


class Unauthorized(ServingError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"

    def __init__(self, message: str = "The API key is missing or wrong. Send the header 'Authorization: Bearer KEY'.") -> None:
        super().__init__(message)


class NotAdmin(Unauthorized):
    """The API key is right, but does not open the administration paths."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} needs an admin key. Send one of them in the header 'Authorization: Bearer KEY'.")


class ModelNotFound(ServingError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"This server does not serve the model {shown(asked)}; it serves {shown(served)}.", "model")


class BodyTooLarge(ServingError):
    """The request body is over the limit."""

    status = 413
    code = "request_too_large"

    def __init__(self, limit_mib: int) -> None:
        super().__init__(f"The request body is larger than {limit_mib} MiB (--max-body-mib).")


class BodyTooComplex(BodyTooLarge):
    """The request body has too many values to check without keeping other requests waiting."""

    def __init__(self, values: int, limit_ms: int) -> None:
        ServingError.__init__(
            self,
            f"The request body has at least {values} values, which take longer than {limit_ms} ms to check (--max-parse-ms). "
            "Split it into several requests.",
        )


class CacheBusy(RequestError):
    """The prefix cache cannot be flushed while requests use it."""

    status = 409
    code = "cache_busy"

    def __init__(self, requests: int) -> None:
        super().__init__(f"The cache cannot be flushed while requests are running ({requests} now). Try again when they have ended.")


class WrongProfile(RequestError):
    """A profile is already running, or none is."""

    status = 409


class RateLimited(ServingError):
    """The server, or a key, takes no more requests for a while."""

    status = 429
    retry_after = 1
    code = "rate_limit_exceeded"


class QueueFull(RateLimited):
    """The waiting queue is full."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The queue is full: {limit} requests are waiting (--max-queued-requests). Try again later.")


class BodiesFull(RateLimited):
    """The large bodies that are being read take all room."""

    def __init__(self) -> None:
        super().__init__("Too many large request bodies are arriving. Try again later.")


class KeyLimitReached(RateLimited):
    """An API key has used up one of its limits."""

    def __init__(self, name: str, limit: str, retry_after: int) -> None:
        super().__init__(f"The API key {name} has reached its limit of {limit}. Try again in {retry_after} s.")
        self.retry_after = retry_after


class QueuedTokensFull(RateLimited):
    """The prompts that wait have too many tokens."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The queue is full: its prompts have {limit} tokens (--max-queued-tokens). Try again later.")


class RequestTimeout(ServingError):
    """The request took too long."""

    status = 504
    code = "timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request took longer than {seconds:g} seconds (--request-timeout). Lower max_tokens.")


class Unavailable(ServingError):
    """The server cannot answer requests."""

    status = 503
    code = "service_unavailable"


class QueueTimeout(Unavailable):
    """The request waited too long for its first step."""

    retry_after = 1

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request waited longer than {seconds:g} seconds (--queue-timeout). Try again later.")


class CompilerBusy(Unavailable):
    """Other grammars keep the compiler busy."""

    retry_after = 1

    def __init__(self) -> None:
        super().__init__("The server is compiling other grammars. Try again later.")


class GrammarBackendFailed(ServingError):
    """The server could not load its grammar backend. `reason`: why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"This server cannot follow a grammar, because its grammar backend could not be loaded: {reason.rstrip('.')}.")


class ServerDraining(Unavailable):
    """The server is shutting down and takes no new work."""

    retry_after = 10

    def __init__(self) -> None:
        super().__init__("The server is shutting down.")


class WorkerDied(Unavailable):
    """A process of the server died; the server is about to stop."""

    def __init__(self, process: str) -> None:
        super().__init__(f"The {process} process died; the server is stopping.")


class ClientTooSlow(ServingError):
    """The client sends or reads too slowly."""

    status = 408
    code = "timeout"


class SlowReader(ClientTooSlow):
    """A client reads its stream too slowly, so the server ended it."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The stream has ended because the client did not read it: {limit} parts were unread.")


class RequestAborted(ServingError):
    """An administrator aborted a request of which no part can be shown."""

    status = 503
    code = "request_aborted"

    def __init__(self) -> None:
        super().__init__("The request was aborted.")


class StepFailed(ServingError):
    """One forward step failed; its requests are lost, and the server continues."""

    def __init__(self, detail: str = "The forward step of this request failed.") -> None:
        super().__init__(detail)


class ServerFault(ServingError):
    """Something went wrong that no later step can mend; the server ends."""


class RankFailed(ServerFault):
    """One rank of a model failed in a step, so that the ranks no longer hold the same."""

    def __init__(self, rank: int, step: int, error: Exception) -> None:
        super().__init__(f"rank {rank} failed in step {step}: {type(error).__name__}: {error}")


class RanksDiffer(ServerFault):
    """The ranks of a model committed different tokens."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the ranks committed different tokens in step {step - 1}, found in step {step}")


class ConfigError(ServingError):
    """The server cannot start as it was asked to: one line, exit status 2."""


def report(error: ServingError | KeyboardInterrupt, line: Callable[[str], str] = str) -> int:
    """Print the line with which a command ends, in the form that `line` gives it; returns its exit status. Ctrl-C needs no line."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    print(line(f"talon: {error}"), file=sys.stderr)
    return BAD_USE if isinstance(error, ConfigError) else FAILED


def shown(value: object) -> str:
    """`value` in JSON's words; a large value by its size."""
    if isinstance(value, str):
        # Lone surrogates and control characters are escaped.
        return (
            json.dumps(value, ensure_ascii=not value.isprintable()) if len(value) <= MAX_SHOWN else f"a string of {len(value)} characters"
        )
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else "an integer of more than 64 bits"
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)} items"
    return f"an object of {len(value)} entries" if isinstance(value, dict) else str(value)[:MAX_SHOWN]
