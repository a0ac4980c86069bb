"""Errors that the scheduler reported."""

from __future__ import annotations

from runtime.errors import GrammarError, QueueFull, QueueTimeout, RequestError, ServingError, StepFailed
from runtime.managers.messages import CallFailed, Finish
from runtime.sampling_params import GRAMMAR_KINDS


def request_failure(finish: Finish) -> ServingError:
    """The error of a request that the scheduler refused or failed."""
    if finish.param in GRAMMAR_KINDS:
        return GrammarError(finish.param, finish.message)
    error = _error(finish.message, finish.status, finish.code, StepFailed)
    error.param = finish.param
    if finish.status == QueueFull.status:
        error.kind = QueueFull.kind
    if finish.status in (QueueFull.status, QueueTimeout.status):
        error.retry_after = QueueFull.retry_after
    return error


def call_failure(failed: CallFailed) -> ServingError:
    """The error of an administrative call."""
    return _error(failed.message, failed.status, failed.code, ServingError)


def _error(message: str, status: int, code: str | None, server_error: type[ServingError]) -> ServingError:
    error = RequestError(message) if status < 500 else server_error(message)
    error.status, error.code = status, code or error.code
    return error
