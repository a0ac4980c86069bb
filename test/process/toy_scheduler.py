"""The scheduler process of a server that has the algorithm TOY."""

from __future__ import annotations

import sys
from pathlib import Path

from process.fake import ENV
from runtime.entrypoints import child
from unit.toy_drafter import toy_row


def scheduler_command() -> list[str]:
    """What to run in place of the scheduler process."""
    return ["/usr/bin/env", f"PYTHONPATH={ENV['PYTHONPATH']}", sys.executable, str(Path(__file__).resolve())]


if __name__ == "__main__":
    with toy_row():
        sys.exit(child.main(sys.argv[1:]))
