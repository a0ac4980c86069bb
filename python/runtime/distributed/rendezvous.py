"""Where the ranks of a model meet. No torch."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import psutil

from runtime.errors import ConfigError

LOOPBACK = "lo"


class Rendezvous(msgspec.Struct, frozen=True):
    """The meeting point of the ranks.

    Attributes:
        url: for torch.distributed.
        interface: the network interface that gloo uses.
        bind: where rank 0 opens a socket for `name`: an address of ZMQ in which `{name}` is replaced.
    """

    url: str
    interface: str
    bind: str

    @classmethod
    def in_folder(cls, folder: str) -> Rendezvous:
        """For ranks of one host, in a folder that is new."""
        return cls(f"file://{Path(folder) / 'rendezvous'}", LOOPBACK, f"ipc://{folder}/{{name}}")

    @classmethod
    def at_address(cls, address: str) -> Rendezvous:
        """For ranks of several hosts, at HOST:PORT of the first. Raises `ConfigError` where it cannot be reached."""
        host, _, port = address.rpartition(":")
        try:
            target = socket.gethostbyname(host)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((target, int(port)))  # sends nothing
                own = probe.getsockname()[0]
        except (OSError, UnicodeError) as error:  # the latter for names that no DNS can hold
            why = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(f"--dist-init-addr {address} cannot be reached: {why or error}") from error
        return cls(f"tcp://{address}", interface_of(own), f"tcp://{target}:*")


def interface_of(address: str) -> str:
    """The name of the network interface with this address of this host."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return LOOPBACK
