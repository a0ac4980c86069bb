"""What the GPU tests share: FlashInfer's modules, compiled before the first test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gpu.attention_kinds import BF16, FP16, KERNELS

WINDOWED = {"full": (False,), "mixed": (False, True), "window": (True,)}
MODULES = {(dtype, head_dim, w) for dtype, head_dim, masked in KERNELS for w in WINDOWED[masked]} | {
    (BF16, 64, True),
    (FP16, 64, False),
}
"""Type, head dimension and whether there is a window, of every module that a test plans with."""
SIDE_BY_SIDE = 6
"""Modules that compile at once; each runs several compilers, which take one to two GiB."""


@pytest.fixture(scope="session", autouse=True)
def flashinfer_modules(request: pytest.FixtureRequest) -> None:
    """Compile the modules of the selected tests side by side; otherwise each test would wait for its own."""
    if torch.cuda.is_available() and any("flashinfer" in item.nodeid for item in request.session.items):
        pytest.importorskip("flashinfer")
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(_compile, sorted(MODULES, key=str)))


def _compile(module: tuple[torch.dtype, int, bool]) -> None:
    from flashinfer.jit.attention import gen_batch_prefill_module

    dtype, head_dim, windowed = module
    spec = gen_batch_prefill_module(
        "fa2", dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, windowed, use_logits_soft_cap=False, use_fp16_qk_reduction=False
    )
    if not spec.is_aot:
        spec.build(False)
