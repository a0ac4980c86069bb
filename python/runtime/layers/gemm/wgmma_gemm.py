"""GEMMs on Hopper: TMA streams weights through shared memory while the tensor cores multiply (WGMMA).

The kernel is `wgmma_gemm.cu`. It is compiled at start-up for the tilings that are timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from runtime.layers.gemm.deferred_norm import norms_argument
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.cuda_program import program

PARTS = Path(__file__).with_name("wgmma_parts.cu")
"""The part common to all WGMMA GEMMs."""
BLOCK_ROWS, WIDE_ROWS = 128, 192
"""Rows of x per block, the second for tiles of at most `WIDE_TILE` weight rows; 64 if there are at most 64."""
COLUMNS = 64
"""Columns of x and of the weight in a TMA box: rows of 128 bytes."""
MAX_TILE = 256
"""Maximum width of the right operand of wgmma."""
WIDE_TILE = 192
"""Maximum weight rows per block of `WIDE_ROWS` rows of x, whose threads have fewer registers."""
SHARED_BYTES = 225 << 10
"""Bytes of shared memory for the rings, of the 227 KiB that a block may have on Hopper."""
MOST_STAGES = 12
"""More stages would delay the first rows of x, which are loaded after the weights."""
MOST_BLOCKS = 8
"""Maximum blocks per cluster that every GPU supports."""
LOAD_REGISTERS = 40
"""Registers per thread of a loading warpgroup, in which only one thread issues TMA loads."""
ROW_BYTES = 2 * COLUMNS
ALIGNMENT = 1024
"""Alignment of the rings in bytes: eight swizzled rows."""
Store = Literal["NARROW", "SILU", "GELU", "ADD", "FLOAT"]
"""How sums are stored: rounded to 16 bits; gated by SiLU or GELU, then rounded; added to float32; as float32."""


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """Tiling of the WGMMA GEMM: tiles of rows of x by rows of the weight, and clusters of blocks that share loads.

    Attributes:
        tile: weight rows per block, at most 256; a multiple of 8 * split, and of 16 for gate and up rows.
        split: blocks of a cluster that split the columns of one tile (split-K).
        cluster_m: blocks of a cluster with neighbouring rows of x and the same weight rows; each loads a part of the weight rows.
        cluster_n: blocks of a cluster with neighbouring weight rows and the same rows of x; each loads a part of the rows of x.
        rows: rows of x per block, `BLOCK_ROWS` or `WIDE_ROWS`.
    """

    tile: int
    split: int = 1
    cluster_m: int = 1
    cluster_n: int = 1
    rows: int = BLOCK_ROWS

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n * self.split

    def block_rows(self, rows: int) -> int:
        """Rows of x per block of a GEMM of this many rows."""
        return 64 if rows <= 64 else self.rows

    def parts(self, weight_rows: int) -> int:
        """Columns of `DeferredNorm.squares` that a GEMM with this many weight rows writes."""
        return -(-weight_rows // self.tile) * self.split

    def fits(self, gated: bool) -> bool:
        """Whether the kernel supports this tiling; `gated`: for gate and up rows."""
        boxes = 2 if gated and self.cluster_m % 2 else 1  # weight boxes that a block loads
        return (
            0 < self.tile <= (MAX_TILE if self.rows == BLOCK_ROWS else WIDE_TILE)
            and self.rows in (BLOCK_ROWS, WIDE_ROWS)
            and self.cluster <= MOST_BLOCKS
            and self.tile % (8 * self.split) == 0
            and self.tile % (8 * self.cluster_m * boxes) == 0
            and self.tile % (16 if gated else 8) == 0
            and not (gated and self.split > 1)
        )

    def __str__(self) -> str:
        size = f"{self.tile}" if self.rows == BLOCK_ROWS else f"{self.rows}x{self.tile}"
        across = f"x{self.cluster_n}" if self.cluster_n > 1 else ""
        shared = f" cluster {self.cluster_m}{across}" if self.cluster_m * self.cluster_n > 1 else ""
        return f"WGMMA {size}{shared}{f' split {self.split}' if self.split > 1 else ''}"


@dataclass(frozen=True, slots=True)
class _Variant:
    """Compile-time parameters other than the tiling: the `rows` per block, and the epilogue."""

    rows: int
    write: Store
    dtype: torch.dtype
    bias: bool
    pdl: bool
    scale: bool = False
    deferred: bool = False
    argmax: bool = False
    store: bool = True

    @classmethod
    def of(cls, rows: int, epilogue: Epilogue, out: torch.Tensor | None, dtype: torch.dtype, pdl: bool) -> _Variant:
        """The variant for a weight of `dtype`."""
        return cls(
            rows, store_of(epilogue, out, dtype), dtype, epilogue.bias is not None, pdl, epilogue.scale is not None,
            epilogue.deferred is not None, epilogue.argmax is not None, out is not None,
        )  # fmt: skip


def supports(weight: torch.Tensor, silu: bool = False) -> bool:
    """Whether the kernel can multiply by this weight on its device."""
    columns = weight.shape[0] // 2 if silu else weight.shape[0]
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and columns % 8 == 0
        and weight.shape[1] % 8 == 0
        and cuda_driver.on_hopper(weight)
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
        x: [M, K] contiguous, the weight's dtype.
        weight: [N, K], one that the kernel `supports`.
        out: [M, `epilogue.columns(N)`] contiguous, aligned to 16 bytes, the weight's dtype with `silu` or `gelu`, float32 with `add`,
            otherwise either; None if only the argmax is needed.
        config: the tiling.
        epilogue: operations on the sums; a deferred norm has `config.parts(N)` sums of squares per row, an argmax that many tiles.
        pdl: start before the previous kernel has ended, load weights, then wait (programmatic dependent launch).

    Each row of `out` depends only on its own row of x, summed in an order fixed by K and `config`.
    """
    (M, K), N = x.shape, weight.shape[0]
    epilogue.check_gemm(x, weight, out, config.parts(N))
    assert out is None or out.dtype is torch.float32 or out.data_ptr() % 16 == 0, "expected an out that is aligned to 16 bytes"
    columns, rows, step = epilogue.columns(N), config.block_rows(M), 8 * config.cluster_n
    loaded = min(rows, -(-M // step) * step)  # few rows beyond the last, which TMA is slow to fill with zeros
    kernel = _kernel(config, _Variant.of(rows, epilogue, out, weight.dtype, pdl))
    boxes = _boxes(config, rows, loaded, epilogue.gated)
    kernel(
        _blocks(config, -(-M // rows), -(-columns // boxes.outputs), kernel.clusters_at_once),
        (
            cuda_driver.tensor_map(x.data_ptr(), (K, M), x.dtype, (COLUMNS, loaded // config.cluster_n)),
            cuda_driver.tensor_map(weight.data_ptr(), (K, N), weight.dtype, (COLUMNS, boxes.w_rows)),
            out, epilogue.argmax, epilogue.bias, norms_argument(epilogue.scale, epilogue.deferred), M, columns, K, loaded, boxes.stages,
        ),
        pdl,
    )  # fmt: skip
    return out


def store_of(epilogue: Epilogue, out: torch.Tensor | None, narrow: torch.dtype) -> Store:
    """How to store `out`; `narrow` is the dtype of 16-bit results. Without `out`, the argmax is taken over float32."""
    dtype = torch.float32 if out is None else out.dtype
    possible = (narrow,) if epilogue.gated else (torch.float32,) if epilogue.add else (torch.float32, narrow)
    assert dtype in possible, f"expected a {' or '.join(str(each).removeprefix('torch.') for each in possible)} out; got {dtype}"
    return (
        "SILU" if epilogue.silu else "GELU" if epilogue.gelu else "ADD" if epilogue.add else "FLOAT" if dtype is torch.float32 else "NARROW"
    )


@dataclass(frozen=True, slots=True)
class _Boxes:
    """The loads and outputs of a block.

    Attributes:
        w_rows: weight rows per load.
        outputs: output columns per tile.
        stages: stages of the ring.
    """

    w_rows: int
    outputs: int
    stages: int


@cache
def _boxes(config: WgmmaConfig, rows: int, loaded: int, gated: bool) -> _Boxes:
    """For blocks that compute `rows` rows of x and load `loaded` of them per stage."""
    outputs = config.tile // 2 if gated else config.tile
    w_rows = config.tile // config.cluster_m // (2 if gated and config.cluster_m % 2 else 1)
    # Rows that are computed but not loaded are read from beyond the last stage.
    stages = min((SHARED_BYTES - ALIGNMENT - (rows - loaded) * ROW_BYTES) // ((loaded + config.tile) * ROW_BYTES), MOST_STAGES)
    exchanged = rows * config.tile * 4 if config.split > 1 else 0
    assert exchanged <= stages * (loaded + config.tile) * ROW_BYTES, f"the sums of {config} exceed the ring"
    return _Boxes(w_rows, outputs, stages)


def _blocks(config: WgmmaConfig, m_tiles: int, n_tiles: int, clusters_at_once: int) -> int:
    """Blocks of a launch: with split-K a cluster computes one group of tiles, otherwise several, one after another."""
    groups = -(-m_tiles // config.cluster_m) * -(-n_tiles // config.cluster_n)
    return (groups if config.split > 1 else min(groups, clusters_at_once)) * config.cluster


@cache
def _kernel(config: WgmmaConfig, variant: _Variant) -> cuda_driver.Kernel:
    threads = 2 * variant.rows + _loaders(config, variant)
    return cuda_driver.compile_kernel(
        source(config, variant), "wgmma_gemm", threads=threads, cluster=config.cluster, shared_bytes=SHARED_BYTES
    )


def _loaders(config: WgmmaConfig, variant: _Variant) -> int:
    """Loading threads: a warp, or a warpgroup that releases registers if the others need more."""
    warps = variant.rows // 16 + 1  # a quarter of them, rounded up, share 16384 registers
    needed = config.tile // 2 + 48 + (32 if variant.write == "ADD" else 0)
    return 32 if needed <= 512 // -(-warps // 4) else 128


def source(config: WgmmaConfig, variant: _Variant) -> str:
    """The CUDA program of one tiling and variant."""
    v = variant
    assert config.fits(v.write in ("SILU", "GELU")), f"invalid tiling: {config}"
    assert config.split == 1 or (v.write in ("NARROW", "ADD") and not v.argmax), "split-K supports NARROW and ADD only"
    assert v.write == "ADD" or not v.deferred, "a deferred norm requires ADD"
    constants = dict(
        ROWS=v.rows, TILE=config.tile, SPLIT=config.split, SHARERS=config.split, CLUSTER_M=config.cluster_m, CLUSTER_N=config.cluster_n,
        LOADERS=_loaders(config, v), LOAD_REGISTERS=LOAD_REGISTERS, MOST_STAGES=MOST_STAGES, BFLOAT16=v.dtype is torch.bfloat16,
        WRITE=v.write, BIAS=v.bias, EARLY=v.pdl, SCALE=v.scale, DEFER=v.deferred, ARGMAX=v.argmax,
        STORE=v.store,
    )  # fmt: skip
    multiply = multiply_source(config.tile, "bf16" if v.dtype is torch.bfloat16 else "f16")
    return program(constants, PARTS, multiply, *(Path(__file__).with_name(f"wgmma_{name}.cu") for name in ("output", "gemm")))


def multiply_source(tile: int, dtype: Literal["bf16", "f16", "e4m3"], *, overwrites: bool = False, fragments: bool = False) -> str:
    """The wgmma instruction for a tile, in which a thread has one sum per two rows of the tile.

    With `overwrites`, the function has a parameter `add`; if it is 0, the sums are overwritten. With `fragments`, the left operand `x` is
    in registers.
    """
    count, narrow = tile // 2, dtype == "e4m3"
    sums = ", ".join(f"%{i}" for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{tile}k{32 if narrow else 16}.f32.{dtype}.{dtype}"
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    registers = 4 if fragments else 1
    left = ", ".join(f"%{count + i}" for i in range(registers))
    lefts = ", ".join(f'"r"(x[{i}])' for i in range(registers)) if fragments else '"l"(x)'
    right = count + registers
    predicate = f"setp.ne.s32 add, %{right + 1}, 0;" if overwrites else "setp.eq.u32 add, 0, 0;"
    options = "1, 1" if narrow else "1, 1, 0" if fragments else "1, 1, 0, 0"
    parameter = "const u32 (&x)[4]" if fragments else "u64 x"
    return "\n".join(
        [
            f"__device__ __forceinline__ void multiply(float (&sums)[{count}], {parameter}, u64 w{', int add' if overwrites else ''}) {{",
            f'    asm volatile("{{\\n.reg .pred add;\\n{predicate}\\n"',
            f'        "{instruction} {{{sums}}}, {f"{{{left}}}" if fragments else left}, %{right}, add, {options};\\n}}"',
            f"        : {operands}",
            f'        : {lefts}, "l"(w){", " + chr(34) + "r" + chr(34) + "(add)" if overwrites else ""});',
            "}",
        ]
    )
