"""From a configuration to the parts that every worker is made of: weights, memory, rows, graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import psutil
import torch

from runtime.batch import PAD_ROW, CostModel, RowInit, ScheduleBatch, WorkerLimits, no_ints
from runtime.config.runtime_config import RuntimeConfig
from runtime.errors import ConfigError
from runtime.layers.attention.registry import backend_class
from runtime.layers.backend_selection import select_ops, select_sampling
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.sampler import sample, top_logprobs
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.graph_capture import CaptureReport, capture_all
from runtime.model_executor.graph_runner import GraphOptions, GraphRunner
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.memory_plan import MIB, Budget, MemoryPlan, plan_memory
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.request_rows import GREEDY, RequestRows
from runtime.model_executor.short_prompts import PromptCost, ShortPrompts, prompt_forward, prompt_spec
from runtime.model_executor.staging import HostCopy, StagingRing
from runtime.model_executor.target import ExtendPass, Target
from runtime.model_executor.weight_loader import dummy_weights, safetensors_weights
from runtime.model_executor.worker import TpWorker, decode_forward, decode_spec
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel
from runtime.models.registry import build_model
from runtime.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

log = logging.getLogger(__name__)
ReplayKind = Literal["cuda", "eager", "none"]
CPU_KV_SHARE = 0.25
"""Of the free memory of a machine without a GPU."""
CPU_KV_MOST = 4 << 30
CPU_RUNNING = 16
CPU_BUSY_TOKENS = 256
"""A prompt pass of fewer takes longer a token: it has the weights to read, and 8-bit ones to widen."""
FILTERED = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01)
"""Of a request that needs every filter."""
STEPS_AHEAD = 4
"""Steps by which a row's pages may run ahead of its committed length: one in flight, one submitted, and both of a finished request."""


@dataclass(slots=True)
class Parts:
    """What a worker is built from, in the order it comes to be."""

    config: RuntimeConfig
    device: torch.device
    dtype: torch.dtype
    running: int
    sizes: list[int]
    replay: ReplayKind
    timings: GemmTimings
    facts: dict[str, object] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        """The most requests of one pass, padding included."""
        return max(self.running, max(self.sizes, default=1))

    @property
    def extend_tokens(self) -> int:
        """Tokens of one EXTEND batch: the chunk, or the longest prompt where none is cut."""
        chunk = self.config.scheduler.chunked_prefill_size
        return chunk if chunk > 0 else self.config.model.context_length


def make_parts(
    config: RuntimeConfig, replay: ReplayKind | None = None, sizes: list[int] | None = None, timings: GemmTimings | None = None
) -> Parts:
    """Decide device, dtype, admission limit and graph sizes. The other arguments override the configuration's (tests, parity checks)."""
    device = torch.device(config.device.device, 0) if config.device.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(config.device.cpu_threads)
    captured = list(config.graphs.cuda_graph_bs) if sizes is None else sizes
    kind: ReplayKind = replay if replay is not None else ("cuda" if captured and device.type == "cuda" else "none")
    default = max(captured, default=CPU_RUNNING) if kind == "cuda" else CPU_RUNNING
    running = config.scheduler.max_running_requests or default
    if captured and running > max(captured) and kind == "cuda":
        log.warning("batches above %d requests have no graph and run eagerly; raise --cuda-graph-max-bs to %d", max(captured), running)
    return Parts(config, device, getattr(torch, config.device.dtype), running, captured, kind, timings or GemmTimings())


def load_model(parts: Parts, config: ModelConfig, folder: str, load_format: str, quantization: str | None) -> DecoderModel:
    """Build a model and fill its weights."""
    started = time.perf_counter()
    ops, why = select_ops(parts.device, parts.dtype, parts.timings)
    log.info("block operations: %s", why)
    model = build_model(config, ops, parts.dtype, parts.device, quantization)
    model.load(model_weights(parts, model.expected_weights(), folder, load_format))
    seconds = time.perf_counter() - started
    parts.phases["load_weights"] = parts.phases.get("load_weights", 0.0) + seconds
    log.info("weights: %s, %.0f MiB, %s%s, %.1f s", config.architecture, model.weight_bytes / MIB, parts.config.device.dtype,
             f" with {quantization} linears" if quantization else "", seconds)  # fmt: skip
    return model


def decode_sizes(parts: Parts) -> list[int]:
    """Batch sizes that decode passes run at, padding included; where nothing is captured, the ends of what may come."""
    return parts.sizes or [1, parts.running]


def graph_options(parts: Parts, model: ModelRunner, sizes: Sequence[int], max_size: int | None = None) -> GraphOptions:
    """Options of a graph runner of `model` that captures `sizes`."""
    captured = () if parts.replay == "none" else tuple(sizes)
    return GraphOptions(
        captured,
        parts.config.graphs.cuda_graph_padding,
        max_size,
        parts.replay == "cuda",
        model.arena,
        parts.config.device.tuning.graph_node_bytes,
    )


def autotune_gemms(parts: Parts, target: Target, rows: Iterable[int], others: Iterable[Callable[[], object]]) -> None:
    """Choose the kernel of every GEMM of decode passes, at these numbers of `rows`.

    The other kernels of a first start are compiled beside them: sampling, and `others`.
    """
    started, model = time.perf_counter(), target.runner.model
    with torch.inference_mode():
        choosing = partial(rehearse_sampling, target, torch.zeros((1, model.config.vocab_size), device=parts.device))
        chosen = model.context.ops.autotune(model.gemms(), rows, [*others, choosing])
    if chosen:
        parts.facts["products"] = chosen
        parts.phases["autotune_gemms"] = round(time.perf_counter() - started, 3)


def model_weights(parts: Parts, shapes: dict[str, tuple[int, ...]], folder: str, load_format: str):
    """The tensors of a checkpoint, or random ones."""
    if load_format == "dummy":
        return dummy_weights(shapes, parts.dtype, parts.device, seed=parts.config.model.random_seed)
    return safetensors_weights(folder, parts.device)


def make_page_table(parts: Parts, tokens_per_step: int) -> PageTable:
    """Rows for every request and the padding; columns for the longest context and what runs ahead of it."""
    positions = parts.config.model.context_length + STEPS_AHEAD * tokens_per_step
    return PageTable(parts.running + 1, positions, parts.config.cache.page_size, parts.device)


def make_target(parts: Parts, runner: ModelRunner, page_table: PageTable, tokens_per_step: int) -> Target:
    """The target side, with its rows and staging."""
    ops, why = select_sampling(parts.device, parts.config.device.sampling_backend)
    log.info("sampling: %s", why)
    rows = RequestRows(parts.running + 1, runner.config.vocab_size, parts.device, ops)
    # an EXTEND batch uploads three arrays a token and five a request; a page is three numbers: one page a token, or a decode step's reach
    pages = 2 * tokens_per_step // page_table.page_size + 2
    capacity = 6 * parts.extend_tokens + (64 + 3 * pages + tokens_per_step) * parts.requests + 3 * page_table.max_pages
    return Target(runner, rows, page_table, StagingRing(capacity, parts.device))


def measure_activations(
    parts: Parts,
    target: Target,
    rehearse: Callable[[], None],
    aux_layers: tuple[int, ...] = (),
    follow: Callable[[ExtendPass], None] = lambda done: None,
) -> int:
    """Bytes that the largest prompt step and the choice of the largest batch's tokens take at their peak, found by a run over page 0.

    0 on the CPU, whose allocator returns what it does not use.

    Args:
        rehearse: chooses tokens for as many requests as can run, with all that they may ask for.
        follow: what a draft does with a prompt step.
    """
    if parts.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        batch = padding_prompt(parts)
        done, result = target.extend(batch, target.stage_rows(batch)[0], aux_layers)
        follow(done)
        result.collect()
        if not parts.config.scheduler.mixed_chunk:  # else decode rows of the pass choose their tokens beside what the prompts left
            del done, result
        rehearse()
        target.rows.admit([RowInit(PAD_ROW, 0, GREEDY, 0, no_ints())])
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    target.reset()
    torch.cuda.empty_cache()
    return peak


def padding_prompt(parts: Parts) -> ScheduleBatch:
    """The largest EXTEND batch, all on the padding row: of as many prompts as can run, the first ones as long as fits, all sampled."""
    count = max(min(parts.running, parts.extend_tokens // 2), 1)
    lens, left = np.ones(count, dtype=np.int32), parts.extend_tokens - count
    for i in range(count):
        lens[i] += (more := min(left, parts.config.model.context_length - 2))
        left -= more
    zeros = np.zeros(count, dtype=np.int32)
    return ScheduleBatch(
        step=0, rows=zeros + PAD_ROW, len_bounds=zeros, top_logprobs=zeros + MAX_TOP_LOGPROBS,
        new_rows=[RowInit(PAD_ROW, 1, FILTERED, 0, no_ints())], prefix_lens=zeros, extend_lens=lens,
        token_ids=np.zeros(int(lens.sum()), dtype=np.int32), next_tokens=zeros - 1, prompt_logprobs=zeros == np.arange(count),
    )  # fmt: skip


def rehearse_sampling(target: Target, logits: torch.Tensor) -> None:
    """Choose a token for each row of float32 [B, V] logits with all that requests may ask for, so that the memory it takes is seen."""
    rows = torch.full((len(logits),), PAD_ROW, dtype=torch.int64, device=logits.device)
    needs = SamplingNeeds.every(len(logits))
    tokens = sample(logits, target.rows.tables, rows, rows, needs)
    HostCopy(*top_logprobs(logits, tokens, MAX_TOP_LOGPROBS)).wait()


def divide_memory(parts: Parts, activations: int, reservations: dict[str, int], bytes_per_slot: int, tokens_per_step: int) -> MemoryPlan:
    """Give KV what is left."""
    config = parts.config
    wanted = config.cache.max_total_tokens
    least = min(config.model.context_length, 1024) + 2 * tokens_per_step + config.cache.page_size
    if parts.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
    else:
        free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
        if wanted is None and config.cache.mem_fraction_static is None:
            most = min(int(free * CPU_KV_SHARE), CPU_KV_MOST) // bytes_per_slot
            # A step writes past the context's end: for a single short request its own context is too little.
            wanted = min(most, max(parts.running * config.model.context_length, least + config.cache.page_size))
    plan = plan_memory(
        Budget(total, free, activations, reservations, bytes_per_slot),
        config.cache.page_size,
        wanted,
        config.cache.mem_fraction_static,
        least,
    )
    log.info("KV cache: %d tokens in pages of %d", plan.num_pages * config.cache.page_size, config.cache.page_size)
    parts.facts["memory_mib"] = {name: round(size / MIB, 1) for name, size in plan.table.items()}
    return plan


def capture_graphs(parts: Parts, runners: list[GraphRunner]) -> list[CaptureReport]:
    """Capture and log one line per runner."""
    started = time.perf_counter()
    with torch.inference_mode():
        reports = capture_all(runners)
    parts.phases["capture_graphs"] = time.perf_counter() - started
    for r in reports:
        log.info("graphs: %-14s %3d sizes up to %4d, %5.1f s, reserved %8.1f MiB, used %8.1f MiB",
                 r.name, len(r.sizes), max(r.sizes, default=0), r.seconds, r.reserved_mib, r.used_mib)  # fmt: skip
    parts.facts["graphs"] = [
        {"runner": r.name, "sizes": r.sizes, "seconds": round(r.seconds, 3), "reserved_mib": round(r.reserved_mib, 1),
         "used_mib": round(r.used_mib, 1)} for r in reports
    ]  # fmt: skip
    return reports


def prompt_cost(parts: Parts, model: DecoderModel) -> PromptCost:
    """Cost of the model's prompt passes on this GPU."""
    return PromptCost.of(parts.config.device.tuning, model.active_parameters, model.kernel_launches)


def make_runner(parts: Parts, model: DecoderModel, config: ModelConfig) -> ModelRunner:
    """The target's runner; on a GPU short prompts will have graphs."""
    attention, sizes = parts.config.device.attention_backend, list[int]()
    if parts.device.type == "cuda" and parts.replay != "none" and backend_class(attention).caps.cuda_graph:
        sizes = prompt_cost(parts, model).sizes(min(parts.extend_tokens, parts.config.model.context_length))
    return ModelRunner(model, config, attention, parts.dtype, parts.device, sizes, parts.config.device.tuning)


def add_short_prompts(parts: Parts, target: Target, aux_layers: tuple[int, ...] = ()) -> list[GraphRunner]:
    """Let short prompts of the target run through graphs where its runner has sizes for them.

    Returns:
        Their runner, for `fit_memory`, or nothing.
    """
    runner = target.runner
    sizes, hidden, launches = runner.prompt_sizes, runner.config.hidden_size, runner.model.kernel_launches
    if not sizes:
        return []
    spec = prompt_spec(hidden, len(aux_layers) * hidden, parts.dtype, launches)
    inputs = InputBuffers(1, max_tokens=sizes[-1], device=parts.device)
    options = replace(graph_options(parts, runner, sizes), padding=True)
    graphs = GraphRunner(spec, prompt_forward(runner.model, aux_layers), inputs, [runner.backend], options)
    target.short_prompts = ShortPrompts(graphs, target.page_table, prompt_cost(parts, runner.model))
    return [graphs]


def fit_memory(
    parts: Parts,
    owners: dict[ModelRunner, list[GraphRunner]],
    page_table: PageTable,
    widths: dict[ModelRunner, tuple[int, int]],
    activations: int,
    ahead: int,
) -> MemoryPlan:
    """Ask every graph runner what capturing will take, give KV the rest, capture, and log who was promised what and took it.

    Args:
        owners: the graph runners of each model; every model has a KV pool of one page so far.
        widths: tokens per request and passes that each model's backend must prepare for.
        ahead: positions that a step may write past the committed length.
    """
    reservations: dict[str, int] = {}
    with torch.inference_mode():
        for graphs in owners.values():
            for runner in graphs:
                activations = max(activations, runner.eager_peak())
                runner.find_peak()
            # What one model's graphs leave free in the pool is cut in its own sizes, and another's logits do not fit into it; nor do large
            # tensors fit where small ones were, so that who needs most comes first.
            graphs.sort(key=lambda runner: -runner.pool_peak)
            pooled = 0
            for runner in graphs:
                reservations[runner.spec.name] = runner.reserve(pooled)
                pooled = max(pooled, runner.pool_peak)
    if parts.device.type == "cuda":
        torch.cuda.empty_cache()
    plan = divide_memory(parts, activations, reservations, sum(m.bytes_per_slot for m in owners), ahead)
    for model, graphs in owners.items():
        model.allocate(plan.num_pages, page_table, parts.requests, *widths[model])
        for runner in graphs:
            runner.rebind([model.backend])
    reports = capture_graphs(parts, [g for graphs in owners.values() for g in graphs])
    if parts.device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        for line in plan.lines({r.name: r.captured for r in reports}, free):
            log.info("memory: %s", line)
    return plan


def make_limits(parts: Parts, plan: MemoryPlan, target: Target, overlap: bool | None = None, **more: Any) -> WorkerLimits:
    """The scheduler's view of the memory plan. `more`: the fields that speculation sets."""
    config, model, on_gpu = parts.config, target.runner.model, parts.device.type == "cuda"
    mixed_from = 1 if target.short_prompts is None else target.short_prompts.largest + 1
    if config.scheduler.mixed_chunk and mixed_from > parts.extend_tokens:
        log.warning("--enable-mixed-chunk takes nobody along: a prompt step of this model is at most %d tokens, which have a graph of "
                    "their own", parts.extend_tokens)  # fmt: skip
    limits = WorkerLimits(
        max_total_tokens=plan.num_pages * config.cache.page_size,
        max_running_requests=parts.running,
        max_context_len=config.model.context_length,
        max_extend_tokens=parts.extend_tokens,
        page_size=config.cache.page_size,
        vocab_size=model.config.vocab_size,
        overlap=config.scheduler.overlap if overlap is None else overlap,
        mixed=config.scheduler.mixed_chunk and mixed_from <= parts.extend_tokens,
        cost_model=CostModel(prompt_cost(parts, model).saturating_tokens if on_gpu else CPU_BUSY_TOKENS, mixed_from),
        **more,
    )
    log.info("admission: at most %d requests at once, %d tokens of KV, %d tokens a prompt step", limits.max_running_requests,
             limits.max_total_tokens, limits.max_extend_tokens)  # fmt: skip
    return limits


def build_worker(
    config: RuntimeConfig,
    model_config: ModelConfig,
    replay: ReplayKind | None = None,
    sizes: list[int] | None = None,
    timings: GemmTimings | None = None,
) -> TpWorker:
    """The plain worker, ready to run. Workers that share `timings` compute equal GEMMs with equal kernels.

    Raises:
        ConfigError: the model or the memory does not allow it.
    """
    if config.speculative is not None:
        raise ConfigError("a plain worker cannot speculate")
    parts = make_parts(config, replay, sizes, timings)
    model = load_model(parts, model_config, config.model.model_path, config.model.load_format, config.model.quantization)
    runner = make_runner(parts, model, model_config)
    page_table = make_page_table(parts, 1)
    target = make_target(parts, runner, page_table, 1)
    runner.allocate(1, page_table, parts.requests, 1, 1)
    autotune_gemms(parts, target, decode_sizes(parts), runner.backend.warmup_runs(decode_sizes(parts), 1, tree=False))
    spec = decode_spec(model_config.vocab_size, model.kernel_launches)
    inputs = InputBuffers(parts.requests, max_tokens=parts.requests, device=parts.device)
    options = graph_options(parts, runner, parts.sizes)
    decode = GraphRunner(spec, decode_forward(target), inputs, [runner.backend], options)
    activations = measure_activations(parts, target, lambda: rehearse_sampling(target, decode.outputs(parts.running)["logits"]))
    graphs = [*add_short_prompts(parts, target), decode]
    plan = fit_memory(parts, {runner: graphs}, page_table, {runner: (1, 1)}, activations, 1)
    parts.facts["startup_seconds"] = parts.phases
    return TpWorker(target, decode, inputs, make_limits(parts, plan, target), parts.facts)
