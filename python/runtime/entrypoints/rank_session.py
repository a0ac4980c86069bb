"""Runs the other ranks of a model whose rank 0 is this process, for checks without a server."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.config.runtime_config import RuntimeConfig
from runtime.distributed.rank_place import RankPlace, places_on_node
from runtime.entrypoints.child import ChildConfig
from runtime.entrypoints.child_process import COMMAND, ChildProcess, start_rank
from runtime.entrypoints.socket_folder import make_socket_folder
from runtime.errors import ConfigError


@contextmanager
def other_ranks(config: RuntimeConfig) -> Iterator[RankPlace]:
    """Run the other ranks inside the `with` block; yields the place of rank 0. Raises `ConfigError` for several nodes."""
    if config.parallel.nnodes > 1:
        raise ConfigError("--nnodes must be 1 for this check; run it on one node")
    loop, folder = asyncio.new_event_loop(), make_socket_folder()
    thread = threading.Thread(target=loop.run_forever, name="other-ranks", daemon=True)
    thread.start()
    place, *others = places_on_node(config.parallel, folder)
    child = ChildConfig(config=config, folder=folder, parent=os.getpid())

    async def start() -> list[ChildProcess]:
        return [start_rank(child, COMMAND, other) for other in others]

    async def end(ranks: list[ChildProcess]) -> None:
        for rank in ranks:
            rank.kill()

    ranks = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield place
    finally:
        asyncio.run_coroutine_threadsafe(end(ranks), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        shutil.rmtree(folder, ignore_errors=True)
