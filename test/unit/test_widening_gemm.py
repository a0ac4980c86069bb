"""The GEMM that widens e4m3 weights on their way to the tensor cores: its conversion bit by bit, its fragments and tilings."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch

from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import WideningConfig
from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.gemm.wgmma_gemm import Store
from runtime.layers.gemm.widening_gemm import (
    ALIGNMENT,
    DEPTH,
    FEWEST_INT4_ROWS,
    INT4_TOKENS,
    MOST_ROWS,
    ROWS,
    SHARED_BYTES,
    SPLITS,
    TOKENS,
    WideningVariant,
    ring_stages,
    source,
    supports,
    widening_configs,
    widening_gemm,
)

H200_SMS = 132
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FACTOR = torch.tensor(0x7B80, dtype=torch.int32).to(torch.uint16).view(BF16)
PICK_EVEN, PICK_ODD = (4, 0, 5, 1), (6, 2, 7, 3)
"""Bytes of two words that lanes of even and odd t take, the lowest first."""


def numbers(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The two numbers of 16 bits of each 32-bit word, [..., 2]."""
    return torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), -1).to(torch.int32).to(torch.uint16).view(dtype)


def widen_four(words: torch.Tensor, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    """`widen_four` of `wgmma_parts.cu`: [..., 2] numbers of bytes 1 and 3, and of bytes 0 and 2."""
    half = dtype is torch.float16
    down, mask = (1, 0x3F803F80) if half else (4, 0x07F007F0)
    signs = words & 0x80808080
    odd = (words >> down & mask) | (signs & ~mask)
    even = (words << 8 - down & mask) | (signs << 8 & 0xFFFFFFFF & ~mask)
    first, second = numbers(odd, dtype), numbers(even, dtype)
    return (first, second) if half else (first * FACTOR, second * FACTOR)


@pytest.mark.parametrize(("dtype", "factor"), [(BF16, 1.0), (torch.float16, 2.0**-8)], ids=str)
@pytest.mark.parametrize("place", range(4))
def test_every_finite_e4m3_number_becomes_a_number_of_16_bits(place: int, dtype: torch.dtype, factor: float) -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F])
    want = codes.to(torch.uint8).view(E4M3).float() * factor
    assert FACTOR.float() == 2.0**120
    for filler in (0, 0xFF, 0xA5, 0x80):
        words = codes << 8 * place
        for other in range(4):
            words = words | (filler << 8 * other if other != place else 0)
        found = widen_four(words, dtype)[(place + 1) % 2][:, place // 2].float()
        assert torch.equal(found, want)
        assert torch.equal(found.signbit(), want.signbit())


def test_lanes_hold_the_columns_that_the_instruction_multiplies() -> None:
    codes = torch.arange(16 * DEPTH).reshape(16, DEPTH) * 37 % 251 % 127  # of 16 weight rows: neither NaN nor negative
    weights = codes.to(torch.uint8).view(E4M3).float()
    pieces, shared = codes.reshape(16, 8, 16), torch.empty((16, 8, 16), dtype=codes.dtype)
    for row in range(16):  # the copy engine swizzles pieces of 16 bytes
        for piece in range(8):
            shared[row, piece ^ row % 8] = pieces[row, piece]
    memory = shared.flatten()
    found = torch.full((16, DEPTH), float("nan"))
    for lane in range(32):
        g, t = lane // 4, lane % 4
        start = g * DEPTH + g * 16 + t // 2 * 4
        for step in range(DEPTH // 16):
            for eight in range(2):
                low = (start ^ step * 16) + eight * 8
                both = torch.cat((memory[low : low + 4], memory[low + 8 * DEPTH : low + 8 * DEPTH + 4]))
                word = sum(int(both[byte]) << 8 * i for i, byte in enumerate(PICK_ODD if t % 2 else PICK_EVEN))
                of_g, of_g8 = widen_four(torch.tensor(word))
                columns = slice(step * 16 + eight * 8 + 2 * t, step * 16 + eight * 8 + 2 * t + 2)
                found[g, columns], found[g + 8, columns] = of_g.float(), of_g8.float()
    assert torch.equal(found, weights)


def test_lanes_of_experts_hold_even_columns_before_odd_ones() -> None:
    """As `e4m3_weights.cu` reads a matrix that the copy engine has swizzled: `ldmatrix` of two pieces, then `widen_four`."""
    codes = torch.arange(64 * DEPTH).reshape(64, DEPTH) * 37 % 251 % 127
    rows, pieces = torch.meshgrid(torch.arange(64), torch.arange(8), indexing="ij")
    shared = torch.empty((64, 8, 16), dtype=codes.dtype)
    shared[rows, pieces ^ rows % 8] = codes.reshape(64, 8, 16)
    memory, lanes = shared.flatten(), torch.arange(32)
    found = torch.full((64, DEPTH), float("nan"))  # by the rows and columns of the instructions
    for warp, batch in itertools.product(range(4), range(4)):
        row = 16 * warp + lanes % 16
        addresses = row * DEPTH + (lanes // 16 ^ row % 8) * 16 ^ batch * 32
        for matrix in range(4):  # rows g or g + 8 of the first or the second piece
            held = memory[addresses[8 * matrix : 8 * matrix + 8, None] + torch.arange(16)]
            odd, even = widen_four((held.view(8, 4, 4) << 8 * torch.arange(4)).sum(-1))
            row0, column0 = 16 * warp + matrix % 2 * 8, batch * 32 + matrix // 2 * 16
            found[row0 : row0 + 8, column0 : column0 + 16] = torch.cat((even.reshape(8, 8), odd.reshape(8, 8)), 1).float()
    order = torch.arange(DEPTH).view(-1, 8, 2).transpose(1, 2).flatten()  # of the columns of rows that widened_rows.cu prepares
    assert torch.equal(found, codes.to(torch.uint8).view(E4M3).float()[:, order])


def test_int4_fragments_hold_each_code_once_at_its_row_and_column() -> None:
    codes = torch.randint(16, (64, DEPTH), generator=torch.Generator().manual_seed(0))
    halves = codes.view(64, DEPTH // 32, 2, 16)
    stored = halves[:, :, 0] | halves[:, :, 1] << 4  # 16 bytes of 32 columns
    rows, pieces = torch.meshgrid(torch.arange(64), torch.arange(4), indexing="ij")
    shared = torch.empty_like(stored)
    shared[rows, pieces ^ rows // 2 % 4] = stored  # boxes with rows of 64 bytes are swizzled
    memory, found = shared.flatten(), torch.full((64, DEPTH), -1)
    for warp, lane, run, eight in itertools.product(range(4), range(32), range(DEPTH // 32), range(2)):
        g, t = lane // 4, lane % 4
        row, pick = 16 * warp + g, PICK_ODD if t % 2 else PICK_EVEN
        at = (row * DEPTH // 2 + g // 2 * 16 + t // 2 * 4 ^ run * 16) + eight * 8
        words = torch.cat((memory[at : at + 4], memory[at + 8 * DEPTH // 2 :][:4]))
        four = sum(int(words[byte]) << 8 * i for i, byte in enumerate(pick))
        for upper in range(2):
            column = 32 * run + 16 * upper + 8 * eight + 2 * t
            for own, shift in ((row, 8 + 4 * upper), (row + 8, 4 * upper)):
                assert (found[own, column : column + 2] == -1).all()
                found[own, column : column + 2] = torch.tensor([four >> shift & 15, four >> 16 + shift & 15])
    assert torch.equal(found, codes)


@pytest.mark.parametrize(("weight_rows", "columns"), [(5120, 2048), (2048, 4096), (28672, 4096), (4096, 14336), (8, 16)])
def test_tilings_are_offered_for_more_rows_than_fragments_take(weight_rows: int, columns: int) -> None:
    for rows in (1, 16, MOST_ROWS + 1, 2048):
        assert widening_configs(rows, weight_rows, columns, H200_SMS, H200) == ()
    for rows in (17, 32, 64, 100, 128, 256, MOST_ROWS):
        found = widening_configs(rows, weight_rows, columns, H200_SMS, H200)
        assert len(set(found)) == len(found) >= 1
        assert all(config.split in SPLITS and config.split <= -(-columns // DEPTH) for config in found)
    assert widening_configs(FEWEST_INT4_ROWS - 1, weight_rows, columns, H200_SMS, H200, int4=True) == ()
    assert widening_configs(FEWEST_INT4_ROWS, weight_rows, columns, H200_SMS, H200, int4=True)


def test_clusters_keep_multiprocessors_busy() -> None:
    assert widening_configs(64, 5120, 2048, H200_SMS, H200)[0] == WideningConfig(2), "40 clusters of three blocks do not run at once"
    assert widening_configs(64, 2048, 4096, H200_SMS, H200)[0] == WideningConfig(6), "nor do 16 clusters of eight"
    assert WideningConfig(1) in widening_configs(64, 28672, 4096, H200_SMS, H200), "more tiles than multiprocessors"


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("write", get_args(Store))
def test_programs_fit_shared_memory(write: Store, tokens: int) -> None:
    for columns, split in itertools.product((16, 2048, 4096, 14336), SPLITS):
        variant = WideningVariant(tokens, ring_stages(tokens, columns, split), write, bias=True, pdl=True, scale=True)
        assert variant.shared_bytes <= SHARED_BYTES
        assert variant.stages >= min(4, -(-columns // DEPTH // split))
        own = -(-tokens // 8 // split) * 8
        exchanged = split * own * ROWS * 4 if split > 1 else 0
        assert exchanged + (own + 8) * (ROWS + 4) * 4 <= variant.shared_bytes - ALIGNMENT, "sums take the place of the ring"
        text = source(WideningConfig(split), variant)
        assert f"#define SPLIT {split}\n" in text
        assert f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16" in text


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("tokens", INT4_TOKENS)
def test_two_programs_with_int4_weights_fit_shared_memory(tokens: int, group: int) -> None:
    for split in SPLITS:
        variant = WideningVariant(tokens, ring_stages(tokens, 4096, split, int4=True), "FLOAT", bias=True, pdl=True, group=group)
        assert variant.shared_bytes * (2 if tokens <= 64 else 1) <= SHARED_BYTES
        own = -(-tokens // 8 // split) * 8
        exchanged = split * own * ROWS * 4 if split > 1 else 0
        assert exchanged + (own + 8) * (ROWS + 4) * 4 <= variant.shared_bytes - ALIGNMENT, "sums take the place of the ring"
        assert f"#define GROUP {group}\n" in source(WideningConfig(split), variant)


@pytest.mark.parametrize(
    ("epilogue", "out", "reason"),
    [
        (Epilogue(add=True), torch.empty((3, 16), dtype=BF16), "float32 out"),
        (Epilogue(silu=True), torch.empty((3, 8)), "bfloat16 out"),
        (NO_EPILOGUE, torch.empty((3, 16)).half(), "float32 or bfloat16"),
        (NO_EPILOGUE, torch.empty((3, 8)), "out of shape"),
        (Epilogue(argmax=torch.empty((2, 3, 4), dtype=torch.int32)), torch.empty((3, 16)), "no argmax"),
        (
            Epilogue(add=True, deferred=DeferredNorm(torch.empty(16), torch.empty((3, 16)), torch.empty((3, 1)))),
            torch.empty((3, 16)),
            "squares of shapes",
        ),
    ],
)
def test_what_it_does_not_compute_is_refused(epilogue: Epilogue, out: torch.Tensor, reason: str) -> None:
    x, weight = torch.zeros((3, 64), dtype=BF16), torch.zeros((16, 64), dtype=E4M3)
    with pytest.raises(AssertionError, match=reason):
        widening_gemm(x, weight, out, WideningConfig(), epilogue, weight_scale=torch.ones(16))


def test_weights_on_a_cpu_are_not_supported() -> None:
    assert not supports(torch.zeros((16, 64), dtype=E4M3), torch.ones(16))
