"""What rank 0 sends to the other ranks: msgpack, with arrays as raw bytes. No torch."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from runtime.batch import BatchResult, ScheduleBatch


class RunStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run one step."""

    batch: ScheduleBatch


class Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Send the result of a step: from the first rank of each attention group but rank 0's."""

    step: int


class SetRun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How the following steps run: the run mode of each graph runner. For checks."""

    modes: tuple[str, ...]


class Reset(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget every request."""


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """There are no more steps."""


RankMessage = RunStep | Answer | SetRun | Reset | Close


class GroupResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step of one attention group emitted."""

    step: int
    group: int
    result: BatchResult


def _to_bytes(value: Any) -> object:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).data if value.ndim == 1 else (value.shape, value.tobytes())
    raise NotImplementedError(f"a step cannot carry {type(value).__name__}")


def _to_array(kind: Any, value: Any) -> object:
    if get_origin(kind) is np.ndarray:
        (scalar,) = get_args(get_args(kind)[1])
        shape, data = value if isinstance(value, list) else (-1, value)
        return np.frombuffer(data, dtype=scalar).reshape(shape)
    raise NotImplementedError(f"a step cannot carry {kind}")


class RankCodec:
    """Encodes and decodes `RankMessage` and `GroupResult`. Decoded arrays are read-only."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
        self._decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage, dec_hook=_to_array)
        self._results = msgspec.msgpack.Decoder(GroupResult, dec_hook=_to_array)

    def encode(self, message: RankMessage | GroupResult) -> bytes:
        """One frame."""
        return self._encoder.encode(message)

    def decode(self, frame: bytes) -> RankMessage:
        """The message of a frame."""
        return self._decoder.decode(frame)

    def decode_result(self, frame: bytes) -> GroupResult:
        """The result in a frame."""
        return self._results.decode(frame)
