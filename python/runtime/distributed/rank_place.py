"""The place of one process among the ranks of a model: where they meet, and how steps and signs of life travel. No torch."""

from __future__ import annotations

import msgspec

from runtime.distributed.rendezvous import Rendezvous
from runtime.distributed.ring import RingFds


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What a process must know to be one of `size` ranks.

    Attributes:
        ring: file descriptors of the ring that carries steps.
        reader: which reader of the ring this rank is; -1 on rank 0, which writes.
        watch: address at which rank 0 hears the other ranks.
    """

    rank: int
    size: int
    rendezvous: Rendezvous
    ring: RingFds
    reader: int
    watch: str
    timeout: float


def places_on_host(folder: str, size: int, timeout: float) -> list[RankPlace]:
    """The places of all ranks of one host, which meet in `folder`, a new one. The ring is open in this process."""
    ring, meeting = RingFds.create(size - 1), Rendezvous.in_folder(folder)
    return [
        RankPlace(rank=rank, size=size, rendezvous=meeting, ring=ring, reader=rank - 1, watch=f"ipc://{folder}/ranks", timeout=timeout)
        for rank in range(size)
    ]
