"""The place of one process among the ranks of a model. No torch."""

from __future__ import annotations

import msgspec

from runtime.config.runtime_config import ParallelConfig
from runtime.distributed.rendezvous import Rendezvous
from runtime.distributed.ring import RingFds


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The information that a process needs to be one of the ranks.

    Attributes:
        ring: file descriptors of the ring that carries steps between ranks of rank 0's host; None if this rank does not
            inherit them: steps then come through a socket. Rank R reads it as reader R - 1.
    """

    rank: int
    rendezvous: Rendezvous
    ring: RingFds | None = None


def places_on_node(config: ParallelConfig, folder: str) -> list[RankPlace]:
    """The places of the ranks of this node. A ring among them is open in this process.

    Args:
        folder: a new one, in which the ranks of a single node meet.

    Raises:
        ConfigError: the address of node 0 cannot be reached.
    """
    meeting = meeting_of(config, folder)
    ring = RingFds.create(config.ranks_per_node - 1) if config.node_rank == 0 and config.ranks_per_node > 1 else None
    return [RankPlace(rank=rank, rendezvous=meeting, ring=ring) for rank in config.own_ranks]


def meeting_of(config: ParallelConfig, folder: str) -> Rendezvous:
    """The rendezvous of the ranks: in `folder`, which is new, or at the address of node 0. Raises `ConfigError` if it cannot be used."""
    if config.dist_init_addr is None:
        return Rendezvous.in_folder(folder)
    return Rendezvous.at_address(config.dist_init_addr, listens=config.node_rank == 0)
