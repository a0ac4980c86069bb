"""Runs the ranks of a node other than 0 until node 0 ends. Such a node serves no HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Sequence

from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.child import ChildConfig
from runtime.entrypoints.child_process import COMMAND, ChildProcess, start_ranks
from runtime.entrypoints.socket_folder import make_socket_folder
from runtime.entrypoints.tasks import cancel
from runtime.entrypoints.watchdog import DUMP_SECONDS, SHARDED_TICKS, TICK_SECONDS, Watchdog
from runtime.log import say

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NODE_0_SECONDS = 5.0
"""Seconds that node 0 may take to end after its open requests have ended."""


async def run_node(config: RuntimeConfig, command: Sequence[str] | None = None) -> int:
    """Start the ranks of this node and wait until they have finished, one dies or hangs, or a signal arrives.

    A signal may go to all nodes at once. Then node 0 lets open requests finish, and this node ends after it, or at a second signal.

    Args:
        command: replaces the command of this package's worker processes.

    Returns:
        The exit status: 0 after node 0 ended or a signal arrived, 1 after a failure.

    Raises:
        ConfigError: a rank cannot run with this configuration.
        ServingError: a rank failed at start-up.
    """
    loop, stop, folder = asyncio.get_running_loop(), asyncio.Event(), make_socket_folder()
    child = ChildConfig(config=config, folder=folder, parent=os.getpid())
    ranks = list[ChildProcess]()

    def on_signal() -> None:
        if not all(rank.ready.done() for rank in ranks):
            stop.set()
            return
        log.info("waiting for node 0 to end; send the signal again to exit at once")
        loop.call_later(config.server.shutdown_timeout + NODE_0_SECONDS, stop.set)
        for number in SIGNALS:
            loop.add_signal_handler(number, stop.set)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        ranks += start_ranks(child, command or COMMAND)
        return await _watch(ranks, stop)
    finally:
        for rank in ranks:
            rank.kill()
        shutil.rmtree(folder, ignore_errors=True)


async def _watch(ranks: Sequence[ChildProcess], stop: asyncio.Event) -> int:
    ends = [asyncio.ensure_future(rank.gone.wait()) for rank in ranks]
    stopped = asyncio.ensure_future(stop.wait())
    ready = asyncio.gather(*(rank.ready for rank in ranks))
    by_role = {rank.role: rank for rank in ranks}
    watchdog = Watchdog(by_role, SHARDED_TICKS)
    try:
        await asyncio.wait([ready, stopped, *ends], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            say(f"talon: ready, {', '.join(rank.role for rank in ranks)} on this node; node 0 serves", log)
        while not stop.is_set() and not all(rank.finished for rank in ranks):
            dead = [rank for rank in ranks if rank.gone.is_set() and not rank.finished]
            for rank in dead:
                log.error("the %s process died: %s", rank.role, rank.describe_end())
            if dead:
                return 1
            waiting = [end for end in ends if not end.done()]
            done, _ = await asyncio.wait([stopped, *waiting], timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not done and (hung := watchdog.tick({role: rank.beats for role, rank in by_role.items()}, writes_trace=False)):
                log.error("the %s process hangs: no heartbeat for %g s; its stacks follow", hung, watchdog.patience * TICK_SECONDS)
                by_role[hung].dump_stacks()
                await asyncio.sleep(DUMP_SECONDS)
                return 1
        return 0
    finally:
        await cancel(ready, stopped, *ends)
