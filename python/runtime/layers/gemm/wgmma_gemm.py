"""Skinny GEMMs on Hopper: the copy engine streams each weight through shared memory once while the tensor cores
multiply (WGMMA).

The kernel is `wgmma_gemm.cu`. It is compiled when the server starts, for the tilings that are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from runtime.layers.gemm.deferred_norm import norms_argument
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.kernels import cuda_driver

MAX_ROWS = 128
COLUMNS = 64
"""Columns of x and of the weight in a box: rows of 128 bytes."""
MAX_TILE = 256
"""The widest right operand of wgmma."""
SHARED_BYTES = 225 << 10
"""Shared memory of the rings, out of the 227 KiB that a block may have on Hopper."""
MOST_STAGES = 12
"""More stages would delay the first rows of x, which are loaded after the weights."""
ROW_BYTES = 2 * COLUMNS
ALIGNMENT = 1024
"""Of the rings: eight swizzled rows."""
Store = Literal["NARROW", "SILU", "GELU", "ADD", "FLOAT"]
"""How sums are stored: rounded to 16 bits; gated, then rounded; added to float32; as float32."""


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """Tiling of the WGMMA GEMM.

    Attributes:
        tile: weight rows of a block, at most 256; a multiple of 8 * split, and of 16 for gate and up rows.
        split: blocks that share the columns of one tile (split-K).
    """

    tile: int
    split: int = 1

    def parts(self, weight_rows: int) -> int:
        """Columns of `DeferredNorm.squares` that a GEMM with this many weight rows writes."""
        return -(-weight_rows // self.tile) * self.split

    def __str__(self) -> str:
        return f"WGMMA {self.tile}{f' split {self.split}' if self.split > 1 else ''}"


@dataclass(frozen=True, slots=True)
class _Variant:
    """What a program is compiled for besides the tiling: the `rows` it computes, and its epilogue."""

    rows: int
    write: Store
    dtype: torch.dtype
    bias: bool
    pdl: bool
    scale: bool = False
    deferred: bool = False
    argmax: bool = False
    store: bool = True


def supports(weight: torch.Tensor, silu: bool = False) -> bool:
    """Whether the kernel can multiply by this weight on its device."""
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


def wgmma_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    config: WgmmaConfig,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    pdl: bool = False,
) -> torch.Tensor | None:
    """`out = epilogue(x @ weight.T)`; returns `out`.

    Args:
        x: [M, K] contiguous, M <= 128, the weight's dtype.
        weight: [N, K], one that the kernel `supports`.
        out: [M, `epilogue.columns(N)`] contiguous, the weight's dtype with `silu` or `gelu`, float32 with `add`, else either;
            None where only the argmax is wanted.
        config: the tiling.
        epilogue: what is done to the sums; a deferred norm gets `config.parts(N)` sums of squares per row, an argmax as
            many tiles.
        pdl: start before the previous kernel has ended, load weights and wait (programmatic dependent launch).

    Each row of `out` depends on its own row of x only, summed in an order that K and `config` fix.
    """
    (M, K), N = x.shape, weight.shape[0]
    assert 0 < M <= MAX_ROWS, f"expected 1 to {MAX_ROWS} rows; got {M}"
    assert weight.shape[1] == K, f"expected x of {weight.shape[1]} columns; got {K}"
    assert x.is_contiguous(), "expected a contiguous x"
    epilogue.check(out, M, N, config.parts(N))
    bias, scale, deferred = epilogue.bias, epilogue.scale, epilogue.deferred
    columns, outputs = epilogue.columns(N), config.tile // 2 if epilogue.gated else config.tile
    rows, x_rows = _computed_rows(M), max(8, 1 << (M - 1).bit_length())
    variant = _Variant(
        rows, _store(epilogue, out, weight.dtype), weight.dtype, bias is not None, pdl, scale is not None, deferred is not None,
        epilogue.argmax is not None, out is not None,
    )  # fmt: skip
    kernel = _kernel(config, variant)
    # Rows that are computed but not loaded lie past the last stage.
    stages = (SHARED_BYTES - ALIGNMENT - (rows - x_rows) * ROW_BYTES) // ((x_rows + config.tile) * ROW_BYTES)
    tiles = -(-columns // outputs)
    kernel(
        tiles * config.split if config.split > 1 else min(tiles, kernel.clusters_at_once),
        (
            _map(x.data_ptr(), M, K, x.dtype, x_rows),
            _map(weight.data_ptr(), N, K, weight.dtype, outputs),
            cuda_driver.pointer(out),
            cuda_driver.pointer(epilogue.argmax),
            cuda_driver.pointer(bias),
            norms_argument(scale, deferred),
            cuda_driver.int32(M),
            cuda_driver.int32(columns),
            cuda_driver.int32(K),
            cuda_driver.int32(x_rows),
            cuda_driver.int32(min(stages, MOST_STAGES)),
        ),
        pdl,
    )
    return out


def _store(epilogue: Epilogue, out: torch.Tensor | None, narrow: torch.dtype) -> Store:
    """How to store `out`; `narrow` is the weight's dtype. The argmax alone is taken over float32."""
    dtype = torch.float32 if out is None else out.dtype
    possible = (narrow,) if epilogue.gated else (torch.float32,) if epilogue.add else (narrow, torch.float32)
    assert dtype in possible, f"expected out of dtype {possible}; got {dtype}"
    return (
        "SILU" if epilogue.silu else "GELU" if epilogue.gelu else "ADD" if epilogue.add else "FLOAT" if dtype is torch.float32 else "NARROW"
    )


def _computed_rows(rows: int) -> int:
    """Rows that the tensor cores compute: those of one warpgroup or of two."""
    return 64 if rows <= 64 else 128


@lru_cache(maxsize=1 << 14)
def _map(address: int, rows: int, columns: int, dtype: torch.dtype, box_rows: int) -> Any:
    return cuda_driver.tensor_map(address, (columns, rows), dtype, (COLUMNS, box_rows))


@cache
def _kernel(config: WgmmaConfig, variant: _Variant) -> cuda_driver.Kernel:
    return cuda_driver.compile_kernel(
        source(config, variant), "wgmma_gemm", threads=2 * variant.rows + 32, cluster=config.split, shared_bytes=SHARED_BYTES
    )


def source(config: WgmmaConfig, variant: _Variant) -> str:
    """The CUDA program of one tiling and variant."""
    v = variant
    multiple = 16 if v.write in ("SILU", "GELU") else 8 * config.split
    assert 0 < config.tile <= MAX_TILE and config.tile % multiple == 0, f"invalid tiling: {config}"  # noqa: PT018
    assert config.split == 1 or (v.write in ("NARROW", "ADD") and not v.argmax), "split-K supports NARROW and ADD only"
    assert v.write == "ADD" or not v.deferred, "a deferred norm requires ADD"
    constants = dict(
        ROWS=v.rows, TILE=config.tile, SPLIT=config.split, MOST_STAGES=MOST_STAGES, BFLOAT16=int(v.dtype is torch.bfloat16),
        WRITE=v.write, BIAS=int(v.bias), EARLY=int(v.pdl), SCALE=int(v.scale), DEFER=int(v.deferred), ARGMAX=int(v.argmax),
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
    """The wgmma instruction for a tile: a thread holds one sum per two rows of the tile."""
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
