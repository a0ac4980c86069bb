"""The kernels of the draft's stored inputs against their definition: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.request_rows import RequestRows
from runtime.speculative.catch_up import PAD_SLOT, WIDTH, StoredInputs, catch_up_spec
from runtime.speculative.catch_up_kernel import fill_window_cuda, gather_states_cuda, store_position_cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CPU = torch.device("cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
SIZES = [1, 3, 64, 256]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS, PAGE = 300, 16


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values. Under the interpreter every dtype represents them, because it truncates float32 instead of rounding it."""
    if INTERPRETED:
        return torch.randint(-128, 128, shape, generator=generator(seed)).to(dtype)
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def distinct_rows(size: int) -> torch.Tensor:
    """int64 [size], rows of requests; every fourth is padding."""
    rows = torch.randperm(ROWS - 1, generator=generator(size))[:size] + 1
    rows[3::4] = 0
    return rows


@pytest.mark.parametrize("width", [64, 1024, 4096, 3 * 1360])
@pytest.mark.parametrize("stored_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_positions_are_stored_by_one_kernel(size: int, dtype: torch.dtype, stored_dtype: torch.dtype, width: int) -> None:
    if size * width > (1 << 14 if INTERPRETED else 1 << 20):
        pytest.skip("the interpreter is slow")
    rows, positions = distinct_rows(size), torch.arange(size) * 3 + WIDTH - 1
    tokens = torch.randint(0, 1 << 40, (size, 2), generator=generator(size))[:, 0]
    states = values(size, width, dtype=dtype, seed=size)
    for kind in (torch.int32, torch.int64):
        stored = StoredInputs(ROWS, width, stored_dtype, InputBuffers(1, max_tokens=1, device=CPU))
        stored._tokens.fill_(-1)
        stored._states.copy_(values(ROWS, WIDTH, width, dtype=stored_dtype, seed=1))
        own_tokens, own_states = stored._tokens.to(DEVICE, copy=True), stored._states.to(DEVICE, copy=True)
        stored.add(rows, positions.to(kind), tokens, states)
        # The tokens keep their stride.
        own = (torch.stack([tokens, tokens], dim=1).to(DEVICE)[:, 0], states.to(DEVICE), own_tokens, own_states)
        store_position_cuda(rows.to(DEVICE), positions.to(DEVICE, kind), *own)
        assert torch.equal(own_tokens.cpu()[1:], stored._tokens[1:])  # the padding row has any of the values
        assert torch.equal(own_states.cpu()[1:], stored._states[1:])


def test_states_of_any_layout_are_stored() -> None:
    rows, positions, tokens = torch.tensor([2, 1], device=DEVICE), torch.tensor([7, 8], device=DEVICE), torch.tensor([5, 6], device=DEVICE)
    states = values(96, 2, dtype=torch.float16, seed=0).to(DEVICE).t()
    stored_tokens, stored_states = torch.zeros((3, WIDTH), dtype=torch.int64, device=DEVICE), torch.zeros((3, WIDTH, 96), device=DEVICE)
    store_position_cuda(rows, positions, tokens, states, stored_tokens, stored_states)
    assert stored_tokens[2, 7] == 5
    assert stored_tokens[1, 0] == 6
    assert torch.equal(stored_states[[2, 1], [7, 0]], states.float())


@pytest.mark.parametrize("width", [64, 1024, 4096, 3 * 1360])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_states_of_windows_are_gathered_by_one_kernel(size: int, dtype: torch.dtype, width: int) -> None:
    if INTERPRETED and size * width > 1 << 14:
        pytest.skip("the interpreter is slow")
    rows, starts = distinct_rows(size), (torch.arange(size) * 3).to(torch.int32)
    batch, inputs = inputs_of(size, CPU)
    batch.set_rows(rows)
    inputs.kv_lens(size).copy_(starts)
    stored = StoredInputs(ROWS, width, dtype, inputs)
    stored._states.copy_(values(ROWS, WIDTH, width, dtype=dtype, seed=2))
    found = gather_states_cuda(rows.to(DEVICE), starts.to(DEVICE), stored._states.to(DEVICE))
    assert torch.equal(found.cpu(), stored.states(batch))


def inputs_of(size: int, device: torch.device) -> tuple[ForwardBatch, InputBuffers]:
    """A batch of windows and the inputs that hold it, with values that must all be overwritten."""
    inputs = InputBuffers(size + 1, max_tokens=(size + 1) * WIDTH, device=device)
    inputs.declare(catch_up_spec(("",), 0).inputs, size + 1, (size + 1) * WIDTH)
    for tensor in inputs.tensors.values():
        tensor.fill_(-7)
    return inputs.view(ForwardMode.DRAFT_EXTEND, size, size * WIDTH), inputs


def state_of(device: torch.device) -> tuple[RequestRows, PageTable]:
    state, table = RequestRows(ROWS, 97, device), PageTable(ROWS, 20 * PAGE, PAGE, device)
    state.kv_lens.copy_((torch.arange(ROWS) * 5) % (18 * PAGE))
    state.last_tokens.copy_(torch.arange(ROWS) + 7)
    table.pages.copy_(torch.randperm(ROWS * 20, generator=generator(3)).view(ROWS, 20))
    table.pages[0] = 0
    return state, table


@pytest.mark.parametrize("size", SIZES)
def test_stored_windows_are_filled_by_one_kernel(size: int) -> None:
    rows, stored = distinct_rows(size), torch.randint(0, 1 << 40, (ROWS, WIDTH), generator=generator(4))
    # Windows of 1 to 8 positions begin at every index; rows with nothing behind are padding, whose KV is empty.
    lens = torch.where(rows > 0, torch.arange(size) % WIDTH + 1, 1).to(torch.int32)
    plain_batch, plain = inputs_of(size, CPU)
    plain_stored = StoredInputs(ROWS, 8, torch.float32, plain)
    plain_stored._tokens.copy_(stored)
    plain_stored.fill(plain_batch, rows, lens, *state_of(CPU))
    batch, found = inputs_of(size, DEVICE)
    fill_window_cuda(batch, found, rows.to(DEVICE), lens.to(DEVICE), stored.to(DEVICE), *state_of(DEVICE), PAD_SLOT)
    for name, expected in plain.tensors.items():
        assert torch.equal(found.tensors[name].cpu(), expected), name
    assert plain.kv_lens(size).min() >= 0
    assert (batch.positions.cpu() == plain_batch.positions).all()
