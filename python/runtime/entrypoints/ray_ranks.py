"""Ranks as Ray actors: each actor hosts the process of one rank, on the node and GPU that Ray gave it. Needs the extra `ray`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import ray  # pyright: ignore[reportMissingImports]
from msgspec import structs
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from runtime.config.runtime_config import ParallelConfig
from runtime.distributed.rank_place import RankPlace, meeting_of
from runtime.entrypoints.child import ChildConfig, Role
from runtime.entrypoints.child_process import Child, start_child
from runtime.errors import ConfigError


class RankHost:
    """The actor. It starts the process of a rank, which ends with the actor, and passes on its status reports."""

    def gpus(self) -> str:
        """The GPUs that Ray gave this actor, as CUDA_VISIBLE_DEVICES."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start(self, command: Sequence[str], role: Role, config: bytes, environment: dict[str, str]) -> None:
        """Start it. `config`: a `ChildConfig` as JSON, without the pid of the parent."""
        child = structs.replace(msgspec.json.decode(config, type=ChildConfig), parent=os.getpid())
        self._process, status = start_child(role, command, child, {**os.environ, **environment})
        self._lines = os.fdopen(status, "rb")

    def next_status(self) -> bytes:
        """Wait for the next line of the process's status pipe; empty once the process has ended."""
        return self._lines.readline()

    def exit_status(self) -> int:
        """The exit status of the process once it has ended; minus the signal number if it was killed."""
        return self._process.wait()


class RayRank(Child):
    """One rank as the server sees it."""

    def __init__(self, role: Role, host: Any) -> None:
        super().__init__(role)
        self._host = host
        self._end = "its Ray actor died"
        self._reader: asyncio.Task[None] | None = None

    async def start(self, command: Sequence[str], config: ChildConfig, environment: dict[str, str]) -> None:
        """Start the process of the rank, and begin to read its status reports."""
        await self._host.start.remote(list(command), self.role, msgspec.json.encode(config), environment)
        self._reader = asyncio.create_task(self._read())

    def describe_end(self) -> str:
        """How it ended, for the log."""
        return self._end

    def dump_stacks(self) -> None:
        """Do nothing; Ray's logs have the stacks."""

    def kill(self) -> None:
        """End the actor and with it the process."""
        if self._reader is not None:
            self._reader.cancel()
        ray.kill(self._host)

    async def _read(self) -> None:
        try:
            while line := await self._host.next_status.remote():
                self._take_status(line)
            self._end = f"exit status {await self._host.exit_status.remote()}"
        except RayError:
            pass  # the actor and its process died
        finally:
            self._is_gone()


class RayRanks:
    """All ranks of a model, in one placement group per node; the first group is on this node."""

    def __init__(self) -> None:
        self._groups: list[PlacementGroup] = []
        self._joined = False

    async def start(self, config: ChildConfig, command: Sequence[str]) -> list[RayRank]:
        """Reserve the nodes and start the ranks: rank 0, which is the scheduler, and the workers. Uses the cluster of RAY_ADDRESS, or a
        local one.

        Raises:
            ConfigError: Ray could not reserve resources for the ranks within --dist-timeout.
        """
        parallel, gpu = config.config.parallel, config.config.device.device == "cuda"
        self._joined = await asyncio.to_thread(_connect)
        _restore_sigterm()
        self._groups = [_reserve(parallel, node, gpu) for node in range(parallel.nnodes)]
        for group in self._groups:
            try:
                await asyncio.wait_for(group.ready(), parallel.dist_timeout)
            except asyncio.TimeoutError:
                raise ConfigError(
                    f"Ray has no room for {parallel.ranks_per_node} ranks on each of {parallel.nnodes} nodes. Lower --tp-size."
                ) from None
        meeting, hosts = meeting_of(parallel, config.folder), [self._host(parallel, rank, gpu) for rank in range(parallel.tp_size)]
        given = await asyncio.gather(*(host.gpus.remote() for host in hosts))
        ranks = [RayRank(f"worker-{rank}" if rank else "scheduler", host) for rank, host in enumerate(hosts)]
        for number, rank in enumerate(ranks):
            child = structs.replace(config, place=RankPlace(rank=number, rendezvous=meeting))
            await rank.start(command, child, _environment(parallel, number, given) if gpu else {})
        return ranks

    def release(self) -> None:
        """Remove the placement groups after the ranks were killed, and disconnect from Ray if `start` connected."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []
        if self._joined:
            self._joined = False
            ray.shutdown()  # otherwise agents of a local cluster would run for another minute after Python exits

    def _host(self, parallel: ParallelConfig, rank: int, gpu: bool) -> Any:
        node, bundle = divmod(rank, parallel.ranks_per_node)
        strategy = PlacementGroupSchedulingStrategy(self._groups[node], placement_group_bundle_index=bundle)
        return ray.remote(RankHost).options(num_cpus=1, num_gpus=int(gpu), scheduling_strategy=strategy, max_restarts=0).remote()


def _connect() -> bool:
    """Join a cluster or start a local one; False if already connected. Call it off the main thread, where Ray would replace SIGTERM."""
    if ray.is_initialized():
        return False
    ray.init(include_dashboard=False, logging_level=logging.WARNING, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
    return True


def _restore_sigterm() -> None:
    """Install Python's SIGTERM handler again: Ray's aborts the process after 3 s, while requests may still be open."""
    if threading.current_thread() is threading.main_thread() and (handler := signal.getsignal(signal.SIGTERM)) is not None:
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)


def _reserve(parallel: ParallelConfig, node: int, gpu: bool) -> PlacementGroup:
    bundles: list[dict[str, float]] = [{"CPU": 1.0, **({"GPU": 1.0} if gpu else {})} for _ in range(parallel.ranks_per_node)]
    if node == 0:
        bundles[0][f"node:{ray.util.get_node_ip_address()}"] = 0.001  # on this node: scheduler and this process share socket files
    return placement_group(bundles, strategy="STRICT_PACK")


def _environment(parallel: ParallelConfig, rank: int, given: Sequence[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES with the GPUs of all ranks of this node, the rank's own first, so that ranks can access each other's memory."""
    first = rank // parallel.ranks_per_node * parallel.ranks_per_node
    return {"CUDA_VISIBLE_DEVICES": parallel.visible_devices(rank, ",".join(given[first : first + parallel.ranks_per_node]))}
