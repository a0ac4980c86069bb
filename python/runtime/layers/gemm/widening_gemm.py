"""GEMMs with e4m3 or int4 weights and 16-bit activations on Hopper: weights become tensor-core fragments (`widening_gemm.cu`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.config.device_tuning import DeviceTuning
from runtime.config.kernel_configs import WideningConfig
from runtime.layers.gemm.deferred_norm import norms_argument
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.gemm.wgmma_gemm import LOAD_REGISTERS, PARTS, Store, multiply_source, store_of
from runtime.layers.kernels import cuda_driver
from runtime.layers.kernels.cuda_program import program
from runtime.layers.kernels.scale_layout import num_columns, scale_layout

ROWS, DEPTH = 128, 128
"""Weight rows per block; columns per stage."""
TOKENS = (32, 64, 128)
"""Possible numbers of rows of x per block; more rows need several blocks."""
INT4_TOKENS = (16, *TOKENS)
"""The same for int4 weights."""
FEWEST_ROWS, FEWEST_INT4_ROWS, MOST_ROWS = 17, 9, 512
"""Rows of x for which it is timed. For fewer rows, fragment GEMMs need no shared memory; for more rows it is faster to convert weights
once, or to round rows to e4m3."""
X_COLUMNS = 64
"""Columns of a TMA box of x."""
SHARED_BYTES, ALIGNMENT = 225 << 10, 1024
"""Maximum dynamic shared memory per block; the ring's alignment, eight swizzled rows."""
FEWEST_STAGES, MOST_STAGES = 3, 9
"""Minimum and maximum stages: the sums of a block reuse the memory of up to three; more than nine would delay the first rows of x."""
INT4_STAGES = 4
"""Stages with int4 weights: two blocks with up to 64 rows fit on an SM, and one converts while the other waits."""
SPLITS = (1, 2, 3, 4, 6, 8)
CANDIDATES = 2
MOST_BLOCKS = 1.25
"""Blocks on an SM that run as fast as one, in the estimate. Several small blocks fit on an SM, but start one after another."""
STAGE_CYCLES, BLOCK_CYCLES, PART_CYCLES = 700, 3400, 100
"""Clock cycles per stage for loads and conversions; per block in addition to its stages; and per block of the cluster for adding up sums.
They hold for an SM of a Hopper GPU, the only kind that runs the kernel."""


class _Scales(ctypes.Structure):
    """`Scales` in the CUDA source."""

    _fields_ = (("at", ctypes.c_void_p), ("row_scales", ctypes.c_int), ("scale_rows", ctypes.c_int), ("column_shift", ctypes.c_int))


@dataclass(frozen=True, slots=True)
class WideningVariant:
    """Compile-time parameters other than the tiling: `tokens` rows of x per block, stages of the ring, the epilogue, and the columns of a
    group of int4 weights (0 for e4m3).
    """

    tokens: int
    stages: int
    write: Store
    bias: bool
    pdl: bool
    scale: bool = False
    deferred: bool = False
    group: int = 0

    @property
    def gated(self) -> bool:
        """Whether a block computes gate rows and the matching up rows."""
        return self.write in ("SILU", "GELU")

    @property
    def loaders(self) -> int:
        """Loading threads: a warp, or a warpgroup that releases registers if the others need more."""
        return 32 if self.tokens <= 64 else 128

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory."""
        return ALIGNMENT + self.stages * _stage_bytes(self.tokens, self.group > 0)


def supports(weight: torch.Tensor, scale: torch.Tensor, gated: bool = False) -> bool:
    """Whether the kernel can multiply bfloat16 rows by this weight on its device."""
    rows, columns, int4 = len(weight), num_columns(weight), weight.dtype is torch.uint8
    block = scale_layout(rows, columns, scale)[2]
    return (
        weight.is_cuda
        and weight.dtype in (torch.float8_e4m3fn, torch.uint8)
        and weight.is_contiguous()
        and rows % (8 * (1 + gated)) == 0
        and columns % 16 == 0
        and (DEPTH % block == 0 if int4 else block % DEPTH == 0)
        and cuda_driver.on_hopper(weight)
    )


def widening_configs(
    rows: int, weight_rows: int, columns: int, num_sms: int, tuning: DeviceTuning, int4: bool = False
) -> tuple[WideningConfig, ...]:
    """The tilings worth timing for `rows` rows of x, by an estimate of their time with e4m3 weights; none for too few or too many rows."""
    if not (FEWEST_INT4_ROWS if int4 else FEWEST_ROWS) <= rows <= MOST_ROWS:
        return ()
    stages = -(-columns // DEPTH)
    configs = [WideningConfig(split) for split in SPLITS if split <= stages]
    return tuple(sorted(configs, key=lambda config: _cycles(config, rows, weight_rows, stages, num_sms, tuning))[:CANDIDATES])


def _cycles(config: WideningConfig, rows: int, weight_rows: int, stages: int, num_sms: int, tuning: DeviceTuning) -> float:
    """Estimated clock cycles of a GEMM."""
    tokens, split = _tokens(rows), config.split
    clusters = -(-weight_rows // ROWS) * -(-rows // tokens)
    on_sm = max((227 << 10) // (ALIGNMENT + ring_stages(tokens, stages * DEPTH, split) * _stage_bytes(tokens, False)), 1)
    waves = -(-clusters * tuning.num_sms // (tuning.clusters_at_once[split] * num_sms * on_sm))
    if clusters * split > MOST_BLOCKS * num_sms:
        waves = max(waves, 2)
    # wgmma multiplies 64 x tokens x 16 in tokens / 2 cycles.
    stage = max(STAGE_CYCLES, ROWS // 64 * DEPTH // 16 * tokens // 2)
    return waves * (-(-stages // split) * stage + BLOCK_CYCLES) + (split * PART_CYCLES if split > 1 else 0)


def ring_stages(tokens: int, columns: int, split: int, int4: bool = False) -> int:
    """Stages of the ring: no more than a block's columns need, because the remaining shared memory lets neighbouring kernels overlap."""
    if int4:
        return INT4_STAGES
    fit = (SHARED_BYTES - ALIGNMENT) // _stage_bytes(tokens, False)
    return min(max(-(-columns // (DEPTH * split)), FEWEST_STAGES), MOST_STAGES, fit)


def _stage_bytes(tokens: int, int4: bool) -> int:
    return DEPTH * (ROWS // (2 if int4 else 1) + 2 * tokens)


def _tokens(rows: int, int4: bool = False) -> int:
    """Rows of x per block, for `rows` in total."""
    return next((tokens for tokens in (INT4_TOKENS if int4 else TOKENS) if rows <= tokens), TOKENS[-1])


def widening_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    config: WideningConfig,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    weight_scale: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """`out = epilogue(x @ weight.T)`; returns `out`.

    Args:
        x: bfloat16 [M, K] contiguous.
        weight: [N, K], or [N, K / 2] in int4, one that the kernel `supports`.
        out: [M, `epilogue.columns(N)`] contiguous, aligned to 16 bytes; float32 with `add`, bfloat16 with `silu` or `gelu`, otherwise
            either.
        epilogue: without argmax; a deferred norm gets `config.parts(N)` sums of squares per row.
        weight_scale: as in `scale_layout`.
        pdl: start before the previous kernel has ended, load weights, then wait (programmatic dependent launch).
    Each row of `out` depends only on its own row of x; the order of summation depends only on K and `config`.
    """
    (M, K), N = x.shape, weight.shape[0]
    assert x.dtype is torch.bfloat16, f"expected bfloat16 rows; got {x.dtype}"
    assert epilogue.argmax is None, "expected no argmax"
    epilogue.check_gemm(x, weight, out, config.parts(N))
    assert out.data_ptr() % 16 == 0, "expected an out that is aligned to 16 bytes"
    bias, scale, deferred = epilogue.bias, epilogue.scale, epilogue.deferred
    int4, write = weight.dtype is torch.uint8, store_of(epilogue, out, x.dtype)
    columns, tokens, (row_scales, scale_rows, scale_columns) = epilogue.columns(N), _tokens(M, int4), scale_layout(N, K, weight_scale)
    stages = ring_stages(tokens, K, config.split, int4)
    variant = WideningVariant(
        tokens, stages, write, bias is not None, pdl, scale is not None, deferred is not None, scale_columns if int4 else 0
    )
    packed = 2 if int4 else 1  # columns in a byte, and float16 numbers that the kernel reads as one
    outputs = ROWS // 2 if variant.gated else ROWS
    _kernel(config, variant)(
        -(-M // variant.tokens) * -(-columns // outputs) * config.split,
        (
            cuda_driver.tensor_map(x.data_ptr(), (K, M), x.dtype, (X_COLUMNS, variant.tokens)),
            cuda_driver.tensor_map(weight.data_ptr(), (K // packed, N), weight.dtype, (DEPTH // packed, outputs)),
            _Scales(weight_scale.data_ptr(), row_scales // packed, scale_rows, scale_columns.bit_length() - 1),
            out, bias, norms_argument(scale, deferred), M, columns, K,
        ),
        pdl,
    )  # fmt: skip
    return out


@cache
def _kernel(config: WideningConfig, variant: WideningVariant) -> cuda_driver.Kernel:
    threads, size = 2 * ROWS + variant.loaders, variant.shared_bytes
    return cuda_driver.compile_kernel(source(config, variant), "widening_gemm", threads=threads, cluster=config.split, shared_bytes=size)


def source(config: WideningConfig, variant: WideningVariant) -> str:
    """The CUDA program of one tiling and variant."""
    v = variant
    assert v.write == "ADD" or not v.deferred, "a deferred norm requires ADD"
    constants = dict(
        GROUP=v.group, TOKENS=v.tokens, SPLIT=config.split, STAGES=v.stages, EARLY=v.pdl, ROWS=ROWS, CLUSTER_M=1, CLUSTER_N=1,
        LOADERS=v.loaders, LOAD_REGISTERS=LOAD_REGISTERS, TILE=64 if v.gated else 32, SHARERS=1, BFLOAT16=1, BIAS=v.bias,
        WRITE=v.write, STORE=1, ARGMAX=0, SCALE=v.scale, DEFER=v.deferred,
    )  # fmt: skip
    multiply = multiply_source(v.tokens, "bf16", overwrites=True, fragments=True)
    return program(constants, PARTS, multiply, *(Path(__file__).with_name(name) for name in ("wgmma_output.cu", "widening_gemm.cu")))
