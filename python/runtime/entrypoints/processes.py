"""Starts the scheduler and the detokenizer, watches them, and ends them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, TypeVar

from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.child import ChildConfig, Role
from runtime.entrypoints.child_process import COMMAND, Child, ChildProcess, first_failure, start_ranks
from runtime.entrypoints.socket_folder import make_socket_folder
from runtime.entrypoints.tasks import cancel
from runtime.entrypoints.watchdog import DUMP_SECONDS, SHARDED_TICKS, SILENT_TICKS, TICK_SECONDS, Watchdog
from runtime.errors import ServerDraining, ServingError
from runtime.managers.ipc import AsyncInbox, Outbox
from runtime.managers.messages import ToTokenizer
from runtime.managers.telemetry.health import Health
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.models.config import ModelConfig
from runtime.sampling_params import SamplingParams
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from runtime.entrypoints.ray_ranks import RayRanks

T = TypeVar("T")

EXIT_SECONDS = 3.0
"""How long a child may take to exit after it was asked to."""


class Runtime:
    """The processes of one server or engine and the `TokenizerManager` in front of them. Belongs to one event loop.

    Args:
        config, model_config: from `prepare`.
        scheduler_command: replaces the command of this package's scheduler and worker processes; the role and a file descriptor are
            appended.

    Attributes:
        died: set after a process has died or hung and all open requests have failed.
        stopping: set when HTTP must end.
    """

    def __init__(self, config: RuntimeConfig, model_config: ModelConfig, scheduler_command: Sequence[str] | None = None) -> None:
        self.config = config
        self.model_config = model_config
        self.health = Health()
        self.died = asyncio.Event()
        self.stopping = asyncio.Event()
        self._scheduler_command = scheduler_command or COMMAND
        self._children: list[Child] = []
        self._ray: RayRanks | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._cleanup = ExitStack()  # for the folder, the sockets and the manager
        self._manager: TokenizerManager | None = None

    @property
    def manager(self) -> TokenizerManager:
        """The manager; available only after `start`."""
        assert self._manager is not None
        return self._manager

    async def start(self) -> None:
        """Start all children and wait until they are ready.

        Raises:
            ConfigError: a child cannot run with this configuration.
            ServingError: a child failed.
        """
        folder = make_socket_folder()
        self._cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        inbox: AsyncInbox[ToTokenizer] = self._cleanup.enter_context(closing(AsyncInbox(folder, "tokenizer", ToTokenizer)))
        outbox = self._cleanup.enter_context(closing(Outbox(folder, "scheduler")))
        child_config = ChildConfig(config=self.config, folder=folder, parent=os.getpid())
        scheduler, *ranks = await self._start_ranks(child_config)
        detokenizer = ChildProcess("detokenizer", COMMAND, child_config)
        self._children.append(detokenizer)
        load = asyncio.to_thread(Tokenizer.load, self.config.model.tokenizer_path, chat_template=self.config.model.chat_template)
        others = asyncio.gather(detokenizer.ready, *(rank.ready for rank in ranks))
        tokenizer, limits, _ = await self._while_all_live(asyncio.gather(load, scheduler.ready, others))
        assert limits is not None
        self._manager = TokenizerManager(self.config, tokenizer, self.model_config, limits, outbox.send, self.health)
        self._cleanup.callback(self._manager.close)
        if self.manager.max_context_len < self.config.model.context_length:
            log.warning(
                "KV cache of %d tokens limits requests to %d of the model's %d; raise --max-total-tokens for more",
                limits.max_total_tokens, self.manager.max_context_len, self.config.model.context_length,
            )  # fmt: skip
        duties = [self._receive(inbox), self._watch(), *map(self._await_end, self._children)]
        self._tasks = [asyncio.create_task(self._perform(duty)) for duty in duties]

    async def warm_up(self) -> None:
        """Generate a few tokens so that lazy initialisation does not delay the first request."""
        if not self.config.server.skip_server_warmup:
            tokens = min(4, self.config.model.context_length - 1)
            sampling, prompt = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True), list(range(tokens))
            async with await self.manager.generate(prompt, sampling) as generation:
                async for _ in generation:
                    pass
        self.health.warm = True

    async def drain(self) -> None:
        """Refuse new requests; abort those still open after `shutdown_timeout` seconds."""
        if not await self.manager.drain(self.config.server.shutdown_timeout):
            log.warning("aborting %d requests that are still open", self.manager.open_requests)
            self.manager.abort(all=True)
            await self.manager.drain(1.0)

    async def stop(self) -> None:
        """End all processes and remove their files; open requests fail. May be called twice, and after a failed start.

        Sets `died` if a process dies before it has finished its work.
        """
        self.health.draining = True
        if self._tasks and not self.died.is_set():
            self.manager.drain_scheduler()
            ends = [asyncio.gather(*(child.gone.wait() for child in self._children)), asyncio.create_task(self.died.wait())]
            await asyncio.wait(ends, timeout=EXIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            await cancel(*ends)
        if self._manager is not None:
            self._manager.fail_all(ServerDraining)
        await cancel(*self._tasks)
        self._tasks = []
        self.kill()

    def kill(self) -> None:
        """End all processes now and remove their files, without awaiting anything."""
        for child in self._children:
            child.kill()
        self._children = []
        self._cleanup.close()
        if self._ray is not None:  # last, because it may take seconds
            self._ray.release()
            self._ray = None

    async def _start_ranks(self, config: ChildConfig) -> list[Child]:
        """Start the scheduler, and a worker for every other rank of the model."""
        if self.config.parallel.tp_size == 1:
            self._children.append(ChildProcess("scheduler", self._scheduler_command, config))
        elif self.config.parallel.executor == "ray":
            from runtime.entrypoints.ray_ranks import RayRanks

            self._ray = RayRanks()
            self._children += await self._ray.start(config, self._scheduler_command)
        else:
            self._children += start_ranks(config, self._scheduler_command)
        return list(self._children)

    async def _while_all_live(self, start: asyncio.Future[T]) -> T:
        """Await `start`. Raises `ServingError` if a child dies first."""
        ends = [asyncio.create_task(child.gone.wait()) for child in self._children]
        try:
            await asyncio.wait([start, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                child = next(child for child in self._children if child.gone.is_set())
                raise ServingError(f"the {child.role} process died during its start ({child.describe_end()})")
            return start.result()
        except ServingError as error:
            raise await first_failure(self._children, error) from None
        finally:
            await cancel(start, *ends)

    async def _perform(self, duty: Coroutine[object, object, None]) -> None:
        """Run a background task; an unexpected error in it is logged and ends the server."""
        try:
            await duty
        except Exception:
            log.exception("a task of the HTTP process failed")
            self.manager.process_died("http")
            self.died.set()

    async def _receive(self, inbox: AsyncInbox[ToTokenizer]) -> None:
        try:
            await self.manager.serve(inbox.receive)
        except Exception:  # logged by the manager
            self.died.set()

    async def _await_end(self, child: Child) -> None:
        await child.gone.wait()
        if not child.finished:
            log.error("the %s process died: %s", child.role, child.describe_end())
            self._fail(child.role)

    async def _watch(self) -> None:
        """Fail when a child is alive but sends no heartbeats."""
        # The detokenizer is checked first, because it forwards the scheduler's heartbeats. Rank 0 watches the other ranks.
        children: dict[Role, Child] = {child.role: child for child in reversed(self._children) if child.role in self.manager.beats}
        watchdog = Watchdog(children, SHARDED_TICKS if self.config.parallel.tp_size > 1 else SILENT_TICKS)
        while True:
            await asyncio.sleep(TICK_SECONDS)
            hung = watchdog.tick(self.manager.beats, self.manager.writes_trace)
            if hung is not None:
                log.error("the %s process hangs: no heartbeat for %g s; its stacks follow", hung, watchdog.patience * TICK_SECONDS)
                self._fail(hung)
                children[hung].dump_stacks()
                await asyncio.sleep(DUMP_SECONDS)
                return

    def _fail(self, role: Role) -> None:
        self.manager.process_died(role)
        self.died.set()
