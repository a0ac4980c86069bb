"""Fixtures of the GPU tests: compile FlashInfer's modules in parallel while other tests run, and release unused GPU memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.attention_kinds import BF16, FP16, KERNELS

WINDOWED = {"full": (False,), "mixed": (False, True), "window": (True,)}
MODULES = {(dtype, head_dim, w) for dtype, head_dim, masked in KERNELS for w in WINDOWED[masked]} | {
    (BF16, 64, True),
    (FP16, 64, False),
}
"""(dtype, head dimension, whether there is a window) of every module of per-head attention that a test uses."""
LATENT_DIMS = (512, 64)
"""Widths of a latent row and of its rotated part."""
SIDE_BY_SIDE = 6
"""Modules that compile at the same time; each runs several compilers, which take one to two GiB."""
MOST_KEPT = 2 << 30
"""Bytes that a process may keep between tests."""


@pytest.fixture(autouse=True)
def unused_memory_is_returned() -> Iterator[None]:
    """Release cached GPU memory: processes that run tests in parallel share the GPU, but torch keeps freed memory for its own process."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MOST_KEPT:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def flashinfer_modules(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile the modules of the selected tests in the background; a test that needs one waits on FlashInfer's file lock.

    Processes that run tests in parallel wait on the same locks, so that each module compiles once.
    """
    wanted = torch.cuda.is_available() and any("flashinfer" in item.nodeid for item in request.session.items)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for module in _modules(tmp_path_factory.getbasetemp().parent) if wanted and find_spec("flashinfer") else ():
            pool.submit(_compile, module)
        yield


def _modules(folder: Path) -> list[Any]:
    """The modules, slowest first. A lock in `folder` ensures that only one process writes the modules' sources."""
    from filelock import FileLock
    from flashinfer.jit.attention import gen_batch_mla_module, gen_batch_prefill_module
    from flashinfer.utils import determine_mla_backend

    options = {"use_logits_soft_cap": False, "use_fp16_qk_reduction": False}
    with FileLock(folder / "flashinfer-sources.lock"):
        latent = gen_batch_mla_module(determine_mla_backend(torch.device("cuda")), BF16, BF16, BF16, torch.int32, *LATENT_DIMS, False)
        return [latent] + [
            gen_batch_prefill_module("fa2", dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, windowed, **options)
            for dtype, head_dim, windowed in sorted(MODULES, key=str)
        ]


def _compile(module: Any) -> None:
    if not module.is_aot:
        module.build(False)
