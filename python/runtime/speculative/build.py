"""From a configuration to a speculative worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

from runtime.config.runtime_config import RuntimeConfig, SpeculativeConfig
from runtime.errors import ConfigError
from runtime.layers.gemm.timings import GemmTimings
from runtime.model_executor.build import (
    Parts,
    ReplayKind,
    add_short_prompts,
    autotune_gemms,
    decode_sizes,
    fit_memory,
    graph_options,
    load_model,
    make_limits,
    make_page_table,
    make_parts,
    make_runner,
    make_target,
    measure_activations,
    model_weights,
)
from runtime.model_executor.graph_runner import Forward, GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.target import Target
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel
from runtime.models.draft_config import load_draft_config
from runtime.models.draft_head import DraftModel
from runtime.models.eagle import LlamaForCausalLMEagle
from runtime.models.eagle3 import LlamaForCausalLMEagle3
from runtime.models.registry import build_model
from runtime.models.standalone import StandaloneDraft
from runtime.models.token_map import load_token_map
from runtime.speculative.draft_decode_graph_runner import draft_decode_forward, draft_decode_spec
from runtime.speculative.draft_extend_graph_runner import draft_extend_forward, draft_extend_spec
from runtime.speculative.draft_rows import DraftRows
from runtime.speculative.draft_tree import NO_DRAFTS, TreeShape
from runtime.speculative.eagle_worker import Draft, EagleWorker, draft_prompt, first_window
from runtime.speculative.ngram_worker import NgramWorker
from runtime.speculative.parity import check_parity
from runtime.speculative.verifier import Pause, Rules, Verifier, verify_forward, verify_spec
from runtime.speculative.verify import AcceptThresholds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batches:
    """The batch sizes that one kind of iteration meets.

    Attributes:
        running: the most requests.
        most: the same with padding.
        captured: sizes of graphs.
        expected: sizes that its kernels are chosen for.
    """

    running: int
    most: int
    captured: list[int]
    expected: list[int]


def divide_batches(parts: Parts, above: int | None) -> tuple[Batches, Batches | None]:
    """Those of iterations with drafts, and, where some run without, of those: the batches of more than `above` requests."""
    if above is None or above >= parts.running:
        if above is not None:
            log.info("drafting never pauses: no more than %d requests run at once", parts.running)
        return Batches(parts.running, parts.requests, parts.sizes, decode_sizes(parts)), None
    few, many = ([size for size in sorted(parts.sizes) if (size > above) == larger] for larger in (False, True))
    if parts.config.graphs.cuda_graph_padding and above not in few:
        few = few + many[:1]  # what a batch of `above` is padded to
    drafting = Batches(above, max([above, *few]), few, few or [1, above])
    return drafting, Batches(parts.running, parts.requests, many, many or [above + 1, parts.running])


@dataclass(frozen=True, slots=True)
class RunnerMaker:
    """Makes the graph runners of one worker, which share its inputs."""

    parts: Parts
    inputs: InputBuffers

    def make(self, spec: RunnerSpec, forward: Forward, model: ModelRunner, batches: Batches, wanted: bool = True) -> GraphRunner:
        """One of passes of `model`; eager where its graphs are not `wanted`."""
        sizes = batches.captured if wanted else []
        return GraphRunner(spec, forward, self.inputs, [model.backend], graph_options(self.parts, model, sizes, batches.most))

    def verify(self, target: Target, aux_layers: tuple[int, ...], feature: int, shape: TreeShape, batches: Batches) -> GraphRunner:
        """Of the target's passes over windows of `shape`; `feature`: width of what a draft reads of them."""
        model = target.runner
        spec = verify_spec(shape, model.config.vocab_size, feature, self.parts.dtype, model.model.kernel_launches)
        return self.make(spec, verify_forward(target, aux_layers), model, batches)


def build_speculative_worker(
    config: RuntimeConfig,
    model_config: ModelConfig,
    replay: ReplayKind | None = None,
    sizes: list[int] | None = None,
    timings: GemmTimings | None = None,
) -> EagleWorker | NgramWorker:
    """The worker that `config.speculative` asks for, ready to run. Workers that share `timings` compute equal GEMMs with equal kernels.

    Raises:
        ConfigError: draft and target do not fit, or the memory does not suffice.
    """
    speculative = config.speculative
    assert speculative is not None
    build = _build_ngram if speculative.algorithm == "NGRAM" else _build_eagle
    worker = build(make_parts(config, replay, sizes, timings), speculative, model_config)
    if speculative.check_parity:
        check_parity(worker)
    return worker


def _build_eagle(parts: Parts, speculative: SpeculativeConfig, model_config: ModelConfig) -> EagleWorker:
    config = parts.config
    drafting, pausing = divide_batches(parts, speculative.disable_by_batch_size)
    shape = TreeShape(speculative.num_steps, speculative.topk, speculative.num_draft_tokens)
    ahead = max(shape.num_steps * shape.topk, shape.num_draft_tokens)
    model = load_model(parts, model_config, config.model.model_path, config.model.load_format, config.model.quantization)
    head = load_head(parts, speculative, model)
    runner = make_runner(parts, model, model_config)
    draft_runner = ModelRunner(
        cast(DecoderModel, head), head.config, speculative.attention_backend, parts.dtype, parts.device, tuning=config.device.tuning
    )
    page_table = make_page_table(parts, ahead)
    target = make_target(parts, runner, page_table, ahead)
    rows = DraftRows(parts.running + 1, shape.topk, head.hidden_width, head.vocab_size, head.hidden_dtype, parts.device)
    widths = (shape.num_draft_tokens, max(shape.num_draft_tokens, shape.topk))
    runner.allocate(1, page_table, parts.requests, widths[0], 1)
    passes = shape.num_steps - head.lookahead
    draft_runner.allocate(1, page_table, parts.requests, widths[1], max(passes, 1))
    sizes, tree = drafting.expected, shape.topk > 1
    first_runs = [
        *runner.backend.warmup_runs(sizes, shape.num_draft_tokens, tree),
        *draft_runner.backend.warmup_runs(sizes, shape.topk, tree),
        *draft_runner.backend.warmup_runs(sizes, shape.num_draft_tokens, tree=False),
    ]
    if pausing is not None:
        first_runs += [run for model in (runner, draft_runner) for run in model.backend.warmup_runs(pausing.expected, 1, tree=False)]
    autotune_gemms(parts, target, _product_rows(drafting, pausing, shape), first_runs)

    passes_launches = head.kernel_launches
    rules = replace(_rules(speculative, shape, parts.device), to_target=head.to_target, to_draft=head.to_draft)
    inputs = InputBuffers(parts.requests, max_tokens=parts.requests * widths[1], device=parts.device)
    maker = RunnerMaker(parts, inputs)
    verify = maker.verify(target, head.aux_layers, head.input_width, shape, drafting)
    decode = None
    if passes:
        spec = draft_decode_spec(shape, head.vocab_size, passes_launches, passes)
        forward = draft_decode_forward(head, shape, target.rows, rows, page_table, inputs)
        decode = maker.make(spec, forward, draft_runner, drafting, speculative.draft_decode_graph)

    def draft_extend(width: int, batches: Batches) -> GraphRunner:
        spec = draft_extend_spec(shape, width, head.input_width, parts.dtype, passes_launches)
        forward = draft_extend_forward(head, target.rows, rows, inputs)
        return maker.make(spec, forward, draft_runner, batches, speculative.draft_extend_graph)

    extend, pause, paused_extend = draft_extend(shape.num_draft_tokens, drafting), None, None
    if pausing is not None:
        pause = Pause(drafting.running, maker.verify(target, head.aux_layers, head.input_width, NO_DRAFTS, pausing))
        paused_extend = draft_extend(NO_DRAFTS.num_draft_tokens, pausing)
    verifier = Verifier(target, verify, inputs, rules, pause)
    draft = Draft(draft_runner, head, rows, shape, decode, extend, paused_extend)
    nobody = torch.zeros(parts.running, dtype=torch.int64, device=parts.device)
    drafted = first_window(draft, target.rows, nobody[: drafting.running]) if decode is None else decode.outputs(drafting.running)
    activations = measure_activations(
        parts, target, _rehearsal(verifier, drafted, nobody), head.aux_layers, lambda done: draft_prompt(draft, target.rows.tables, done)
    )
    rows.reset()
    owners = {
        runner: [*add_short_prompts(parts, target, head.aux_layers), *_present(verify, pause and pause.runner)],
        draft_runner: _present(extend, decode, paused_extend),
    }
    backends = {runner: (widths[0], 1), draft_runner: (widths[1], max(passes, 1))}
    plan = fit_memory(parts, owners, page_table, backends, activations, ahead)
    parts.facts["startup_seconds"] = parts.phases
    parts.facts["speculative"] = {"algorithm": speculative.algorithm, "num_steps": shape.num_steps, "topk": shape.topk,
                                  "num_draft_tokens": shape.num_draft_tokens,
                                  "disable_by_batch_size": speculative.disable_by_batch_size}  # fmt: skip
    limits = make_limits(parts, plan, target, tokens_per_step=ahead, max_accept_len=shape.num_steps + 1, prefix_lookahead=head.lookahead)
    return EagleWorker(target, draft, verifier, inputs, limits, parts.facts)


def load_head(parts: Parts, speculative: SpeculativeConfig, target: DecoderModel) -> DraftModel:
    """The draft, loaded beside its target.

    Raises:
        ConfigError: they do not fit, or the draft knows fewer tokens than a node shall have branches.
    """
    folder = speculative.draft_model_path
    assert folder is not None
    if speculative.algorithm == "STANDALONE":
        return _load_standalone(parts, speculative, folder, target)
    assert speculative.algorithm != "NGRAM"
    config = load_draft_config(folder, speculative.algorithm, target.config)
    if speculative.algorithm == "EAGLE3":
        head: DraftModel = LlamaForCausalLMEagle3(config, target)
    else:
        token_map = load_token_map(speculative.token_map) if speculative.token_map else None
        head = LlamaForCausalLMEagle(config, target, token_map)
    if speculative.topk > head.vocab_size:
        raise ConfigError(f"--speculative-eagle-topk is {speculative.topk}; this draft knows {head.vocab_size} tokens, so lower it")
    head.load(model_weights(parts, head.expected_weights(), folder, speculative.draft_load_format))
    log.info("draft head: %s, %d of %d tokens", config.model.architecture, head.vocab_size, target.config.vocab_size)
    return head


def _load_standalone(parts: Parts, speculative: SpeculativeConfig, folder: str, target: DecoderModel) -> StandaloneDraft:
    config = load_draft_config(folder, "STANDALONE", target.config)
    model = build_model(config.model, target.context.ops, parts.dtype, parts.device, parts.config.model.quantization)
    draft = StandaloneDraft(model)
    draft.load(model_weights(parts, draft.expected_weights(), folder, speculative.draft_load_format))
    return draft


def _build_ngram(parts: Parts, speculative: SpeculativeConfig, model_config: ModelConfig) -> NgramWorker:
    config = parts.config
    shape = TreeShape(speculative.num_steps, 1, speculative.num_draft_tokens)
    drafting, pausing = divide_batches(parts, speculative.disable_by_batch_size)
    D = shape.num_draft_tokens
    model = load_model(parts, model_config, config.model.model_path, config.model.load_format, config.model.quantization)
    runner = make_runner(parts, model, model_config)
    page_table = make_page_table(parts, D)
    target = make_target(parts, runner, page_table, D)
    runner.allocate(1, page_table, parts.requests, D, 1)
    first_runs = runner.backend.warmup_runs(drafting.expected, D, tree=False)
    if pausing is not None:
        first_runs += runner.backend.warmup_runs(pausing.expected, 1, tree=False)
    autotune_gemms(parts, target, _product_rows(drafting, pausing, shape), first_runs)
    inputs = InputBuffers(parts.requests, max_tokens=parts.requests * D, device=parts.device)
    maker = RunnerMaker(parts, inputs)
    verify = maker.verify(target, (), 0, shape, drafting)
    pause = None if pausing is None else Pause(drafting.running, maker.verify(target, (), 0, NO_DRAFTS, pausing))
    verifier = Verifier(target, verify, inputs, _rules(speculative, shape, parts.device), pause)
    nobody = torch.zeros(parts.running, dtype=torch.int64, device=parts.device)
    drafted = {"tokens": nobody[: drafting.running, None].repeat(1, D)}
    activations = measure_activations(parts, target, _rehearsal(verifier, drafted, nobody))
    owners = {runner: [*add_short_prompts(parts, target), *_present(verify, pause and pause.runner)]}
    plan = fit_memory(parts, owners, page_table, {runner: (D, 1)}, activations, D)
    parts.facts["startup_seconds"] = parts.phases
    limits = make_limits(parts, plan, target, overlap=False, tokens_per_step=D, max_accept_len=D, needs_history=True)
    return NgramWorker(target, verifier, shape.num_steps, limits, parts.facts)


def _product_rows(drafting: Batches, pausing: Batches | None, shape: TreeShape) -> list[int]:
    """Rows of the products of decode passes: of whole windows and of one token a request."""
    alone = drafting.expected + ([] if pausing is None else pausing.expected)
    return [*alone, *(size * shape.num_draft_tokens for size in drafting.expected)]


def _rehearsal(verifier: Verifier, drafted: Outputs, nobody: torch.Tensor) -> Callable[[], None]:
    """Judges the largest iteration with drafts, and the largest without where there are such. nobody int64 [running]: padding rows."""

    def rehearse() -> None:
        verifier.rehearse(drafted)
        if verifier.pause is not None:
            verifier.rehearse(verifier.bare_window(nobody))

    return rehearse


def _present(*runners: GraphRunner | None) -> list[GraphRunner]:
    return [runner for runner in runners if runner is not None]


def _rules(speculative: SpeculativeConfig, shape: TreeShape, device: torch.device) -> Rules:
    thresholds = AcceptThresholds(speculative.accept_threshold_single, speculative.accept_threshold_acc)
    return Rules(shape, thresholds, _synthetic(speculative, device))


def _synthetic(speculative: SpeculativeConfig, device: torch.device) -> torch.Tensor | None:
    if speculative.synthetic_accept is None:
        return None
    return torch.tensor(speculative.synthetic_accept, dtype=torch.float32, device=device)
