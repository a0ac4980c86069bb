"""The two GEMMs per head of absorbed latent attention in CUDA C++ compared with float64, alone and in a chain with adjacent kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import LatentConfig
from runtime.layers.attention.kernels.absorb_queries import absorb_queries, can_write
from runtime.layers.attention.kernels.absorb_queries import supports as can_absorb
from runtime.layers.attention.kernels.latent_decode import LatentShape, LatentWorkspace, latent_attention, trial_inputs
from runtime.layers.attention.kernels.paged_keys import PagedKeys
from runtime.layers.attention.kernels.project_values import project_values
from runtime.layers.attention.kernels.project_values import supports as can_project
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import NO_EPILOGUE, Epilogue
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.gemm.resident_gemm import resident_config, resident_gemm
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.kernels.latent_rows import write_latent
from runtime.layers.latent_heads import LatentHeads, NewRows
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import Stream
from runtime.layers.rope import Rope
from runtime.layers.torch_ops import TorchOps, rms_norm, rotate

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("latent_heads"), pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
BF16 = torch.bfloat16
HALF_STEP = 2.0**-8
"""Twice the largest relative rounding error of bfloat16, because float32 sums may be on the other side of a tie."""


@dataclass(frozen=True)
class Widths:
    """Widths of a head's unrotated query, of its value, of the latent, and of the rotated key."""

    nope: int
    value: int
    rank: int = 512
    rope: int = 64


GLM, DEEPSEEK = Widths(192, 256), Widths(128, 128)
SMALL = (Widths(256, 32), Widths(64, 96, 256, 32), Widths(32, 64, 64, 8), Widths(64, 64, 320, 128), Widths(32, 32, 1024, 16))


@dataclass(frozen=True)
class Case:
    """Queries that are views of wider rows, and both halves of `kv_b_proj` as views of one weight, as in the layer."""

    q: torch.Tensor
    heads: LatentHeads
    key: torch.Tensor
    value: torch.Tensor
    attended: torch.Tensor
    positions: torch.Tensor


def case(tokens: int, num_heads: int, widths: Widths, interleaved: bool = True, dtype: torch.dtype = BF16, seed: int = 0) -> Case:
    random = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cuda")

    norm = RMSNorm(torch.ones(widths.rank, device="cuda"), 1e-6)
    heads = LatentHeads(num_heads, widths.nope, widths.value, norm, Rope(normal(64, widths.rope), interleaved))
    columns = num_heads * heads.query_dim
    q = normal(tokens, columns + heads.row_dim).to(dtype)[:, :columns].view(tokens, num_heads, -1)
    weight = (normal(num_heads, widths.nope + widths.value, widths.rank) * widths.rank**-0.5).to(dtype)
    attended = normal(tokens, num_heads, widths.rank).to(dtype)
    positions = torch.randint(0, 64, (tokens,), generator=random, device="cuda")
    return Case(q, heads, weight[:, : widths.nope], weight[:, widths.nope :], attended, positions)


def absorbed(c: Case) -> torch.Tensor:
    nope = c.heads.nope_dim
    latent = torch.einsum("thd,hdr->thr", c.q[..., :nope].double(), c.key.double())
    return torch.cat((latent, rotate(c.q[..., nope:], c.heads.rope, c.positions).double()), dim=2)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=HALF_STEP, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_heads", [1, 16, 20])
@pytest.mark.parametrize("widths", [GLM, DEEPSEEK, *SMALL], ids=str)
def test_queries_are_absorbed_and_rotated(widths: Widths, num_heads: int, interleaved: bool, pdl: bool) -> None:
    for tokens in range(1, 17):
        c = case(tokens, num_heads, widths, interleaved)
        assert can_absorb(c.q, c.heads, c.key)
        query = absorb_queries(c.q, c.heads, c.key, c.positions, pdl=pdl)
        assert query.is_contiguous()
        check(query, absorbed(c))


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("widths", [GLM, DEEPSEEK, *SMALL], ids=str)
def test_new_rows_are_written_with_the_queries(widths: Widths, interleaved: bool, pdl: bool) -> None:
    for tokens in range(1, 17):
        c = case(tokens, 5, widths, interleaved)
        heads = replace(c.heads, kv_norm=RMSNorm(torch.randn(widths.rank, device="cuda").to(BF16), 1e-6))
        rows, slots = torch.randn((tokens, 40 + heads.row_dim), device="cuda").to(BF16), torch.randperm(64, device="cuda")[:tokens]
        got, want = (torch.full((64, 1, heads.row_dim), 7.0, device="cuda", dtype=BF16) for _ in range(2))
        if tokens > 1:
            rows[1, 40], rows[-1, -1] = torch.nan, torch.inf
        new = NewRows(rows, slots, got)
        assert can_write(new, heads)
        query = absorb_queries(c.q, heads, c.key, c.positions, new, pdl=pdl)
        assert torch.equal(query, absorb_queries(c.q, heads, c.key, c.positions, pdl=pdl))
        write_latent(rows[:, 40:].contiguous(), replace(heads, num_heads=0), c.positions, slots, want, pdl=False)
        torch.testing.assert_close(got, want, rtol=2 * HALF_STEP, atol=1e-5)


def test_operations_prepare_the_norm_of_the_queries() -> None:
    from runtime.config.kernel_configs import ResidentConfig
    from runtime.layers.cuda_ops import CudaOps

    torch.manual_seed(0)
    ops, hidden, rank = CudaOps(GemmTimings(H200)), 2048, 768
    norm, q_norm = (RMSNorm(torch.randn(width, device="cuda").to(BF16), 1e-6) for width in (hidden, rank))
    down, up = (Linear.dense((torch.randn(size, device="cuda") * size[1] ** -0.5).to(BF16)) for size in ((1344, hidden), (5120, rank)))
    ops.autotune([Gemm("linear", down, norm, q_norm=q_norm), Gemm("linear", up, None, q_norm=q_norm)], (1, 4, 16, 32))
    for rows in (1, 3, 16, 20):
        stream = Stream(torch.randn((rows, hidden), device="cuda"))
        latent = ops.project_latent(stream, norm, down, q_norm)
        assert (latent.deferred is not None) is isinstance(ops.choice("linear", down, rows), ResidentConfig)
        assert rows > 8 or isinstance(ops.choice("linear", up, rows), ResidentConfig)
        plain = ops.norm_linear(stream, norm, down)
        assert torch.equal(latent.rows, plain)
        queries = ops.project_queries(latent, up, q_norm)
        if latent.deferred is None or ops.choice("linear", up, rows) is None:
            assert queries is None
            continue
        assert queries is not None
        want = rms_norm(plain[:, :rank].float(), q_norm) @ up.weight.float().T
        assert (queries.float() - want).norm() / want.norm() < 1e-2


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("num_heads", [1, 16, 20])
@pytest.mark.parametrize("widths", [GLM, DEEPSEEK, *SMALL], ids=str)
def test_values_are_projected(widths: Widths, num_heads: int, pdl: bool) -> None:
    for tokens in range(1, 17):
        c = case(tokens, num_heads, widths)
        assert can_project(c.attended, c.value)
        out = project_values(c.attended, c.value, pdl=pdl)
        assert out.is_contiguous()
        check(out, torch.einsum("thr,hvr->thv", c.attended.double(), c.value.double()))


@pytest.mark.parametrize("widths", [GLM, DEEPSEEK], ids=str)
def test_tokens_do_not_depend_on_each_other(widths: Widths) -> None:
    c = case(16, 20, widths)
    query, out = absorb_queries(c.q, c.heads, c.key, c.positions), project_values(c.attended, c.value)
    for tokens in range(1, 16):
        assert torch.equal(absorb_queries(c.q[:tokens], c.heads, c.key, c.positions[:tokens]), query[:tokens])
        assert torch.equal(project_values(c.attended[:tokens], c.value), out[:tokens])
    c.q[1:], c.attended[1:] = torch.nan, torch.nan
    assert torch.equal(absorb_queries(c.q, c.heads, c.key, c.positions)[0], query[0])
    assert torch.equal(project_values(c.attended, c.value)[0], out[0])


def test_other_shapes_and_types_are_refused() -> None:
    c = case(4, 2, GLM)
    assert not can_absorb(*(getattr(case(17, 2, GLM), name) for name in ("q", "heads", "key")))
    assert not can_project(case(17, 2, GLM).attended, c.value)
    assert not can_absorb(c.q[:0], c.heads, c.key)
    for odd in (Widths(40, 64), Widths(288, 64), Widths(192, 64, 480), Widths(192, 64, 512, 12), Widths(64, 64, 64, 128)):
        other = case(4, 2, odd)
        assert not can_absorb(other.q, other.heads, other.key), odd
    for odd in (Widths(192, 48), Widths(192, 64, 480), Widths(192, 64, 1088)):
        other = case(4, 2, odd)
        assert not can_project(other.attended, other.value), odd
    half = case(4, 2, GLM, dtype=torch.float16)
    assert not can_absorb(half.q, half.heads, half.key)
    assert not can_project(half.attended, half.value)
    assert not can_project(torch.cat((c.attended, c.attended), dim=2)[..., : c.heads.kv_rank], c.value)
    assert not can_project(c.attended.cpu(), c.value)
    shifted = torch.zeros(c.q.numel() + 1, dtype=BF16, device="cuda")[1:].view(c.q.shape)
    assert not can_absorb(shifted, c.heads, c.key), "not aligned to 16 bytes"


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("tokens", [3, 16, 17, 40])
def test_operations_take_any_number_of_tokens(tokens: int, dtype: torch.dtype) -> None:
    from runtime.layers.cuda_ops import CudaOps

    c, ops, slow = case(tokens, 20, GLM, dtype=dtype), CudaOps(GemmTimings(H200)), TorchOps()
    query, want = (each.absorb(c.q, c.heads, c.key, c.positions) for each in (ops, slow))
    torch.testing.assert_close(query, want, rtol=2 * HALF_STEP, atol=1e-3)
    values, want = (each.project_values(c.attended, c.value) for each in (ops, slow))
    torch.testing.assert_close(values, want, rtol=2 * HALF_STEP, atol=1e-3)


@dataclass(frozen=True)
class Chain:
    """Layers of both projections, absorption, attention, values and output projection; each reads the rows of the previous one."""

    layers: list[Case]
    x: torch.Tensor
    first: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    q_norm: RMSNorm
    slots: torch.Tensor
    shape: LatentShape
    cache: torch.Tensor
    keys: PagedKeys
    workspace: LatentWorkspace

    @classmethod
    def of(cls, batch: int, width: int) -> Chain:
        torch.manual_seed(0)
        layers = [case(batch * width, 20, GLM, seed=seed) for seed in (0, 1, 2)]
        gain = torch.ones(GLM.rank, device="cuda", dtype=BF16)
        layers = [replace(c, heads=replace(c.heads, kv_norm=RMSNorm(gain, 1e-6))) for c in layers]
        heads, num_sms = layers[0].heads, torch.cuda.get_device_properties(0).multi_processor_count
        columns, outputs = heads.num_heads * heads.query_dim, heads.num_heads * heads.value_dim
        sizes = (batch * width, 768), (768 + heads.row_dim, 768), (columns, 768), (768, outputs)
        x, first, up, down = (torch.randn(size, device="cuda") for size in sizes)
        shape = LatentShape(batch, width, heads.num_heads, heads.kv_rank, heads.rope.dim, num_sms, LatentConfig(32, 32, 8, 2))
        _, cache, keys = trial_inputs(shape, 16, BF16, x.device, 300)
        at = keys.seq_lens[:, None].long() - width + torch.arange(width, device="cuda")
        slots = (keys.pages[keys.rows.long()[:, None], at // 16].long() * 16 + at % 16).flatten()
        workspace, q_norm = LatentWorkspace([shape], x.device), RMSNorm(torch.ones(768, device="cuda", dtype=BF16), 1e-6)
        x, first, up, down = (each.to(BF16) for each in (x, first * 768**-0.5, up * 768**-0.5, down * 10 * outputs**-0.5))
        return cls(layers, x, first, up, down, q_norm, slots, shape, cache.normal_(), keys, workspace)

    def run(self, pdl: bool) -> list[torch.Tensor]:
        """The rows after each of 24 layers."""
        x, outs = self.x, list[torch.Tensor]()
        for c in self.layers * 8:
            scaled, squares = torch.empty_like(self.x), torch.empty((len(x), 48), device="cuda")
            rows = self.project(x, self.first, pdl, Epilogue(deferred=DeferredNorm(self.q_norm.weight, scaled, squares)))
            q = self.project(scaled, self.up, pdl, Epilogue(scale=RowScale(squares, self.q_norm.eps)))
            new = NewRows(rows, self.slots, self.cache.flatten(0, 1))
            query = absorb_queries(q.view(len(x), c.heads.num_heads, -1), c.heads, c.key, c.positions, new, pdl=pdl)
            attended = latent_attention(query, self.cache, self.keys, self.shape, self.workspace, 0.2, pdl=pdl)
            x = self.project(project_values(attended, c.value, pdl=pdl).flatten(1), self.down, pdl)
            outs.append(x)
        return outs

    def project(self, x: torch.Tensor, weight: torch.Tensor, pdl: bool, epilogue: Epilogue = NO_EPILOGUE) -> torch.Tensor:
        config = resident_config(weight.shape[0], weight.shape[1], self.shape.num_sms)
        assert config is not None
        return resident_gemm(x, weight, torch.empty((len(x), len(weight)), dtype=BF16, device="cuda"), config, epilogue, pdl=pdl)


@pytest.mark.parametrize(("batch", "width"), [(1, 1), (1, 4), (4, 4), (5, 1)])
def test_kernels_that_start_early_wait_for_each_other(batch: int, width: int) -> None:
    chain = Chain.of(batch, width)
    want, graph = chain.run(pdl=False), torch.cuda.CUDAGraph()
    assert want[-1].isfinite().all()
    chain.run(pdl=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = chain.run(pdl=True)
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))
