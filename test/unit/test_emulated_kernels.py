"""CUDA C++ kernels for few rows, emulated on the CPU, against their definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from emulated import COMPILER, emulated, guarded
from int4_weights import random_int4
from runtime.config.kernel_configs import FragmentConfig
from runtime.layers.attention.kernels import absorb_queries
from runtime.layers.gemm import fragment_gemm, fully_resident_gemm, resident_gemm
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.latent_heads import LatentHeads, NewRows
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope
from runtime.layers.torch_ops import rms_norm, rotate

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
BF16 = torch.bfloat16
SMS = 4


@pytest.fixture(scope="module", autouse=True)
def on_cpu(programs: Path) -> Iterator[None]:
    with emulated(programs, [absorb_queries, fragment_gemm, fully_resident_gemm, resident_gemm], SMS):
        yield


def relative(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


def scaled(N: int, K: int, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 weights, their scales, and what they represent in float64."""
    weight = (torch.randn((N, K)) * 50).to(torch.float8_e4m3fn)
    scale = torch.rand((-(-N // block[0]), -(-K // block[1]))) / 50
    wide = weight.double() * scale.double().repeat_interleave(block[0], 0)[:N].repeat_interleave(block[1], 1)[:, :K]
    return guarded(weight), guarded(scale), wide


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_fragments_compute_the_same_gemm(rows: int) -> None:
    N, K = 64, 720  # the last columns are less than one load of a warp
    x, (weight, scale, wide) = guarded(torch.randn((rows, K)).to(BF16)), scaled(N, K, (32, 64))
    want = x.double() @ wide.T
    for config in (FragmentConfig(4, 2), FragmentConfig(8, 2, tall=2)):
        out = torch.full((rows, N), float("nan"))
        fragment_gemm.fragment_gemm(x, weight, out, config, weight_scale=scale)
        assert relative(out, want) < 1e-5, config


@pytest.mark.parametrize(("group", "K"), [(32, 736), (64, 704), (128, 768)])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_fragments_multiply_by_int4_weights(rows: int, group: int, K: int) -> None:
    torch.manual_seed(rows)
    weight, scale, values = random_int4(64, K, group, "cpu")
    x, weight, scale = (guarded(part) for part in (torch.randn((rows, K)).to(BF16), weight, scale))
    want = x.double() @ (values if group == 128 else values.half()).double().T
    for config in (FragmentConfig(4, 2), FragmentConfig(8, 2, tall=2)):
        out = torch.full((rows, 64), float("nan"))
        fragment_gemm.fragment_gemm(x, weight, out, config, weight_scale=scale)
        assert relative(out, want) < 1e-5, config
    half = torch.full((rows, 32), float("nan"))
    fragment_gemm.fragment_gemm(x, weight, half, FragmentConfig(4, 2), Epilogue(silu=True), weight_scale=scale)
    gate, up = want.chunk(2, dim=1)
    assert relative(half, F.silu(gate) * up) < 1e-5


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_resident_weights_compute_the_same_gemm(rows: int) -> None:
    N, K, eps = 64, 576, 0.25
    x, weight = guarded(torch.randn((rows, K)).to(BF16)), guarded(torch.randn((N, K)).to(BF16))
    config = resident_gemm.resident_config(N, K, SMS)
    assert config is not None
    want, squares, gain = x.double() @ weight.double().T, torch.rand((rows, 150)) * K, torch.randn(N).to(BF16)
    normed = want / (squares.double().sum(1) / K + eps).sqrt()[:, None]
    out = torch.full((rows, N), float("nan"))
    resident_gemm.resident_gemm(x, weight, out, config, Epilogue(scale=RowScale(squares, eps)))
    assert relative(out, normed) < 1e-5
    deferred = DeferredNorm(gain, torch.empty((rows, N), dtype=BF16), torch.empty((rows, config.parts(N))))
    resident_gemm.resident_gemm(x, weight, out, config, Epilogue(add=True, deferred=deferred))
    assert relative(out, normed + want) < 1e-5
    assert torch.equal(deferred.scaled, (out * gain.float()).to(BF16))
    own, narrow = 3 * N // 4, torch.full((rows, N), float("nan"), dtype=BF16)
    first = DeferredNorm(gain[:own], guarded(torch.empty((rows, own), dtype=BF16)), guarded(torch.empty((rows, config.parts(own)))))
    resident_gemm.resident_gemm(x, weight, narrow, config, Epilogue(deferred=first))
    assert relative(narrow, want) < 1e-2
    assert relative(first.scaled, want[:, :own] * gain[:own].double()) < 1e-2
    torch.testing.assert_close(first.squares.double().sum(1), want[:, :own].square().sum(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("rows", "activation"), [(1, "silu"), (5, "gelu"), (16, "silu")])
def test_resident_weights_gate_their_results(rows: int, activation: str) -> None:
    N, K, eps = 112, 320, 0.25
    x, weight = guarded(torch.randn((rows, K)).to(BF16)), guarded((torch.randn((N, K)) / 8).to(BF16))
    config = resident_gemm.resident_config(N, K, SMS)
    assert config is not None
    assert config.blocks > 1
    bias, squares = guarded(torch.randn(N).to(BF16)), torch.rand((rows, 7)) * K
    sums = x.double() @ weight.double().T / (squares.double().sum(1) / K + eps).sqrt()[:, None] + bias.double()
    gate, up = sums.chunk(2, 1)
    want = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    epilogue = Epilogue(**{activation: True}, bias=bias, scale=RowScale(squares, eps))
    for dtype, error in ((torch.float32, 1e-5), (BF16, 1e-2)):
        out = guarded(torch.full((rows, N // 2), float("nan"), dtype=dtype))
        resident_gemm.resident_gemm(x, weight, out, config, epilogue)
        assert relative(out, want) < error


def scaled_by(name: str, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 weights, their scales by block or by row, and what they represent in float64."""
    weight, scale, wide = scaled(N, K, (32, 128) if name == "block" else (1, K))
    return weight, scale if name == "block" else scale.flatten(), wide


@pytest.mark.parametrize(("N", "K"), [(80, 720), (160, 1024), (64, 2048)], ids=["one and two units", "two and three", "one each"])
@pytest.mark.parametrize(("rows", "name"), [(1, "block"), (3, "row"), (13, "block")])
def test_fully_resident_weights_compute_the_same_gemm(N: int, K: int, rows: int, name: str) -> None:
    (weight, scale, wide), eps = scaled_by(name, N, K), 0.25
    x, bias = guarded(torch.randn((rows, K)).to(BF16)), guarded(torch.randn(N).to(BF16))
    config = fully_resident_gemm.fully_resident_config(weight, rows, SMS)
    assert config is not None
    want, squares, gain = x.double() @ wide.T, torch.rand((rows, 150)) * K, torch.randn(N).to(BF16)
    normed = want / (squares.double().sum(1) / K + eps).sqrt()[:, None]

    def run(out: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
        return fully_resident_gemm.fully_resident_gemm(x, weight, out, config, epilogue, weight_scale=scale)

    out = run(guarded(torch.full((rows, N), float("nan"))), Epilogue(bias=bias))
    assert relative(out, want + bias.double()) < 1e-5
    assert relative(run(out, Epilogue(add=True)), 2 * want + bias.double()) < 1e-5
    narrow = run(guarded(torch.full((rows, N), float("nan"), dtype=BF16)), Epilogue(scale=RowScale(squares, eps)))
    assert relative(narrow, normed) < 5e-3
    if config.tall == 1:
        deferred = DeferredNorm(gain, torch.empty((rows, N), dtype=BF16), torch.empty((rows, config.parts(N))))
        out = run(torch.zeros((rows, N)), Epilogue(add=True, deferred=deferred))
        assert torch.equal(deferred.scaled, (out * gain.float()).to(BF16))
        exact = out.double().square().reshape(rows, config.parts(N), -1).sum(2)
        torch.testing.assert_close(deferred.squares.double(), exact, rtol=1e-5, atol=0)


def test_a_row_of_fully_resident_weights_does_not_depend_on_others() -> None:
    (weight, scale, _), x = scaled_by("block", 80, 720), torch.randn((16, 720)).to(BF16)
    config, gemm = fully_resident_gemm.fully_resident_config(weight, 16, SMS), fully_resident_gemm.fully_resident_gemm
    assert config is not None
    outs = [gemm(x[:M], weight, torch.empty((M, 80)), config, weight_scale=scale) for M in (1, 2, 7, 9, 16)]
    assert all(torch.equal(out, outs[-1][: len(out)]) for out in outs)


def test_large_weights_are_not_resident() -> None:
    def fits(N: int, K: int, rows: int) -> bool:
        return fully_resident_gemm.fully_resident_config(torch.empty((N, K), dtype=torch.float8_e4m3fn), rows, 132) is not None

    assert fits(5120, 2048, 16)
    assert not fits(10240, 5120, 1)
    assert not fits(2056, 2048, 1)
    assert not fits(2048, 2048, 17)


@pytest.mark.parametrize(
    ("tokens", "rank", "rope_dim", "interleaved"),
    [
        (tokens, *dims, (i + j) % 2 == 0)
        for i, tokens in enumerate((1, 5, 16))
        for j, dims in enumerate(((512, 64), (64, 8), (320, 32)))  # all pairs
    ],
)
def test_queries_are_absorbed_and_new_rows_written(tokens: int, rank: int, rope_dim: int, interleaved: bool) -> None:
    torch.manual_seed(tokens)
    H, nope, first, slots = 2, 32, 24, torch.randperm(20)[:tokens]
    heads = LatentHeads(H, nope, 32, RMSNorm(torch.randn(rank).to(BF16), 1e-6), Rope(torch.randn(64, rope_dim), interleaved))
    key, positions = guarded(torch.randn((H, nope, rank)).to(BF16)), torch.randint(0, 64, (tokens,))
    q = guarded(torch.randn((tokens, H, heads.query_dim)).to(BF16))
    rows = guarded(torch.randn((tokens, first + heads.row_dim)).to(BF16))
    cache = guarded(torch.full((20, 1, heads.row_dim), 7.0).to(BF16))
    new = NewRows(rows, slots, cache)
    assert absorb_queries.can_write(new, heads)
    query = absorb_queries.absorb_queries(q, heads, key, positions, new)
    want = torch.einsum("thd,hdr->thr", q[..., :nope].double(), key.double())
    torch.testing.assert_close(query[..., :rank].double(), want, rtol=2.0**-8, atol=1e-4)
    torch.testing.assert_close(query[..., rank:].float(), rotate(q[..., nope:], heads.rope, positions), rtol=2.0**-8, atol=1e-5)
    assert torch.equal(query, absorb_queries.absorb_queries(q, heads, key, positions)), "writing changes no query"
    latent, shared = rows[:, first:].split((rank, rope_dim), 1)
    stored = torch.cat((rms_norm(latent.float(), heads.kv_norm), rotate(shared[:, None].float(), heads.rope, positions)[:, 0]), 1)
    torch.testing.assert_close(cache[slots, 0].float(), stored, rtol=2.0**-8, atol=1e-6)
    others = torch.ones(20, dtype=torch.bool)
    others[slots] = False
    assert (cache[others] == 7.0).all()
    rows[0, first], rows[-1, -1] = torch.nan, torch.inf
    absorb_queries.absorb_queries(q, heads, key, positions, new)
    assert cache.isfinite().all(), "NaN in a cache would reach other requests"
    assert not cache[slots[0], 0, :rank].any()


def test_rows_of_other_layouts_are_not_written_with_queries() -> None:
    heads = LatentHeads(2, 32, 32, RMSNorm(torch.ones(64).to(BF16), 1e-6), Rope(torch.randn(64, 8), True))
    rows, cache, slots = torch.zeros((4, 24 + 72), dtype=BF16), torch.zeros((8, 1, 72), dtype=BF16), torch.arange(4)
    assert absorb_queries.can_write(NewRows(rows, slots, cache), heads)
    assert not absorb_queries.can_write(NewRows(rows[:, :-4].contiguous(), slots, cache), heads), "not aligned to 16 bytes"
    assert not absorb_queries.can_write(NewRows(rows[:, :88], slots, cache), heads), "not contiguous"
    assert not absorb_queries.can_write(NewRows(rows, slots, cache.to(torch.float8_e4m3fn)), heads)
    assert not absorb_queries.can_write(NewRows(rows.half(), slots, cache), heads)
