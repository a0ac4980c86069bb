"""Kernel tilings worth trying for skinny GEMMs: the one place of the GEMM constants that were found on an H200."""

from __future__ import annotations

from runtime.layers.gemm.gemm import GemmOp
from runtime.layers.gemm.triton_gemm import MAX_ROWS, TritonConfig
from runtime.layers.gemm.wgmma_gemm import MAX_TILE, WgmmaConfig

GemmChoice = TritonConfig | WgmmaConfig | None
"""How a GEMM is computed: Triton or WGMMA with a tiling, or cuBLAS (None) with separate kernels for the epilogue."""
M_BUCKETS = (1, 4, 8, 16, 32, 64, MAX_ROWS)
"""A GEMM of M rows uses the kernel chosen for the next of these."""
TRITON_ROWS = 32
"""Up to this many rows Triton is the default for GEMMs that were not timed; and WGMMA is no faster but for plain GEMMs (H200)."""


def m_bucket(rows: int) -> int:
    """The bucket of `rows`, 1..MAX_ROWS."""
    return next(most for most in M_BUCKETS if rows <= most)


def default_choice(op: GemmOp, rows: int) -> GemmChoice:
    """The choice for GEMMs that were not timed."""
    return None if rows > TRITON_ROWS else triton_configs(op, rows)[0]


def triton_configs(op: GemmOp, rows: int) -> tuple[TritonConfig, ...]:
    """Triton tilings worth timing, the most promising first: the fastest of a sweep over the GEMMs of Llama-3-8B on an H200.

    Deep prefetching slows the chain of kernels for a large GEMM; for a small one it pays for the first columns.
    """
    few, some = rows <= 8, rows <= 16
    if rows > 64:
        if op in ("gate_up", "logits"):
            return TritonConfig(256, 64, 8, 4, swap=True, prefetch=0), TritonConfig(128, 64, 8, 4, swap=True, prefetch=0)
        return TritonConfig(32, 128, 4, 4, prefetch=0), TritonConfig(64, 64, 4, 6, swap=True, prefetch=0)
    if rows > 32 and op in ("linear", "linear_add"):  # deeper tiles would not fit beside 64 rows of input
        return TritonConfig(64, 128, 4, 6, swap=True, prefetch=0), TritonConfig(32, 256, 4, 4, swap=True, prefetch=512)
    shallow = (TritonConfig(128, 64, 8, 4, swap=True, prefetch=0),) if rows > 32 else ()
    if op == "gate_up":
        wide = TritonConfig(128, 128, 4, 4, swap=True, prefetch=0)
        if few:
            return TritonConfig(64, 256, 4, 3, prefetch=0), TritonConfig(64, 256, 4, 3, tma=True, late=True, prefetch=0)
        half = TritonConfig(64, 128, 4, 4, swap=True, prefetch=0)
        return (half, wide) if some else (wide, half, *shallow)
    if op == "logits":
        if few:
            return TritonConfig(32, 128, 2, 6, prefetch=0), TritonConfig(64, 256, 4, 4, swap=True, tma=True, prefetch=0)
        half, wide = TritonConfig(64, 128, 4, 5, swap=True, prefetch=0), TritonConfig(128, 128, 4, 4, swap=True, prefetch=0)
        return (half, wide) if some else (wide, half, *shallow)
    if op == "linear":
        if few:
            return TritonConfig(16, 256, 2, 6, swap=True, prefetch=512), TritonConfig(16, 256, 2, 4, swap=True, prefetch=0)
        return TritonConfig(64, 128, 4, 6, swap=True, prefetch=0), TritonConfig(64, 256, 4, 4, swap=True, prefetch=0)
    if some:
        return TritonConfig(16, 256, 2, 6, prefetch=512), TritonConfig(16, 256, 2, 6, swap=True, prefetch=512)
    return TritonConfig(32, 512, 4, 3, swap=True, prefetch=512), TritonConfig(32, 256, 4, 5, swap=True, tma=True, prefetch=0)


def wgmma_configs(op: GemmOp, rows: int, weight_rows: int, num_sms: int) -> tuple[WgmmaConfig, ...]:
    """WGMMA tilings worth timing: tiles that fill the multiprocessors evenly, whole or in halves."""
    if rows <= TRITON_ROWS and op != "linear":
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


def describe(choice: GemmChoice) -> str:
    """For the log and for tables."""
    return "cuBLAS" if choice is None else f"Triton {choice}" if isinstance(choice, TritonConfig) else str(choice)
