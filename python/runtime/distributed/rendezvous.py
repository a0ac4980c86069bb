"""Where the ranks of a model meet. No torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

LOOPBACK = "lo"


class Rendezvous(msgspec.Struct, frozen=True):
    """The meeting point of torch.distributed, and the network interface that gloo uses, "" for its own choice."""

    url: str
    interface: str = ""

    @classmethod
    def in_folder(cls, folder: str) -> Rendezvous:
        """For ranks of one host, in a folder that is new."""
        return cls(f"file://{Path(folder) / 'rendezvous'}", LOOPBACK)
