"""Exchanges between the GPUs of one host by our own kernels: `push_exchange.cu`, compiled by NVRTC."""

from __future__ import annotations

import ctypes
import logging
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runtime.distributed.parallel_group import ParallelGroup
from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.cuda_program import program

log = logging.getLogger(__name__)
THREADS = 128
VALUES = 8
"""16-bit values per thread."""
PACKET = 16
"""Bytes of a packet, half of which are flags."""
PACKETS = 1 << 15
"""Packets of a sender in a slot."""
TILE_BYTES = THREADS * VALUES * 2
TILES = 8192
"""Tiles of a slot."""
CHECK_SECONDS, NANOSECONDS = 10, 10**9
MOST_NORMED = 1024
"""Maximum rows of `norm_rows`, which has one block per row; all of these run at once."""
_ONE_SHOT, _TWO_SHOT, _SCATTERED = range(3)  # `KIND` in the CUDA source
_EMPTY = 0x80008000  # `EMPTY` in the CUDA source
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


def _inboxes(group: ParallelGroup) -> list[int]:
    """The addresses in this process of each rank's memory into which the other ranks write. It exists as long as the process.

    All ranks call it together. Raises `RuntimeError` if the driver cannot share memory between these GPUs.
    """
    driver, packets, tiles = cuda_driver.driver, 2 * group.size * PACKETS * PACKET, 2 * TILES * TILE_BYTES
    own = cuda_driver.check(driver.cuMemAlloc(packets + tiles))
    cuda_driver.check(driver.cuMemsetD8(own, 0, packets))
    cuda_driver.check(driver.cuMemsetD32(int(own) + packets, _EMPTY, tiles // 4))
    torch.cuda.synchronize()  # the other ranks may write from now on
    handles = group.gather(bytes(cuda_driver.check(driver.cuIpcGetMemHandle(own)).reserved))
    return [int(own) if rank == group.rank else _open(handle) for rank, handle in enumerate(handles)]


def _open(reserved: bytes) -> int:
    handle = cuda_driver.driver.CUipcMemHandle()
    handle.reserved = reserved
    return int(cuda_driver.check(cuda_driver.driver.cuIpcOpenMemHandle(handle, _PEER_ACCESS)))


@dataclass(frozen=True, slots=True)
class _Variant:
    """The compile-time parameters of a program."""

    rank: int
    size: int
    bfloat16: bool
    defer: bool
    kind: int
    early: bool


class PushExchange:
    """`FusedExchange` of the GPUs of one host. Owner of the memory into which the ranks write.

    Sums of small arrays take one shot: each rank sends its part to all others. Those of larger arrays take two: each part goes to one rank,
    which sends the sum, rounded to 16 bits, to all others. That is less traffic with more than two ranks, but a second trip.

    Attributes:
        shot_limits: the values of `one_shot_limit` worth trying: always one shot, and with more than two ranks never.
        limit: maximum bytes of an array that `fits`; set once, after timing; 0 if NCCL is faster for all sizes.
        one_shot_limit: maximum bytes of an array that is added in one shot; set once, after timing.
    """

    def __init__(self, group: ParallelGroup, device: torch.device, pdl: bool) -> None:
        """All ranks call it together. Raises `RuntimeError` if the driver or the compiler refuse."""
        self._rank, self._size, self._pdl = group.rank, group.size, pdl
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        addresses = (ctypes.c_uint64 * group.size)(*_inboxes(group))
        self._ranks = _ranks_struct(group.size)(addresses, PACKETS, TILES, CHECK_SECONDS * NANOSECONDS)
        self.shot_limits = (sys.maxsize, 0) if group.size > 2 else (sys.maxsize,)
        self.limit = self.one_shot_limit = sys.maxsize
        kinds = (_ONE_SHOT, _SCATTERED, _TWO_SHOT) if group.size > 2 else (_ONE_SHOT, _SCATTERED)
        for dtype in (torch.bfloat16, torch.float16):
            for defer in (False, True):
                for kind in kinds:
                    self._kernel("reduce_add", dtype is torch.bfloat16, defer, kind)
            for name in ("norm_rows", "scatter_sum"):
                self._kernel(name, dtype is torch.bfloat16)
        for name in ("gather", "largest", "commit"):
            self._kernel(name)

    def wait_at_most(self, seconds: float) -> None:
        """How long kernels launched or captured from now on wait for another rank before they fail; `CHECK_SECONDS` at first."""
        self._ranks.timeout = int(seconds * NANOSECONDS)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether `add` and `scatter_sum` support this array."""
        return x.dtype in (torch.bfloat16, torch.float16) and self.moves(x)

    def moves(self, x: torch.Tensor) -> bool:
        """Whether `gather_rows` supports this result, or `gather_columns` this argument; see `gathers_columns`."""
        row = x.shape[1] * x.element_size()
        return x.is_contiguous() and row % PACKET == 0 and row <= TILES // self._size * TILE_BYTES and 0 < x.nbytes <= self.limit

    def gathers_columns(self, x: torch.Tensor, columns: int) -> bool:
        """Whether `gather_columns` supports x [N, own] of [N, `columns`]: `moves`, and all ranks have equally many columns."""
        return columns == self._size * x.shape[1] and self.moves(x)

    def parts(self, columns: int) -> int:
        """Sums of squares per row that `add` stores."""
        return -(-columns // (VALUES * THREADS))

    def add(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        gain: torch.Tensor | None = None,
        scaled: torch.Tensor | None = None,
        squares: torch.Tensor | None = None,
        *,
        scattered: bool = False,
    ) -> None:
        """`h += sum of x over the ranks`; x [M, N] in 16 bits that `fits`, h float32 [M, N].

        If `scattered`, x has `size` equal parts of at least M rows, of which this rank adds the sum of its own part to h.

        With `gain` [N], also writes `scaled` [M, N] = h * gain, both bfloat16, and `squares` float32 [M, parts(N)], the sums of h * h.
        Large arrays take several kernels, each for as many rows as fit into a slot.
        """
        rows, columns = len(x) // self._size if scattered else len(x), x.shape[1]
        assert h.dtype is torch.float32 and h.is_contiguous() and h.shape[1] == columns, "the stream is float32 and contiguous"  # noqa: PT018
        assert len(h) <= rows if scattered else len(h) == rows, "a row for each row of the stream"
        kind = _SCATTERED if scattered else _TWO_SHOT if self._size > 2 and x.nbytes > self.one_shot_limit else _ONE_SHOT
        tiles = TILES // 2 // self._size * self._size if kind == _TWO_SHOT else TILES // self._size
        kernel = self._kernel("reduce_add", x.dtype is torch.bfloat16, gain is not None, kind)
        chunks, tensors = self.parts(columns), (x, h, gain, scaled, squares)
        for first, count in _pieces(rows, tiles // chunks):
            kernel(count * chunks, (self._ranks, self._state, *tensors, columns, chunks, first, rows, len(h)), self._pdl)

    def gather_rows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The rows [N, columns] of all ranks, contiguous, one rank after another in `out`, [size * N, columns], which `moves`."""
        vectors = x[0].nbytes // PACKET
        self._gather(x, out, vectors, len(x) * vectors, vectors)

    def gather_columns(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The columns [N, own] of all ranks, contiguous, one rank after another in each row of `out`, [N, size * own]; x `moves`."""
        vectors = x[0].nbytes // PACKET
        self._gather(x, out, vectors, vectors, self._size * vectors)

    def _gather(self, x: torch.Tensor, out: torch.Tensor, vectors: int, rank_stride: int, row_stride: int) -> None:
        chunks, strides = -(-vectors // THREADS), (ctypes.c_uint64(rank_stride), ctypes.c_uint64(row_stride))
        for first, count in _pieces(len(x), TILES // self._size // chunks):
            self._kernel("gather")(count * chunks, (self._ranks, self._state, x, out, vectors, chunks, first, *strides), self._pdl)

    def scatter_sum(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """This rank's rows, `out` [N, columns], of the sum of x over all ranks, [size * N, columns], which `fits`."""
        columns, kernel = x.shape[1], self._kernel("scatter_sum", x.dtype is torch.bfloat16)
        chunks = self.parts(columns)
        for first, count in _pieces(len(out), TILES // self._size // chunks):
            kernel(count * chunks, (self._ranks, self._state, x, out, columns // VALUES, chunks, len(out), first), self._pdl)

    def norm_rows(self, rows: torch.Tensor, gains: tuple[torch.Tensor, torch.Tensor], columns: tuple[int, int], eps: float) -> bool:
        """RMS norms of the first len(gains[0]) columns of each row, and of the following len(gains[1]), over all ranks, in place.

        Args:
            rows: [T, own columns].
            gains: this rank's weights of both norms.
            columns: columns of each norm on all ranks together, by which the sums of squares are divided.

        Returns:
            False, and nothing is done, if the kernel does not support these rows; the same on every rank.
        """
        (T, width), (q, k) = rows.shape, map(len, gains)
        narrow = rows.dtype in (torch.bfloat16, torch.float16) and rows.is_contiguous()
        if not narrow or any(each % VALUES for each in (width, q, k)) or not 0 < T <= MOST_NORMED or self.limit == 0:
            return False
        vectors, numbers = (width // VALUES, q // VALUES, k // VALUES), map(ctypes.c_float, (1 / columns[0], 1 / columns[1], eps))
        kernel = self._kernel("norm_rows", rows.dtype is torch.bfloat16)
        kernel(T, (self._ranks, self._state, rows, *gains, *vectors, *numbers), self._pdl)
        return True

    def largest(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        first: int,
        tokens: torch.Tensor | None = None,
        hashed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The most likely token over all ranks, int64 [N], written to `tokens` if given.

        Args:
            logits: float32 [N, own], rows contiguous.
            ids: int64 [N], the argmax of each row.
            first: the token of column 0.
            hashed: the hash int64 [1], and a flag int32 [1] that is set if it differs between ranks.
        """
        count = len(ids)
        if tokens is None:
            tokens = torch.empty(count, dtype=torch.int64, device=ids.device)
        assert tokens.is_contiguous() and logits.stride(1) == 1 and count < PACKETS  # noqa: PT018
        tensors, numbers = (logits, ids, tokens, *(hashed or (None, None))), (count, logits.stride(0), first)
        self._kernel("largest")(-(-(count + 1) // THREADS), (self._ranks, self._state, *tensors, *numbers), self._pdl)
        return tokens

    def commit(self, hashed: torch.Tensor, tokens: torch.Tensor, lens: torch.Tensor) -> None:
        """Add to the hash int64 [1] the first `lens` int32 [B] tokens of each row of int64 [B, D]."""
        assert tokens.stride(1) == 1 or tokens.shape[1] == 1, "rows must be contiguous"
        self._kernel("commit")(1, (hashed, tokens, lens.contiguous(), *tokens.shape, tokens.stride(0)), self._pdl)

    def _kernel(self, name: str, bfloat16: bool = True, defer: bool = False, kind: int = _ONE_SHOT) -> cuda_driver.Kernel:
        return _compiled(name, _Variant(self._rank, self._size, bfloat16, defer and bfloat16, kind, self._pdl))


def _pieces(rows: int, most: int) -> list[tuple[int, int]]:
    """The first row and the number of rows of each piece of at most `most` rows."""
    return [(first, min(most, rows - first)) for first in range(0, rows, most)]


@cache
def _compiled(name: str, variant: _Variant) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(source(variant), name, threads=THREADS)


@cache
def _ranks_struct(size: int) -> Any:
    """`Ranks` in the CUDA source."""
    fields = [("inbox", ctypes.c_uint64 * size), ("packets", ctypes.c_int), ("tiles", ctypes.c_int), ("timeout", ctypes.c_uint64)]
    return type("Ranks", (ctypes.Structure,), {"_fields_": fields})


def source(variant: _Variant) -> str:
    """The CUDA program of one variant."""
    constants = dict(
        SIZE=variant.size, RANK=variant.rank, THREADS=THREADS, EARLY=variant.early, BFLOAT16=variant.bfloat16,
        DEFER=variant.defer, KIND=variant.kind,
    )  # fmt: skip
    return program(constants, Path(__file__).with_suffix(".cu"))
