"""Short prompts give the same results through padded buffers, and padding leaves no trace."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.distributed.parallel_group import ALONE
from runtime.layers.forward_batch import ForwardBatch
from runtime.model_executor import build
from runtime.model_executor.build import add_short_prompts, build_worker, make_limits, make_runner
from runtime.model_executor.context import BuildOptions
from runtime.model_executor.draft_window import NO_DRAFTS
from runtime.model_executor.drafter import DrafterSpec
from runtime.model_executor.graph_capture import CallPool, GraphKey, Replay
from runtime.model_executor.graph_runner import GraphOptions, GraphRunner, RunnerSpec, capture_all
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.memory_plan import MemoryPlan
from runtime.model_executor.short_prompts import (
    SLOTS,
    PromptCost,
    ShortPrompts,
    prompt_forward,
    prompt_spec,
    shared_sizes,
    shared_spec,
)
from runtime.model_executor.target_model import TargetModel
from runtime.models.config import DeltaConfig
from unit.driver import Driver
from unit.tiny import tiny_model, tiny_runtime

CPU = torch.device("cpu")
SIZES = [8, 16]
SHARED_SIZES = [16, 32]
LAYERS = (0, 2)
ROW = 3
READ_TOKENS = 128
PLENTY = 3 * READ_TOKENS
"""`free_tokens` that three of the smallest replays fit in."""
Spans = dict[int, tuple[int, int]]
"""By row, where in its text a chunk begins and how many tokens it has."""


@pytest.fixture
def worker() -> Any:
    return build_worker(tiny_runtime(), tiny_model(), options=BuildOptions("none"))


@pytest.fixture
def target(worker: Any) -> TargetModel:
    return worker.parts.target


def short_prompts(
    target: TargetModel, layers: tuple[int, ...] = (), free: int = PLENTY, shared: bool = False, alone: bool = True
) -> ShortPrompts:
    runner = target.runner
    hidden = runner.config.hidden_size
    spec = prompt_spec(hidden, len(layers) * hidden, torch.float32, 0)
    inputs = InputBuffers(SLOTS, max_tokens=SHARED_SIZES[-1], device=CPU)

    def graphs(spec: RunnerSpec, sizes: list[int]) -> GraphRunner:
        options = GraphOptions(sizes, cuda=False, node_bytes=H200.graph_node_bytes, max_size=sizes[-1], arena=runner.arena)
        return GraphRunner(spec, prompt_forward(runner.model, layers), inputs, [runner.backend], options)

    prompts = ShortPrompts(
        graphs(spec, SIZES) if alone else None,
        target.page_table,
        PromptCost(free, READ_TOKENS),
        graphs(shared_spec(spec), SHARED_SIZES) if shared else None,
    )
    with torch.inference_mode():
        capture_all(prompts.runners)
    return prompts


def chunks(target: TargetModel, spans: Spans) -> ForwardBatch:
    """A ragged batch of one chunk of each row's own text, in the order given; the rows' pages are in the table."""
    table = target.page_table
    for row in spans:
        table.pages[row] = torch.arange(1, table.max_pages + 1, dtype=torch.int32) + (row - 1) * table.max_pages
    texts = {row: torch.randint(0, 90, (4096,), generator=torch.Generator().manual_seed(row)) for row in spans}
    lens = np.array([count for _, count in spans.values()], dtype=np.int32)
    ends = np.array([start + count for start, count in spans.values()], dtype=np.int32)
    positions = torch.cat([torch.arange(start, start + count) for start, count in spans.values()])
    rows = torch.tensor(list(spans))
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        batch_size=len(spans),
        tokens_per_req=0,
        input_ids=torch.cat([texts[row][start : start + count] for row, (start, count) in spans.items()]),
        positions=positions,
        out_cache_loc=table.slots(rows.repeat_interleave(torch.from_numpy(lens)), positions),
        req_pool_indices=rows,
        seq_lens=torch.from_numpy(ends.copy()),
        qo_indptr=torch.from_numpy(np.concatenate([[0], lens.cumsum()]).astype(np.int32)),
        seq_len_bounds=ends,
        extend_lens=lens,
    )


def chunk(target: TargetModel, start: int, count: int) -> ForwardBatch:
    return chunks(target, {ROW: (start, count)})


def caches(target: TargetModel) -> list[torch.Tensor]:
    pool = target.runner.kv_pool
    return [cache.flatten(0, 1) for cache in (*pool.k, *pool.v)]


def kv(target: TargetModel) -> list[torch.Tensor]:
    return [cache.clone() for cache in caches(target)]


def test_prompt_sizes_without_a_graph_are_named_as_tokens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, target: TargetModel
) -> None:
    def starved(self: CallPool, key: GraphKey, function: Replay) -> Replay:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(CallPool, "capture", starved)
    with caplog.at_level("WARNING"):
        assert short_prompts(target).largest == 0
    assert "short prompts: no graph for prompt lengths [8, 16]; they run eagerly and slower" in caplog.text
    assert caplog.text.rstrip().endswith("Lower --mem-fraction-static."), "no flag of batch sizes helps"


def check_that_replays_equal_the_ragged_pass(target: TargetModel, spans: Spans, shared: bool = False) -> None:
    """States in the batch's order, and KV; whatever the inputs held before."""
    prompts = short_prompts(target, LAYERS, shared=shared)
    for row, (start, _) in spans.items():
        if start:
            target.runner.extend(chunks(target, {row: (0, start)}))
    before = kv(target)
    want, want_aux = target.runner.extend(chunks(target, spans), LAYERS)
    after = kv(target)
    for cache, old in zip(caches(target), before, strict=True):
        cache.copy_(old)
    for runner in prompts.runners:
        padded = runner.batch(runner.sizes[-1])
        for tensor in (padded.out_cache_loc, padded.req_pool_indices, padded.seq_lens):
            tensor.fill_(-1)  # positions and ids of padding need only be valid
    found = prompts.run(chunks(target, spans))
    assert found is not None
    torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], want_aux, rtol=1e-4, atol=1e-5)
    for got, expected, old in zip(kv(target), after, before, strict=True):
        torch.testing.assert_close(got[1:], expected[1:], rtol=1e-4, atol=1e-5)
        unchanged = (expected == old).flatten(1).all(1)
        assert torch.equal(got[1:][unchanged[1:]], old[1:][unchanged[1:]]), "padding writes slot 0 only"
    assert [runner.replayed for runner in prompts.runners] == ([0, 1] if shared else [len(spans)])


@torch.inference_mode()
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 7), (0, 8), (0, 9), (5, 3), (16, 16), (31, 10)])
def test_a_chunk_is_what_it_is_without_padding(target: TargetModel, start: int, count: int) -> None:
    check_that_replays_equal_the_ragged_pass(target, {ROW: (start, count)})


@torch.inference_mode()
@pytest.mark.parametrize(
    "spans",
    [
        {3: (0, 5), 4: (0, 13)},
        {3: (0, 13), 4: (0, 5)},
        {5: (0, 16), 3: (0, 1), 4: (0, 8)},
        {4: (0, 6), 3: (0, 6)},
        {3: (9, 7), 5: (0, 3), 4: (30, 12)},
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [False, True])
def test_replayed_chunks_equal_one_ragged_pass(target: TargetModel, spans: Spans, shared: bool) -> None:
    check_that_replays_equal_the_ragged_pass(target, spans, shared)


@torch.inference_mode()
@pytest.mark.parametrize(
    "spans",
    [
        {3: (0, 8), 4: (0, 8)},
        {3: (0, 16), 4: (16, 16)},
        {3: (0, 1), 4: (0, 1)},
        {row: (7 * row, 4) for row in range(1, SLOTS)},
        dict.fromkeys(range(1, SLOTS), (0, 2)),
    ],
    ids=["no padding", "the largest", "most is padding", "every slot", "every slot and padding"],
)
def test_prompts_that_share_a_replay_equal_one_ragged_pass(target: TargetModel, spans: Spans) -> None:
    check_that_replays_equal_the_ragged_pass(target, spans, shared=True)


@torch.inference_mode()
def test_prompts_that_share_no_graph_run_as_without(target: TargetModel) -> None:
    prompts = short_prompts(target, shared=True)
    assert prompts.run(chunk(target, 0, 5)) is not None
    assert prompts.run(chunks(target, {3: (0, 16), 4: (0, 16), 5: (0, 1)})) is not None
    assert prompts.shared is not None
    assert (prompts.runner.replayed, prompts.shared.replayed) == (1 + 3, 0), "one prompt alone, and more tokens than the largest graph"
    assert prompts.run(chunks(target, dict.fromkeys(range(1, SLOTS + 1), (0, 2)))) is None, "one slot is the padding's"
    end = target.page_table.max_pages * target.page_table.page_size
    assert prompts.run(chunks(target, {3: (0, 4), 4: (end - 2, 2)})) is not None, "padding lies in no request"
    assert prompts.shared.replayed == 1


def test_graphs_over_several_prompts_have_whole_slots() -> None:
    assert shared_sizes([32, 64, 128, 256, 384]) == [64, 128, 256, 384]
    assert shared_sizes([32, 64, 100]) == [64]
    assert shared_sizes([16]) == []


@torch.inference_mode()
@pytest.mark.parametrize("shared", [False, True])
def test_one_after_the_other_leaves_nothing_behind(target: TargetModel, shared: bool) -> None:
    prompts = short_prompts(target, shared=shared)
    for spans in ({3: (0, 16)}, {3: (16, 2)}, {3: (0, 5), 4: (0, 16), 5: (0, 2)}, {4: (16, 1), 3: (5, 12)}, {5: (2, 7)}, {3: (0, 1)}):
        want, _ = target.runner.extend(chunks(target, spans))
        found = prompts.run(chunks(target, spans))
        assert found is not None
        assert found[1] is None
        torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("shared", "bounds"), [(False, [8, 46, 24]), (True, [5, 42, *[15] * 6, 24])], ids=["one after the other", "together"]
)
def test_bounds_include_padding(target: TargetModel, monkeypatch: pytest.MonkeyPatch, shared: bool, bounds: list[int]) -> None:
    """Of the padding's too: a plan of fewer would be too small for the pass."""
    prompts, backend, seen = short_prompts(target, shared=shared), target.runner.backend, list[int]()
    prepare = backend.prepare

    def checked(batch: ForwardBatch, num_passes: int = 1) -> None:
        assert batch.seq_len_bounds.tolist() == batch.seq_lens.tolist()
        seen.extend(batch.seq_len_bounds.tolist())
        prepare(batch, num_passes)

    monkeypatch.setattr(backend, "prepare", checked)
    prompts.run(chunks(target, {3: (0, 5), 4: (30, 12)}))
    prompts.run(chunk(target, 16, 8))
    assert seen == bounds


@torch.inference_mode()
def test_a_single_prompt_is_not_copied(target: TargetModel) -> None:
    prompts = short_prompts(target, LAYERS)
    found = prompts.run(chunk(target, 0, 5))
    assert found is not None
    assert found[1] is not None
    outputs = prompts.runner.outputs(8)
    assert [part.data_ptr() for part in found if part is not None] == [outputs["hidden"].data_ptr(), outputs["aux"].data_ptr()]


@torch.inference_mode()
def test_batches_that_do_not_fit_a_graph_run_eagerly(target: TargetModel) -> None:
    prompts, table = short_prompts(target), target.page_table
    end = table.max_pages * table.page_size
    before = kv(target)
    for bad in ((0, SIZES[-1] + 1), (end - 9, 9)):
        assert prompts.run(chunks(target, {3: bad})) is None, "without a graph, or the padded chunk would end behind the table"
        for spans in ({3: bad, 4: (0, 4)}, {3: (0, 4), 4: bad}, {3: (0, 4), 4: (0, 4), 5: bad}):
            assert prompts.run(chunks(target, spans)) is None
    assert prompts.runner.replayed == 0, "what is decided is decided before anything runs"
    assert all(torch.equal(a, b) for a, b in zip(before, kv(target), strict=True))
    assert prompts.run(chunk(target, end - 8, 8)) is not None
    assert prompts.run(chunks(target, {3: (0, 4), 4: (end - 8, 8)})) is not None


@torch.inference_mode()
def test_several_prompts_are_replayed_if_that_is_faster(target: TargetModel) -> None:
    def replayed(free: int, *lens: int) -> bool:
        return short_prompts(target, free=free).run(chunks(target, {ROW + i: (0, n) for i, n in enumerate(lens)})) is not None

    assert replayed(0, 4), "one prompt: there is a graph of its size, and an eager pass only takes longer to launch"
    assert replayed(2 * READ_TOKENS, 4, 16)
    assert not replayed(2 * READ_TOKENS - 1, 4, 16), "every replay reads the weights"
    assert replayed(3 * READ_TOKENS, 4, 16, 1)
    assert not replayed(3 * READ_TOKENS - 1, 4, 16, 1)
    assert not replayed(1 << 20, 1, 1, 1, 1), "more than three, however small the model is"


def cost(parameters: int, launches: int) -> PromptCost:
    return PromptCost.of(H200, parameters, launches)


LLAMA_8B, SMOLLM2 = (6_979_321_856, 298), (106_168_320, 280)
"""Parameters of the blocks, and launches: 32 layers of 4096 and 30 of 576."""


@pytest.mark.parametrize(
    ("model", "sizes", "wins"),
    [
        (LLAMA_8B, [256], True),
        (LLAMA_8B, [128, 128], True),
        (LLAMA_8B, [32, 32, 32], True),
        (LLAMA_8B, [128, 128, 128], True),
        (LLAMA_8B, [256, 128], True),
        (LLAMA_8B, [512, 256], True),
        (LLAMA_8B, [640, 384], True),
        (LLAMA_8B, [640, 512], False),
        (LLAMA_8B, [896, 32, 32], False),
        (SMOLLM2, [1024, 1024, 64], True),
        (SMOLLM2, [2048, 2048, 2048], True),
        (SMOLLM2, [32, 32, 32, 32], False),
        ((31_000_000_000, 586), [32], True),
        ((31_000_000_000, 586), [256, 32], True),
        ((31_000_000_000, 586), [384, 32], False),
    ],
)
def test_several_replays_read_the_weights_each_and_compute_their_padding(model: tuple[int, int], sizes: list[int], wins: bool) -> None:
    assert cost(*model).replays_win(sizes) == wins


@pytest.mark.parametrize(
    ("model", "most", "sizes"),
    [
        (LLAMA_8B, 2048, [32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024]),
        ((7_500_000_000, 298), 2048, [32, 64, 128, 192, 256, 384, 512, 640, 768, 896]),
        (LLAMA_8B, 16384, [32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024]),
        (LLAMA_8B, 200, [32, 64, 128, 192, 200]),
        (LLAMA_8B, 300, [32, 64, 128, 192, 256, 300]),
        (SMOLLM2, 2048, [32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]),
        (SMOLLM2, 1100, [32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1100]),
        (SMOLLM2, 1 << 20, [32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]),
        (SMOLLM2, 32, [32]),
        (SMOLLM2, 16, [16]),
        ((70_000_000_000, 730), 2048, [32, 64, 128, 192]),
        ((1_000_000_000_000, 100), 2048, []),
    ],
)
def test_sizes_end_at_the_free_tokens(model: tuple[int, int], most: int, sizes: list[int]) -> None:
    assert cost(*model).sizes(most) == sizes


def test_free_tokens_follow_kernels_and_parameters() -> None:
    assert cost(1_000_000_000, 100).free_tokens == 2400  # 8 ms of launching; 2 GFLOP a token take 3.3 us at 6e14 FLOP/s
    assert cost(2_000_000_000, 100).free_tokens == 1200
    assert cost(1_000_000_000, 300).free_tokens == 7200


def test_a_pass_saturates_before_the_free_tokens() -> None:
    assert (cost(*LLAMA_8B).saturating_tokens, cost(*LLAMA_8B).free_tokens) == (768, 1024)
    assert cost(70_000_000_000, 730).saturating_tokens == 512, "reading weights hides more than launching"
    assert cost(*SMOLLM2).saturating_tokens > 16384, "launching hides whole chunks"


@pytest.mark.parametrize("tied", [False, True])
def test_every_token_is_multiplied_with_the_blocks_matrices_alone(tied: bool) -> None:
    worker: Any = build_worker(tiny_runtime(), tiny_model(tie_embeddings=tied, qkv_bias=True, qk_norm=True), options=BuildOptions("none"))
    model = worker.parts.target.runner.model
    blocks = [shape for name, shape in model.expected_weights().items() if ".layers." in name and len(shape) == 2]
    assert len(blocks) == 3 * 7
    assert model.active_parameters == sum(math.prod(shape) for shape in blocks)


# ---- how a worker gets them


def test_on_a_cpu_prompts_run_as_they_are(target: TargetModel) -> None:
    class Parts:
        device, replay, extend_tokens, dtype, config, group = CPU, "eager", 64, torch.float32, tiny_runtime(), ALONE
        exchange = kv_dtype = None

    runner = make_runner(Parts(), target.runner.model)  # type: ignore[arg-type]
    assert runner.prompt_sizes == target.runner.prompt_sizes == []
    assert add_short_prompts(Parts(), target) == []  # type: ignore[arg-type]
    assert target.short_prompts is None


def parts_of(**changes: object) -> Any:
    """Of a GPU's worker as far as prompts and limits read them."""
    config = tiny_runtime(**changes)
    return SimpleNamespace(
        device=torch.device("cuda"),
        dtype=torch.float32,
        replay="eager",
        running=8,
        extend_tokens=config.scheduler.chunked_prefill_size,
        config=config,
        group=ALONE,
        exchange=None,
        kv_dtype=None,
    )


def add_as_on_a_gpu(target: TargetModel, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[GraphRunner]:
    """`make_runner` and `add_short_prompts` for a GPU, with buffers on the CPU."""
    monkeypatch.setattr(build, "InputBuffers", lambda most, max_tokens, device: InputBuffers(most, max_tokens=max_tokens, device=CPU))
    backend = target.runner.backend
    captured = SimpleNamespace(caps=replace(backend.caps, cuda_graph=True))
    monkeypatch.setattr(build, "backend_class", lambda _: captured)
    parts = parts_of(**changes)
    target.runner.prompt_sizes = make_runner(parts, target.runner.model).prompt_sizes
    target.aux_layers = LAYERS
    return add_short_prompts(parts, target)


def test_attention_that_cannot_be_captured_leaves_prompts_as_they_are(target: TargetModel) -> None:
    assert not target.runner.backend.caps.cuda_graph
    assert make_runner(parts_of(), target.runner.model).prompt_sizes == []


@pytest.mark.parametrize(
    ("chunk", "context", "sizes"), [(64, 256, [32, 64]), (100, 256, [32, 64, 100]), (2048, 256, [32, 64, 128, 192, 256]), (16, 256, [16])]
)
def test_graphs_end_at_the_chunk_and_the_context(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, chunk: int, context: int, sizes: list[int]
) -> None:
    runner, *several = add_as_on_a_gpu(target, monkeypatch, chunked_prefill_size=chunk, context_length=context)
    assert runner.sizes == sizes
    assert [each.sizes for each in several] == ([found] if (found := shared_sizes(sizes)) else [])
    buffers = [*runner.outputs(sizes[-1]).values()]
    planned = sum(spec.bytes(*runner.spec.shape(sizes[-1])) for spec in runner.spec.outputs)
    assert planned == sum(b.nbytes for b in buffers) == sizes[-1] * 4 * 64 * (1 + len(LAYERS))
    assert runner.batch(sizes[-1]).num_tokens == sizes[-1]


def test_graphs_follow_the_size_of_the_model(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = target.runner.model.kernel_launches
    for free, sizes in ((150, [32, 64, 128]), (31, [])):
        parameters = round(launches * H200.launch_seconds * H200.gemm_flops / (2 * (free + 0.5)))
        monkeypatch.setattr(type(target.runner.model), "active_parameters", parameters)
        runners = add_as_on_a_gpu(target, monkeypatch, chunked_prefill_size=2048)
        assert [runner.sizes for runner in runners] == ([sizes, shared_sizes(sizes)] if sizes else [])
        assert (target.short_prompts is not None) == bool(runners)
        target.short_prompts = None


def test_replayed_prompts_give_the_eager_answers(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {r: np.random.default_rng(r).integers(2, 90, 3 + 9 * r).tolist() for r in (5, 1, 3)}
    expected = Driver(worker)
    expected.prefill(prompts, chunk=20)
    target = worker.parts.target
    target.reset()
    runners = add_as_on_a_gpu(target, monkeypatch)
    with torch.inference_mode():
        capture_all(runners)
    driver = Driver(worker)
    driver.prefill(prompts, chunk=20)
    assert driver.out == expected.out
    assert [runner.replayed for runner in runners] == [1, 2], "48, 30 and 12 tokens in chunks of 20: three, two, one"
    assert sum(runner.ran_eagerly for runner in runners) == 0


def limits(target: TargetModel, **changes: object) -> Any:
    return make_limits(parts_of(**changes), MemoryPlan(64, {}), target, DrafterSpec(NO_DRAFTS))


def test_the_scheduler_is_told_when_the_device_is_busy(target: TargetModel) -> None:
    model = target.runner.model
    expected = cost(model.active_parameters, model.kernel_launches).saturating_tokens
    assert limits(target).saturating_tokens == expected
    on_cpu = parts_of()
    on_cpu.device = CPU
    assert make_limits(on_cpu, MemoryPlan(64, {}), target, DrafterSpec(NO_DRAFTS)).saturating_tokens == 256


def mixing(target: TargetModel, **changes: object) -> tuple[bool, int]:
    made = limits(target, **changes)
    return made.mixed, made.piggyback_min_tokens


def test_prompts_with_graphs_of_their_own_take_nobody_along(target: TargetModel, caplog: pytest.LogCaptureFixture) -> None:
    assert mixing(target) == (False, 1)
    assert mixing(target, mixed_chunk=True) == (True, 1)
    target.short_prompts = short_prompts(target)
    assert mixing(target, mixed_chunk=True) == (
        True,
        SIZES[-1] + 1,
    )
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with caplog.at_level("WARNING"):
        assert not limits(target, mixed_chunk=True, chunked_prefill_size=SIZES[-1]).mixed
    assert "--enable-mixed-chunk has no effect: prompt steps of at most 16 tokens are captured as CUDA graphs" in caplog.text
    target.short_prompts.runner.keep([])
    assert limits(target, mixed_chunk=True).piggyback_min_tokens == 1, "no graph fitted into memory"


@pytest.mark.parametrize("spans", [{1: (0, 5)}, {2: (0, 13), 1: (0, 1), 4: (0, 2)}, {3: (9, 17), 5: (0, 6)}])
@torch.inference_mode()
def test_padding_changes_no_recurrent_state(spans: Spans) -> None:
    """Single prompts too run in a graph for several, in which padding is a request of its own."""
    delta = DeltaConfig((True, False, True), num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, conv_width=4)
    model = tiny_model(architecture="Qwen3_5ForCausalLM", delta=delta, output_gate=True)
    targets = [build_worker(tiny_runtime(), model, options=BuildOptions("none")).parts.target for _ in range(2)]
    prompts = short_prompts(targets[0], LAYERS, shared=True, alone=False)
    for target in targets:
        for row, (start, _) in spans.items():
            if start:
                target.runner.extend(chunks(target, {row: (0, start)}))
    want, want_aux = targets[1].runner.extend(chunks(targets[1], spans), LAYERS)
    found = prompts.run(chunks(targets[0], spans))
    assert found is not None
    torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], want_aux, rtol=1e-4, atol=1e-5)
    states, expected = (target.runner.states for target in targets)
    assert states is not None
    assert expected is not None
    rows = list(spans)
    assert torch.equal(states.applied[rows], expected.applied[rows])
    for own, other in zip(states.layers, expected.layers, strict=True):
        torch.testing.assert_close(own.matrices[rows], other.matrices[rows], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own.tail[rows], other.tail[rows], rtol=1e-4, atol=1e-5)
    assert prompts.run(chunks(targets[0], dict.fromkeys(range(1, SLOTS + 1), (0, 1)))) is None, "too many prompts run eagerly"
