"""One rank of a sharded model in this process: rank 0's worker for the scheduler, or a rank that follows it. Loads torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from runtime.config.runtime_config import RuntimeConfig
from runtime.distributed.rank_place import RankPlace
from runtime.distributed.rank_watch import RankBeat, RankWatch
from runtime.distributed.ring import RingReader, RingWriter
from runtime.distributed.step_links import SenderList, StepReceiver, StepSender
from runtime.distributed.step_sockets import StepPublisher, StepSubscriber
from runtime.distributed.torch_group import EXCHANGE_SECONDS, TorchGroup
from runtime.entrypoints.grammars import make_compiler
from runtime.errors import RankFailed
from runtime.model_executor.build import build_worker
from runtime.model_executor.follow import follow
from runtime.model_executor.followers import Followers
from runtime.model_executor.worker import Worker
from runtime.models.config import ModelConfig
from runtime.speculative.build import build_speculative_worker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sockets:
    """Where rank 0 listens: for signs of life, and for readers of steps on other hosts ("" where there are none)."""

    watch: str
    steps: str


def lead(config: RuntimeConfig, model_config: ModelConfig, place: RankPlace) -> Worker:
    """Rank 0's worker, which sends every step to the other ranks. A rank that is lost ends this process.

    Raises:
        ConfigError: the model, the drafter or the memory does not allow it.
    """
    parallel, meeting = config.parallel, place.rendezvous
    group = join(config, place)
    watch = RankWatch(meeting.bind.format(name="ranks"), range(1, parallel.tp_size), _end_process)
    publisher = StepPublisher(meeting.bind.format(name="steps")) if parallel.nnodes > 1 else None
    group.agree((config, Sockets(watch.address, publisher.address if publisher else "")))
    senders = list[StepSender]()
    if place.ring is not None:
        senders.append(RingWriter(place.ring, EXCHANGE_SECONDS))
    if publisher is not None:
        publisher.await_readers(parallel.tp_size - parallel.ranks_per_node, parallel.dist_timeout)
        senders.append(publisher)
    worker = _build(config)(config, model_config, group=group, followers=Followers(SenderList(*senders), watch.close))
    watch.start()
    return worker


def follow_rank_0(config: RuntimeConfig, model_config: ModelConfig, place: RankPlace, ready: Callable[[], None]) -> None:
    """Build the worker of another rank, call `ready`, and run what rank 0 sends until it sends no more.

    Raises:
        ConfigError: as for `lead`.
        RankFailed: a step failed on this rank.
    """
    group = join(config, place)
    leader, sockets = group.agree((config, Sockets("", "")))
    config = with_own_files(leader, config)
    receiver: StepReceiver = StepSubscriber(sockets.steps) if place.ring is None else RingReader(place.ring, place.rank - 1)
    worker = _build(config)(config, model_config, group=group)
    compiler = make_compiler(config, model_config)
    if compiler is not None:
        worker.parts.grammars.compile = lambda spec: compiler.compile(spec).future.result()
    beat = RankBeat(sockets.watch, place.rank, _end_process)
    beat.start()
    ready()
    try:
        follow(worker, receiver, place.rank)
    except RankFailed as error:
        beat.close(str(error))
        raise
    beat.close()
    worker.close()
    if compiler is not None:
        compiler.close()


def join(config: RuntimeConfig, place: RankPlace) -> TorchGroup:
    """Meet the other ranks."""
    return TorchGroup(place.rendezvous, place.rank, config.parallel.tp_size, config.parallel.dist_timeout)


def with_own_files(leader: RuntimeConfig, own: RuntimeConfig) -> RuntimeConfig:
    """Rank 0's configuration with the folders of this node: what was drawn or decided on node 0 holds everywhere."""
    model = structs.replace(leader.model, model_path=own.model.model_path, tokenizer_path=own.model.tokenizer_path)
    speculative = leader.speculative
    if speculative is not None and own.speculative is not None:
        speculative = structs.replace(speculative, draft_model_path=own.speculative.draft_model_path)
    return structs.replace(leader, model=model, speculative=speculative, parallel=own.parallel)


def _build(config: RuntimeConfig) -> Callable[..., Worker]:
    return build_worker if config.speculative is None else build_speculative_worker


def _end_process(why: str) -> None:
    """End this process at once: its main thread may wait for a rank that is gone."""
    log.error("%s; this process ends", why)
    sys.stderr.flush()
    os._exit(1)
