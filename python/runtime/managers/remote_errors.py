"""Exceptions for the errors that the scheduler reported."""

from __future__ import annotations

from runtime.errors import GrammarError, QueueFull, QueueTimeout, RequestError, ServingError, StepFailed
from runtime.managers.messages import CallFailed, Finish
from runtime.sampling_params import GRAMMAR_KINDS


def request_failure(finish: Finish) -> ServingError:
    """The error of a request that the scheduler refused or failed."""
    if finish.param in GRAMMAR_KINDS:
        return GrammarError(finish.param, finish.message)
    error = _error(finish, StepFailed)
    if finish.status in (QueueFull.status, QueueTimeout.status):
        error.retry_after = QueueFull.retry_after
    return error


def call_failure(failed: CallFailed) -> ServingError:
    """The error of an administrative call."""
    return _error(failed, ServingError)


def _error(failed: Finish | CallFailed, server_error: type[ServingError]) -> ServingError:
    error = RequestError(failed.message) if failed.status < 500 else server_error(failed.message)
    error.status, error.code, error.param = failed.status, failed.code or error.code, failed.param
    return error
