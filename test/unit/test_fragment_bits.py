"""The conversions of `fragments.cu`, bit by bit: every e2m1, e4m3 and int4 code, every bfloat16 number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emulated import COMPILER, EmulatedKernel, compiled
from runtime.layers.kernels.fragments import source
from runtime.layers.quantization.mxfp4 import E2M1, packed, unpacked

NUMBERS = torch.tensor([*E2M1, *(-value for value in E2M1)])
BFLOAT16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
INFINITE, LARGEST, LARGEST_SCALE = 255, 254, 128
"""Exponents of bfloat16 as they are stored: of NaN and infinities, and of its largest numbers; and the largest scale of MXFP4."""


WIDEN_INT4 = """
extern "C" __global__ void widen_words(const u32* words, const u32* numbers, uint4* out) {
    const int i = 32 * blockIdx.x + threadIdx.x;
    out[i] = widen_int4(words[i], numbers_of(numbers[i]));
}
"""


def halves(words: torch.Tensor) -> torch.Tensor:
    """The two float16 numbers of each 32-bit word, [..., 2]."""
    return torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), dim=-1).to(torch.int32).to(torch.uint16).view(torch.float16)


def widen_second(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return halves(words << 8 & 0x8E008E00), halves(words & 0x8E008E00)


def widen_first(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return widen_second((words >> 3 & 0x0E0E0E0E) | (words << 7 & 0xFFFFFFFF & ~0x0E0E0E0E))


def base_of(largest: torch.Tensor) -> torch.Tensor:
    return ((largest >> 7).clamp(max=LARGEST) - 30).clamp(min=0)


def narrow(bits: torch.Tensor, base: int) -> torch.Tensor:
    smallest = base << 7
    found = (torch.maximum(bits & 0x7FFF, torch.tensor(smallest)) * 8 - smallest * 8) | (bits & 0x8000)
    return found.to(torch.uint16).view(torch.float16)


@pytest.mark.parametrize("filler", [0, 15, 5, 10])
def test_e2m1_codes_become_float16(filler: int) -> None:
    codes = torch.arange(16, dtype=torch.int64)
    for place in range(8):
        beside = torch.full((16, 8), filler)
        beside[:, place] = codes
        words = sum(packed(beside[:, 2 * byte], beside[:, 2 * byte + 1]) << 8 * byte for byte in range(4))
        assert isinstance(words, torch.Tensor)
        byte, found = place // 2, (widen_first, widen_second)[place % 2](words)
        assert torch.equal(found[byte % 2][:, byte // 2].float(), NUMBERS * 2.0**-14), place


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_a_byte_gives_back_its_codes(dtype: torch.dtype) -> None:
    first, second = torch.arange(16, dtype=dtype).repeat(16), torch.arange(16, dtype=dtype).repeat_interleave(16)
    byte = packed(first, second)
    assert len(byte.unique()) == 256
    assert torch.equal(torch.stack(unpacked(byte)), torch.stack((first, second)))


def test_e4m3_codes_are_float16_numbers() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    torch.testing.assert_close(codes.to(torch.float16).float(), codes.float(), rtol=0, atol=0, equal_nan=True)


def test_mxfp4_scales_are_exponents_of_float32() -> None:
    scale = torch.arange(255, dtype=torch.int32)
    found = (scale << 23).view(torch.float32)
    assert torch.equal(found[1:].double(), torch.ldexp(torch.ones(254, dtype=torch.float64), scale[1:] - 127))
    assert found[0] == 0


@pytest.mark.parametrize("largest", [0, 1, 29, 30, 31, 97, 127, 142, 200, 253, LARGEST])
def test_bfloat16_entries_stay_exact_beside_the_largest(largest: int) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    exponent, wide = bits >> 7 & 0xFF, BFLOAT16.double()
    base = int(base_of(torch.tensor(largest << 7 | 0x7F)))
    back = narrow(bits, base).double() * 2.0 ** (base - 112)
    here = exponent <= largest
    assert back[here].isfinite().all(), "nothing overflows"
    exact = here & ((exponent > largest - 30) | (base == 0))
    assert torch.equal(back[exact], wide[exact])
    assert ((back - wide).abs()[here & ~exact] <= 2.0 ** (largest - 127 - 29)).all()
    assert torch.equal(back[here].signbit(), wide[here].signbit())


def test_nan_and_infinities_remain() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    special = (bits >> 7 & 0xFF) == INFINITE
    found = narrow(bits, int(base_of(torch.tensor(0x7FFF)))).float()
    assert torch.equal(found[special].isnan(), BFLOAT16[special].isnan())
    infinite = BFLOAT16.isinf()
    assert torch.equal(found[infinite], BFLOAT16[infinite].float())
    assert found[~special].isfinite().all()


@pytest.mark.parametrize("mxfp4", [False, True])
def test_the_scale_of_a_row_is_undone_by_a_float32_number(mxfp4: bool) -> None:
    largest = torch.arange(1 << 15, dtype=torch.int32)
    base = base_of(largest)
    widening = (base + (29 if mxfp4 else 15) << 23).view(torch.float32)
    assert torch.equal(widening.double(), torch.ldexp(torch.ones(1 << 15, dtype=torch.float64), base - (98 if mxfp4 else 112)))
    assert (widening >= torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("largest", [1, 5, 29, 30, 31, 90, 127, LARGEST_SCALE])
def test_scales_over_the_largest_of_a_row_are_float16_factors(largest: int) -> None:
    scale = torch.arange(largest + 1, dtype=torch.int64)
    factor = halves((scale + 30 - largest).clamp(min=0) << 10)[:, 0].double()
    weights = (NUMBERS[None, :].double() * 2.0**-14 * factor[:, None]).to(torch.float16).double()
    found, want = weights * 2.0 ** (largest - 128), NUMBERS[None, :].double() * torch.exp2(scale.double() - 127)[:, None]
    near = scale >= largest - 24
    assert torch.equal(found[near], want[near])
    assert ((found - want).abs() <= 2.0 ** (largest - 128 - 24)).all(), "what is lost is less than 2^-24 of the row's unit"


def test_columns_of_an_instruction_are_the_even_ones_then_the_odd_ones() -> None:
    columns = torch.arange(16)
    order = torch.cat((columns[::2], columns[1::2]))  # of rows that widened_rows.cu prepares
    for code, widen in ((0, widen_first), (1, widen_second)):
        held = torch.zeros((16, 16), dtype=torch.int64)
        held[columns, columns] = 2  # the code of 1.0 in column i of matrix row i
        blank = torch.zeros_like(held)
        bytes_ = packed(*((held, blank) if code == 0 else (blank, held))).view(16, 4, 4)  # [row, lane t, byte]
        words = (bytes_ << 8 * torch.arange(4)).sum(-1)
        low, high = widen(words)  # [row, lane t, 2]: positions 2 t and 2 t + 1, and 8 further on
        found = torch.cat((low.reshape(16, 8), high.reshape(16, 8)), dim=1).float() * 2.0**14
        want = torch.zeros((16, 16))
        want[order, torch.arange(16)] = 1.0
        assert torch.equal(found, want), code


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_int4_codes_become_weights_rounded_once(programs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes = torch.randint(16, (4096, 8))  # low codes of bytes 0 to 3, then high ones
    codes[:16] = torch.arange(16)[:, None]
    scale = (torch.randn(len(codes)) * torch.logspace(-7, 4, len(codes))).half()
    scale[:7] = torch.tensor([1, -0.25, 0, 2**-24, 2**-23, 65504, -65504]).half()
    numbers = torch.stack((scale, torch.randint(16, scale.shape).half()), 1)
    words = sum((codes[:, i] | codes[:, 4 + i] << 4) << 8 * i for i in range(4))
    assert isinstance(words, torch.Tensor)
    (file := tmp_path / "widen.cu").write_text(WIDEN_INT4, encoding="utf-8")
    kernel, out = compiled(source(file, dict(FORMAT=3, ACT=0, EARLY=0)), "widen_words", programs), torch.zeros((len(codes), 8)).half()
    EmulatedKernel(kernel, 32, 1)(len(codes) // 32, (words.to(torch.uint32), numbers, out), False)
    order = [0, 2, 1, 3, 4, 6, 5, 7]
    want = ((codes - numbers[:, 1:].double()) * numbers[:, :1].double()).half()[:, order]
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))
