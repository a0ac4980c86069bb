"""The kernels before a model's first layer against their definition: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from runtime.batch import ForwardMode
from runtime.layers.draft_input import DraftInput, StreamStart
from runtime.layers.kernels.embed_rows import embed_rows
from runtime.layers.kernels.join_rows import join_rows
from runtime.layers.norm import RMSNorm
from runtime.layers.torch_ops import TorchOps, rms_norm
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.request_rows import RequestRows
from runtime.model_executor.window import fill_window, load_rows
from runtime.model_executor.window_kernel import fill_window_cuda, load_rows_cuda
from runtime.speculative.chain_start_kernel import start_chain_cuda
from runtime.speculative.draft_state import DraftState

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CPU = torch.device("cpu")
PDL = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
DTYPES = [torch.bfloat16, torch.float16]
VOCAB = 97


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(count)).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 64.0, 0.3])
@pytest.mark.parametrize("hidden", [64, 96, 576, 2048, 2880, 4096, 5376, 7168])
def test_stream_starts_with_the_bits_of_the_definition(hidden: int, scale: float, dtype: torch.dtype) -> None:
    table, norm = random(VOCAB, hidden, dtype=dtype), RMSNorm(random(hidden, dtype=dtype, seed=1), 1e-6)
    for count in (1, 2, 3, 16) if INTERPRETED else range(1, 65):
        ids = tokens(count)
        h, normed = embed_rows(ids, table, scale, norm, PDL)
        want = TorchOps().embed(ids, table, norm, scale).h
        assert torch.equal(h, want)
        assert normed is not None
        assert normed.dtype is dtype
        step = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]  # the interpreter truncates instead of rounding
        torch.testing.assert_close(normed.float(), rms_norm(want, norm), rtol=2 * step, atol=1e-6)


def test_stream_starts_without_a_norm_and_at_any_alignment() -> None:
    table, ids = random(VOCAB, 128, dtype=torch.float16), tokens(9)[1:]
    h, normed = embed_rows(ids, table, 1.0, None, PDL)
    assert normed is None
    assert torch.equal(h, table[ids].float())


def test_rows_are_alike_in_any_batch() -> None:
    """A row has the same bits whatever the other rows are."""
    table, norm, ids = random(VOCAB, 2880, dtype=torch.float16), RMSNorm(random(2880, dtype=torch.float16, seed=1), 1e-6), tokens(7)
    _, together = embed_rows(ids, table, 1.0, norm, PDL)
    assert together is not None
    for i in range(7):
        _, alone = embed_rows(ids[i : i + 1], table, 1.0, norm, PDL)
        assert alone is not None
        assert torch.equal(alone[0], together[i])


def request_rows(count: int, device: torch.device) -> RequestRows:
    state = RequestRows(count, VOCAB, device)
    state.kv_lens.copy_(torch.arange(count) * 3)
    state.last_tokens.copy_(torch.arange(count) + 7)
    state.kv_lens[0] = 0
    return state


@pytest.mark.parametrize("size", [1, 3, 64, 129, 300])
def test_rows_are_loaded_by_one_kernel(size: int) -> None:
    rows = torch.randint(0, 400, (size,), generator=torch.Generator().manual_seed(size))
    plain = InputBuffers(size, max_tokens=size, device=CPU)
    load_rows(plain, rows, request_rows(400, CPU))
    found, names = InputBuffers(size, max_tokens=size, device=DEVICE), ("req_pool_indices", "page_rows", "kv_lens", "last_tokens")
    for name in names:
        found.tensors[name].fill_(-1)
    load_rows_cuda(found, rows.to(DEVICE), request_rows(400, DEVICE))
    for name in names:
        assert torch.equal(found.tensors[name].cpu(), plain.tensors[name]), name


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 3, 4, 8])
def test_windows_are_filled_by_one_kernel(width: int, ahead: int) -> None:
    size, page = 5, 16
    results = []
    for device, fill in ((CPU, fill_window), (DEVICE, fill_window_cuda)):
        inputs = InputBuffers(size, max_tokens=size * width, device=device)
        table = PageTable(9, 6 * page, page, device)
        table.pages.copy_(torch.arange(54).view(9, 6))
        load_rows(inputs, torch.tensor([3, 0, 8, 1, 0], device=device), request_rows(9, device))
        batch = inputs.view(ForwardMode.TARGET_VERIFY, size, size * width)
        window = torch.arange(size * (width + 2), device=device).view(size, -1)[:, :width]
        fill(batch, table, inputs.kv_lens(size), window, None, ahead)
        results.append([t.cpu() for t in (batch.input_ids, batch.positions, batch.out_cache_loc, batch.seq_lens)])
    for plain, own in zip(*results, strict=True):
        np.testing.assert_array_equal(own.numpy(), plain.numpy())


@pytest.mark.parametrize("hidden", [64, 2880])
@pytest.mark.parametrize("size", [1, 5])
def test_chains_start_by_one_kernel(size: int, hidden: int) -> None:
    rows = torch.tensor([3, 0, 8, 1, 0], device=DEVICE)[:size]
    last, state = torch.arange(9, device=DEVICE) + 50, DraftState(9, 1, hidden, 4, torch.float32, DEVICE)
    state.hidden.copy_(random(9, hidden, dtype=torch.float32))
    state.guesses.copy_(torch.arange(9)[:, None] + 70)
    window = torch.full((size, 4), -7, device=DEVICE)
    hidden_states = start_chain_cuda(rows, last, state.guesses, state.hidden, window)
    assert torch.equal(hidden_states, state.hidden[rows])
    assert window.tolist() == [[50 + row, 70 + row, -7, -7] for row in rows.tolist()]


@pytest.mark.parametrize("states_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("state_first", [False, True])
@pytest.mark.parametrize("stream", list(StreamStart))
@pytest.mark.parametrize(("hidden", "normed", "blank"), [(96, True, True), (2880, True, False), (4096, False, False)])
def test_draft_rows_are_joined_by_one_kernel(
    hidden: int, normed: bool, blank: bool, stream: StreamStart, state_first: bool, states_dtype: torch.dtype
) -> None:
    dtype = torch.float16
    table, norms = random(VOCAB, hidden, dtype=dtype), tuple(RMSNorm(random(hidden, dtype=dtype, seed=i), 10.0 ** -(5 + i)) for i in (1, 2))
    layout = DraftInput((norms[0], norms[1]) if normed else None, state_first, blank, stream)
    for count in (1, 3) if INTERPRETED else (1, 2, 3, 4, 16, 33, 64):
        ids, states, positions = tokens(count), random(count, hidden, dtype=states_dtype, seed=3), torch.arange(count, device=DEVICE)
        rows, begin = join_rows(ids, table, states, positions, layout, PDL)
        want, want_begin = TorchOps().join(ids, table, states, positions, layout)
        assert rows.dtype is dtype
        torch.testing.assert_close(rows, want, rtol=0 if not normed else 2**-10, atol=0 if not normed else 1e-6)
        if want_begin is None or begin is None:
            assert begin is want_begin
        elif stream is StreamStart.STATE or not normed:
            assert torch.equal(begin, want_begin)
        else:
            first = 0 if state_first else hidden
            assert torch.equal(begin, rows[:, first : first + hidden].float())
