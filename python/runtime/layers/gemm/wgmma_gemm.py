"""Matrix products of up to 128 rows on Hopper: weights stream through shared memory once, by the copy engine, under the tensor cores.

`streamed_gemm.cu` says how. It is compiled when the server starts, for the tiles that are asked for.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from runtime.layers.gemm.deferred_norm import NormAhead, RowScale
from runtime.layers.gemm.epilogue import NOTHING, Epilogue
from runtime.layers.kernels import cuda_driver

MAX_ROWS = 128
COLUMNS = 64
"""Columns of x and of the weight in a box: rows of 128 bytes."""
MAX_TILE = 256
"""The widest right operand of wgmma."""
SHARED_BYTES = 225 << 10
"""What a block asks for its rings, of the 227 KiB that Hopper gives it in all."""
MOST_STAGES = 12
"""Weights further ahead than this delay the first rows of x, which come after them."""
ROW_BYTES = 2 * COLUMNS
ALIGNMENT = 1024
"""Of the rings: eight swizzled rows."""
Write = Literal["NARROW", "SILU", "ADD", "FLOAT"]
"""How sums are written: rounded to 16 bits; gated, then rounded; added to float32; as float32."""


@dataclass(frozen=True, slots=True)
class StreamedConfig:
    """How the product is cut.

    Attributes:
        tile: weight rows of a block, at most 256; a multiple of 8 * split, of 16 where half of it are gates and half ups.
        split: blocks that take parts of the columns.
    """

    tile: int
    split: int = 1

    def parts(self, weight_rows: int) -> int:
        """The columns of `NormAhead.squares` that a product with so many weight rows writes."""
        return -(-weight_rows // self.tile) * self.split

    def __str__(self) -> str:
        return f"streamed {self.tile}{f' split {self.split}' if self.split > 1 else ''}"


@dataclass(frozen=True, slots=True)
class _Variant:
    """What a program is compiled for, beside the cut: `rows` that are computed, and what happens to the sums."""

    rows: int
    write: Write
    dtype: torch.dtype
    bias: bool
    pdl: bool
    scale: bool = False
    ahead: bool = False
    largest: bool = False
    store: bool = True


def takes(weight: torch.Tensor, silu: bool = False) -> bool:
    """Whether products with this weight can be computed on its device."""
    columns = weight.shape[0] // 2 if silu else weight.shape[0]
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and columns % 8 == 0
        and weight.shape[1] % 8 == 0
        and torch.cuda.get_device_capability(weight.device)[0] == 9
        and cuda_driver.available()
    )


def streamed_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    config: StreamedConfig,
    epilogue: Epilogue = NOTHING,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """`out = epilogue(x @ weight.T)`.

    Args:
        x: [M, K] contiguous, M <= 128, the weight's dtype.
        weight: [N, K], one that the kernel `takes`.
        out: [M, `epilogue.columns(N)`] contiguous, the weight's dtype with `silu`, float32 with `add`, else either; written.
        config: how to cut it.
        epilogue: what is done to the sums; of squares, it writes `config.parts(N)` sums a row.
        pdl: start before the kernel ahead has ended, ask for weights and wait (programmatic dependent launch).

    Each row of `out` depends on its own row of x only, summed in an order that K and `config` fix.
    """
    _run(x, weight, out, None, config, epilogue, pdl)
    return out


def streamed_gemm_largest(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: StreamedConfig,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The largest of `x @ weight.T + bias` in each row and each tile of columns, for `argmax_chunks`; arguments as in `streamed_gemm`.

    Args:
        out: float32 [M, N], written where given: the same numbers as `streamed_gemm` writes.

    Returns:
        int32 [2, M, tiles]: the key of each tile's largest entry and its first column, by `first_of_largest`.
    """
    assert out is None or out.dtype is torch.float32, "the largest entries are those of float32"
    largest = torch.empty((2, x.shape[0], -(-weight.shape[0] // config.tile)), dtype=torch.int32, device=x.device)
    _run(x, weight, out, largest, config, Epilogue(bias=bias), pdl)
    return largest


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    largest: torch.Tensor | None,
    config: StreamedConfig,
    epilogue: Epilogue,
    pdl: bool,
) -> None:
    """Launch; what is written is what is given of `out` and `largest`."""
    (M, K), N = x.shape, weight.shape[0]
    assert 0 < M <= MAX_ROWS, f"streamed_gemm takes up to {MAX_ROWS} rows, not {M}"
    assert weight.shape[1] == K, f"x has {K} columns, the weight {weight.shape[1]}"
    assert x.is_contiguous(), "rows of x lie behind each other"
    epilogue.check(out, M, N, config.parts(N))
    bias, scale, ahead = epilogue.bias, epilogue.scale, epilogue.ahead
    columns, outputs = epilogue.columns(N), config.tile // 2 if epilogue.silu else config.tile
    rows, x_rows = _computed_rows(M), max(8, 1 << (M - 1).bit_length())
    variant = _Variant(
        rows, _write(epilogue, out, weight.dtype), weight.dtype, bias is not None, pdl, scale is not None, ahead is not None,
        largest is not None, out is not None,
    )  # fmt: skip
    kernel = _kernel(config, variant)
    # Rows that are computed and not brought lie past the last stage's.
    stages = (SHARED_BYTES - ALIGNMENT - (rows - x_rows) * ROW_BYTES) // ((x_rows + config.tile) * ROW_BYTES)
    tiles = -(-columns // outputs)
    kernel(
        tiles * config.split if config.split > 1 else min(tiles, kernel.clusters_at_once),
        (
            _map(x.data_ptr(), M, K, x.dtype, x_rows),
            _map(weight.data_ptr(), N, K, weight.dtype, outputs),
            cuda_driver.pointer(out),
            cuda_driver.pointer(largest),
            cuda_driver.pointer(bias),
            _norms(scale, ahead),
            cuda_driver.int32(M),
            cuda_driver.int32(columns),
            cuda_driver.int32(K),
            cuda_driver.int32(x_rows),
            cuda_driver.int32(min(stages, MOST_STAGES)),
        ),
        pdl,
    )


def _write(epilogue: Epilogue, out: torch.Tensor | None, narrow: torch.dtype) -> Write:
    """How to write `out`; `narrow` is the weight's dtype. Where nothing is stored, what is looked at is float32."""
    dtype = torch.float32 if out is None else out.dtype
    possible = (narrow,) if epilogue.silu else (torch.float32,) if epilogue.add else (narrow, torch.float32)
    assert dtype in possible, f"out is {dtype}, not one of {possible}"
    return "SILU" if epilogue.silu else "ADD" if epilogue.add else "FLOAT" if dtype is torch.float32 else "NARROW"


def _computed_rows(rows: int) -> int:
    """What the tensor cores go through: one warpgroup's rows, or two's."""
    return 64 if rows <= 64 else 128


@lru_cache(maxsize=1 << 14)
def _map(address: int, rows: int, columns: int, dtype: torch.dtype, box_rows: int) -> Any:
    return cuda_driver.tensor_map(address, (columns, rows), dtype, (COLUMNS, box_rows))


class _Norms(ctypes.Structure):
    """`Norms` of the program."""

    _fields_ = (
        ("squares", ctypes.c_void_p),
        ("parts", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("gain", ctypes.c_void_p),
        ("scaled", ctypes.c_void_p),
        ("next_squares", ctypes.c_void_p),
    )


def _norms(scale: RowScale | None, ahead: NormAhead | None) -> _Norms:
    read = (scale.squares.data_ptr(), scale.squares.shape[1], scale.eps) if scale is not None else (None, 0, 0.0)
    written = (ahead.gain.data_ptr(), ahead.scaled.data_ptr(), ahead.squares.data_ptr()) if ahead is not None else (None, None, None)
    return _Norms(*read, *written)


@cache
def _kernel(config: StreamedConfig, variant: _Variant) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(
        source(config, variant), "streamed_gemm", threads=2 * variant.rows + 32, cluster=config.split, shared_bytes=SHARED_BYTES
    )


def source(config: StreamedConfig, variant: _Variant) -> str:
    """The CUDA program of one cut and variant."""
    v = variant
    assert 0 < config.tile <= MAX_TILE and config.tile % (16 if v.write == "SILU" else 8 * config.split) == 0, f"no such cut: {config}"  # noqa: PT018
    assert config.split == 1 or (v.write in ("NARROW", "ADD") and not v.largest), "parts of columns are added for these only"
    assert v.write == "ADD" or not v.ahead, "a norm ahead is that of a sum"
    constants = dict(
        ROWS=v.rows, TILE=config.tile, SPLIT=config.split, MOST_STAGES=MOST_STAGES, BFLOAT16=int(v.dtype is torch.bfloat16),
        WRITE=v.write, BIAS=int(v.bias), EARLY=int(v.pdl), SCALE=int(v.scale), AHEAD=int(v.ahead), LARGEST=int(v.largest),
        STORE=int(v.store),
    )  # fmt: skip
    return "\n".join(
        [
            "typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;",
            *(f"#define {name} {value}" for name, value in constants.items()),
            _multiply(config.tile, "bf16" if v.dtype is torch.bfloat16 else "f16"),
            (Path(__file__).parent / "wgmma_gemm.cu").read_text(encoding="utf-8"),
        ]
    )


def _multiply(tile: int, dtype: str) -> str:
    """The wgmma instruction for a tile: its sums are as many operands as half the tile has rows."""
    count = tile // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{tile}k16.f32.{dtype}.{dtype}"
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return "\n".join(
        [
            f"__device__ __forceinline__ void multiply(float (&sums)[{count}], u64 x, u64 w) {{",
            '    asm volatile("{\\n.reg .pred add;\\nsetp.eq.u32 add, 0, 0;\\n"',
            f'        "{instruction} {{{sums}}}, %{count}, %{count + 1}, add, 1, 1, 0, 0;\\n}}"',
            f"        : {operands}",
            '        : "l"(x), "l"(w));',
            "}",
        ]
    )
