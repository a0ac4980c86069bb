"""Free ports for servers that tests and benchmarks start."""

from __future__ import annotations

import random
import socket

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
        drawn = iter([used, used, free_port()])
        monkeypatch.setattr(random.SystemRandom, "randint", lambda *_: next(drawn))
        assert free_port() != used
        monkeypatch.setattr(random.SystemRandom, "randint", lambda *_: used)
        with pytest.raises(OSError, match=f"no free port of 127.0.0.1 between {ports.LOWEST} and {ports.HIGHEST}"):
            free_port()
