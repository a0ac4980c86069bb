"""The address of node 0, HOST:PORT, as --dist-init-addr gives it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """`host` is a name or an address, without the brackets of an IPv6 address."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> NodeAddress:
        """Read HOST:PORT, in which an IPv6 address is in brackets. Raises `ConfigError`."""
        host, _, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        bare = host[1:-1] if bracketed else host
        valid = _is_ipv6(bare) if bracketed else bool(bare) and not set(bare) & set("[]:/")
        if not valid or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"--dist-init-addr must be HOST:PORT, such as 10.0.0.1:29500 or [fd00::1]:29500; got {text!r}.")
        return cls(bare, int(port))


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
