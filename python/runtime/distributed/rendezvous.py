"""The rendezvous of a model's ranks. No torch."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from runtime.config.node_address import NodeAddress
from runtime.errors import ConfigError

LOOPBACK = "lo"
FILE = "file://"
RETRY_SECONDS = 0.2


class Rendezvous(msgspec.Struct, frozen=True):
    """The meeting point of the ranks.

    Attributes:
        url: for torch.distributed.
        interface: the network interface that gloo uses.
        bind: where rank 0 opens a socket for `name`: an address of ZMQ in which `{name}` is replaced; an IPv6 address is in brackets.
    """

    url: str
    interface: str
    bind: str

    @property
    def file(self) -> str:
        """The file of the ranks of one host, which torch would not find in the URL of a folder with `#` or `?` in its name; else ""."""
        return self.url.removeprefix(FILE) if self.url.startswith(FILE) else ""

    @property
    def node(self) -> NodeAddress:
        """The address of node 0, if the ranks are on several hosts."""
        return NodeAddress.parse(self.url.removeprefix("tcp://"))

    @classmethod
    def in_folder(cls, folder: str) -> Rendezvous:
        """Create a rendezvous for ranks of one host, in a new folder."""
        return cls(f"{FILE}{Path(folder) / 'rendezvous'}", LOOPBACK, f"ipc://{folder}/{{name}}")

    @classmethod
    def at_address(cls, address: str, listens: bool = False) -> Rendezvous:
        """Create a rendezvous for ranks of several hosts, at HOST:PORT of the first.

        Args:
            listens: whether this host is the first.

        Raises:
            ConfigError: this host cannot reach the address, or cannot listen there.
        """
        node = NodeAddress.parse(address)
        try:
            target, own = _reach(node)
        except (OSError, UnicodeError) as error:  # the latter for names that are invalid in DNS
            why = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(f"--dist-init-addr {address} cannot be reached: {why or error}") from error
        if listens and (problem := _cannot_listen(target, node.port)):
            raise ConfigError(f"Node 0 cannot listen at --dist-init-addr {address}: {problem}. Give an address of node 0 and a free port.")
        host = f"[{target}]" if ":" in target else target
        return cls(f"tcp://{host}:{node.port}", interface_of(own), f"tcp://{host}:*")

    def await_listener(self, seconds: float) -> None:
        """Wait until rank 0 listens at the address. torch would wait for twice as long. Raises `OSError`."""
        node, deadline = self.node, time.monotonic() + seconds
        while True:
            try:
                socket.create_connection((node.host, node.port), max(deadline - time.monotonic(), RETRY_SECONDS)).close()
                return
            except OSError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RETRY_SECONDS)


def _reach(node: NodeAddress) -> tuple[str, str]:
    """The node's address, and the address of this host that packets to it carry. IPv4 is tried first. Raises `OSError`."""
    found = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_DGRAM)
    error = OSError("no address")
    for family, kind, _, _, target in sorted(found, key=lambda one: one[0] != socket.AF_INET):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(target)  # sends nothing
            except OSError as unreachable:
                error = unreachable
                continue
            return _numeric(target), _numeric(probe.getsockname())
    raise error


def _cannot_listen(host: str, port: int) -> str:
    """Why this host cannot listen there; "" if it can. torch would wait for the whole time-out at an address of another host."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


def _numeric(address: tuple[Any, ...]) -> str:
    """The host of a socket's address; of a link-local one with its interface."""
    return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def interface_of(address: str) -> str:
    """The name of the network interface with this address of this host."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(_without_zone(one.address) == _without_zone(address) for one in addresses):
            return name
    return LOOPBACK


def _without_zone(address: str) -> str:
    return address.partition("%")[0]
