"""One rank of a sharded model in this process: rank 0's worker for the scheduler, or a rank that follows it. Loads torch."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from msgspec import structs

from runtime.config.runtime_config import ParallelConfig, RuntimeConfig
from runtime.distributed.parallel_group import ParallelGroup
from runtime.distributed.rank_place import RankPlace
from runtime.distributed.rank_sockets import ResultPusher, ResultSocket, StepPublisher, StepSubscriber
from runtime.distributed.rank_watch import RankBeat, RankWatch
from runtime.distributed.ring import RingReader, RingWriter
from runtime.distributed.step_links import StepReceiver, StepSender
from runtime.distributed.torch_group import EXCHANGE_SECONDS, TorchGroup
from runtime.entrypoints.grammars import eos_ids_of, make_compiler
from runtime.errors import ConfigError, RankFailed
from runtime.model_executor.build import build_worker
from runtime.model_executor.context import AS_CONFIGURED, BuildOptions
from runtime.model_executor.follower_loop import run_follower
from runtime.model_executor.followers import Followers, StepWait
from runtime.model_executor.weight_sample import weight_sample
from runtime.model_executor.worker import Worker
from runtime.models.config import ModelConfig
from runtime.speculative.registry import make_drafter

log = logging.getLogger(__name__)
STEP_PERIODS = 14
"""Most half seconds that a step on GPUs, or its start on any device, may take. The largest prompt chunk of a 70B model takes about 1 s."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """Addresses where rank 0 listens; "" for a socket that is not needed.

    Attributes:
        watch: for heartbeats.
        steps: for readers of steps on other hosts.
        results: for results of other attention groups.
    """

    watch: str
    steps: str
    results: str


def lead(config: RuntimeConfig, model_config: ModelConfig, place: RankPlace, options: BuildOptions = AS_CONFIGURED) -> Worker:
    """Build rank 0's worker, which sends every step to the other ranks. The loss of a rank ends this process.

    Raises:
        ConfigError: the model or the drafter does not support this configuration, or memory is too small.
    """
    parallel, meeting = config.parallel, place.rendezvous
    group = join(config, place)
    check_same_model(group, model_config, parallel)
    waits = list[StepWait]()  # those of rank 0 during a step

    def overdue() -> str:
        """A sentence about a wait that takes too long, or "". Called every half second."""
        return next(filter(None, [wait.longer_than(STEP_PERIODS) for wait in waits]), "")

    watch = RankWatch(meeting.bind.format(name="ranks"), range(1, parallel.tp_size), _end_process, overdue)
    by_ring = 0 if place.ring is None else len(place.ring.wake)
    by_socket = parallel.tp_size - 1 - by_ring
    publisher = StepPublisher(meeting.bind.format(name="steps")) if by_socket else None
    results = ResultSocket(meeting.bind.format(name="results"), parallel.dp_size - 1) if parallel.dp_size > 1 else None
    sockets = Sockets(watch.address, publisher.address if publisher else "", results.address if results else "")
    group.agree((config, sockets, options))
    check_same_weights(group, config)
    senders = list[StepSender]()
    if place.ring is not None:
        senders.append(RingWriter(place.ring, EXCHANGE_SECONDS))
    if publisher is not None:
        publisher.await_readers(by_socket, parallel.dist_timeout)
        senders.append(publisher)

    followers = Followers(senders, watch, results)
    worker = build_worker(config, model_config, make_drafter, options, group, followers)
    waits.append(followers.start)
    if config.device.device == "cuda":  # on a CPU an exchange has its own timeout, and steps may be slow
        waits.append(followers.wait)
    return worker


def follow_rank_0(
    config: RuntimeConfig, model_config: ModelConfig, place: RankPlace, ready: Callable[[], None], alive: Callable[[], None]
) -> None:
    """Build the worker of another rank, call `ready`, and run the steps that rank 0 sends until it closes.

    Args:
        alive: called every half second once the worker is built.

    Raises:
        ConfigError: as for `lead`.
        RankFailed: a step failed on this rank.
    """
    group = join(config, place)
    check_same_model(group, model_config, config.parallel)
    leader, sockets, options = group.agree((config, Sockets("", "", ""), AS_CONFIGURED))
    config = with_own_files(leader, config)
    check_same_weights(group, config)
    receiver: StepReceiver = StepSubscriber(sockets.steps) if place.ring is None else RingReader(place.ring, place.rank - 1)
    worker = build_worker(config, model_config, make_drafter, options, group)
    compiler = make_compiler(config, model_config, eos_ids_of(config.model.tokenizer_path, model_config), tried=True)
    if compiler is not None:
        worker.parts.grammars.compile = lambda spec: compiler.compile(spec).future.result()
    beat = RankBeat(sockets.watch, place.rank, _end_process, alive)
    group.gather(None)  # heartbeats are expected only once every rank has built its worker
    beat.start()
    ready()
    try:
        run_follower(worker, receiver, place.rank, ResultPusher(sockets.results) if worker.answering_group is not None else None)
    except RankFailed as error:
        beat.close(str(error))
        raise
    beat.close()
    worker.close()
    if compiler is not None:
        compiler.close()


def join(config: RuntimeConfig, place: RankPlace) -> ParallelGroup:
    """Connect to the other ranks."""
    parallel = config.parallel
    group = TorchGroup.join(place.rendezvous, place.rank, parallel.tp_size, parallel.dist_timeout)
    if config.device.device == "cpu":
        return group
    from runtime.layers.cuda_group import CudaGroup

    device = torch.device("cuda", 0)  # CUDA_VISIBLE_DEVICES begins with the GPU of this rank
    torch.cuda.set_device(device)
    own_kernels = parallel.nnodes == 1 and not parallel.disable_custom_all_reduce
    return CudaGroup(group, device, own_kernels, parallel.dist_timeout)


def check_same_model(group: ParallelGroup, own: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise `ConfigError` on every rank if their config.json files differ. All ranks must call it."""
    found = group.gather(own)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ConfigError(
                f"The config.json of node {rank // parallel.ranks_per_node}, a {other.architecture}, differs from that of node 0, "
                f"a {found[0].architecture}. All nodes need the same model."
            )


def check_same_weights(group: ParallelGroup, config: RuntimeConfig) -> None:
    """Raise `ConfigError` on every rank if nodes have different weights. All ranks must call it."""
    if config.parallel.nnodes == 1:
        return
    model, draft = config.model, config.speculative
    own = {"model": "" if model.load_format == "dummy" else weight_sample(model.model_path)}
    if draft is not None and draft.draft_model_path is not None and draft.draft_load_format != "dummy":
        own["draft model"] = weight_sample(draft.draft_model_path)
    found = group.gather(own)
    for rank, what in itertools.product(range(len(found)), own):
        if found[rank][what] != found[0][what]:
            node = rank // config.parallel.ranks_per_node
            raise ConfigError(f"The weights of the {what} on node {node} differ from those on node 0. All nodes need the same model.")


def with_own_files(leader: RuntimeConfig, own: RuntimeConfig) -> RuntimeConfig:
    """Rank 0's configuration with the file paths of this node: seeds and choices made on node 0 apply to all nodes."""
    model = structs.replace(leader.model, model_path=own.model.model_path, tokenizer_path=own.model.tokenizer_path)
    speculative, files = leader.speculative, own.speculative
    if speculative is not None and files is not None:
        speculative = structs.replace(speculative, draft_model_path=files.draft_model_path, token_map=files.token_map)
    parallel = structs.replace(leader.parallel, node_rank=own.parallel.node_rank)
    return structs.replace(leader, model=model, speculative=speculative, parallel=parallel)


def _end_process(why: str) -> None:
    """End this process at once, because its main thread may be waiting for the lost rank."""
    log.error("%s; this process exits", why)
    sys.stderr.flush()
    os._exit(1)
