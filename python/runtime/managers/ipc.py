"""Typed ends of the ZMQ sockets between the processes: one inbox a process, any number of senders."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import zmq
import zmq.asyncio

from runtime.errors import ServingError

log = logging.getLogger(__name__)

EndName = Literal["scheduler", "detokenizer", "tokenizer"]
"""Who reads an inbox; also the name of its socket file."""

LINGER_MS = 1000
MAX_PATH = 107  # bytes in sockaddr_un.sun_path, the final NUL aside

M = TypeVar("M")


class BadFrame(ServingError):
    """A frame on an internal socket is not a message of the expected types."""

    def __init__(self, size: int, why: str) -> None:
        super().__init__(f"dropped a frame of {size} bytes that is no known message: {why}")


class Codec(Generic[M]):
    """Bytes to one of the messages of a union, and back. Only msgpack and declared types: nothing in a frame can name code to run."""

    def __init__(self, types: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(types, strict=True)

    def decode(self, frame: bytes) -> M:
        """The message in `frame`; raises `BadFrame` for anything else."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise BadFrame(len(frame), str(error)[:200]) from error

    def decode_or_log(self, frame: bytes) -> M | None:
        """The message in `frame`, or None after logging what was wrong with it."""
        try:
            return self.decode(frame)
        except BadFrame as error:
            log.error("%s", error)
            return None


def address(folder: str | os.PathLike[str], name: EndName) -> str:
    """Where the inbox `name` listens, inside the private folder of this server."""
    path = str(Path(folder) / name)
    if len(os.fsencode(path)) > MAX_PATH:
        raise ValueError(f"the socket path {path!r} is longer than {MAX_PATH} bytes; use a shorter folder")
    return f"ipc://{path}"


class Inbox(Generic[M]):
    """The reading end of a process: a bound PULL socket. One thread reads.

    Args:
        folder: the server's private folder (mode 0700).
        name: who reads here.
        types: the union of messages that may arrive, e.g. `ToScheduler`.
    """

    def __init__(self, folder: str | os.PathLike[str], name: EndName, types: Any) -> None:
        self._codec: Codec[M] = Codec(types)
        self._context = zmq.Context()
        self._socket = _pull(self._context, address(folder, name))

    def receive(self, timeout: float | None = 0.0) -> M | None:
        """The next message, or None when none came within `timeout` seconds. Garbage is logged, not returned.

        A timeout of 0 only looks; None waits for ever.
        """
        wait_ms = None if timeout is None else round(timeout * 1000)
        while self._socket.poll(wait_ms, zmq.POLLIN):
            message = self._codec.decode_or_log(self._socket.recv(zmq.NOBLOCK))
            if message is not None:
                return message
        return None

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self._socket.close(linger=0)
        self._context.term()


class AsyncInbox(Generic[M]):
    """`Inbox` for an asyncio loop. Make it inside the running loop."""

    def __init__(self, folder: str | os.PathLike[str], name: EndName, types: Any) -> None:
        self._codec: Codec[M] = Codec(types)
        self._context = zmq.asyncio.Context()
        self._socket = _pull(self._context, address(folder, name))

    async def receive(self) -> M:
        """The next message, as soon as there is one. Garbage is logged, not returned."""
        while True:
            message = self._codec.decode_or_log(await self._socket.recv())
            if message is not None:
                return message

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self._socket.close(linger=0)
        self._context.term()


class Outbox:
    """A writing end: a PUSH socket connected to the inbox `name`. Any thread may send, also from a coroutine: it never blocks.

    Messages queue without bound while the reader is slow or not yet there; a reader that died is noticed by whoever watches the processes.
    """

    def __init__(self, folder: str | os.PathLike[str], name: EndName) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(address(folder, name))

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message."""
        frame = self._encoder.encode(message)
        with self._lock:
            self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Give what is queued one second to leave, then close."""
        with self._lock:
            self._socket.close()
        self._context.term()


def _pull(context: Any, where: str) -> Any:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(where)
    return socket
