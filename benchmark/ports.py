"""Chooses ports for servers that open them later."""

from __future__ import annotations

import random
import socket

LOWEST, HIGHEST = 15000, 29999
"""Below the ephemeral ports (from 32768 on Linux): an outgoing connection could take one of those before the server opens it."""
TRIES = 1000

_claims: list[socket.socket] = []
"""Hold the ports that this process chose: each is bound to a name that only one process of a network namespace can have."""


def free_port(host: str = "127.0.0.1") -> int:
    """A free port of `host`, chosen at random, that no other program which chooses its ports here gets until this process ends."""
    draw = random.SystemRandom()
    for _ in range(TRIES):
        port = draw.randint(LOWEST, HIGHEST)
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0talon-port-{port}")
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return port
    raise OSError(f"no free port of {host} between {LOWEST} and {HIGHEST} in {TRIES} tries")
