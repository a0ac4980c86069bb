"""The server's command line: parse, resolve, serve."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setproctitle
import uvloop

from runtime import log as logging_setup
from runtime.config.flag_parser import dump, parse
from runtime.config.resolve import check
from runtime.config.runtime_config import RuntimeConfig
from runtime.config.server import check_certificate
from runtime.config.server_args import ServerArgs
from runtime.entrypoints.kept_memory import freeze_gc
from runtime.entrypoints.node import run_node
from runtime.entrypoints.prepare import check_token_map, check_tokenizer, check_weights, prepare
from runtime.entrypoints.processes import Runtime
from runtime.errors import ConfigError, ServingError, report
from runtime.log import say, write_stdout
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.models.config import ModelConfig

log = logging.getLogger(__name__)

DEATH_GRACE = 1.5
"""Seconds during which the HTTP side still answers 503 after a process died, so that clients get an error."""
CLOSE_SECONDS = 5.0
"""Seconds that open connections may take to close at shutdown."""
DEATH_CLOSE = 1.5
"""The same after a process died; all requests have failed by then."""
MIN_FILES = 64
"""Files that must be allowed to be open: the server opens 30 to 40 itself."""
DROP_CLOSE = 0.5
"""Seconds that the handlers of dropped connections may take to end."""
LAST_RESORT = 4.0
"""Seconds after a process died when this process exits, even if the event loop is stuck."""


def main(argv: Sequence[str] | None = None, scheduler_command: Sequence[str] | None = None) -> int:
    """Run the server until a signal stops it.

    Args:
        argv: the command line without the program.
        scheduler_command: replaces the command of the scheduler process and the workers.

    Returns:
        The exit status: 0 after a signal, 2 for a mistake in the flags or the model, 1 after a failure, 130 after a SIGINT before the
        processes start.
    """
    start = time.monotonic()
    open_standard_streams()
    reset_signals()
    logging_setup.hold()
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        logging_setup.setup(command.args.log_level, "talon::http", command.args.log_format)
        if command.dump_config:
            return print_config(command.args)
        if command.check:
            config, model_config = prepare(command.args)
            check_certificate(command.args)
            check_tokenizer(config)
            check_token_map(config, model_config)
            check_weights(config, model_config)
            say(f"talon: {config.model.served_model_name} can be served on {config.device.device}", log)
            return 0
        check(command.args)
        check_certificate(command.args)
        if command.args.api_key_file is not None:
            signal.signal(signal.SIGHUP, _reload_later)
        allow_many_files()
        if command.args.node_rank > 0:
            config, _ = prepare(command.args)
            setproctitle.setproctitle("talon::node")
            return uvloop.run(run_node(config, scheduler_command))
        with _listener(command.args) as listener:
            config, model_config = prepare(command.args)
            setproctitle.setproctitle("talon::http")
            return uvloop.run(_Server(config, model_config, listener, scheduler_command, start).run())
    except ServingError as error:
        return report(error, _error_line)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def print_config(args: ServerArgs) -> int:
    """Print all flags as YAML; returns the exit status. Raises `ServingError` if stdout is full or closed."""
    try:
        write_stdout(dump(args))
    except OSError as error:
        raise ServingError(f"The configuration cannot be written to stdout: {(error.strerror or str(error)).lower()}.") from error
    return 0


def _error_line(text: str) -> str:
    return logging_setup.line_of(text, log.name, logging.ERROR)


def _reload_later(*_: object) -> None:
    """A SIGHUP before there is an HTTP server to reload the keys must not end the start."""
    log.info("SIGHUP: the API keys will be read when the server is ready")


def open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that the parent closed; sockets and pipes would get their numbers.

    Stdout escapes what its encoding lacks, as stderr does.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def reset_signals() -> None:
    """Undo what the parent set: blocked signals would not stop the server, and ignored ends of children would look like exits.

    SIGTERM gets a handler until the event loop has its own, because the kernel has no default action for process 1 of a container. Signals
    are unblocked after that: one may have arrived while it was blocked.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD))


def allow_many_files() -> None:
    """Raise the limit of open files to the maximum: each connection takes one, and the usual limit is 1024.

    Raises:
        ConfigError: the maximum is too low for the server itself.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < MIN_FILES:
        raise ConfigError(
            f"Only {hard} files may be open; the server needs {MIN_FILES}. Raise the limit, for example with ulimit -Hn 1024."
        )
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket before anything slow happens. Raises `ConfigError` for an address that is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, TypeError) as error:  # TypeError: the name cannot be encoded
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket in place of one that a dead server left. Raises `ConfigError` for a path that is in use or not ours."""
    path = os.path.abspath(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and not _is_bound(path) and listener.connect_ex(path) == errno.ECONNREFUSED:
            Path(path).unlink()
        listener.close()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen at --uds {path}: {(error.strerror or str(error)).lower()}. Choose another path.") from error
    return listener


def _is_bound(path: str) -> bool:
    """Whether a process has a socket bound to `path`: a server that is loading its model does not listen yet."""
    try:
        sockets = Path("/proc/net/unix").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False
    return any(one.endswith(f" {path}") for one in sockets)


@contextlib.contextmanager
def _listener(args: ServerArgs) -> Iterator[socket.socket]:
    """The bound socket that --uds, or --host and --port, ask for. The file of a Unix socket goes with it."""
    with bind(args.host, args.port) if args.uds is None else bind_unix(args.uds) as listener:
        try:
            yield listener
        finally:
            if args.uds is not None:
                Path(args.uds).unlink(missing_ok=True)


def _cannot_listen(host: str, port: int, error: OSError | TypeError) -> ConfigError:
    why = (isinstance(error, OSError) and error.strerror) or str(error)
    return ConfigError(f"Cannot listen at {host} port {port}: {why.lower()}. Choose another --port or --host.")


Serve = Callable[[TokenizerManager, socket.socket, asyncio.Event], Coroutine[Any, Any, None]]
"""Serves HTTP on a listening socket until the event is set."""


@dataclass
class _Server:
    """One run of the server, from loading to the end of the last process."""

    config: RuntimeConfig
    model_config: ModelConfig
    listener: socket.socket
    scheduler_command: Sequence[str] | None
    start: float
    signals: int = 0

    async def run(self) -> int:
        self._runtime = Runtime(self.config, self.model_config, self.scheduler_command)
        self._stop_requested = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # neither ignored, as under nohup, nor used to read the API keys again
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hang_up)
        try:
            start = asyncio.create_task(self._runtime.start())
            await asyncio.sleep(0)  # starts the children; HTTP's modules are imported while they load
            from runtime.entrypoints.http.connection import check_version
            from runtime.entrypoints.server.server import serve

            check_version()
            status = await self._answer(serve) if await self._finished(start) else 0
        finally:
            await self._runtime.stop()
        return 1 if self._runtime.died.is_set() else status

    def _on_signal(self, number: int) -> None:
        self.signals += 1
        if self.signals > 1:
            self._runtime.kill()
            os._exit(128 + number)
        log.info("%s: shutting down; send it again to exit at once", signal.Signals(number).name)
        self._stop_requested.set()

    def _on_hang_up(self) -> None:
        """Drain when the terminal closes. The kernel and the shell may both say so, so a second SIGHUP does not end the process at once."""
        log.info("SIGHUP: shutting down")
        self._stop_requested.set()

    async def _answer(self, serve: Serve) -> int:
        self._listen()
        runtime = self._runtime
        http = asyncio.create_task(serve(runtime.manager, self.listener, runtime.stopping))
        try:
            if await self._finished(runtime.warm_up(), http):
                freeze_gc()
                self._print_ready()
                await _first(self._stop_requested.wait(), runtime.died.wait(), http)
            if not runtime.died.is_set():
                if http.done():
                    http.result()
                    return 1
                await _first(runtime.drain(), runtime.died.wait())
            if runtime.died.is_set():
                _end_process_after(LAST_RESORT)
                await asyncio.sleep(DEATH_GRACE)
            return 0
        finally:
            runtime.stopping.set()
            await asyncio.wait([http], timeout=DEATH_CLOSE if runtime.died.is_set() else CLOSE_SECONDS)
            http.cancel()
            await asyncio.wait([http], timeout=DROP_CLOSE)

    def _listen(self) -> None:
        try:
            self.listener.listen(2048)
        except OSError as error:
            raise _cannot_listen(self.config.server.host, self.config.server.port, error) from error

    async def _finished(self, work: object, *others: asyncio.Task[None]) -> bool:
        """Await `work`; False if a signal, the death of a process or the end of another task came first."""
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        await _first(task, self._stop_requested.wait(), self._runtime.died.wait(), *others)
        if task.done() and not self._runtime.died.is_set():
            task.result()
            return True
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ServingError):
            await task
        return False

    def _address(self) -> tuple[str, str]:
        """The address for clients on this machine, and the option with which curl finds it."""
        server = self.config.server
        scheme = "http" if server.ssl_certfile is None else "https"
        insecure = "" if server.ssl_certfile is None else " --cacert " + shlex.quote(server.ssl_certfile)
        if server.uds is not None:
            return f"{scheme}://localhost", f"{insecure} --unix-socket {shlex.quote(server.uds)}"
        host, port = (str(part) for part in self.listener.getsockname()[:2])
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}", insecure

    def _print_ready(self) -> None:
        url, socket_option = self._address()
        body = json.dumps(
            {
                "model": self.config.model.served_model_name,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
            }
        )
        server = self.config.server
        key = " -H 'Authorization: Bearer YOUR_KEY'" if server.api_key or server.api_key_file else ""
        served = f"{self.config.model.served_model_name} ({self.config.weights} weights)"
        say(f"talon: ready after {time.monotonic() - self.start:.1f} s, serving {served} at {url}", log)
        say(f"curl{socket_option} {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}", log)


async def _first(*work: object) -> None:
    """Wait until one of `work` is done. Cancels the coroutines among the others and leaves tasks running."""
    tasks = [asyncio.ensure_future(one) for one in work]  # type: ignore[arg-type]
    ours = [task for task, one in zip(tasks, work, strict=True) if task is not one]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)


def _end_process_after(seconds: float) -> None:
    """Exit with status 1 after `seconds`, even if the event loop is stuck."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
