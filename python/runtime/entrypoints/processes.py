"""The composition root: starts the scheduler and the detokenizer, watches them, and ends them without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from runtime.batch import WorkerLimits
from runtime.config.machine import probe
from runtime.config.model_facts import ModelFacts
from runtime.config.resolve import check, resolve
from runtime.config.runtime_config import RuntimeConfig
from runtime.config.server_args import ServerArgs
from runtime.config.speculative import with_embedded_draft
from runtime.entrypoints.child import Failed, Orders, Ready, Report, Role
from runtime.errors import ConfigError, ServerDraining, ServingError
from runtime.managers.ipc import AsyncInbox, Outbox
from runtime.managers.messages import ToTokenizer
from runtime.managers.telemetry.health import Health
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.model_files.model_source import DRAFT_FLAGS, resolve_model, resolve_weights
from runtime.models.config import ModelConfig
from runtime.models.draft_config import load_draft_config
from runtime.models.hf_config import load_hf_config
from runtime.sampling_params import SamplingParams
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TURN_SECONDS = 0.5
SILENT_TURNS = 16
"""Turns of the watch without a child's heartbeat after which it counts as hung: 8 s."""
TRACE_TURNS = 1200
"""Turns for which the scheduler may be silent while it writes a profile's trace, through which torch holds the interpreter: 10 minutes."""
EXIT_SECONDS = 3.0
"""How long a child may take to exit when asked."""
DUMP_SECONDS = 1.0
"""How long a hung child gets to print its stacks."""
_FOLDER_PREFIX = "talon-"
_LONGEST_TEMP = 60  # bytes of a temporary folder's path that leave room for ours in a socket address


def prepare(args: ServerArgs) -> tuple[RuntimeConfig, ModelConfig]:
    """Find the model and decide everything. Fetches and converts what is not here yet; loads nothing.

    Raises:
        ConfigError: for anything the user asked that cannot be done.
    """
    check(args)
    source = resolve_model(args.model_path, load_format=args.load_format, tokenizer_path=args.tokenizer_path, revision=args.revision)
    args = with_embedded_draft(args, source.is_embedded)
    model_config = load_hf_config(source.weights_folder)
    facts = ModelFacts(
        path=source.weights_folder,
        load_format=source.kind,
        tokenizer_path=source.tokenizer_folder,
        name=source.served_name,
        dtype=model_config.dtype,
        max_context_len=model_config.max_context_len,
        vocab_size=model_config.vocab_size,
        head_dim=model_config.head_dim,
        embedded=source.is_embedded,
    )
    config = resolve(args, probe(), facts, _draft(args, source.kind))
    speculative = config.speculative
    if speculative is not None and speculative.algorithm != "NGRAM":
        assert speculative.draft_model_path is not None
        load_draft_config(speculative.draft_model_path, speculative.algorithm, model_config)  # refused here, weights are not read for it
    return config, model_config


def _draft(args: ServerArgs, target_kind: str) -> tuple[str, str] | None:
    """(folder, what lies there) of the draft model, if there is one."""
    path = args.speculative_draft_model_path
    if path is None:
        return None
    made_up = target_kind == "dummy" and not path.endswith(".gguf")  # of a GGUF file's shape alone nothing is known before it is read
    load_format = args.speculative_draft_load_format or ("dummy" if made_up else "auto")
    return resolve_weights(path, load_format=load_format, flags=DRAFT_FLAGS)


class Child:
    """One child process and the reading end of its report pipe."""

    def __init__(self, role: Role, command: Sequence[str], orders: Orders) -> None:
        self.role: Role = role
        self.ready: asyncio.Future[WorkerLimits | None] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self._rest = b""
        self._fd, theirs = os.pipe()
        os.set_blocking(self._fd, False)
        # Its own session keeps Ctrl-C in the terminal from reaching it: the parent decides when it ends.
        self._process = subprocess.Popen(
            [*command, role, str(theirs)], stdin=subprocess.PIPE, pass_fds=(theirs,), start_new_session=True, env=_child_env()
        )
        os.close(theirs)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(orders))
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def describe_end(self) -> str:
        """How it ended, for people."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its report pipe"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def dump_stacks(self) -> None:
        """Make it print its stacks and die, also when it was stopped."""
        self._signal(signal.SIGABRT)
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it now."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self.close()

    def close(self) -> None:
        """Let go of its report pipe. Harmless twice."""
        if self._fd >= 0:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._ended()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(msgspec.json.decode(line, type=Report))

    def _take(self, report: Report) -> None:
        if isinstance(report, Ready) and not self.ready.done():
            self.ready.set_result(report.limits)
        elif isinstance(report, Failed) and not self.ready.done():
            kind = ConfigError if report.fault == "config" else ServingError
            self.ready.set_exception(kind(report.message))

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        self.gone.set()
        if not self.ready.done():
            self.ready.set_exception(ServingError(f"the {self.role} process died while starting ({self.describe_end()})"))


class Runtime:
    """The processes behind one server or engine, and the `TokenizerManager` that speaks for them. Belongs to one event loop.

    Args:
        config, model_config: from `prepare`.
        scheduler_command: what to run in place of this package's scheduler process; gets the role and a file descriptor.

    Attributes:
        manager: there after `start`.
        died: set when a process died or hangs; every open request has failed by then.
        stopping: set when HTTP should end.
    """

    manager: TokenizerManager

    def __init__(self, config: RuntimeConfig, model_config: ModelConfig, scheduler_command: Sequence[str] | None = None) -> None:
        self.config = config
        self.model_config = model_config
        self.health = Health()
        self.died = asyncio.Event()
        self.stopping = asyncio.Event()
        self._own_command = (sys.executable, "-m", "runtime.entrypoints.child")
        self._scheduler_command = scheduler_command or self._own_command
        self._children: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._folder: str | None = None
        self._inbox: AsyncInbox[ToTokenizer] | None = None
        self._outbox: Outbox | None = None

    async def start(self) -> None:
        """Start both children side by side and wait until they serve.

        Raises:
            ConfigError: a child cannot do what was asked.
            ServingError: a child broke.
        """
        self._folder = private_folder()
        self._inbox = AsyncInbox(self._folder, "tokenizer", ToTokenizer)
        self._outbox = Outbox(self._folder, "scheduler")
        orders = Orders(config=self.config, folder=self._folder, parent=os.getpid())
        scheduler = Child("scheduler", self._scheduler_command, orders)
        self._children.append(scheduler)
        detokenizer = Child("detokenizer", self._own_command, orders)
        self._children.append(detokenizer)
        load = asyncio.to_thread(Tokenizer.load, self.config.model.tokenizer_path, chat_template=self.config.model.chat_template)
        tokenizer, limits, _ = await asyncio.gather(load, scheduler.ready, detokenizer.ready)
        assert limits is not None
        self.manager = TokenizerManager(self.config, tokenizer, self.model_config, limits, self._outbox.send, self.health)
        if self.manager.max_context_len < self.config.model.context_length:
            log.warning(
                "KV holds %d tokens: a request may have %d of the context's %d; raise --max-total-tokens for more",
                limits.max_total_tokens, self.manager.max_context_len, self.config.model.context_length,
            )  # fmt: skip
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        self._tasks += [asyncio.create_task(self._await_end(child)) for child in self._children]

    async def warm_up(self) -> None:
        """Make the first tokens, so that the first user does not wait for them."""
        if not self.config.server.skip_server_warmup:
            sampling = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
            async with await self.manager.generate([0, 1, 2, 3], sampling) as generation:
                async for _ in generation:
                    pass
        self.health.warm = True

    async def drain(self) -> None:
        """Take no new work, give what is open `shutdown_timeout` seconds, then abort it."""
        if not await self.manager.drain(self.config.server.shutdown_timeout):
            log.warning("%d requests are still open; aborting them", self.manager.open_requests)
            self.manager.abort(all=True)
            await self.manager.drain(1.0)

    async def stop(self) -> None:
        """End every process and remove what they left; what is still open fails. Harmless twice, and after a failed start."""
        self.health.draining = True
        if self._tasks and not self.died.is_set():
            self.manager.dismiss()
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(asyncio.gather(*(child.gone.wait() for child in self._children)), EXIT_SECONDS)
        if hasattr(self, "manager"):
            self.manager.give_up(ServerDraining)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self.kill()

    def kill(self) -> None:
        """End every process now and remove what they left; needs no loop turn."""
        for child in self._children:
            child.kill()
        self._children = []
        for end in (self._inbox, self._outbox):
            if end is not None:
                end.close()
        self._inbox = self._outbox = None
        if hasattr(self, "manager"):
            self.manager.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _receive(self) -> None:
        assert self._inbox is not None
        try:
            await self.manager.serve(self._inbox.receive)
        except Exception:  # logged by the manager
            self.died.set()

    async def _await_end(self, child: Child) -> None:
        await child.gone.wait()
        if not self.health.draining or self.manager.open_requests:
            log.error("the %s process died: %s", child.role, child.describe_end())
            self._fail(child.role)

    async def _watch(self) -> None:
        """Notice children that neither end nor respond.

        Time is counted in turns of this loop, not read from a clock: a machine that was suspended lost no beat.
        """
        silent, heard = dict.fromkeys(self._children, 0), dict.fromkeys(self._children, -1)
        traced = 0
        while True:
            await asyncio.sleep(TURN_SECONDS)
            traced = traced + 1 if self.manager.writes_trace else 0
            for child in reversed(self._children):  # the detokenizer first: the scheduler's beats come by way of it
                beats = self.manager.beats[child.role]
                excused = child.role == "scheduler" and 0 < traced <= TRACE_TURNS
                silent[child] = silent[child] + 1 if beats == heard[child] and not excused else 0
                heard[child] = beats
                if silent[child] >= SILENT_TURNS:
                    await self._give_up(child)
                    return

    async def _give_up(self, child: Child) -> None:
        log.error("the %s process hangs: no heartbeat for %g s; its stacks follow", child.role, SILENT_TURNS * TURN_SECONDS)
        self._fail(child.role)
        child.dump_stacks()
        await asyncio.sleep(DUMP_SECONDS)

    def _fail(self, who: str) -> None:
        self.manager.fail_all(who)
        self.died.set()


def _child_env() -> dict[str, str]:
    """Our environment, from which a child finds this very package, installed or not."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def private_folder() -> str:
    """A new folder that only this user may enter, for the sockets. Removes those that servers killed before us left behind."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _LONGEST_TEMP:
        base = "/tmp"
    for left in Path(base).glob(f"{_FOLDER_PREFIX}*-*"):
        pid = left.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir=base)
