"""The conversion of 8- and 4-bit weights in Triton kernels: it compiles for every GPU whose Triton has the stored dtype."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runtime.layers.kernels.weight_step import FP8, INT4, MXFP4, dot_step, row_pointers

POINTERS = {FP8.value: ("*fp8e4nv", "*fp32"), MXFP4.value: ("*u8", "*u8"), INT4.value: ("*u8", "*fp16")}


@triton.jit
def _kernel(x_ptr, w_ptr, scale_ptr, out_ptr, K, FORMAT: tl.constexpr):
    n, m = tl.arange(0, 32)[:, None], tl.arange(0, 16)
    acc = tl.zeros((32, 16), dtype=tl.float32)
    for start in tl.range(0, K, 128):
        w_rows, x_rows = row_pointers(w_ptr, n, K, FORMAT), x_ptr + m[:, None] * K
        acc = dot_step(acc, w_rows, scale_ptr + n, x_rows, m[:, None] < 16, start, K, 128, 128, FORMAT, True, True)
    tl.store(out_ptr + n * 16 + m[None, :], acc)


CASES = [(FP8.value, 89), (FP8.value, 90), (MXFP4.value, 80), (MXFP4.value, 89), (MXFP4.value, 90), (INT4.value, 80), (INT4.value, 90)]


@pytest.mark.parametrize(("kind", "capability"), CASES)
def test_weights_are_converted_on_all_gpus(kind: int, capability: int) -> None:
    weight, scale = POINTERS[kind]
    signature = {"x_ptr": "*bf16", "w_ptr": weight, "scale_ptr": scale, "out_ptr": "*fp32", "K": "i32", "FORMAT": "constexpr"}
    triton.compile(ASTSource(_kernel, signature, {"FORMAT": kind}), target=GPUTarget("cuda", capability, 32))
