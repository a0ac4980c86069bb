"""Kernels that many threads need at once are compiled once, and each thread launches the right one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from runtime.layers.gemm.autotune import compile_all  # noqa: E402
from runtime.layers.kernels import cuda_driver  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KINDS, CALLS = 6, 16


@triton.jit
def _fill(out_ptr, first, second, KIND: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, 16), tl.zeros((16,), tl.float32) + first * 1000 + second * 10 + KIND)


def test_threads_launch_the_kernels_that_they_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers equal to 1 and other pointer types change a launcher's arguments, so the launchers differ too."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wanted = [(kind, first, dtype) for kind in range(KINDS) for first in (1, 3) for dtype in (torch.float32, torch.bfloat16)]
    outs = [(torch.zeros(16, dtype=dtype, device="cuda"), kind, first) for kind, first, dtype in wanted * CALLS]
    compile_all(lambda _, out=out, kind=kind, first=first: _fill[(1,)](out, first, 1 + kind % 2, kind) for out, kind, first in outs)
    for out, kind, first in outs:
        expected = torch.full((16,), float(first * 1000 + (1 + kind % 2) * 10 + kind), device="cuda").to(out.dtype)
        assert torch.equal(out, expected), (kind, first, out.dtype)
    machine_code = list(tmp_path.rglob("*.cubin"))
    assert len(machine_code) == len(wanted)


def test_programs_come_from_disk_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not cuda_driver.available():
        pytest.skip("NVRTC does not work here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda_driver._code_cache.cache_clear()
    try:
        source = 'extern "C" __global__ void answer(float* out) { out[threadIdx.x] = 42.0f; }  // a text of its own'
        code = cuda_driver.compile_program(source)
        (file,) = (tmp_path / "talon" / "cuda").iterdir()
        assert file.read_bytes().endswith(code)
        kernel = cuda_driver.compile_kernel(source, "answer", threads=32)
        out = torch.zeros(32, device="cuda")
        kernel(1, (out,), pdl=False)
        assert out.tolist() == [42.0] * 32
        monkeypatch.setattr(cuda_driver, "_run_nvrtc", lambda *_: pytest.fail("the program is compiled again"))
        assert cuda_driver.compile_program.__wrapped__(source) == code  # pyright: ignore[reportFunctionMemberAccess]
    finally:
        cuda_driver._code_cache.cache_clear()
