"""Typed ZMQ sockets between the processes: one inbox per process, any number of senders."""

from __future__ import annotations

import asyncio
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
"""The process that reads an inbox, and the name of its socket file."""

LINGER_MS = 1000
MAX_PATH = 107  # bytes in sockaddr_un.sun_path, the final NUL aside
LARGE_FRAME = 1 << 16
"""Bytes. Before a larger frame is decoded, other tasks of the event loop run."""

M = TypeVar("M")


class BadFrame(ServingError):
    """A frame on an internal socket is not a valid message."""

    def __init__(self, size: int, why: str) -> None:
        super().__init__(f"dropped a frame of {size} bytes that is not a known message: {why}")


class Codec(Generic[M]):
    """Decodes the messages of a union: msgpack of declared types only, so a frame cannot make it run code."""

    def __init__(self, types: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(types, strict=True)

    def decode(self, frame: bytes) -> M:
        """The message in `frame`; raises `BadFrame` if it is not valid."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise BadFrame(len(frame), str(error)[:200]) from error

    def decode_or_log(self, frame: bytes) -> M | None:
        """The message in `frame`, or None after logging why it is not valid."""
        try:
            return self.decode(frame)
        except BadFrame as error:
            log.error("%s", error)
            return None


def address(folder: str | os.PathLike[str], name: EndName) -> str:
    """The address of the inbox `name` in the server's private folder."""
    path = str(Path(folder) / name)
    if len(os.fsencode(path)) > MAX_PATH:
        raise ValueError(f"the socket path {path!r} is longer than {MAX_PATH} bytes; use a shorter folder")
    return f"ipc://{path}"


class _Bound(Generic[M]):
    """The inbox of a process: a bound PULL socket, read by one thread.

    Args:
        context: the ZMQ context, used by this socket only.
        folder: the server's private folder (mode 0700).
        name: the process that reads it.
        types: the union of messages that may arrive, e.g. `ToScheduler`.
    """

    def __init__(self, context: Any, folder: str | os.PathLike[str], name: EndName, types: Any) -> None:
        self._codec: Codec[M] = Codec(types)
        self._context, self._socket = context, context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address(folder, name))

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self._socket.close(linger=0)
        self._context.term()


class Inbox(_Bound[M]):
    """An inbox for a thread that may block."""

    def __init__(self, folder: str | os.PathLike[str], name: EndName, types: Any) -> None:
        super().__init__(zmq.Context(), folder, name, types)

    def receive(self, timeout: float = 0.0) -> M | None:
        """The next message, or None if none comes within `timeout` seconds; 0 does not wait. Invalid frames are logged and skipped."""
        while self._socket.poll(round(timeout * 1000), zmq.POLLIN):
            message = self._codec.decode_or_log(self._socket.recv(zmq.NOBLOCK))
            if message is not None:
                return message
        return None


class AsyncInbox(_Bound[M]):
    """An inbox for an asyncio loop; create it inside the running loop."""

    def __init__(self, folder: str | os.PathLike[str], name: EndName, types: Any) -> None:
        super().__init__(zmq.asyncio.Context(), folder, name, types)

    async def receive(self) -> M:
        """Wait for the next message. Invalid frames are logged and skipped."""
        while True:
            frame = await self._socket.recv()
            if len(frame) > LARGE_FRAME:
                await asyncio.sleep(0)  # receiving a waiting frame does not suspend, and this one takes milliseconds to decode
            message = self._codec.decode_or_log(frame)
            if message is not None:
                return message


class Outbox:
    """A PUSH socket connected to the inbox `name`. Any thread or coroutine may send; sending never blocks.

    Messages queue without bound while the reader is slow or not started. The supervisor notices a reader that died.
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
        """Encode and queue one message."""
        frame = self._encoder.encode(message)
        with self._lock:
            self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Close after giving queued messages one second to be sent."""
        with self._lock:
            self._socket.close()
        self._context.term()
