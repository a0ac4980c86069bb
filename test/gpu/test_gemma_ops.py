"""Kernels of Gemma 4 and of block drafts against their definition: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from runtime.layers.activation import Activation, gated
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.triton_gemm import TritonConfig, triton_gemm
from runtime.layers.kernels.add_normed import add_normed_rows
from runtime.layers.kernels.rope_and_cache import rope_and_cache
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope, RotaryHeads
from runtime.layers.torch_ops import rms_norm, rotate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
DTYPE = torch.float16
"""A dtype that both the interpreter and a GPU support."""


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("hidden", [96, 2816])
@pytest.mark.parametrize("following", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_rows_or_their_norm_are_added_and_the_stream_is_normed(hidden: int, following: bool, scaled: bool, first: bool) -> None:
    x, h = random(5, hidden), random(5, hidden, dtype=torch.float32)
    norm, next_norm = RMSNorm(random(hidden), 1e-6) if first else None, RMSNorm(random(hidden + 1)[1:].contiguous(), 1e-5)
    factor = torch.tensor([0.75], dtype=DTYPE, device=DEVICE) if scaled else None
    want = (h + (x.float() if norm is None else rms_norm(x, norm))) * (0.75 if scaled else 1.0)
    normed = add_normed_rows(x, norm, h, next_norm if following else None, factor, pdl=False)
    torch.testing.assert_close(h, want, rtol=1e-5, atol=1e-5)
    if following:
        assert normed is not None
        torch.testing.assert_close(normed.float(), rms_norm(want, next_norm), rtol=2e-3, atol=2e-3)
    else:
        assert normed is None


@pytest.mark.parametrize(("H", "G", "D"), [(8, 2, 64), (4, 1, 512), (0, 2, 128)])
@pytest.mark.parametrize("shared", [True, False])
def test_values_are_normed_and_may_be_the_keys(H: int, G: int, D: int, shared: bool) -> None:
    """Without query heads, only keys and values are written."""
    T, slots = 3, 7
    rope = Rope(torch.rand((32, D), device=DEVICE))
    q_norm, k_norm, v_norm = (
        RMSNorm(random(D), 1e-6),
        RMSNorm(random(D + 2)[2:].contiguous(), 1e-6),
        RMSNorm(torch.ones_like(random(D)), 1e-6),
    )
    if INTERPRETED:  # it does not support scalar masks, which the norms of q and k have
        q_norm = k_norm = None
    heads = RotaryHeads(H, G, D, rope, q_norm, k_norm, v_norm, shared)
    rows = random(T, H + G if shared else H + 2 * G, D)
    positions, at = torch.tensor([4, 30, 9], device=DEVICE), torch.tensor([1, 6, 3], device=DEVICE)
    caches = tuple(torch.zeros((slots, G, D), dtype=DTYPE, device=DEVICE) for _ in range(2))
    q = rope_and_cache(rows.view(T, -1), heads, positions, at, caches, pdl=False)
    keys, values = rows[:, H : H + G], rows[:, -G:]

    def normed(x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        return x.float() if norm is None else rms_norm(x, norm)

    torch.testing.assert_close(caches[0][at].float(), rotate(normed(keys, k_norm), rope, positions), rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(caches[1][at].float(), rms_norm(values, v_norm), rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(q.float(), rotate(normed(rows[:, :H], q_norm), rope, positions), rtol=3e-3, atol=3e-3)
    kept = [cache[at[0]].clone() for cache in caches]
    rows[1], rows[2] = torch.nan, torch.inf
    rope_and_cache(rows.view(T, -1), heads, positions, at, caches, pdl=False)
    for cache, first in zip(caches, kept, strict=True):
        assert torch.equal(cache[at[0]], first)
        assert cache.isfinite().all(), "NaN in a cache would reach other requests"


@pytest.mark.skipif(INTERPRETED, reason="the interpreter rounds to e4m3 in its own way")
def test_keys_and_values_are_stored_in_eight_bits_by_their_scales() -> None:
    T, G, D, slots = 3, 2, 64, 7
    scales = torch.tensor([0.02, 0.5], device=DEVICE)
    heads = RotaryHeads(4, G, D, Rope(torch.rand((32, D), device=DEVICE)), kv_scales=scales)
    rows, positions, at = random(T, 4 + 2 * G, D), torch.tensor([4, 30, 9], device=DEVICE), torch.tensor([1, 6, 3], device=DEVICE)
    rows[2, -1, 5] = torch.nan
    caches = tuple(torch.zeros((slots, G, D), device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    rope_and_cache(rows.view(T, -1), heads, positions, at, caches, pdl=False)
    keys = rotate(rows[:, 4 : 4 + G], heads.rope, positions).to(DTYPE).float()
    for cache, want, scale in zip(caches, (keys, rows[:, -G:].float()), scales, strict=True):
        stored = cache.view(torch.uint8)[at].view(torch.float8_e4m3fn).float()
        torch.testing.assert_close(stored, (want.nan_to_num(0.0) / scale).clamp(-448, 448), rtol=0.07, atol=1e-2)


@pytest.mark.parametrize("swap", [True, False])
def test_gelu_is_fused_into_the_gemm(swap: bool) -> None:
    x, weight = random(5, 64), random(96, 64) * 0.2
    out = torch.empty((5, 48), dtype=DTYPE, device=DEVICE)
    triton_gemm(x, weight, out, TritonConfig(32, 64, 4, 2, swap=swap, prefetch=0), Epilogue(gelu=True))
    want = gated(Activation.GELU_TANH, x.float() @ weight.float().T)
    torch.testing.assert_close(out.float(), want, rtol=5e-3, atol=5e-3)
