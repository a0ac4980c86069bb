"""The m buckets of GEMMs, default kernels, and the WGMMA tilings worth timing."""

from __future__ import annotations

from runtime.config.device_tuning import DeviceTuning
from runtime.layers.gemm.gemm import GemmOp
from runtime.layers.gemm.timings import GemmChoice
from runtime.layers.gemm.triton_gemm import MAX_ROWS
from runtime.layers.gemm.wgmma_gemm import MAX_TILE, WgmmaConfig
from runtime.layers.linear import Linear

M_BUCKETS = (1, 4, 8, 16, 32, 64, MAX_ROWS, 192, 256, 384, 512, 768, 1024, 2048)
"""A GEMM of M rows uses the kernel chosen for the next of these sizes, or for the last. Above `MAX_ROWS` that is a WGMMA kernel or
cuBLAS."""


def m_bucket(rows: int) -> int:
    """The bucket of `rows`."""
    return next((most for most in M_BUCKETS if rows <= most), M_BUCKETS[-1])


def default_choice(op: GemmOp, rows: int, tuning: DeviceTuning, linear: Linear) -> GemmChoice:
    """The choice for GEMMs that were not timed."""
    if rows <= MAX_ROWS and (linear.is_scaled or linear.is_int4):
        return (tuning.scaled_configs(rows) if linear.is_scaled else tuning.int4_configs(rows))[0]
    return None if rows > tuning.triton_gemm_rows else tuning.gemm_configs(op, rows)[0]


def wgmma_configs(op: GemmOp, rows: int, weight_rows: int, num_sms: int, tuning: DeviceTuning) -> tuple[WgmmaConfig, ...]:
    """WGMMA tilings worth timing for up to `MAX_ROWS` rows: tiles whose number fills the SMs evenly, with or without split-K."""
    if rows <= tuning.triton_gemm_rows and op == "logits":
        return ()
    outputs, halves = (weight_rows // 2, 2) if op == "gate_up" else (weight_rows, 1)

    def even(programs: int, multiple: int) -> int:
        return halves * (-(-outputs // (programs * multiple)) * multiple)

    if op in ("linear", "linear_add"):
        found = [WgmmaConfig(even(num_sms // split, 8 * split), split) for split in (1, 2)]
    else:
        waves = -(-weight_rows // (num_sms * MAX_TILE))
        found = [WgmmaConfig(even(waves * num_sms, 8))]
        if op == "gate_up":
            found.append(WgmmaConfig(even(2 * waves * num_sms, 8)))
    return tuple(config for config in found if config.tile <= MAX_TILE)
