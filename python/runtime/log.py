"""Logging: one format for all processes."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname).1s %(process_title)s %(message)s"


class _Title(logging.Filter):
    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def filter(self, record: logging.LogRecord) -> bool:
        record.process_title = self.title
        return True


def setup(level: str, title: str) -> None:
    """Send records of `level` and above to stderr, marked with the title of the process. Call it once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(_Title(title))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
