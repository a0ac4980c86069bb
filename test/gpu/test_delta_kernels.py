"""The gated delta rule's kernels against its definition: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from runtime.layers.cuda_delta_ops import CudaDeltaOps
from runtime.layers.delta import definition
from runtime.layers.delta.heads import DeltaHeads
from runtime.layers.delta.kernels import recurrence
from runtime.layers.delta.kernels.begin import begin as begin_by_kernel
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.kernels.pdl import starts_early
from runtime.layers.norm import RMSNorm
from runtime.layers.torch_ops import TorchOps
from runtime.mem_cache.state_pool import StatePool, StateSpec
from unit.delta_passes import Request, pass_over

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Allowed difference of outputs of size 1: the model's rounding."""
SHAPES = {
    "qwen3.5": (16, 32, 128, 128, 4, 4),
    "small": (2, 6, 16, 8, 3, 5),
    "one window": (1, 2, 32, 64, 2, 1),
    "wide": (2, 4, 64, 256, 4, 8),
    "large": (1, 2, 256, 256, 4, 4),
}
"""Key heads, value heads, key_dim, value_dim, width of the convolution and of windows."""
CACHED = 3
"""Slots for states of prefixes."""
if INTERPRETED:
    SHAPES["qwen3.5"] = (1, 2, 128, 128, 4, 4)


def kernels() -> CudaDeltaOps:
    ops = CudaDeltaOps()
    ops.pdl = not INTERPRETED and starts_early(DEVICE)
    return ops


class Layer:
    """One layer and two pools of its states: the definition runs over one, the kernels over the other."""

    def __init__(self, shape: str, dtype: torch.dtype, length: int, rows: int = 5, equal_keys: bool = False) -> None:
        keys, values, key_dim, value_dim, conv, window = SHAPES[shape]
        generator = torch.Generator().manual_seed(length)
        channels = 2 * keys * key_dim + values * value_dim

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        self.heads = DeltaHeads(
            keys,
            values,
            key_dim,
            value_dim,
            (random(channels, conv) / 2).to(DEVICE, dtype),
            random(values).to(DEVICE),
            random(values).to(DEVICE),
        )
        spec = StateSpec(values, key_dim, value_dim, channels, conv, dtype)
        self.pools = [StatePool([spec], rows + 1, window, DEVICE, CACHED) for _ in range(2)]
        for pool in self.pools:  # what a row held before must not matter
            for tensor in (pool.layers[0].matrices, pool.layers[0].tail, pool.layers[0].window, pool.layers[0].gates):
                tensor.fill_(7.0)
        self.rows = random(rows + 1, length, channels + 3).to(DEVICE, dtype)  # wider, so that rows have a stride
        if equal_keys:
            self.rows[:] = self.rows[:, :1]
        self.gates = random(rows + 1, length, 2 * values).to(DEVICE, dtype)
        self.window, self.dtype = window, dtype

    def batch(self, requests: Sequence[Request]) -> ForwardBatch:
        return pass_over(requests, self.window, DEVICE)

    def inputs(self, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat([self.rows[row, start : start + count] for row, start, count in requests])
        return rows[:, : self.heads.channels], torch.cat([self.gates[row, start : start + count] for row, start, count in requests])

    def run(self, requests: Sequence[Request], check_rows: bool = True) -> None:
        """Run both, and compare outputs and states."""
        batch, inputs, outputs = self.batch(requests), self.inputs(requests), []
        for pool, rule in zip(self.pools, (definition.delta_rule, kernels().delta_rule), strict=True):
            states = (TorchOps() if pool is self.pools[0] else kernels()).begin_states(pool, batch)
            outputs.append(rule(*inputs, self.heads, 0, states, batch))
        expected, out = outputs
        assert out.dtype == self.dtype
        close(out, expected, TOLERANCE[self.dtype])
        if check_rows:
            self.compare_states(sorted({row for row, _, _ in requests} - {0}))

    def compare_states(self, rows: list[int], of_prefixes: bool = False) -> None:
        expected, own = (pool.layers[0] for pool in self.pools)
        close(own.matrices[rows], expected.matrices[rows], 10 * TOLERANCE[torch.float32])
        assert torch.equal(own.tail[rows], expected.tail[rows])
        if of_prefixes:
            return
        assert torch.equal(own.window[rows], expected.window[rows])
        close(own.gates[rows], expected.gates[rows], 1e-5)

    def keep(self, rows: list[int], lens: list[int], slots: list[int]) -> None:
        """Let the next chunks of these rows leave their states, in both pools."""
        for pool in self.pools:
            pool.keep(
                torch.tensor(rows, device=DEVICE), torch.tensor(lens, dtype=torch.int32, device=DEVICE), torch.tensor(slots, device=DEVICE)
            )


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = max(1.0, float(expected.float().abs().max()))
    torch.testing.assert_close(got.float(), expected.float(), rtol=0.0, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_then_windows_of_any_width(shape: str, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype, 60)
    lens = {1: 9, 3: 20, 4: 1}
    layer.run([(row, 0, length) for row, length in lens.items()])
    generator = np.random.default_rng(1)
    for _ in range(5):
        width = int(generator.integers(1, layer.window + 1))
        layer.run([(row, length, width) for row, length in lens.items()])
        for row in lens:
            lens[row] += int(generator.integers(1, width + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(64, 65, 63), (130, 1, 7), (2, 3, 200)])
@pytest.mark.parametrize("shape", ["qwen3.5", "small", "one window"])
def test_chunks_of_prompts_beside_each_other(shape: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype, 260)
    starts = [0, 0, 0]
    for counts in (lengths, (1, 2, 3), lengths[::-1]):
        requests = [(row + 1, start, count) for row, (start, count) in enumerate(zip(starts, counts, strict=True))]
        layer.run(requests)
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["qwen3.5", "small", "one window"])
def test_a_chunk_leaves_its_state_for_another_request(shape: str, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype, 260)
    first = layer.pools[0].layers[0].matrices.shape[0] - CACHED
    layer.rows[4], layer.gates[4] = layer.rows[1], layer.gates[1]
    layer.keep([1, 2, 3], [128, 64, 0], [0, 2, 1])
    layer.run([(1, 0, 200), (2, 0, 64), (3, 0, 70)])
    layer.compare_states([first, first + 2], of_prefixes=True)
    for pool in layer.pools:
        assert (pool.layers[0].matrices[first + 1] == 7.0).all()  # no other slot was written
        pool.restore(4, 0, 128)
    layer.run([(4, 128, 72)])
    own = layer.pools[1].layers[0]
    assert torch.equal(own.matrices[4], own.matrices[1])  # the bits of the whole prompt
    assert torch.equal(own.tail[4], own.tail[1])
    layer.run([(4, 200, 2), (1, 200, 2)])


@pytest.mark.parametrize("requests", [1, 5, 300])
def test_a_pass_begins_as_defined(requests: int) -> None:
    generator = torch.Generator().manual_seed(requests)

    def random(high: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, high, (requests + 1,), generator=generator).to(DEVICE, dtype)

    pools = [StatePool([StateSpec(1, 8, 8, 24, 4, torch.float32)], requests + 1, 4, DEVICE, CACHED) for _ in range(2)]
    applied, kept_lens, kept_rows = random(300, torch.int32), random(300, torch.int32), random(9, torch.int64)
    rows = torch.randperm(requests + 1, generator=generator)[:requests].to(DEVICE)
    counts, starts = random(100, torch.int32)[1:] + 1, random(4, torch.int32)[1:] * applied[rows]
    indptr = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    found = []
    for pool, begin in zip(pools, (StatePool.begin, partial(begin_by_kernel, pdl=kernels().pdl)), strict=True):
        for own, value in ((pool.applied, applied), (pool.kept_lens, kept_lens), (pool.kept_rows, kept_rows)):
            own.copy_(value)
        found.append(begin(pool, rows, starts + counts, indptr))
    expected, got = found
    for name in ("pending", "fresh", "kept", "kept_rows"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
        assert getattr(got, name).dtype == getattr(expected, name).dtype
    assert torch.equal(pools[1].applied, pools[0].applied)
    assert requests < 300 or int((expected.kept > 0).sum()) > 0 < int((expected.pending > 0).sum())


@pytest.mark.parametrize("shape", ["qwen3.5", "small"])
def test_equal_keys_stay_exact(shape: str) -> None:
    """The system of a chunk is far from the identity."""
    layer = Layer(shape, torch.float32, 130, equal_keys=True)
    values = layer.heads.num_value_heads
    layer.gates[:, :, :values], layer.gates[:, :, values:] = 6.0, -9.0  # full updates, hardly any decay
    layer.run([(1, 0, 130)])


@pytest.mark.parametrize("requests", [1, 7, 65])
def test_many_requests_and_padding(requests: int) -> None:
    layer = Layer("small", torch.float32, 12, rows=requests)
    rows = [row if row % 3 else 0 for row in range(1, requests + 1)]
    layer.run([(row, 0, 2) for row in rows])
    layer.run([(row, 1 if row else 0, 3) for row in rows])


@pytest.mark.parametrize("few_programs", [0, recurrence.FEW_PROGRAMS])
@pytest.mark.parametrize("shape", ["qwen3.5", "wide", "large"])
def test_every_count_of_pending_tokens(shape: str, few_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both widths of the recurrence's programs, with requests beside each other that differ in what is pending; one is new."""
    monkeypatch.setattr(recurrence, "FEW_PROGRAMS", few_programs)
    width = SHAPES[shape][-1]
    layer = Layer(shape, torch.float32, 3 * width + 9, rows=width + 2)
    rows, new = range(1, width + 2), width + 2
    layer.run([(row, 0, width + row) for row in rows])
    layer.run([(row, width + row, width) for row in rows])
    layer.run([*((row, width + row + row - 1, 2 if width > 1 else 1) for row in rows), (new, 0, 2 if width > 1 else 1)])


def test_slow_decays_stay_accurate() -> None:
    """Of decays close to 1 the logarithm matters relative to its size: it adds up over many tokens."""
    layer = Layer("small", torch.float32, 40)
    values = layer.heads.num_value_heads
    layer.heads.decay_bias.zero_()
    layer.gates[:, :, values:] = torch.linspace(-20.0, -4.0, values, device=DEVICE)
    requests = [(1, 0, layer.window)]
    layer.run(requests)
    expected, own = (pool.layers[0].gates[1, :, 0] for pool in layer.pools)
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=0.0)


def test_memory_of_chunks_is_bounded_by_all_tokens() -> None:
    """One long prompt beside many short ones does not make each as expensive as the long one."""
    layer = Layer("small", torch.float32, 300, rows=33)
    requests = [(1, 0, 300), *((row, 0, 1) for row in range(2, 34))]
    batch, pool = layer.batch(requests), layer.pools[1]
    states = pool.begin(batch.req_pool_indices, batch.seq_lens, batch.qo_indptr)
    with LargestTensor() as largest:
        kernels().delta_rule(*layer.inputs(requests), layer.heads, 0, states, batch)
    tokens, chunk = 332 + 33 * layer.window, definition.CHUNK
    assert largest.count <= 2 * (tokens // chunk + 33) * layer.heads.num_value_heads * chunk**2


class LargestTensor(TorchDispatchMode):
    """Records the most entries of a tensor that is allocated."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.count = max(self.count, out.numel())
        return out


def test_a_pass_runs_again_with_equal_results() -> None:
    layer = Layer("small", torch.float32, 40)
    layer.run([(1, 0, 20), (2, 0, 7)])
    layer.run([(1, 20, 3), (2, 7, 3)])
    for _ in range(2):
        layer.run([(1, 22, 4), (2, 10, 4)])


@pytest.mark.skipif(INTERPRETED, reason="captures a graph")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_replays_windows(dtype: torch.dtype) -> None:
    layer = Layer("qwen3.5", dtype, 40)
    lens = [11, 30]
    layer.run([(1, 0, 11), (2, 0, 30)])
    batch = layer.batch([(1, 11, 4), (2, 30, 4)])
    rows, gates = (tensor.clone() for tensor in layer.inputs([(1, 11, 4), (2, 30, 4)]))
    ops, pool = kernels(), layer.pools[1]

    def run() -> torch.Tensor:
        states = pool.begin(batch.req_pool_indices, batch.seq_lens, batch.qo_indptr)
        return ops.delta_rule(rows, gates, layer.heads, 0, states, batch)

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for accepted in ((1, 4), (3, 2), (4, 1)):
        requests = [(1, lens[0], 4), (2, lens[1], 4)]
        own, own_gates = layer.inputs(requests)
        rows.copy_(own)
        gates.copy_(own_gates)
        batch.seq_lens.copy_(layer.batch(requests).seq_lens)
        graph.replay()
        states = layer.pools[0].begin(batch.req_pool_indices, batch.seq_lens, batch.qo_indptr)
        close(out, definition.delta_rule(own, own_gates, layer.heads, 0, states, batch), TOLERANCE[dtype])
        layer.compare_states([1, 2])
        lens = [length + count for length, count in zip(lens, accepted, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 128, 96])
def test_gated_norm(dim: int, dtype: torch.dtype) -> None:
    x, gate = (torch.randn(5, 3 * dim, device=DEVICE).to(dtype) for _ in range(2))
    wide = torch.cat([gate, gate, gate], dim=1)[:, 3 * dim : 6 * dim]
    norm = RMSNorm(torch.randn(dim, device=DEVICE).to(dtype), 1e-6)
    close(kernels().gated_norm(x, wide, norm), definition.gated_norm(x, gate, norm.weight, norm.eps), TOLERANCE[dtype])
