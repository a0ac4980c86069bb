"""The product of few rows at every cut that may be chosen, and the choice among them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from runtime.layers.linear import Linear
from runtime.layers.ops import RMSNorm, Stream

if TYPE_CHECKING:
    from runtime.layers.small_gemm import GemmConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16
ROWS = (3, 16, 64, 128)


def cuts(rows: int) -> list[GemmConfig]:
    from runtime.layers.gemm_choice import candidate_configs
    from runtime.layers.small_gemm import GemmConfig

    kinds = ("linear", "linear_add", "gate_up", "logits")
    ways = itertools.product(((32, 128, 4, 3), (64, 64, 4, 4)), (False, True), (False, True), (0, 4096), (False, True))
    odd = [GemmConfig(*cut, swap, tma, prefetch, late) for cut, swap, tma, prefetch, late in ways]
    return [*{c for op in kinds for c in candidate_configs(op, rows)}, *odd]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_every_cut_gives_the_same_product(rows: int, pdl: bool) -> None:
    from runtime.layers.small_gemm import small_gemm

    if pdl and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    N, K = 1000, 2064  # neither is a multiple of a tile
    x, weight = (torch.randn((n, K), device="cuda").to(BF16) for n in (rows, N))
    want = x.double() @ weight.double().T
    gate, up = (want * K**-0.5).chunk(2, dim=1)
    gated, scaled = torch.nn.functional.silu(gate) * up, (x.float() * K**-0.5).to(BF16)
    for config in cuts(rows):
        out = torch.full((rows + 1, N), float("nan"), device="cuda")
        small_gemm(x, weight, out[:rows], config, pdl=pdl)
        assert ((out[:rows].double() - want).norm() / want.norm()) < 1e-5, config
        small_gemm(x, weight, out[:rows], config, add=True, pdl=pdl)
        assert ((out[:rows].double() - 2 * want).norm() / want.norm()) < 1e-5, config
        assert out[rows].isnan().all(), f"{config} writes past its rows"
        half = torch.full((rows + 1, N // 2), float("nan"), device="cuda")
        small_gemm(scaled, weight, half[:rows], config, silu=True, pdl=pdl)
        assert ((half[:rows].double() - gated).norm() / gated.norm()) < 1e-2, config
        assert half[rows].isnan().all(), f"{config} writes past its rows"


@dataclass
class TinyBlock:
    attn_norm: RMSNorm
    mlp_norm: RMSNorm
    qkv_proj: Linear
    o_proj: Linear
    gate_up_proj: Linear
    down_proj: Linear


def test_preparing_with_timing_keeps_a_choice_for_every_product_that_then_computes_it() -> None:
    from runtime.layers.cuda_ops import CudaOps

    def layer(out: int, width: int) -> Linear:
        return Linear((torch.randn((out, width), device="cuda") * width**-0.5).to(BF16))

    norm = RMSNorm(torch.ones(512, device="cuda", dtype=BF16), 1e-5)
    blocks = [TinyBlock(norm, norm, layer(768, 512), layer(512, 512), layer(2048, 512), layer(512, 1024)) for _ in range(2)]
    head, ops = layer(4000, 512), CudaOps()
    untouched = torch.randn((5, 512), device="cuda")
    report = ops.prepare(blocks, head, rows=(1, 5), timed=True)
    assert {key[3] for key in ops.choices} == {1, 8}
    assert len(ops.choices) == len(report) == 10
    again = CudaOps()
    assert again.prepare(blocks, head, rows=(1, 5), timed=True) == report, "another model in this process computes equal products alike"
    assert again.choices == ops.choices
    want = untouched.double() + (x := torch.randn((5, 1024), device="cuda").to(BF16)).double() @ blocks[0].down_proj.weight.double().T
    got = ops.linear_add(x, blocks[0].down_proj, Stream(untouched.clone())).h
    assert ((got.double() - want).norm() / want.norm()) < 1e-5
