"""Short prompts through padded buffers give what they give by themselves, and padding leaves no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runtime.batch import ForwardMode
from runtime.forward_batch import ForwardBatch
from runtime.model_executor.build import add_short_prompts, build_worker
from runtime.model_executor.graph_runner import GraphRunner, capture_all
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.short_prompts import ShortPrompts, prompt_forward, prompt_spec
from runtime.model_executor.target import Target
from unit.tiny import tiny_model, tiny_runtime

CPU = torch.device("cpu")
SIZES = [8, 16]
LAYERS = (0, 2)
ROW = 3


@pytest.fixture
def target() -> Target:
    worker: Any = build_worker(tiny_runtime(), tiny_model(), "none")
    return worker._target


def short_prompts(target: Target, layers: tuple[int, ...] = ()) -> ShortPrompts:
    runner = target.runner
    hidden = runner.config.hidden_size
    spec = prompt_spec(hidden, len(layers) * hidden, torch.float32, 0)
    inputs = InputBuffers(SIZES[-1], 1, CPU, one_request=True)
    graphs = GraphRunner(spec, prompt_forward(runner.model, layers), inputs, [runner.backend], "eager", SIZES)
    with torch.inference_mode():
        capture_all([graphs])
    return ShortPrompts(graphs, target.page_table)


def chunk(target: Target, start: int, count: int, requests: int = 1) -> ForwardBatch:
    """Tokens `start` to `start + count` of one text, for rows from `ROW` on; their pages are in the table."""
    table = target.page_table
    text = torch.randint(0, 90, (4096,), generator=torch.Generator().manual_seed(5))
    rows = torch.arange(ROW, ROW + requests)
    for row in rows.tolist():
        cols = -(-(start + count) // table.page_size)
        table.pages[row, :cols] = torch.arange(1, cols + 1, dtype=torch.int32) + (row - ROW) * cols
    positions = torch.arange(start, start + count).repeat(requests)
    owner = rows.repeat_interleave(count)
    ends = np.full(requests, start + count, dtype=np.int32)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        batch_size=requests,
        tokens_per_req=0,
        input_ids=text[positions],
        positions=positions,
        out_cache_loc=table.slots(owner, positions),
        req_pool_indices=rows,
        seq_lens=torch.from_numpy(ends.copy()),
        qo_indptr=torch.arange(0, requests * count + 1, count, dtype=torch.int32),
        seq_len_bounds=ends,
        extend_lens=np.full(requests, count, dtype=np.int32),
    )


def kv(target: Target) -> list[torch.Tensor]:
    pool = target.runner.kv_pool
    return [cache.flatten(0, 1).clone() for cache in (*pool.k, *pool.v)]


@torch.inference_mode()
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 7), (0, 8), (0, 9), (5, 3), (16, 16), (31, 10)])
def test_a_chunk_is_what_it_is_without_padding(target: Target, start: int, count: int) -> None:
    prompts = short_prompts(target, LAYERS)
    if start:
        target.runner.extend(chunk(target, 0, start))
    before = kv(target)
    want, want_aux = target.runner.extend(chunk(target, start, count), LAYERS)
    after = kv(target)
    for cache, old in zip((*target.runner.kv_pool.k, *target.runner.kv_pool.v), before, strict=True):
        cache.flatten(0, 1).copy_(old)
    prompts.runner._inputs.poison()
    prompts.runner._inputs.tensors["positions"].zero_()
    prompts.runner._inputs.tensors["input_ids"].zero_()
    found = prompts.run(chunk(target, start, count))
    assert found is not None
    torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], want_aux, rtol=1e-4, atol=1e-5)
    for got, expected, old in zip(kv(target), after, before, strict=True):
        torch.testing.assert_close(got[1:], expected[1:], rtol=1e-4, atol=1e-5)
        unchanged = (expected == old).flatten(1).all(1)
        assert torch.equal(got[1:][unchanged[1:]], old[1:][unchanged[1:]]), "padding writes slot 0 only"
    assert prompts.runner.replayed == 1


@torch.inference_mode()
def test_one_after_the_other_leaves_nothing_behind(target: Target) -> None:
    prompts = short_prompts(target)
    for start, count in [(0, 16), (16, 2), (0, 5), (5, 12), (0, 1)]:
        want, _ = target.runner.extend(chunk(target, start, count))
        found = prompts.run(chunk(target, start, count))
        assert found is not None
        assert found[1] is None
        torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_several_requests_long_chunks_and_the_end_of_the_page_table_run_eagerly(target: Target) -> None:
    prompts, table = short_prompts(target), target.page_table
    end = table.max_pages * table.page_size
    assert prompts.run(chunk(target, 0, 4, requests=2)) is None
    assert prompts.run(chunk(target, 0, SIZES[-1] + 1)) is None
    assert prompts.run(chunk(target, end - 9, 9)) is None, "the padded chunk would end behind the table"
    assert prompts.run(chunk(target, end - 8, 8)) is not None


def test_on_a_cpu_prompts_run_as_they_are(target: Target) -> None:
    class Parts:
        device, replay, extend_tokens = CPU, "eager", 64

    assert add_short_prompts(Parts(), target) == []  # type: ignore[arg-type]
    assert target.short_prompts is None
