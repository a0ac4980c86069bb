"""The argmax in the epilogue of the LM head's GEMM, compared with that of its logits; most tests also run under Triton's interpreter."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

pytest.importorskip("triton")

from runtime.config.device_tuning import H200
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.gemm.triton_gemm import MAX_ROWS, TritonConfig, triton_gemm
from runtime.layers.kernels.argmax_kernel import argmax_chunks, argmax_rows
from runtime.layers.linear import Linear

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPE = torch.float16
"""A dtype that both the interpreter and a GPU support."""
CUTS = [TritonConfig(n, 32, 4, 3, swap, tma, prefetch=0) for n, swap, tma in itertools.product((16, 64), (False, True), (False, True))]
ROWS = (1, 3, 17, MAX_ROWS)
K, V = 80, 200
"""Neither is a multiple of a tile."""
INF, NAN = float("inf"), float("nan")


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, DTYPE)


def definition(logits: torch.Tensor) -> torch.Tensor:
    """The first NaN of each row, or else the first of its largest entries."""
    columns = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    wanted = torch.where(logits.isnan().any(1, keepdim=True), logits.isnan(), logits == logits.amax(1, keepdim=True))
    return torch.where(wanted, columns, logits.shape[1]).amin(1)


def greedy(x: torch.Tensor, weight: torch.Tensor, config: TritonConfig, **given: torch.Tensor | None) -> torch.Tensor:
    tokens = torch.empty(len(x), dtype=torch.int64, device=DEVICE)
    partial = torch.empty((2, len(x), config.parts(len(weight))), dtype=torch.int32, device=DEVICE)
    triton_gemm(x, weight, given.get("out"), config, Epilogue(bias=given.get("bias"), argmax=partial))
    return argmax_chunks(partial, tokens, pdl=False)


@pytest.mark.parametrize("config", CUTS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_the_fused_argmax_is_that_of_the_logits_stored_or_not(rows: int, config: TritonConfig) -> None:
    torch.manual_seed(rows)
    x, weight = rand(rows, K), rand(V, K)
    for bias in (None, rand(V))[rows == MAX_ROWS :]:  # the interpreter is slow
        want, stored = (torch.full((rows + 1, V), NAN, device=DEVICE) for _ in range(2))
        triton_gemm(x, weight, want[:rows], config, Epilogue(bias=bias))
        tokens = greedy(x, weight, config, out=stored[:rows], bias=bias)
        assert torch.equal(stored[:rows], want[:rows]), "fusing the argmax changes the logits"
        assert stored[rows].isnan().all(), "logits are written past their rows"
        assert torch.equal(tokens, definition(want[:rows]))
        assert torch.equal(greedy(x, weight, config, bias=bias), tokens), "storing the logits changes the argmax"


@pytest.mark.parametrize("config", CUTS, ids=str)
def test_of_equal_logits_the_first_wins_within_a_tile_and_across_tiles(config: TritonConfig) -> None:
    torch.manual_seed(0)
    x, few = rand(17, K), rand(5, K)
    weight = few[torch.randint(0, 5, (V,), generator=torch.Generator().manual_seed(1)).to(DEVICE)].contiguous()
    logits = triton_gemm(x, weight, torch.empty((17, V), device=DEVICE), config)
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) > 20).all(), "no ties to break"
    assert torch.equal(greedy(x, weight, config), definition(logits))


@pytest.mark.parametrize("config", CUTS, ids=str)
def test_no_column_past_the_last_beats_negative_logits(config: TritonConfig) -> None:
    x, weight = rand(3, K).abs(), -rand(V, K).abs()
    x[2] = 0
    want = definition(triton_gemm(x, weight, torch.empty((3, V), device=DEVICE), config))
    assert torch.equal(greedy(x, weight, config), want)
    assert want[2] == 0


@pytest.mark.parametrize("config", CUTS, ids=str)
def test_the_fused_argmax_orders_infinities_and_nan_as_torch_does(config: TritonConfig) -> None:
    x, weight = torch.zeros((3, K), device=DEVICE, dtype=DTYPE), rand(V, K)
    x[1, 7] = NAN  # all of the row's logits
    cases = (({70: NAN, 150: NAN, 3: INF}, 70), ({199: NAN, 0: INF}, 199), ({65: INF, 130: INF, 2: 5.0}, 65), ({20: -0.0, 10: -1.0}, 0))
    for entries, first in cases:
        bias = torch.zeros(V, dtype=DTYPE)
        for column, value in entries.items():
            bias[column] = value
        assert greedy(x, weight, config, bias=bias.to(DEVICE)).tolist() == [first, 0, first]
    nothing = torch.full((V,), -INF, dtype=DTYPE, device=DEVICE)
    assert greedy(x, weight, config, bias=nothing).tolist() == [0, 0, 0]
    nothing[198] = -6e4
    assert greedy(x, weight, config, bias=nothing).tolist() == [198, 0, 198]


@pytest.mark.parametrize("chunks", [1, 17, 501, 2004, 4008])
def test_the_chunks_of_a_row_give_the_first_of_their_largest(chunks: int) -> None:
    generator = torch.Generator().manual_seed(chunks)
    for least, most in ((-3, 0), (-(2**31), 2**31)):  # many ties, few ties
        keys = torch.randint(least, most, (5, chunks), generator=generator)
        columns = torch.arange(chunks) * 64 + torch.randint(0, 64, (5, chunks), generator=generator)
        want = torch.where(keys == keys.amax(1, keepdim=True), columns, 2**31).amin(1)
        partial = torch.stack([keys, columns]).to(DEVICE, torch.int32)
        got = argmax_chunks(partial, torch.empty(5, dtype=torch.int64, device=DEVICE), pdl=False)
        assert got.tolist() == want.tolist()


@needs_cuda
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32, 64, 128])
def test_every_choice_of_the_head_gives_the_tokens_of_its_logits(rows: int, pdl: bool) -> None:
    from runtime.layers.cuda_ops import CudaOps

    if pdl and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs compute capability 9")
    ops, (width, vocab) = CudaOps(GemmTimings(H200), pdl=pdl), (1024, 32003)
    x = torch.randn((rows, width), device="cuda").bfloat16()
    for bias in (None, torch.randn(vocab, device="cuda").bfloat16()):
        head = Linear.dense(torch.randn((vocab, width), device="cuda").bfloat16(), bias)
        head.weight[20000:] = head.weight[: vocab - 20000]  # ties between distant tiles, except for the bias
        for choice in (None, *H200.gemm_configs("logits", rows)):
            ops.choices[Gemm("logits", head, None).key(rows)] = choice
            logits = ops.logits(x, head)
            want, stored = argmax_rows(logits, torch.empty(rows, dtype=torch.int64, device="cuda"), pdl), torch.full_like(logits, NAN)
            tokens = torch.full((rows,), -1, device="cuda")
            assert ops.greedy(x, head, tokens, stored) is tokens
            assert torch.equal(tokens, want), choice
            assert torch.equal(want, definition(logits)), choice
            assert torch.equal(stored, logits), choice
            assert torch.equal(ops.greedy(x, head), want), choice
            apart = torch.full((rows, vocab + 3), NAN, device="cuda")[:, :vocab]
            assert torch.equal(ops.greedy(x, head, logits=apart), definition(apart)), "rows with a stride that is not their length"


@needs_cuda
@pytest.mark.parametrize("rows", [3, 40, 128])
def test_a_captured_greedy_pass_reads_the_states_of_its_replay(rows: int) -> None:
    from runtime.layers.cuda_ops import CudaOps
    from runtime.layers.gemm.tilings import m_bucket

    ops, head = CudaOps(GemmTimings(H200)), Linear.dense(torch.randn((50000, 512), device="cuda").bfloat16())
    ops.choices[Gemm("logits", head, None).key(m_bucket(rows))] = H200.gemm_configs("logits", rows)[0]
    x, tokens = torch.randn((rows, 512), device="cuda").bfloat16(), torch.empty(rows, dtype=torch.int64, device="cuda")
    ops.greedy(x, head, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            ops.greedy(x, head, tokens)
    for _ in range(5):
        x.normal_()
        graph.replay()
        assert torch.equal(tokens, definition(ops.logits(x, head)))
