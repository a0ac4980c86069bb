"""A ring of bytes in shared memory from one writer to several readers on one host. No torch.

The memory is an anonymous file, which is freed with the last process that has it open, so nothing can be left over.
Positions count bytes since the start. A reader that finds nothing spins for 20 µs, then sleeps until the writer wakes it up.

    0           position of the writer
    64, 128...  position of each reader
    then        the bytes: frames of [length, checksum, last] and a part of a message, each at a multiple of 16
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
import zlib

import msgspec

from runtime.errors import ServingError

LINE = 64
"""Bytes between two positions: one cache line each."""
FRAME = struct.Struct("<III4x")
SKIP = 0xFFFFFFFF
"""Marks a frame that fills the rest of the ring and is skipped."""
CAPACITY = 8 << 20
SPIN_SECONDS = 20e-6
FULL_SLEEP_SECONDS = 50e-6
TORN_SECONDS = 1.0
"""How long the checksum of a frame may be wrong: other processors may see the bytes later than the position. It covers the frame's
position, because until then a whole frame of an earlier round may be there."""


class RingFds(msgspec.Struct, frozen=True):
    """The file descriptors of a ring: its memory, and one per reader that wakes it. Children inherit them."""

    memory: int
    wake: tuple[int, ...]

    @classmethod
    def create(cls, readers: int) -> RingFds:
        """A new ring for `readers` readers."""
        memory = os.memfd_create("talon-steps")
        os.ftruncate(memory, _data_start(readers) + CAPACITY)
        return cls(memory, tuple(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(readers)))

    @property
    def all(self) -> tuple[int, ...]:
        """All file descriptors."""
        return (self.memory, *self.wake)

    def close(self) -> None:
        """Close them in this process."""
        for fd in self.all:
            os.close(fd)


class RingFull(ServingError):
    """A reader did not read for too long."""

    def __init__(self, readers: list[int], seconds: float) -> None:
        names = ", ".join(f"rank {reader + 1}" for reader in readers)
        super().__init__(f"{names} read no step for {seconds:g} s.")


class _Memory:
    """The mapped memory of a ring."""

    def __init__(self, fds: RingFds) -> None:
        for fd in fds.all:
            os.set_inheritable(fd, False)
        self._map = mmap.mmap(fds.memory, 0)
        start = _data_start(len(fds.wake))
        self.bytes = memoryview(self._map)[start:]
        self.positions = memoryview(self._map)[:start].cast("Q")

    def position(self, line: int) -> int:
        return self.positions[line * LINE // 8]

    def move(self, line: int, position: int) -> None:
        self.positions[line * LINE // 8] = position


class RingWriter:
    """The writing end. `timeout`: seconds that `send` waits for a slow reader."""

    def __init__(self, fds: RingFds, timeout: float) -> None:
        self._memory, self._wake, self._timeout = _Memory(fds), fds.wake, timeout
        self._at = 0

    def send(self, message: bytes) -> None:
        """Hand one message of any length to all readers. Raises `RingFull`."""
        view, most = memoryview(message), CAPACITY // 4
        for start in range(0, max(len(view), 1), most):
            self._put(view[start : start + most], last=start + most >= len(view))

    def close(self) -> None:
        """The memory ends with the processes."""

    def _put(self, part: memoryview, last: bool) -> None:
        size, left = _padded(FRAME.size + len(part)), CAPACITY - self._at % CAPACITY
        data, at = self._memory.bytes, self._at % CAPACITY
        self._await_room(size + (left if left < size else 0))
        if left < size:
            FRAME.pack_into(data, at, SKIP, _checksum(b"", self._at, last=False), 0)
            self._at, at = self._at + left, 0
        FRAME.pack_into(data, at, len(part), _checksum(part, self._at, last), last)
        data[at + FRAME.size : at + FRAME.size + len(part)] = part
        self._at += size
        self._memory.move(0, self._at)
        for fd in self._wake:
            os.eventfd_write(fd, 1)

    def _await_room(self, size: int) -> None:
        deadline = time.monotonic() + self._timeout
        while slow := [i for i in range(len(self._wake)) if self._at + size - self._memory.position(i + 1) > CAPACITY]:
            if time.monotonic() > deadline:
                raise RingFull(slow, self._timeout)
            time.sleep(FULL_SLEEP_SECONDS)


class RingReader:
    """The reading end of reader `index`."""

    def __init__(self, fds: RingFds, index: int) -> None:
        self._memory, self._line, self._wake = _Memory(fds), index + 1, fds.wake[index]
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._at = 0

    def receive(self) -> bytes:
        """Wait for the next message."""
        parts, last = list[bytes](), False
        while not last:
            self._await_frame()
            part, last = self._take()
            parts.append(part)
        return b"".join(parts)

    def _await_frame(self) -> None:
        spin_until = time.perf_counter() + SPIN_SECONDS
        while self._memory.position(0) == self._at:
            if time.perf_counter() > spin_until and self._poll.poll():
                os.eventfd_read(self._wake)

    def _take(self) -> tuple[bytes, bool]:
        deadline = time.monotonic() + TORN_SECONDS
        while (found := self._frame()) is None:
            assert time.monotonic() < deadline, "a frame of the ring is damaged"
        self._at += _padded(FRAME.size + len(found[0]))
        self._memory.move(self._line, self._at)
        return found

    def _frame(self) -> tuple[bytes, bool] | None:
        """The frame at the current position and whether it is the last of its message; None if it is incomplete or was skipped."""
        at, data = self._at % CAPACITY, self._memory.bytes
        length, checksum, last = FRAME.unpack_from(data, at)
        if length == SKIP and checksum == _checksum(b"", self._at, last=False):
            self._at += CAPACITY - at
        if length > CAPACITY // 4:
            return None
        part = bytes(data[at + FRAME.size : at + FRAME.size + length])
        return (part, bool(last)) if len(part) == length and checksum == _checksum(part, self._at, bool(last)) else None


def _checksum(part: bytes | memoryview, position: int, last: bool) -> int:
    """The checksum of a frame at a position, a multiple of 16."""
    return zlib.crc32(part, (position + last) & 0xFFFFFFFF)


def _data_start(readers: int) -> int:
    return LINE * (1 + readers)


def _padded(size: int) -> int:
    """`size` rounded up to 16 bytes, so that a frame's head always fits before the end of the ring."""
    return -(-size // 16) * 16
