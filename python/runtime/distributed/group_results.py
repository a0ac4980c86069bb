"""How the results of attention groups travel to rank 0, over a ZMQ socket. No torch."""

from __future__ import annotations

import zmq

from runtime.batch import BatchResult
from runtime.distributed.step_messages import GroupResult, RankCodec


class ResultSocket:
    """Receives from `senders` groups. A group that is gone is noticed by its signs of life, not here."""

    def __init__(self, bind: str, senders: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(bind)
        self._senders, self._codec = senders, RankCodec()

    @property
    def address(self) -> str:
        """Where it listens, the port included."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, step: int) -> list[BatchResult]:
        """Wait for the results of a step, in the order of the groups 1, 2, …; steps are asked for in order.

        Each group sends one for every step that it is asked about, so none is of another step.
        """
        found = dict[int, BatchResult]()
        while len(found) < self._senders:
            result = self._codec.decode_result(self._socket.recv())
            assert result.step == step, f"group {result.group} answered for step {result.step}, not {step}"
            found[result.group] = result.result
        return [found[group] for group in sorted(found)]

    def close(self) -> None:
        """Close."""
        self._context.destroy(linger=0)


class ResultPusher:
    """Sends to `ResultSocket`."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._codec = RankCodec()

    def send(self, result: GroupResult) -> None:
        """Hand over one result."""
        self._socket.send(self._codec.encode(result))
