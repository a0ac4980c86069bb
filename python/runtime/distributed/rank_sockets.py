"""TCP between the ranks of a model: numbered steps for ranks of other hosts, and the results of attention groups for rank 0. No torch."""

from __future__ import annotations

import struct
import time

import zmq

from runtime.batch import BatchResult
from runtime.distributed.step_messages import GroupResult, RankCodec
from runtime.distributed.zmq_socket import open_socket
from runtime.errors import ServerFault

NUMBER = struct.Struct("<Q")
LINGER_MS = 1000


class RankSocket:
    """A ZMQ socket with an unbounded queue: heartbeats, not limits, detect a rank that is slow or gone.

    Args:
        kind: the ZMQ socket type.
        address: the address to bind or connect to.
        linger: milliseconds that `close` waits for sent messages to leave.
    """

    def __init__(self, kind: int, address: str, linger: int = 0) -> None:
        self._socket = open_socket(kind, address)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, linger)

    @property
    def address(self) -> str:
        """The address it listens on, including the port."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Close."""
        self._socket.close()
        self._socket.context.term()


class StepPublisher(RankSocket):
    """The sending end of steps.

    Args:
        bind: where readers connect; the port may be `*`.
    """

    def __init__(self, bind: str) -> None:
        super().__init__(zmq.XPUB, bind, LINGER_MS)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.bind(bind)
        self._number = 0

    def await_readers(self, count: int, timeout: float) -> None:
        """Wait until `count` readers have subscribed: earlier messages are lost. Raises `ServerFault`."""
        deadline = time.monotonic() + timeout
        for _ in range(count):
            if not self._socket.poll(max(int(1000 * (deadline - time.monotonic())), 0)):
                raise ServerFault(f"{count} ranks of other nodes did not connect to {self.address} within {timeout:g} s")
            self._socket.recv()

    def send(self, message: bytes) -> None:
        """Publish one message."""
        self._socket.send_multipart((NUMBER.pack(self._number), message))
        self._number += 1


class StepSubscriber(RankSocket):
    """The reading end."""

    def __init__(self, address: str) -> None:
        super().__init__(zmq.SUB, address)
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


class ResultSocket(RankSocket):
    """Receives from `senders` groups. A group that is gone is noticed by its heartbeats, not here."""

    def __init__(self, bind: str, senders: int) -> None:
        super().__init__(zmq.PULL, bind)
        self._socket.bind(bind)
        self._senders, self._codec = senders, RankCodec()

    def receive(self, step: int) -> list[BatchResult]:
        """Wait for the results of a step, in the order of the groups 1, 2, …; steps are asked for in order.

        Each group sends one result for every requested step, so results cannot be from another step.
        """
        found = dict[int, BatchResult]()
        while len(found) < self._senders:
            result = self._codec.decode_result(self._socket.recv())
            assert result.step == step, f"group {result.group} answered for step {result.step}, not {step}"
            found[result.group] = result.result
        return [found[group] for group in sorted(found)]


class ResultPusher(RankSocket):
    """Sends to `ResultSocket`."""

    def __init__(self, address: str) -> None:
        super().__init__(zmq.PUSH, address)
        self._socket.connect(address)
        self._codec = RankCodec()

    def send(self, result: GroupResult) -> None:
        """Hand over one result."""
        self._socket.send(self._codec.encode(result))
