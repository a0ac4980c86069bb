"""One rank of a sharded model in this process: rank 0's worker for the scheduler, or a rank that follows it. Loads torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from runtime.config.runtime_config import RuntimeConfig
from runtime.distributed.rank_place import RankPlace
from runtime.distributed.rank_watch import RankBeat, RankWatch
from runtime.distributed.ring import RingReader, RingWriter
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


def lead(config: RuntimeConfig, model_config: ModelConfig, place: RankPlace) -> Worker:
    """Rank 0's worker, which sends every step to the other ranks. A rank that is lost ends this process.

    Raises:
        ConfigError: the model, the drafter or the memory does not allow it.
    """
    group = TorchGroup(place.rendezvous, place.rank, place.size, place.timeout)
    watch = RankWatch(place.watch, range(1, place.size), _end_process)
    followers = Followers(RingWriter(place.ring, EXCHANGE_SECONDS), watch.close)
    worker = _build(config)(config, model_config, group=group, followers=followers)
    watch.start()
    return worker


def follow_rank_0(config: RuntimeConfig, model_config: ModelConfig, place: RankPlace, ready: Callable[[], None]) -> None:
    """Build the worker of another rank, call `ready`, and run what rank 0 sends until it sends no more.

    Raises:
        ConfigError: as for `lead`.
        RankFailed: a step failed on this rank.
    """
    group = TorchGroup(place.rendezvous, place.rank, place.size, place.timeout)
    worker = _build(config)(config, model_config, group=group)
    compiler = make_compiler(config, model_config)
    if compiler is not None:
        worker.parts.grammars.compile = lambda spec: compiler.compile(spec).future.result()
    receiver = RingReader(place.ring, place.reader)
    beat = RankBeat(place.watch, place.rank, _end_process)
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


def _build(config: RuntimeConfig) -> Callable[..., Worker]:
    return build_worker if config.speculative is None else build_speculative_worker


def _end_process(why: str) -> None:
    """End this process at once: its main thread may wait for a rank that is gone."""
    log.error("%s; this process ends", why)
    sys.stderr.flush()
    os._exit(1)
