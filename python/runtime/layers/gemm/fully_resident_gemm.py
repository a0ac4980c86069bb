"""GEMMs of few rows in CUDA C++ whose e4m3 weights are all in shared memory before x is ready (`fully_resident_gemm.cu`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from runtime.config.expert_tuning import WeightFormat
from runtime.config.kernel_configs import FullyResidentConfig
from runtime.layers.gemm.deferred_norm import norms_argument
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.gemm.few_rows_output import OutputVariant
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.kernels.scale_layout import scale_layout
from runtime.layers.kernels.stages import STAGE_COLUMNS, STAGES, TOKEN_PADDING, stage_bytes

FORM: WeightFormat = "fp8"
ROWS = 16
"""Weight rows of a unit."""
WARPS = 8
SHARED_BYTES = 225 << 10
"""Maximum shared memory per block for stages and rows of x, on Hopper."""
SPACES = (1, 4, 8, 16)
"""Numbers of rows of x for which a kernel may have space."""


def fully_resident_config(weight: torch.Tensor, rows: int, num_sms: int) -> FullyResidentConfig | None:
    """The tiling with one block per SM, in which all weights fit into shared memory beside `rows` rows of x; None if none does."""
    N, K = weight.shape
    if N % ROWS or rows > SPACES[-1]:
        return None
    stages = -(-K // STAGE_COLUMNS[FORM])
    config = FullyResidentConfig(WARPS, -(-stages // WARPS), -(-N // (ROWS * num_sms)))
    return config if config.warps * _warp_bytes(config, rows) <= SHARED_BYTES else None


def supports(weight: torch.Tensor, scale: torch.Tensor, gated: bool = False) -> bool:
    """Whether the kernel can multiply bfloat16 rows by this weight on its device. `scale`: as in `scale_layout`."""
    rows, columns = weight.shape
    return (
        weight.is_cuda
        and weight.dtype is torch.float8_e4m3fn
        and not gated
        and scale_layout(rows, columns, scale)[2] % STAGE_COLUMNS[FORM] == 0  # a stage has one scale per row
        and fragments.readable(weight, FORM, columns, STAGE_COLUMNS[FORM])
        and cuda_driver.on_hopper(weight)
    )


def fully_resident_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    config: FullyResidentConfig,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    weight_scale: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """`out = epilogue(x @ weight.T)`; returns `out`.

    Args:
        x: bfloat16 [M, K] contiguous, M <= 16.
        weight: [N, K], one that the kernel `supports`; N a multiple of 16.
        out: [M, N] contiguous; float32 with `add`, otherwise float32 or bfloat16.
        config: from `fully_resident_config` for at least M rows.
        epilogue: not gated, without argmax. A deferred norm requires `config.tall` 1; it gets `config.parts(N)` sums of squares per row.
        weight_scale: as in `scale_layout`.
        pdl: start before the previous kernel has ended, load weights, then wait (programmatic dependent launch).
    Each row of `out` depends only on its own row of x; the order of summation depends only on K.
    """
    (M, K), N = x.shape, weight.shape[0]
    assert not epilogue.gated, "expected an epilogue without a gate"
    assert epilogue.deferred is None or config.tall == 1, "the sums of squares of a deferred norm are those of one unit per block"
    variant = OutputVariant.of(x, weight, out, epilogue, config.parts(N), pdl)
    layout = (0, *scale_layout(N, K, weight_scale))
    weights = fragments.weights_argument(weight, weight_scale, epilogue.bias, (N, K), layout)
    size, norms = _warp_bytes(config, M), norms_argument(epilogue.scale, epilogue.deferred)
    blocks = min(N // ROWS, torch.cuda.get_device_properties(x.device).multi_processor_count)
    kernel = _kernel(config, variant, K % STAGE_COLUMNS[FORM] == 0, config.warps * size)
    kernel(blocks, (x, weights, out, norms, M, size), pdl)
    return out


def _warp_bytes(config: FullyResidentConfig, rows: int) -> int:
    """Bytes of shared memory per warp: its stages, and its columns of x."""
    space = next(space for space in SPACES if rows <= space)
    return config.share * (config.tall * stage_bytes(FORM) + space * 2 * STAGE_COLUMNS[FORM]) + space * TOKEN_PADDING[FORM]


@cache
def _kernel(config: FullyResidentConfig, variant: OutputVariant, even: bool, shared_bytes: int) -> cuda_driver.Kernel:
    program, threads = source(config, variant, even), 32 * config.warps
    return cuda_driver.compile_kernel(program, "fully_resident_gemm", threads=threads, shared_bytes=shared_bytes)


def source(config: FullyResidentConfig, variant: OutputVariant, even: bool) -> str:
    """The CUDA program of one tiling and variant."""
    cut = {"FORMAT": fragments.FORMATS[FORM], "WARPS": config.warps, "TALL": config.tall, "SHARE": config.share, "EVEN": even}
    return variant.source(Path(__file__).with_name("fully_resident_gemm.cu"), cut, STAGES)
