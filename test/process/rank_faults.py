"""A server with the real worker on several ranks, of which rank 1 misbehaves in its sixth iteration.

    python rank_faults.py serve BEHAVIOUR FLAGS...     the server
    python rank_faults.py BEHAVIOUR ROLE FD            its scheduler process and workers, started by the server

BEHAVIOUR is `well`, `diverge` (it commits another token), `oom` (it runs out of memory), `stuck` (it never returns), or `oom-load` (it
runs out of memory while it loads).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from process.fake import ENV

SPOILED = 6


def misbehave(behaviour: str) -> None:
    """Spoil this process, which is rank 1."""
    import torch

    from runtime.model_executor import build
    from runtime.model_executor.accepter import Accepter

    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")

    if behaviour == "oom-load":
        build.load_model = no_memory
    accept, calls = Accepter.accept, [0]

    def spoiled(self: Accepter, *args: Any) -> Any:
        calls[0] += 1
        result = accept(self, *args)
        if calls[0] == SPOILED:
            if behaviour == "oom":
                no_memory()
            if behaviour == "stuck":
                time.sleep(1000)
            if behaviour == "diverge":
                result.tokens[0, 0] ^= 1
        return result

    Accepter.accept = spoiled


def main() -> int:
    if sys.argv[1] == "serve":
        from runtime import launch_server

        command = ["/usr/bin/env", f"PYTHONPATH={ENV['PYTHONPATH']}", sys.executable, str(Path(__file__).resolve()), sys.argv[2]]
        return launch_server.main(sys.argv[3:], command)
    from runtime.entrypoints import child

    behaviour, role, status_fd = sys.argv[1:]
    if role == "worker-1":
        misbehave(behaviour)
    return child.main([role, status_fd])


if __name__ == "__main__":
    sys.exit(main())
