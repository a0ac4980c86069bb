"""Ports for servers that open them some time after they were chosen."""

from __future__ import annotations

import random
import socket

LOWEST, HIGHEST = 15000, 29999
"""Below the ports that systems give to outgoing connections (from 32768 on Linux), one of which could take a free one meanwhile."""
TRIES = 1000


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` on which nothing listens, drawn at random so that programs side by side hardly choose the same one."""
    draw = random.SystemRandom()
    for _ in range(TRIES):
        port = draw.randint(LOWEST, HIGHEST)
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError:
            continue
        return port
    raise OSError(f"no free port of {host} between {LOWEST} and {HIGHEST} in {TRIES} tries")
