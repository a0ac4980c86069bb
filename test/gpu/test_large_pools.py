"""KV pools of more than 2^31 values: kernels read and write at their end the same bits as in a small pool."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from runtime.config.kernel_configs import ClusterConfig, LatentConfig, SplitConfig
from runtime.layers.attention.kernels.latent_decode import LatentShape, LatentWorkspace, latent_attention
from runtime.layers.attention.kernels.paged_keys import CausalQueries, PagedKeys
from runtime.layers.attention.kernels.split_decode import SplitWorkspace, split_attention
from runtime.layers.attention.kernels.split_shape import SplitShape
from runtime.layers.attention.kernels.tree_tail import merge_tree_tail
from runtime.layers.attention.kernels.wide_prefill import wide_prefill
from runtime.layers.kernels.latent_rows import write_latent
from runtime.layers.kernels.rope_and_cache import rope_and_cache
from runtime.layers.latent_heads import LatentHeads
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope, RotaryHeads
from runtime.mem_cache.kv_move import move_slots

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
DTYPE = torch.float16
"""A dtype that both the interpreter and a GPU support."""
PAGE, H, G, D = 16, 4, 2, 64
INTS = {"dtype": torch.int32, "device": DEVICE}


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def behind(small: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A pool whose last pages or slots are those of `small`, and the index of the first of them, after 2^31 values."""
    first = 2**31 // small[0].numel() + 1
    pool = torch.empty((first + len(small), *small.shape[1:]), dtype=small.dtype, device=DEVICE)
    pool[first:] = small
    return pool, first


@pytest.mark.parametrize(
    "kernel", ["static", "scheduled", pytest.param("cluster", marks=pytest.mark.skipif(INTERPRETED, reason="CUDA C++"))]
)
def test_split_attention_reads_keys_behind_2_to_the_31_values(kernel: str) -> None:
    """The cluster kernel if the device supports clusters; otherwise Triton's kernel in bfloat16."""
    config = SplitConfig(16, num_warps=4, stages=2, programs_per_sm=1, max_partial_rows=256, alone=2, scheduled=kernel == "scheduled")
    dtype = torch.bfloat16 if kernel == "cluster" else DTYPE
    config = replace(config, cluster=ClusterConfig(warps=8, stages=2, largest=8) if kernel == "cluster" else None)
    shape, small, q = SplitShape(1, 2, H, G, D, 8, config), random(8, PAGE, G, D, dtype=dtype), random(2, H, D, dtype=dtype)
    pages, lens = torch.arange(8, **INTS)[None], torch.tensor([120], **INTS)
    pool, first = behind(small)

    def attend(cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        schedule = shape.empty_schedule(DEVICE)
        shape.fill_schedule(lens, schedule)
        keys = PagedKeys(at, torch.zeros(1, **INTS), lens, PAGE, schedule)
        return split_attention(q, cache, cache, keys, shape, SplitWorkspace([shape], DEVICE), D**-0.5)

    assert shape.splits > 1
    assert torch.equal(attend(pool, pages + first), attend(small, pages))


def test_tree_tails_read_keys_behind_2_to_the_31_values() -> None:
    small, q, prefix = random(8, PAGE, G, D), random(2, H, D), random(2, H, D)
    pages, lens, mask = torch.arange(8, **INTS)[None], torch.tensor([120], **INTS), torch.tensor([0b01, 0b11], device=DEVICE)
    pool, first = behind(small)

    def attend(cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        keys, lse = PagedKeys(at, torch.zeros(1, **INTS), lens, PAGE), torch.zeros((2, H), device=DEVICE)
        return merge_tree_tail(q, cache, cache, keys, 2, mask, D**-0.5, prefix.clone(), lse, True)

    assert torch.equal(attend(pool, pages + first), attend(small, pages))


def test_wide_prompts_read_keys_behind_2_to_the_31_values() -> None:
    small, q = random(4, PAGE, 1, 128), random(20, 2, 128)
    pages, indptr = torch.arange(4, **INTS)[None], torch.tensor([0, 20], **INTS)
    pool, first = behind(small)

    def attend(cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        keys = PagedKeys(at, torch.zeros(1, **INTS), torch.tensor([50], **INTS), PAGE)
        return wide_prefill(q, cache, cache, keys, CausalQueries(indptr, 20), 0.1)

    assert torch.equal(attend(pool, pages + first), attend(small, pages))


def test_latent_attention_reads_rows_behind_2_to_the_31_values() -> None:
    shape = LatentShape(1, 2, 5, 32, 16, 12, LatentConfig(16, 16, 4, 2))
    small, q, pages = random(8, PAGE, 1, 48), random(2, 5, 48), torch.arange(8, **INTS)[None]
    pool, first = behind(small)

    def attend(cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        keys = PagedKeys(at, torch.zeros(1, **INTS), torch.tensor([120], **INTS), PAGE)
        return latent_attention(q, cache, keys, shape, LatentWorkspace([shape], DEVICE), 0.2)

    assert shape.splits > 1
    assert torch.equal(attend(pool, pages + first), attend(small, pages))


def test_keys_and_values_are_written_behind_2_to_the_31_values() -> None:
    heads = RotaryHeads(H, G, D, Rope(torch.rand((32, D), device=DEVICE)))
    qkv, positions, slots = random(3, (H + 2 * G) * D), torch.tensor([4, 30, 9], device=DEVICE), torch.tensor([1, 6, 3], device=DEVICE)
    small = [torch.zeros((7, G, D), dtype=DTYPE, device=DEVICE) for _ in range(2)]
    rope_and_cache(qkv, heads, positions, slots, (small[0], small[1]), pdl=False)
    pool, first = behind(torch.zeros_like(small[0]))
    values = torch.empty_like(pool)
    values[first:] = 0
    rope_and_cache(qkv, heads, positions, slots + first, (pool, values), pdl=False)
    assert torch.equal(pool[first:], small[0])
    assert torch.equal(values[first:], small[1])


def test_latent_rows_are_written_behind_2_to_the_31_values() -> None:
    norm = RMSNorm(torch.rand(48, device=DEVICE), 1e-6)
    heads = LatentHeads(H, 24, 20, norm, Rope(torch.rand((32, 16), device=DEVICE)))
    rows, positions = random(3, heads.q_columns + heads.row_dim), torch.tensor([4, 30, 9], device=DEVICE)
    slots, small = torch.tensor([1, 6, 3], device=DEVICE), torch.zeros((7, 1, heads.row_dim), dtype=DTYPE, device=DEVICE)
    pool, first = behind(small)
    write_latent(rows, heads, positions, slots, small, pdl=False)
    write_latent(rows, heads, positions, slots + first, pool, pdl=False)
    assert torch.equal(pool[first:], small)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter makes no pointers of integers")
def test_slots_are_moved_behind_2_to_the_31_values() -> None:
    small = random(7, G, D)
    pool, first = behind(small)
    source, target = torch.tensor([3, 6], device=DEVICE), torch.tensor([1, 2], device=DEVICE)
    for cache, start in ((small, 0), (pool, first)):
        move_slots(torch.tensor([cache.data_ptr()], device=DEVICE), source + start, target + start, 2, G * D * 2)
    assert torch.equal(pool[first:], small)
