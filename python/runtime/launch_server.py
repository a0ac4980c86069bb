"""The server's command line: parse, resolve, serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import setproctitle
import uvloop

from runtime import log as logging_setup
from runtime.config.flag_parser import dump, parse
from runtime.config.resolve import check
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.collector import spare_start
from runtime.entrypoints.processes import Runtime, prepare
from runtime.errors import ConfigError, ServingError
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.models.config import ModelConfig

log = logging.getLogger(__name__)

BAD_USE = 2
"""Exit status when the user asked for what cannot be done."""
DEATH_GRACE = 1.5
"""Seconds that the HTTP side goes on answering 503 after a process died, so that every client learns of it."""
CLOSE_SECONDS = 5.0
"""How long open connections may take to close at the end."""
DEATH_CLOSE = 1.5
"""The same after a process died; the answers have failed by then."""
LAST_RESORT = 4.0
"""Seconds after a process died when this one ends, whatever still holds it up."""


def main(argv: Sequence[str] | None = None, scheduler_command: Sequence[str] | None = None) -> int:
    """Run the server until it is told to stop.

    Args:
        argv: the command line without the program.
        scheduler_command: what to run in place of this package's scheduler process.

    Returns:
        The exit status: 0 after a shutdown that was asked for, 2 for what cannot be served, 1 when something broke.
    """
    start = time.monotonic()
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        logging_setup.setup(command.args.log_level, "talon::http")
        if command.dump_config:
            print(dump(command.args), end="")
            return 0
        if command.check:
            config, _ = prepare(command.args)
            print(f"talon: {config.model.served_model_name} can be served so on {config.device.device}")
            return 0
        check(command.args)
        allow_many_files()
        with bind(command.args.host, command.args.port) as listener:
            config, model_config = prepare(command.args)
            setproctitle.setproctitle("talon::http")
            return uvloop.run(_Server(config, model_config, listener, scheduler_command, start).run())
    except ConfigError as error:
        print(f"talon: {error}", file=sys.stderr)
        return BAD_USE
    except ServingError as error:
        print(f"talon: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def allow_many_files() -> None:
    """Use all descriptors that this process may have: every connection takes one, and the customary 1024 are few."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything slow happens. Raises `ConfigError` when it is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    why = error.strerror or str(error)
    return ConfigError(f"cannot listen at {host} port {port}: {why.lower()}; choose another --port or --host")


Serve = Callable[[TokenizerManager, socket.socket, asyncio.Event], Coroutine[Any, Any, None]]
"""Answers HTTP on a listening socket until the event is set."""


class _Server:
    """One run of the server, from loading to the last process's end."""

    def __init__(
        self,
        config: RuntimeConfig,
        model_config: ModelConfig,
        listener: socket.socket,
        scheduler_command: Sequence[str] | None,
        start: float,
    ) -> None:
        self._config = config
        self._model_config = model_config
        self._listener = listener
        self._scheduler_command = scheduler_command
        self._start = start
        self._signals = 0

    async def run(self) -> int:
        self._runtime = Runtime(self._config, self._model_config, self._scheduler_command)
        self._asked_to_stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        try:
            start = asyncio.create_task(self._runtime.start())
            await asyncio.sleep(0)  # the children are on their way; what HTTP needs is imported while they load
            from runtime.entrypoints.http.server import serve

            if not await self._unless_stopped(start):
                return 0
            return await self._answer(serve)
        finally:
            await self._runtime.stop()

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            self._runtime.kill()
            os._exit(128 + number)
        log.info("%s: shutting down; once more to end at once", signal.Signals(number).name)
        self._asked_to_stop.set()

    async def _answer(self, serve: Serve) -> int:
        self._listen()
        runtime = self._runtime
        http = asyncio.create_task(serve(runtime.manager, self._listener, runtime.stopping))
        try:
            if await self._unless_stopped(runtime.warm_up(), http):
                spare_start()
                self._say_ready()
                await _first(self._asked_to_stop.wait(), runtime.died.wait(), http)
            if runtime.died.is_set():
                _end_process_after(LAST_RESORT)
                await asyncio.sleep(DEATH_GRACE)
                return 1
            if http.done():
                http.result()
                return 1
            await _first(runtime.drain(), runtime.died.wait())
            return 1 if runtime.died.is_set() else 0
        finally:
            runtime.stopping.set()
            await asyncio.wait([http], timeout=DEATH_CLOSE if runtime.died.is_set() else CLOSE_SECONDS)
            http.cancel()

    def _listen(self) -> None:
        try:
            self._listener.listen(2048)
        except OSError as error:
            raise _cannot_listen(self._config.server.host, self._config.server.port, error) from error

    async def _unless_stopped(self, work: object, *others: asyncio.Task[None]) -> bool:
        """Do `work`; False when it was cut short by a signal, a death or the end of another task."""
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        await _first(task, self._asked_to_stop.wait(), self._runtime.died.wait(), *others)
        if task.done() and not self._runtime.died.is_set():
            task.result()
            return True
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ServingError):
            await task
        return False

    def _say_ready(self) -> None:
        host, port = (str(part) for part in self._listener.getsockname()[:2])
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
        body = json.dumps(
            {
                "model": self._config.model.served_model_name,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
            }
        )
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._config.server.api_key else ""
        print(f"talon: ready after {time.monotonic() - self._start:.1f} s, serving {self._config.model.served_model_name} at {url}")
        print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}", flush=True)


async def _first(*work: object) -> None:
    """Wait until one of `work` is done; what this call made of coroutines is cancelled, tasks given are left alone."""
    tasks = [asyncio.ensure_future(one) for one in work]  # type: ignore[arg-type]
    ours = [task for task, one in zip(tasks, work, strict=True) if task is not one]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)


def _end_process_after(seconds: float) -> None:
    """End with status 1 even if the event loop is stuck by then."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
