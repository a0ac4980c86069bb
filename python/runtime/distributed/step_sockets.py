"""Steps over TCP, for ranks of other hosts: one publisher, numbered messages. No torch."""

from __future__ import annotations

import struct
import time

import zmq

from runtime.errors import ServerFault

NUMBER = struct.Struct("<Q")
LINGER_MS = 1000


class StepPublisher:
    """The sending end. Encoded steps wait without bound for a slow reader; signs of life find one that is gone.

    Args:
        bind: where readers connect; the port may be `*`.
    """

    def __init__(self, bind: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.bind(bind)
        self._number = 0

    @property
    def address(self) -> str:
        """Where it listens, the port included."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def await_readers(self, count: int, timeout: float) -> None:
        """Wait until `count` readers have subscribed: what is published before is lost. Raises `ServerFault`."""
        deadline = time.monotonic() + timeout
        for _ in range(count):
            if not self._socket.poll(max(int(1000 * (deadline - time.monotonic())), 0)):
                raise ServerFault(f"{count} ranks of other nodes did not connect to {self.address} within {timeout:g} s")
            self._socket.recv()

    def send(self, message: bytes) -> None:
        """Publish one message."""
        self._socket.send_multipart((NUMBER.pack(self._number), message))
        self._number += 1

    def close(self) -> None:
        """Close after one second at most for what has not left yet."""
        self._socket.close()
        self._context.term()


class StepSubscriber:
    """The reading end."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._expected = 0

    def receive(self) -> bytes:
        """Wait for the next message. Raises `ServerFault` if one was lost."""
        number, message = self._socket.recv_multipart()
        if NUMBER.unpack(number)[0] != self._expected:
            raise ServerFault(f"message {self._expected} of rank 0 was lost")
        self._expected += 1
        return message

    def close(self) -> None:
        """Close."""
        self._socket.close()
        self._context.term()
