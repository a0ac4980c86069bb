"""Free ports for servers that tests and benchmarks start."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

import pytest
from benchmark import ports
from benchmark.ports import HIGHEST, LOWEST, free_port

from ipv6 import needs_ipv6


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_free_port_is_none_of_outgoing_connections_and_can_be_opened(host: str) -> None:
    port = free_port(host)
    assert LOWEST <= port <= HIGHEST < 32768
    socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
        drawn = iter([used, used, LOWEST - 1])
        monkeypatch.setattr(random.SystemRandom, "randint", lambda *_: next(drawn))
        assert free_port() == LOWEST - 1
        monkeypatch.setattr(random.SystemRandom, "randint", lambda *_: used)
        with pytest.raises(OSError, match=f"no free port of 127.0.0.1 between {ports.LOWEST} and {ports.HIGHEST}"):
            free_port()


def test_a_port_is_chosen_once_by_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers that both start on a port which no one has opened yet would answer for each other."""
    choose = "from benchmark.ports import free_port; print(free_port(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", choose], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        monkeypatch.setattr(random.SystemRandom, "randint", lambda *_: theirs)
        with pytest.raises(OSError, match="no free port"):
            free_port()
        other.communicate("\n")
    assert free_port() == theirs
    with pytest.raises(OSError, match="no free port"):
        free_port()
