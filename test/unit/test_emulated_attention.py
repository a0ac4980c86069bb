"""The attention kernel for few queries, emulated on the CPU, against its definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from emulated import COMPILER, emulated, guarded
from gpu.attention_definition import definition
from runtime.config.kernel_configs import ClusterConfig
from runtime.layers.attention.kernels import cluster_decode
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope, RotaryHeads

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
BF16 = torch.bfloat16
EPS = 1e-6


@pytest.fixture(scope="module", autouse=True)
def on_cpu(programs: Path) -> Iterator[None]:
    with emulated(programs, [cluster_decode], 4):
        yield


class Case:
    """Requests of these lengths over a shuffled page table, with NaN in all slots after their ends."""

    kv_scales = None

    def __init__(self, lens: list[int], width: int, heads: tuple[int, int, int], page: int = 16, warps: int = 4, blocks: int = 1) -> None:
        torch.manual_seed(sum(lens) + width)
        (H, G, D), B, cols = heads, len(lens), -(-max(lens) // page) + 1
        pages = torch.cat((torch.zeros((1, cols)), torch.randperm(B * cols).view(B, cols) + 1)).int()
        rows, lengths = torch.arange(1, B + 1, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
        self.keys: Any = SimpleNamespace(pages=pages, rows=rows, seq_lens=lengths, page_size=page)
        config = SimpleNamespace(cluster=ClusterConfig(warps, 2, blocks))
        self.shape: Any = SimpleNamespace(batch=B, width=width, num_q_heads=H, num_kv_heads=G, head_dim=D, config=config)
        self.q = guarded(torch.randn((B * width, H, D)).to(BF16))
        self.k, self.v = (guarded(torch.full((B * cols + 1, page, G, D), float("nan"), dtype=BF16)) for _ in range(2))
        self.slots = [pages[b + 1, torch.arange(n) // page].long() * page + torch.arange(n) % page for b, n in enumerate(lens)]
        for slots in self.slots:
            for cache in (self.k, self.v):
                cache.flatten(0, 1)[slots] = torch.randn((len(slots), G, D)).to(BF16)

    def run(self, q: torch.Tensor, **options: Any) -> torch.Tensor:
        scale = self.shape.head_dim**-0.5
        return cluster_decode.cluster_attention(q, self.k, self.v, self.keys, self.shape, scale, **options)

    def want(self, q: torch.Tensor, window: int = -1, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Causal attention by its definition."""
        self.q = q
        return definition(self, True, window, sinks)[0]


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max() < 1e-2)


@pytest.mark.parametrize(("heads", "width", "warps"), [((4, 1, 128), 1, 8), ((8, 2, 128), 4, 4), ((8, 1, 64), 6, 4), ((5, 1, 64), 2, 4)])
def test_attention_follows_its_definition(heads: tuple[int, int, int], width: int, warps: int) -> None:
    case = Case([width, 17, 64, 65, 200, 333], width, heads, warps=warps)
    sinks = torch.randn(heads[0])
    assert close(case.run(case.q), case.want(case.q))
    assert close(case.run(case.q, sinks=sinks, window=50), case.want(case.q, 50, sinks))


@pytest.mark.parametrize("blocks", [2, 3])
def test_the_blocks_of_a_cluster_merge_their_parts(blocks: int) -> None:
    case = Case([4, 100, 333], 4, (4, 1, 128), blocks=blocks)
    assert close(case.run(case.q), case.want(case.q))


@pytest.mark.parametrize(("heads", "width", "blocks"), [((4, 1, 128), 1, 1), ((8, 2, 64), 4, 2)])
@pytest.mark.parametrize("normed", [False, True])
def test_new_tokens_are_normed_rotated_and_stored(heads: tuple[int, int, int], width: int, blocks: int, normed: bool) -> None:
    (H, G, D), lens = heads, [width, 40, 333]
    case = Case(lens, width, heads, blocks=blocks)
    angles = torch.rand((512, D // 2)) * 6
    norms = [RMSNorm(torch.rand(D).to(BF16), EPS) for _ in range(2)] if normed else [None, None]
    rotary = RotaryHeads(H, G, D, Rope(torch.cat((angles.cos(), angles.sin()), 1)), *norms)
    qkv = torch.randn((len(lens) * width, H + 2 * G, D)).to(BF16)
    positions = torch.cat([torch.arange(n - width, n) for n in lens])
    slots = torch.cat([own[-width:] for own in case.slots])
    made = qkv[:, : H + G].double()
    if normed:
        weights = torch.cat([norm.weight.expand(count, D) for norm, count in zip(norms, (H, G), strict=True) if norm is not None])
        made = made * (made.square().mean(-1, keepdim=True) + EPS).rsqrt() * weights.double()
    (low, high), (cos, sin) = made.chunk(2, -1), (part[positions].double()[:, None] for part in (angles.cos(), angles.sin()))
    made = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    for cache in (case.k, case.v):
        cache.flatten(0, 1)[slots] = float("nan")  # which the kernel overwrites
    out = case.run(guarded(qkv.flatten(1)), new=cluster_decode.NewTokens(rotary, positions, slots))
    assert close(case.k.flatten(0, 1)[slots], made[:, H:])
    assert torch.equal(case.v.flatten(0, 1)[slots], qkv[:, H + G :])
    assert close(out, case.want(made[:, :H].to(BF16)))
