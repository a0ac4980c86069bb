"""The inputs of decode passes: rows with their lengths and last tokens, windows behind earlier passes, lengths of several passes."""

from __future__ import annotations

import pytest
import torch

from runtime.batch import ForwardMode
from runtime.layers.attention.decode_metadata import FixedLengths
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.norm import RMSNorm
from runtime.layers.torch_ops import TorchOps, rms_norm
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.request_rows import RequestRows
from runtime.model_executor.window import fill_window, load_rows

CPU = torch.device("cpu")
SIZE, WIDTH = 4, 3


@pytest.fixture
def state() -> RequestRows:
    rows = RequestRows(8, 16, CPU)
    rows.kv_lens.copy_(torch.arange(8) * 5)
    rows.last_tokens.copy_(torch.arange(8) + 3)
    return rows


@pytest.fixture
def inputs() -> InputBuffers:
    return InputBuffers(SIZE, max_tokens=SIZE * WIDTH, device=CPU)


def a_batch(inputs: InputBuffers) -> ForwardBatch:
    return inputs.view(ForwardMode.TARGET_VERIFY, SIZE, SIZE * WIDTH)


def test_rows_are_loaded_with_their_state(state: RequestRows, inputs: InputBuffers) -> None:
    rows = torch.tensor([6, 2, 0])
    load_rows(inputs, rows, state)
    batch = inputs.view(ForwardMode.DECODE, 3, 3)
    assert batch.req_pool_indices.tolist() == batch.page_rows.tolist() == [6, 2, 0]
    assert batch.page_rows.dtype is torch.int32
    assert inputs.kv_lens(3).tolist() == [30, 10, 0]
    assert inputs.last_tokens(3).tolist() == [9, 5, 3]


def test_rows_are_set_in_place_and_padded(inputs: InputBuffers) -> None:
    batch = a_batch(inputs)
    kept = batch.req_pool_indices.data_ptr(), batch.page_rows.data_ptr()
    batch.set_rows(torch.tensor([5, 6, 7, 1]))
    batch.set_rows(torch.tensor([4, 2]))
    assert batch.req_pool_indices.tolist() == batch.page_rows.tolist() == [4, 2, 0, 0]
    assert (batch.req_pool_indices.data_ptr(), batch.page_rows.data_ptr()) == kept


def test_a_window_ahead_begins_behind_earlier_passes(inputs: InputBuffers) -> None:
    batch, table = a_batch(inputs), PageTable(8, 64, 4, CPU)
    table.pages.copy_(torch.arange(128).view(8, 16))
    batch.set_rows(torch.tensor([3, 1, 7, 0]))
    lens, tokens = torch.tensor([5, 9, 30, 0], dtype=torch.int32), torch.arange(SIZE * WIDTH).view(SIZE, WIDTH)
    names = ("input_ids", "positions", "out_cache_loc", "seq_lens")
    for depths in (None, torch.tensor([[0, 1, 1]]).expand(SIZE, -1)):
        fill_window(batch, table, lens + 4, tokens, depths)
        want = [getattr(batch, name).clone() for name in names]
        fill_window(batch, table, lens, tokens, depths, ahead=4)
        assert all(torch.equal(getattr(batch, name), one) for name, one in zip(names, want, strict=True))


def test_a_single_causal_pass_reads_the_lengths_of_its_batch(inputs: InputBuffers) -> None:
    batch, at = a_batch(inputs), FixedLengths.empty(SIZE, WIDTH, 1, 0, CPU)
    batch.seq_lens.copy_(torch.tensor([7, 9, 4, 3]))
    at.fill(batch)
    assert at.seq_lens(batch, 0) is batch.seq_lens
    assert at.key_lens(batch, 0) is batch.seq_lens


@pytest.mark.parametrize("tail", [0, WIDTH])
def test_several_passes_have_lengths_of_their_own(inputs: InputBuffers, tail: int) -> None:
    batch, at = a_batch(inputs), FixedLengths.empty(SIZE, WIDTH, 2, tail, CPU)
    batch.seq_lens.copy_(torch.tensor([7, 9, 4, 2]))
    at.fill(batch)
    assert at.seq_lens(batch, 0).tolist() == [7, 9, 4, 2]
    assert at.seq_lens(batch, 1).tolist() == [10, 12, 7, 5]
    assert at.key_lens(batch, 1).tolist() == ([4, 6, 1, 0] if tail else [10, 12, 7, 5])


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_stream_starts_as_scaled_embeddings(scale: float) -> None:
    torch.manual_seed(0)
    table, ids, ops = torch.randn(11, 16).to(torch.bfloat16), torch.tensor([3, 3, 10]), TorchOps()
    norm = RMSNorm(torch.rand(16).to(torch.bfloat16), 1e-6)
    stream = ops.embed(ids, table, norm, scale, in_prompt=True)
    assert torch.equal(stream.h, table[ids].float() * scale)
    assert stream.in_prompt
    assert torch.equal(ops.norm(stream.h, norm, torch.bfloat16), rms_norm(table[ids].float() * scale, norm).to(torch.bfloat16))
