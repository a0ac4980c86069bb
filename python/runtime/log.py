"""Logging: one format for all processes."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import datetime, timezone
from logging.handlers import BufferingHandler
from typing import Literal

LogFormat = Literal["text", "json"]

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The `X-Request-Id` of the request that the current task serves."""


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, process, logger and message, the request's id, and the record's own `fields`."""

    def __init__(self, title: str) -> None:
        """`title`: that of the process."""
        super().__init__()
        self._title = title

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        shown: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._title,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            shown["request_id"] = request_id
        shown.update(getattr(record, "fields", {}))
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)


def writes_json() -> bool:
    """Whether this process logs JSON lines, which progress bars would break."""
    return _json_handler() is not None


def line_of(message: str, logger: str, level: int = logging.INFO) -> str:
    """A line to print: `message`, or where the log has JSON lines an object with the same fields as they have."""
    handler = _json_handler()
    if handler is None:
        return message
    return handler.format(logging.LogRecord(logger, level, "", 0, message, None, None))


def say(line: str, log: logging.Logger) -> None:
    """Print a line; a full or closed stdout is logged and does not end the program."""
    try:
        write_stdout(line_of(line, log.name) + "\n")
    except OSError as error:
        log.warning("cannot write to stdout: %s", error.strerror or error)


def write_stdout(text: str) -> None:
    """Write to stdout at once. Raises `OSError` if it is full or closed; later text is dropped."""
    try:
        print(text, end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout at exit, and fails again
        raise


def _json_handler() -> logging.Handler | None:
    return next((handler for handler in logging.getLogger().handlers if isinstance(handler.formatter, JsonFormatter)), None)


def hold() -> None:
    """Keep warnings until `setup` knows their form."""
    logging.getLogger().addHandler(BufferingHandler(capacity=1000))


def setup(level: str, title: str, form: LogFormat = "text") -> None:
    """Send records of `level` and above to stderr, marked with the title of the process. Call it once per process."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname).1s {title} %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter(title) if form == "json" else text)
    root = logging.getLogger()
    held = [record for early in root.handlers if isinstance(early, BufferingHandler) for record in early.buffer]
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for record in held:
        if root.isEnabledFor(record.levelno):
            handler.handle(record)
