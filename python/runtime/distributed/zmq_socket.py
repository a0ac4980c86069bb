"""A ZMQ socket for an address of either IP version. No torch."""

from __future__ import annotations

import zmq


def open_socket(kind: int, address: str) -> zmq.Socket[bytes]:
    """A socket in its own context that can bind or connect to `address`; ZMQ accepts IPv6 addresses only with an option."""
    opened = zmq.Context().socket(kind)
    # Elsewhere the option would turn IPv4 addresses into ::ffff:A.B.C.D, which hosts without IPv6 do not know.
    if address.startswith("tcp://["):
        opened.setsockopt(zmq.IPV6, 1)
    return opened
