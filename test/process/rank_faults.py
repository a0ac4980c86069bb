"""A server with the real worker on several ranks, one of which misbehaves in its sixth iteration.

    python rank_faults.py serve BEHAVIOUR FLAGS...     the server
    python rank_faults.py BEHAVIOUR ROLE FD            its scheduler process and workers, started by the server

BEHAVIOUR is `well`, or what the process ROLE does, as FAULT:ROLE: `diverge` (it commits another token), `oom` (it runs out of memory),
`stuck` (it never returns), `loop` (nor does it let go of its processor), `spin` (as `loop`, before it sends the step to the other ranks),
`oom-load` (it runs out of memory while it loads), or `slow-start` (it takes longer than heartbeats may, once it has built its worker).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from process.fake import ENV

SPOILED = 6
SLOW_SECONDS = 6.0


def misbehave(fault: str) -> None:
    """Spoil this process."""
    import torch

    from runtime.entrypoints import rank
    from runtime.model_executor import build
    from runtime.model_executor.accepter import Accepter
    from runtime.model_executor.followers import Followers

    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")

    def loop() -> None:
        while True:
            pass

    if fault == "oom-load":
        build.load_model = no_memory
        return
    if fault == "slow-start":
        delay(build, "prepare_drafting")
        delay(rank, "make_compiler")
        return
    owner, name = (Followers, "run") if fault == "spin" else (Accepter, "accept")
    function, calls = getattr(owner, name), [0]

    def spoiled(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == SPOILED and fault == "spin":
            loop()
        result = function(*args)
        if calls[0] == SPOILED:
            if fault == "oom":
                no_memory()
            if fault == "stuck":
                time.sleep(1000)
            if fault == "loop":
                loop()
            if fault == "diverge":
                result.tokens[0, 0] ^= 1
        return result

    setattr(owner, name, spoiled)


def delay(owner: Any, name: str) -> None:
    """Let a function begin later."""
    function = getattr(owner, name)

    def delayed(*args: Any, **options: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return function(*args, **options)

    setattr(owner, name, delayed)


def main() -> int:
    if sys.argv[1] == "serve":
        from runtime import launch_server

        command = ["/usr/bin/env", f"PYTHONPATH={ENV['PYTHONPATH']}", sys.executable, str(Path(__file__).resolve()), sys.argv[2]]
        return launch_server.main(sys.argv[3:], command)
    from runtime.entrypoints import child

    behaviour, role, status_fd = sys.argv[1:]
    fault, _, spoiled = behaviour.partition(":")
    if role == spoiled:
        misbehave(fault)
    return child.main([role, status_fd])


if __name__ == "__main__":
    sys.exit(main())
