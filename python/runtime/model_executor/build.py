"""Builds a worker in stages: context, load, runners, tune, size memory, capture, limits, checks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from runtime.batch import WorkerLimits
from runtime.config.cache import least_tokens
from runtime.config.device_tuning import CPU
from runtime.config.host_memory import MIB, host_memory
from runtime.config.machine import ask_for_steady_sums
from runtime.config.runtime_config import RuntimeConfig, SpeculativeConfig
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.layers.attention.registry import backend_class
from runtime.layers.backend_selection import select_sampling
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.acceptance_monitor import AcceptanceMonitor
from runtime.model_executor.accepter import Accepter
from runtime.model_executor.context import AS_CONFIGURED, BuildOptions, WorkerContext, make_context
from runtime.model_executor.decode_timer import DecodeTimer
from runtime.model_executor.depth import DepthBatches, DepthControl, depths_to_drop, split_batch_sizes, split_by_depth
from runtime.model_executor.depth_costs import start_controller
from runtime.model_executor.drafter import Drafter, DrafterSpec, DraftSetup, ModelPasses, NoDrafter
from runtime.model_executor.dry_run import measure_activations, sample_padding
from runtime.model_executor.expert_counter import ExpertCounter
from runtime.model_executor.followers import Followers
from runtime.model_executor.grammar_rows import GrammarRows
from runtime.model_executor.graph_runner import Forward, GraphOptions, GraphRunner, RunnerSpec, capture_all
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.iteration_graph import IterationGraphs, IterationStages, iteration_graph_depths
from runtime.model_executor.memory_plan import Budget, MemoryPlan, plan_memory
from runtime.model_executor.model_loader import load_model
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.nccl_graphs import captured_everywhere, nccl_bytes_of_graph, nccl_bytes_of_logits
from runtime.model_executor.parity import check_parity
from runtime.model_executor.request_rows import RequestRows
from runtime.model_executor.short_prompts import SLOTS, PromptCost, ShortPrompts, prompt_forward, prompt_spec, shared_sizes, shared_spec
from runtime.model_executor.staging import HostCopy, StagingRing
from runtime.model_executor.state_cache import cached_states, state_unit
from runtime.model_executor.target_model import PAGES_AT_ONCE, TargetModel
from runtime.model_executor.verification import Verifier
from runtime.model_executor.worker import Worker, WorkerParts
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel
from runtime.worker_info import RankInfo, SpeculativeInfo

log = logging.getLogger(__name__)
MakeDrafter = Callable[[WorkerContext, DecoderModel], Drafter]
MAX_GRAPH_SHARE = 0.05
"""Fraction of the free memory that the graphs of all depths may take."""
PAGE_LOOKAHEAD_STEPS = 4
"""Steps by which a row's pages may exceed its length: one in flight, one submitted, and the same two of a request that has finished."""


def no_drafter(context: WorkerContext, target: DecoderModel) -> Drafter:
    """Plain decoding."""
    assert context.config.speculative is None, "drafts need make_drafter"
    return NoDrafter()


def build_worker(
    config: RuntimeConfig,
    model_config: ModelConfig,
    make_drafter: MakeDrafter = no_drafter,
    options: BuildOptions = AS_CONFIGURED,
    group: ParallelGroup = ALONE,
    followers: Followers | None = None,
) -> Worker:
    """The worker, ready to run.

    Args:
        make_drafter: creates the drafter for the loaded target; plain decoding if not given.
        options: changes for tests and checks.
        group: the ranks that share the model, all of which build their workers at the same time.
        followers: the other ranks; only on rank 0 of several.

    Raises:
        ConfigError: the model or the drafter does not support the configuration, or memory does not suffice.
    """
    ask_for_steady_sums()
    context = make_context(config, options, group)
    model_config = replace(model_config, max_context_len=config.model.context_length)  # some rotary tables depend on it
    model = load_model(context, model_config, config.model.model_path, config.model.load_format, config.model.quantization)
    if config.graphs.head_bounds:
        model.find_bounds()
    drafter = make_drafter(context, model)
    depths = make_depths(context, drafter)
    parts = make_parts(context, model, drafter, depths)
    autotune(context, parts, depths)
    activations = measure_activations(context, parts)
    models = model_passes(context, parts)
    plan = size_memory(context, parts, models, activations)
    capture_graphs(context, models, plan)
    add_info(context)
    limits = make_limits(context, plan, parts.target, drafter.spec, bool(parts.verifier.shared))
    worker = Worker(parts, limits, context.info, group, context.exchange, followers)
    if followers is not None:
        followers.begin(group)
    if config.speculative is not None and group.rank == 0:
        prepare_drafting(worker, config.speculative, options.adaptive)
    return worker


# ---- runners


def make_depths(context: WorkerContext, drafter: Drafter) -> dict[int, DepthBatches]:
    """The depth table, deepest first."""
    config, spec = context.config, drafter.spec
    most = None if config.speculative is None else config.speculative.disable_by_batch_size
    padding = config.graphs.cuda_graph_padding
    if config.speculative is not None and config.speculative.depths:
        return split_by_depth(config.speculative.depths, most, context.running, context.sizes, padding)
    return split_batch_sizes(spec.shape.num_steps, most, context.running, context.sizes, padding)


def make_parts(context: WorkerContext, model: DecoderModel, drafter: Drafter, depths: dict[int, DepthBatches]) -> WorkerParts:
    """All parts of the worker, with KV pools of one page."""
    spec = drafter.spec
    runner = make_runner(context, model)
    target = make_target(context, runner, spec)
    inputs = InputBuffers(context.requests, max_tokens=context.requests * spec.max_width, device=context.device)
    width = spec.shape.num_draft_tokens
    runner.allocate(1, target.page_table, context.requests, width, cached_states(context, model.state_specs))

    def make(spec: RunnerSpec, forward: Forward, model: ModelRunner, batches: DepthBatches, wanted: bool) -> GraphRunner:
        options = graph_options(context, model, batches.captured if wanted else (), batches.padded)
        return GraphRunner(spec, forward, inputs, [model.backend], options)

    verifier = Verifier(target, spec.shape, spec.feature_width, depths, inputs, make, context.config.cache.radix_cache)
    drafter.attach(DraftSetup(target, inputs, depths, make))
    limits, groups = {depth: batches.running for depth, batches in depths.items()}, context.config.parallel.dp_size
    stages = (target, inputs, drafter, verifier, Accepter(target, spec, context.config.speculative))
    graph_depths = iteration_graph_depths(depths, context.config, context.group.agree(model.active_parameters))
    options = replace(graph_options(context, runner, ()), nccl_bytes=partial(nccl_bytes_of_logits, context, model.lm_head))
    graphs = IterationGraphs(IterationStages(*stages), graph_depths, options)
    return WorkerParts(
        *stages,
        depths=DepthControl(limits, context.running + 1, verifier, groups, context.config.model.context_length),
        monitor=AcceptanceMonitor(max(depths)),
        grammars=GrammarRows(model.config.vocab_size, context.device),
        iterations=graphs,
        # With attention groups, routers see the tokens of all groups, so their masks do not describe one rank's tokens.
        experts=ExpertCounter(model.sparse_mlps if context.exchange is None else []),
    )


def make_runner(context: WorkerContext, model: DecoderModel) -> ModelRunner:
    """The target's runner; on a GPU with graphs for short prompts."""
    attention, sizes = context.config.device.attention_backend, list[int]()
    # Attention groups run all prompts of a step in one pass, so that all groups exchange tokens equally often. A captured pass cannot widen
    # the 8-bit keys of a whole prompt.
    wanted = context.replay != "none" and context.exchange is None and context.kv_dtype is None
    if context.device.type == "cuda" and wanted and backend_class(attention).caps.cuda_graph:
        sizes = prompt_cost(context, model).sizes(min(context.extend_tokens, context.config.model.context_length))
    return ModelRunner(model, attention, context.dtype, context.device, sizes, context.group, tuning=context.config.device.tuning)


def make_target(context: WorkerContext, runner: ModelRunner, spec: DrafterSpec) -> TargetModel:
    """The target, with a row and a page-table row for every request and the padding."""
    ops, why = select_sampling(context.device, context.config.device.sampling_backend)
    log.info("sampling: %s", why)
    reach = spec.shape.tokens_per_step
    positions = context.config.model.context_length + PAGE_LOOKAHEAD_STEPS * reach + spec.catch_up
    page_table = PageTable(context.running + 1, positions, context.config.cache.page_size, context.device)
    rows = RequestRows(context.running + 1, runner.config.vocab_size, context.device, ops)
    # A prompt step uploads four numbers of 8 bytes per token, seven numbers per request and three per page. Windows of different widths
    # have two numbers of 8 bytes for each window position.
    capacity = 8 * context.extend_tokens + (64 + 4 * reach) * context.requests + 5 * PAGES_AT_ONCE
    # Drafts that are looked up in the text need the text on every rank.
    reads = context.attention_group.rank == 0 or spec.needs_history
    staging, reads_hidden = StagingRing(capacity, context.device), bool(spec.feature_width) and not spec.aux_layers
    return TargetModel(runner, rows, page_table, staging, spec.aux_layers, reads, reads_hidden)


def graph_options(context: WorkerContext, model: ModelRunner, sizes: Sequence[int], max_size: int | None = None) -> GraphOptions:
    """Options of a graph runner of `model` that captures `sizes`."""
    captured = () if context.replay == "none" else tuple(sizes)
    padding, node_bytes = context.config.graphs.cuda_graph_padding, context.config.device.tuning.graph_node_bytes
    nccl_bytes = partial(nccl_bytes_of_graph, context, model.config)
    return GraphOptions(captured, padding, max_size, context.replay == "cuda", model.arena, node_bytes=node_bytes, nccl_bytes=nccl_bytes)


# ---- tune


def autotune(context: WorkerContext, parts: WorkerParts, depths: dict[int, DepthBatches]) -> None:
    """Autotune every GEMM of decode passes and of prompts of many rows; compile other kernels at the same time."""
    target, shape = parts.target, parts.drafter.spec.shape
    model, backend = target.runner.model, target.runner.backend
    rows, warmup_runs = set[int](), parts.drafter.warmup_runs()
    for depth, batches in depths.items():
        at_depth = shape.at_depth(depth)
        rows.update(batches.tuned, (size * at_depth.num_draft_tokens for size in batches.tuned))
        if batches.tuned:
            warmup_runs += backend.warmup_runs(batches.tuned, at_depth.num_draft_tokens, tree=at_depth.topk > 1)
    rows.update(size * runner.spec.width for runner in parts.verifier.ragged.values() for size in runner.sizes)
    for runner in parts.verifier.shared.values():
        warmup_runs += backend.shared_warmup_runs(runner.sizes, runner.spec.width)
    if context.device.type == "cuda":
        shares = {share for mlp in model.sparse_mlps[:1] for share in mlp.shares}
        of_kernels = context.config.device.tuning.experts.kernel_rows(context.extend_tokens, shares)
        warmup_runs += model.warmup_runs(sorted(rows | of_kernels))
    with torch.inference_mode(), context.timed("autotune_gemms"):
        warmup_runs.append(partial(sample_padding, target, torch.zeros((1, model.config.vocab_size), device=context.device)))
        slot = torch.zeros(1, dtype=torch.int64, device=context.device)
        warmup_runs += [partial(pool.move, slot, slot, 1) for pool in parts.kv_pools]
        warmup_runs.append(lambda: HostCopy(slot, slot.int(), by_kernel=True).wait())
        prompts = prompt_rows(target.runner.prompt_sizes, context.extend_tokens)
        timer = make_timer(context, target.runner)
        context.info.gemms = model.context.ops.autotune(model.gemms(), sorted(rows), warmup_runs, prompts, timer)
        if (bounded := model.bounded_head) is not None and not bounded.choices:
            parts.verifier.greedy.clear()
        if drafting := list(parts.drafter.gemms()):
            context.info.gemms |= model.context.ops.autotune(drafting, sorted(rows), prompt_rows=prompts)


def make_timer(context: WorkerContext, runner: ModelRunner) -> DecodeTimer | None:
    """Times decode passes for autotuning. None without graphs, and with several ranks, which do not time together."""
    alone = context.group.size == 1 and context.exchange is None
    return DecodeTimer(runner, context.requests) if context.replay == "cuda" and alone else None


def prompt_rows(graph_sizes: Sequence[int], most: int) -> list[int]:
    """Row counts of prompt passes to autotune: the sizes of graphs, and longer passes up to `most` in steps of 64."""
    return [*graph_sizes, *range(most, max(graph_sizes, default=0), -64)]


# ---- size memory


def size_memory(context: WorkerContext, parts: WorkerParts, models: list[ModelPasses], activations: int) -> MemoryPlan:
    """Estimate the memory that capturing each graph runner takes, and give KV the rest. `activations`: their peak in bytes."""
    reservations = dict[str, int]()
    with torch.inference_mode():
        for model in models:
            for runner in model.graphs:
                activations = max(activations, runner.eager_peak())
                runner.find_peak()
                runner.pool_peak = max(context.group.gather(runner.pool_peak))  # so that all ranks capture in the same order
            reservations |= _reserve(model)
    if context.config.speculative is not None and context.config.speculative.depths:
        _drop_depths(context, parts, reservations)
        reservations = {name: size for model in models for name, size in _reserve(model).items()}
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    bytes_per_slot, reach = sum(model.runner.bytes_per_slot for model in models), parts.drafter.spec.shape.tokens_per_step
    target = parts.target.runner
    experts = sum(mlp.experts.num_bytes for mlp in target.model.sparse_mlps)
    plan = plan_kv(context, activations, reservations, bytes_per_slot, reach, experts, target.state_bytes)
    for model in models:
        model.runner.resize(plan.num_pages)
        for runner in model.graphs:
            runner.rebind([model.runner.backend])
    return plan


def _drop_depths(context: WorkerContext, parts: WorkerParts, reservations: Mapping[str, int]) -> None:
    """Drop the depths whose graphs would take too much memory on some rank, deepest first."""
    runners = {depth: parts.all_runners(depth) for depth in parts.depths.limits}
    graph_bytes = {depth: sum(reservations[runner.spec.name] for runner in own) for depth, own in runners.items()}
    log.info("graphs by depth, MiB: %s", ", ".join(f"K={depth} {size / MIB:.0f}" for depth, size in sorted(graph_bytes.items())))
    free = torch.cuda.mem_get_info()[0] if parts.target.device.type == "cuda" else 0
    most = min(context.group.gather(int(free * MAX_GRAPH_SHARE)))  # ranks that capture different graphs would wait for each other
    for depth in depths_to_drop(graph_bytes, most):
        log.warning("no graphs for depth %d: they would take %.0f MiB", depth, graph_bytes[depth] / MIB)
        for runner in runners[depth]:
            runner.leave_out()


def _in_capture_order(model: ModelPasses) -> list[GraphRunner]:
    """Largest first, because memory that one runner frees in the pool can only be reused by smaller runners of the same model."""
    return sorted(model.graphs, key=lambda runner: -runner.pool_peak)


def _reserve(model: ModelPasses) -> dict[str, int]:
    """Bytes that capturing each runner of a model takes."""
    pooled, reservations = 0, dict[str, int]()
    for runner in _in_capture_order(model):
        reservations[runner.spec.name] = runner.reserve(pooled)
        pooled = max(pooled, runner.pool_peak)
    return reservations


def model_passes(context: WorkerContext, parts: WorkerParts) -> list[ModelPasses]:
    """The target, with graphs for short prompts, and the drafter's models."""
    verify = [*parts.verifier.runners.values(), *parts.verifier.special]
    graphs = [*add_short_prompts(context, parts.target), *verify, *parts.iterations.runners.values()]
    return [ModelPasses(parts.target.runner, graphs), *parts.drafter.models()]


def add_short_prompts(context: WorkerContext, target: TargetModel) -> list[GraphRunner]:
    """Give the target graph runners for short prompts if its runner has sizes for them.

    Returns:
        These graph runners.
    """
    runner = target.runner
    sizes, hidden, launches = runner.prompt_sizes, runner.config.hidden_size, runner.model.kernel_launches
    if not sizes:
        return []
    spec = prompt_spec(hidden, len(target.aux_layers) * hidden, context.dtype, launches)
    inputs = InputBuffers(SLOTS, max_tokens=sizes[-1], device=context.device)
    forward = prompt_forward(runner.model, target.aux_layers)

    def make(spec: RunnerSpec, sizes: list[int]) -> GraphRunner:
        options = replace(graph_options(context, runner, sizes), padding=True, max_size=sizes[-1])
        return GraphRunner(spec, forward, inputs, [runner.backend], options)

    several = shared_sizes(sizes) if runner.backend.caps.ragged_windows else []
    shared = make(shared_spec(spec), several) if several else None
    alone = make(spec, sizes) if runner.states is None else None
    target.short_prompts = ShortPrompts(alone, target.page_table, prompt_cost(context, runner.model), shared)
    return target.short_prompts.runners


def plan_kv(
    context: WorkerContext,
    activations: int,
    reservations: dict[str, int],
    bytes_per_slot: int,
    tokens_per_step: int,
    experts: int,
    states: int = 0,
) -> MemoryPlan:
    """Give KV the remaining memory."""
    cache, length = context.config.cache, context.config.model.context_length
    wanted = cache.max_total_tokens
    least = least_tokens(length, tokens_per_step, cache.page_size)
    if context.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
    else:
        memory = host_memory()
        # Other processes of the cgroup grow too, and a cgroup that runs out of memory is killed. States take memory when they are used.
        free, total = memory.available - CPU.group_headroom * (memory.cgroup is not None) - states, memory.total
        if wanted is None and cache.mem_fraction_static is None:
            most = min(int(free * CPU.kv_share), CPU.kv_bytes) // context.config.parallel.ranks_per_node // bytes_per_slot
            # A step may write beyond the end of the context, so one request needs more slots than its context.
            wanted = min(most, max(context.running * length, least + cache.page_size))
    budget = Budget(total, free, activations, reservations, bytes_per_slot, experts, states)
    plan = plan_memory(budget, cache.page_size, wanted, cache.mem_fraction_static, least)
    plan = plan.with_pages(min(context.group.gather(plan.num_pages)), bytes_per_slot * cache.page_size)
    log.info("KV cache: %d tokens in pages of %d", plan.num_pages * cache.page_size, cache.page_size)
    context.info.memory_mib = {name: round(size / MIB, 1) for name, size in plan.table.items()}
    return plan


# ---- capture


def capture_graphs(context: WorkerContext, models: list[ModelPasses], plan: MemoryPlan) -> None:
    """Capture all graphs; log their cost, and the planned and used memory."""
    with torch.inference_mode(), context.timed("capture_graphs"):
        runners = [runner for model in models for runner in _in_capture_order(model)]
        wanted = [runner.sizes for runner in runners]
        capture_all(runners)
        for runner, sizes in zip(runners, wanted, strict=True):
            runner.keep(captured_everywhere(context, runner, sizes))
    context.info.graphs = [runner.report() for runner, sizes in zip(runners, wanted, strict=True) if sizes]
    for r in context.info.graphs:
        log.info("graphs: %-14s %3d sizes up to %4d, %5.1f s, reserved %8.1f MiB, used %8.1f MiB",
                 r.runner, len(r.sizes), max(r.sizes, default=0), r.seconds, r.reserved_mib, r.used_mib)  # fmt: skip
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        for line in plan.lines({runner.spec.name: runner.captured_bytes for runner in runners}, free):
            log.info("memory: %s", line)


# ---- limits


def make_limits(
    context: WorkerContext, plan: MemoryPlan, target: TargetModel, spec: DrafterSpec, shares_prefixes: bool = False
) -> WorkerLimits:
    """The limits that the scheduler must respect. `shares_prefixes`: as in `WorkerLimits`."""
    config, model, on_gpu = context.config, target.runner.model, context.device.type == "cuda"
    states = target.runner.states
    mixed_from = 1 if target.short_prompts is None else target.short_prompts.largest + 1
    mixed = config.scheduler.mixed_chunk and mixed_from <= context.extend_tokens
    if config.scheduler.mixed_chunk and not mixed:
        log.warning(
            "--enable-mixed-chunk has no effect: prompt steps of at most %d tokens are captured as CUDA graphs", context.extend_tokens
        )
    limits = WorkerLimits(
        max_total_tokens=plan.num_pages * config.cache.page_size,
        max_running_requests=context.running,
        max_context_len=config.model.context_length,
        max_extend_tokens=context.extend_tokens,
        page_size=config.cache.page_size,
        vocab_size=model.config.vocab_size,
        tokens_per_step=spec.shape.tokens_per_step,
        max_accept_len=spec.shape.num_steps + 1,
        prefix_lookahead=spec.prefix_lookahead,
        overlap=config.scheduler.overlap and spec.overlap,
        needs_history=spec.needs_history,
        mixed=mixed,
        saturating_tokens=prompt_cost(context, model).saturating_tokens if on_gpu else CPU.saturating_tokens,
        piggyback_min_tokens=mixed_from,
        shares_prefixes=shares_prefixes,
        groups=config.parallel.dp_size,
        cached_states=0 if states is None else states.cached,
        state_unit=0 if states is None else state_unit(config.cache.page_size, states.window_width),
    )
    log.info("admission: at most %d running requests, %d KV tokens, %d tokens per prompt step", limits.max_running_requests,
             limits.max_total_tokens, limits.max_extend_tokens)  # fmt: skip
    return limits


def prompt_cost(context: WorkerContext, model: DecoderModel) -> PromptCost:
    """Cost of the model's prompt passes on this GPU."""
    return context.group.agree(PromptCost.of(context.config.device.tuning, model.active_parameters, model.kernel_launches))


def add_info(context: WorkerContext) -> None:
    """Add the draft shape and the ranks to the server info."""
    info, spec, group = context.info, context.config.speculative, context.group
    if spec is not None:
        shape = spec.num_steps, spec.topk, spec.num_draft_tokens
        info.speculative = SpeculativeInfo(spec.algorithm, *shape, spec.disable_by_batch_size, list(spec.depths))
    if group.size > 1:
        info.exchange_micros = group.exchange_micros
        info.ranks = group.gather(RankInfo(group.rank, socket.gethostname(), str(context.device), info.memory_mib))


# ---- checks


def prepare_drafting(worker: Worker, config: SpeculativeConfig, adaptive: bool) -> None:
    """Compare graphs with eager passes with --speculative-check-parity, and measure iterations for the depth controller."""
    if config.check_parity:
        check_parity(worker)
    if config.depths and adaptive:
        start_controller(worker, config.tuning)
