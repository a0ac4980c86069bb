"""The GPU's block operations against their definition in float64, and against themselves: other rows, other launches."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.linear import Linear
from runtime.layers.ops import BlockOps, HeadLayout, RMSNorm, Rope, Stream
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.staging import StagingRing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16
TOLERANCE = 8e-3
ROWS = (1, 5, 16, 40, 200)


@pytest.fixture(scope="module")
def ops() -> BlockOps:
    from runtime.layers.cuda_ops import CudaOps

    return CudaOps()


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def gain(size: int, dtype: torch.dtype = BF16) -> RMSNorm:
    return RMSNorm((torch.rand(size, device="cuda") + 0.5).to(dtype), 1e-5)


def layer(out: int, width: int, bias: bool = False, dtype: torch.dtype = BF16) -> Linear:
    return Linear(rand(out, width, dtype=dtype, scale=width**-0.5), rand(out, dtype=dtype) if bias else None)


def normed(h: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    h = h.double()
    return h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()


def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    out = x.double() @ linear.weight.double().T
    return out if linear.bias is None else out + linear.bias.double()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.isfinite(got).all(), "not finite"
    per_row = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    return float(per_row.max())


@pytest.mark.parametrize("rows", ROWS)
def test_products_follow_the_definition(ops: BlockOps, rows: int) -> None:
    for hidden, bias in ((1024, False), (576, True)):  # 576 columns are no multiple of any tile
        torch.manual_seed(rows)
        h, x, norm = rand(rows, hidden, dtype=torch.float32, scale=50), rand(rows, 1536), gain(hidden)
        qkv, gate_up, down, head = layer(960, hidden, bias), layer(3072, hidden, bias), layer(hidden, 1536, bias), layer(4999, hidden)
        assert error(ops.norm(h, norm, BF16), normed(h, norm)) < TOLERANCE
        assert error(ops.norm_linear(Stream(h), norm, qkv), product(normed(h, norm), qkv)) < TOLERANCE
        gate, up = product(normed(h, norm), gate_up).chunk(2, dim=1)
        assert error(ops.norm_gate_up(Stream(h), norm, gate_up), F.silu(gate) * up) < TOLERANCE
        y = rand(rows, hidden)
        scores = torch.full((rows, 4999), float("nan"), device="cuda")
        assert ops.logits(y, head, scores) is scores
        assert error(scores, product(y, head)) < 1e-4, "logits are rounded to 16 bits somewhere"
        assert torch.equal(ops.logits(y, head), scores)
        # A stream of 2e4 steps by 128 in bfloat16: the update must be added in float32.
        stream = h * 400
        before = stream.double()
        assert error(ops.linear_add(x, down, Stream(stream)).h.double() - before, product(x, down)) < TOLERANCE


def test_float16_products_do_not_overflow_in_a_large_stream(ops: BlockOps) -> None:
    h, norm, linear = rand(4, 1024, dtype=torch.float32, scale=2e4), gain(1024, torch.float16), layer(512, 1024, dtype=torch.float16)
    norm.weight.mul_(20)
    assert error(ops.norm_linear(Stream(h), norm, linear), product(normed(h, norm), linear)) < 2e-3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norms"), [(32, 8, 128, False), (9, 3, 64, False), (16, 8, 128, True), (4, 2, 256, True)]
)
def test_rotary_and_kv_write_touch_their_slots_only(ops: BlockOps, heads: int, kv_heads: int, head_dim: int, norms: bool) -> None:
    T, slots, twin = 7, 40, TorchOps()
    layout = HeadLayout(heads, kv_heads, head_dim)
    angle = torch.outer(torch.arange(3000.0, device="cuda"), 1e4 ** (-torch.arange(0, head_dim, 2, device="cuda") / head_dim))
    rope = Rope(torch.cat((angle.cos(), angle.sin()), dim=1))
    q_norm, k_norm = (gain(head_dim), gain(head_dim)) if norms else (None, None)
    qkv = rand(T, (heads + 2 * kv_heads) * head_dim)
    positions, where = torch.randint(0, 3000, (T,), device="cuda"), torch.randperm(slots, device="cuda")[:T]
    caches = [rand(slots, kv_heads, head_dim) for _ in range(2)]
    expected = [cache.float() for cache in caches]
    q = ops.rope_and_cache(qkv, layout, rope, q_norm, k_norm, positions, where, *caches)
    float_norms = [None if norm is None else RMSNorm(norm.weight.float(), norm.eps) for norm in (q_norm, k_norm)]
    want = twin.rope_and_cache(qkv.float(), layout, rope, *float_norms, positions, where, *expected)
    assert error(q.flatten(1), want.flatten(1).double()) < TOLERANCE
    others = torch.ones(slots, dtype=torch.bool, device="cuda")
    others[where] = False
    for cache, twin_cache in zip(caches, expected, strict=True):
        assert error(cache[where].flatten(1), twin_cache[where].flatten(1).double()) < TOLERANCE
        assert torch.equal(cache[others].float(), twin_cache[others])


@pytest.mark.parametrize("rows", [4, 16, 32])
def test_a_row_does_not_depend_on_the_rows_beside_it(ops: BlockOps, rows: int) -> None:
    h, norm, qkv, gate_up = rand(rows, 1024, dtype=torch.float32), gain(1024), layer(1536, 1024), layer(2048, 1024)
    other = rand(rows, 1024, dtype=torch.float32, scale=1e3)
    other[1] = h[1]
    for op, linear in ((ops.norm_linear, qkv), (ops.norm_gate_up, gate_up)):
        assert torch.equal(op(Stream(h), norm, linear)[1], op(Stream(other), norm, linear)[1])


@pytest.mark.parametrize("rows", [1, 5, 16, 40, 128])
def test_a_norm_left_ahead_is_the_norm(rows: int) -> None:
    from runtime.layers.cuda_ops import CudaOps
    from runtime.layers.gemm.autotune import candidate_configs, row_class, streamed_configs

    hidden, kinds = 1024, {"linear_add": (1024, 1536), "linear": (960, 1024), "gate_up": (3072, 1024)}
    down, qkv, gate_up, norm = layer(1024, 1536), layer(960, 1024), layer(3072, 1024), gain(hidden)
    h, x = rand(rows, hidden, dtype=torch.float32, scale=50), rand(rows, 1536)
    ways = [{op: candidate_configs(op, rows)[0] for op in kinds}]  # type: ignore[arg-type]
    if torch.cuda.get_device_capability()[0] == 9:
        ways += [{op: streamed_configs(op, 128, size[0], 132)[i] for op, size in kinds.items()} for i in (0, 1)]  # type: ignore[arg-type]
        ways += [ways[0] | {"linear_add": ways[1]["linear_add"]}, ways[1] | {"linear_add": ways[0]["linear_add"]}]
    for way in ways:
        ops = CudaOps()
        ops.choices = {(op, *kinds[op], row_class(rows)): choice for op, choice in way.items()}  # type: ignore[dict-item]
        stream = ops.linear_add(x, down, Stream(h.clone()), norm)
        assert stream.ahead is not None
        assert torch.equal(stream.h, ops.linear_add(x, down, Stream(h.clone())).h), "the stream itself is the same"
        assert error(ops.norm_linear(stream, norm, qkv), product(normed(stream.h, norm), qkv)) < TOLERANCE, way
        gate, up = product(normed(stream.h, norm), gate_up).chunk(2, dim=1)
        assert error(ops.norm_gate_up(stream, norm, gate_up), F.silu(gate) * up) < TOLERANCE, way
        ops.choices[("linear", *kinds["linear"], row_class(rows))] = None  # cuBLAS, which scales no rows
        assert error(ops.norm_linear(stream, norm, qkv), product(normed(stream.h, norm), qkv)) < TOLERANCE, way


def test_a_float16_stream_is_never_stored_before_it_is_normed(ops: BlockOps) -> None:
    x, down = rand(4, 512, dtype=torch.float16), layer(1024, 512, dtype=torch.float16)
    stream = ops.linear_add(x, down, Stream(rand(4, 1024, dtype=torch.float32, scale=2e4)), gain(1024, torch.float16))
    assert stream.ahead is None


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_early_launches_change_no_bit_of_a_long_chain(rows: int) -> None:
    from runtime.layers.cuda_ops import CudaOps

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    hidden, layout, slots = 2048, HeadLayout(16, 4, 128), rows + 1
    blocks = [
        (gain(hidden), layer(24 * 128, hidden), layer(hidden, hidden), gain(hidden), layer(8192, hidden), layer(hidden, 4096))
        for _ in range(12)
    ]
    rope = Rope(rand(100, 128, dtype=torch.float32))
    positions, where = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda") + 1
    start = rand(rows, hidden, dtype=torch.float32)
    caches = [torch.zeros((slots, 4, 128), dtype=BF16, device="cuda") for _ in range(2)]

    def chain(ops: BlockOps) -> torch.Tensor:
        stream = Stream(start.clone())
        followers = [*(block[0] for block in blocks[1:]), None]
        for (attn_norm, qkv, o, mlp_norm, gate_up, down), following in zip(blocks, followers, strict=True):
            q = ops.rope_and_cache(ops.norm_linear(stream, attn_norm, qkv), layout, rope, None, None, positions, where, *caches)
            stream = ops.linear_add(q.flatten(1), o, stream, mlp_norm)
            stream = ops.linear_add(ops.norm_gate_up(stream, mlp_norm, gate_up), down, stream, following)
        return stream.h

    plain, early = CudaOps(pdl=False), CudaOps(pdl=True)
    want = chain(plain)
    assert torch.equal(chain(early), want)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain(early)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(early)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)


def test_every_uploaded_array_is_aligned_whatever_came_before_it() -> None:
    ring = StagingRing(64, torch.device("cuda"))
    for _ in range(10):
        arrays = [np.arange(n, dtype=np.int32) + n for n in (5, 1, 3, 0, 8, 2)]
        uploaded = ring.upload(*arrays)
        assert [t.tolist() for t in uploaded] == [a.tolist() for a in arrays]
        assert all(t.data_ptr() % 16 == 0 for t in uploaded), "Triton compiles a kernel for each alignment"


def test_kernels_compiled_side_by_side_get_their_own_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver

    from runtime.layers.cuda_ops import _compile
    from runtime.layers.gemm.triton_gemm import GemmConfig, _small_gemm_kernel, small_gemm

    x, weight = rand(4, 128), rand(256, 128)
    configs = [GemmConfig(block_n, 32, warps, stages) for block_n in (32, 64) for warps in (4, 8) for stages in (2, 3, 4)]
    make, inside, most = driver.active.launcher_cls, [0], [0]

    def watched(source: object, metadata: object) -> object:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return make(source, metadata)

    monkeypatch.setattr(driver.active, "launcher_cls", watched)
    _small_gemm_kernel.device_caches.clear()
    outs = [torch.empty(4, 256, dtype=BF16, device="cuda") for _ in configs]
    _compile([lambda _, o=out, c=config: small_gemm(x, weight, o, c, Epilogue()) for out, config in zip(outs, configs, strict=True)])
    assert most == [1], "two at once: one may get the arguments of the other"
    for out in outs:
        torch.testing.assert_close(out, F.linear(x, weight), rtol=TOLERANCE, atol=TOLERANCE * 16)
