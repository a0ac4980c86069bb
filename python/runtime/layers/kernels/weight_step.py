"""One step of a Triton GEMM along K, for 16-bit, FP8, MXFP4 or int4 weights, which are converted to 16 bits in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.layers.kernels.fragments import FORMATS

DENSE, FP8, MXFP4, INT4 = (tl.constexpr(FORMATS[name]) for name in ("dense", "fp8", "mxfp4", "int4"))


@triton.jit
def row_pointers(w_ptr, row, K, FORMAT: tl.constexpr):
    """Pointers to the first entry of weight rows with K columns; for MXFP4, to their first 16 bytes in a core matrix."""
    if FORMAT == MXFP4:
        return w_ptr + row // 8 * (K * 4) + row % 8 * 16
    if FORMAT == INT4:
        return w_ptr + row * (K // 2)
    return w_ptr + row * K


@triton.jit
def dot_step(
    acc, w_rows, scale_rows, x_rows, x_in, start, K, scale_columns,
    BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`acc + w @ x.T` over columns `start` to `start + BLOCK_K`, float32 [N, M].

    Args:
        w_rows, scale_rows: pointers [N, 1] to the first entry of each weight row (`row_pointers`), and to its first scale.
        x_rows: pointers [M, 1] to rows of x in 16 bits.
        x_in: [M, 1]: whether a row is read; other rows count as zeros.
        scale_columns: for FP8 and int4, columns per scale: a multiple of `BLOCK_K`, or at least K.
        PTX: convert by PTX instructions, to bfloat16; otherwise by Triton's operations.
    """
    if FORMAT == MXFP4:
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        group = start // 32 + tl.arange(0, BLOCK_K // 32)[None, :]
        column = byte // 16 * 32 + byte % 16
        packed = tl.load(w_rows + byte // 16 * 128 + byte % 16, mask=None if EVEN_K else byte < K // 2, other=None if EVEN_K else 0)
        scale = tl.load(scale_rows + group, mask=None if EVEN_K else group < K // 32, other=None if EVEN_K else 0)
        x_mask = x_in if EVEN_K else x_in & (column < K)
        x_low = tl.load(x_rows + column, mask=x_mask, other=0.0)
        x_high = tl.load(x_rows + column + 16, mask=x_mask, other=0.0)
        low, high = unpack_mxfp4(packed, scale, x_low.dtype, PTX)
        acc = tl.dot(low, tl.trans(x_low), acc)
        acc = tl.dot(high, tl.trans(x_high), acc)
        # The condition is always true, but makes this step wait for its dots: otherwise Triton would overlap the last one with the next
        # step, which overwrites the registers from which it still reads `high`. `start` may exceed K.
        acc = tl.where(K > 0, acc, 0.0)
    elif FORMAT == INT4:
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        column = byte // 16 * 32 + byte % 16
        packed = tl.load(w_rows + byte, mask=None if EVEN_K else byte < K // 2, other=None if EVEN_K else 0)
        numbers = scale_rows + 2 * (tl.minimum(start, K - 1) // scale_columns)
        scale, zero = tl.load(numbers).to(tl.float32), tl.load(numbers + 1).to(tl.float32)
        x_mask = x_in if EVEN_K else x_in & (column < K)
        x_low = tl.load(x_rows + column, mask=x_mask, other=0.0)
        x_high = tl.load(x_rows + column + 16, mask=x_mask, other=0.0)
        acc = tl.dot(widen_int4(packed & 15, scale, zero, x_low.dtype), tl.trans(x_low), acc)
        acc = tl.dot(widen_int4(packed >> 4, scale, zero, x_low.dtype), tl.trans(x_high), acc)
        acc = tl.where(K > 0, acc, 0.0)  # waits for the dots, as for MXFP4
    else:
        k = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_rows + k, mask=x_in if EVEN_K else x_in & (k < K), other=0.0)
        w = tl.load(w_rows + k, mask=None if EVEN_K else k < K, other=None if EVEN_K else 0.0)
        if FORMAT == FP8:
            scale = tl.load(scale_rows + tl.minimum(start, K - 1) // scale_columns)  # beyond the last column any scale of the row will do
            if w.dtype != x.dtype:
                w = widen_fp8(w, x.dtype, PTX)
            acc += tl.dot(w, tl.trans(x)) * scale
        else:
            acc = tl.dot(w, tl.trans(x), acc)
    return acc


@triton.jit
def widen_fp8(w, dtype: tl.constexpr, PTX: tl.constexpr):
    """e4m3 to 16 bits, exactly; NaN becomes 480 with `PTX`.

    Exponent and mantissa are moved to their places in bfloat16; a multiplication by 2^120 corrects the exponent bias, also of subnormal
    numbers. It is an `fma` that adds -0, because a product in bfloat16 needs compute capability 9.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, e, s, z;
            mov.b32 z, 0x80008000;
            prmt.b32 t, $2, 0, 0x1404;
            shr.b32 e, t, 4;
            and.b32 s, t, z;
            lop3.b32 e, e, 0x07F007F0, s, 0xEA;
            mov.b32 s, 0x7B807B80;
            fma.rn.bf16x2 $0, e, s, z;
            prmt.b32 t, $2, 0, 0x3424;
            shr.b32 e, t, 4;
            and.b32 s, t, z;
            lop3.b32 e, e, 0x07F007F0, s, 0xEA;
            mov.b32 s, 0x7B807B80;
            fma.rn.bf16x2 $1, e, s, z;
            }""",
            "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return w.to(dtype)


@triton.jit
def widen_int4(code, scale, zero, dtype: tl.constexpr):
    """`(code - zero) * scale` in float32, rounded to `dtype`. `code`: uint8 [N, B], at most 15; `scale`, `zero`: float32 [N, 1]."""
    # As the last bits of the float32 number 2^23, a code is converted without an instruction of the slow conversion units.
    number = (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return ((number - (zero + 8388608.0)) * scale).to(dtype)


@triton.jit
def unpack_mxfp4(packed, scale, dtype: tl.constexpr, PTX: tl.constexpr):
    """The first and the second code of bytes [N, B], times the scale of each 16 bytes: two 16-bit tensors [N, B], exact in bfloat16.

    Args:
        packed: uint8: pairs of e2m1 numbers, packed as by `quantization.mxfp4.packed`.
        scale: uint8 [N, B / 16], with the value 2^(scale - 127); more than 128 counts as 128 with `PTX`.
    Sign, exponent and mantissa are moved to their places in bfloat16, which gives the number times 2^-126, also for the subnormal 0.5; the
    multiplication by the scale corrects this.
    """
    if PTX:
        factor = spread(((tl.minimum(scale, 128).to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True), packed.shape[1])
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, e, s, z;
            mov.b32 z, 0x80008000;
            prmt.b32 t, $4, 0, 0x1404;
            shr.b32 e, t, 3;
            and.b32 s, t, z;
            lop3.b32 e, e, 0x01C001C0, s, 0xEA;
            fma.rn.bf16x2 $2, e, $5, z;
            shl.b32 s, t, 7;
            shr.b32 e, t, 6;
            and.b32 s, s, z;
            lop3.b32 e, e, 0x01C001C0, s, 0xEA;
            fma.rn.bf16x2 $0, e, $5, z;
            prmt.b32 t, $4, 0, 0x3424;
            shr.b32 e, t, 3;
            and.b32 s, t, z;
            lop3.b32 e, e, 0x01C001C0, s, 0xEA;
            fma.rn.bf16x2 $3, e, $6, z;
            shl.b32 s, t, 7;
            shr.b32 e, t, 6;
            and.b32 s, s, z;
            lop3.b32 e, e, 0x01C001C0, s, 0xEA;
            fma.rn.bf16x2 $1, e, $6, z;
            }""",
            "=r,=r,=r,=r,r,r,r", [packed, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    factor = spread(tl.exp2(scale.to(tl.float32) - 127.0), packed.shape[1])
    first, second = packed >> 4 & 7 | (packed & 1) << 3, packed >> 1 & 7 | packed >> 4 & 8
    return (e2m1(first) * factor).to(dtype), (e2m1(second) * factor).to(dtype)


@triton.jit
def spread(scale, columns: tl.constexpr):
    """[N, B / 16] to [N, B]: repeats each entry 16 times."""
    wide = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], 16))
    return wide.reshape(scale.shape[0], columns)


@triton.jit
def e2m1(code):
    """The float32 values of codes: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    exponent = ((code >> 1) & 3).to(tl.float32)
    mantissa = (code & 1).to(tl.float32)
    size = tl.where(exponent == 0, mantissa * 0.5, tl.exp2(exponent - 1.0) * (1.0 + mantissa * 0.5))
    return tl.where(code >= 8, -size, size)
