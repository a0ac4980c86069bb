"""Builds a worker with the configured drafter."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import cast

from runtime.config.quant_config import with_flag
from runtime.config.runtime_config import RuntimeConfig, SpeculativeConfig
from runtime.config.speculative import check_depth
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.errors import ConfigError
from runtime.layers.gemm.timings import GemmTimings
from runtime.model_executor.build import build_worker, model_weights
from runtime.model_executor.context import ReplayKind, WorkerContext
from runtime.model_executor.drafter import Drafter
from runtime.model_executor.followers import Followers
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.worker import Worker
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel
from runtime.models.dflash import DFlashDraftModel
from runtime.models.draft_config import DraftConfig, load_draft_config
from runtime.models.draft_head import DraftModel
from runtime.models.eagle import LlamaForCausalLMEagle
from runtime.models.eagle3 import LlamaForCausalLMEagle3
from runtime.models.mtp import MtpDraft
from runtime.models.registry import build_model
from runtime.models.standalone import StandaloneDraft
from runtime.models.token_map import load_token_map
from runtime.speculative.depth_costs import start_controller
from runtime.speculative.dflash_worker import DFlashWorker
from runtime.speculative.draft_group import draft_group
from runtime.speculative.eagle_worker import EagleWorker
from runtime.speculative.ngram_drafter import NgramDrafter
from runtime.speculative.parity import check_parity

log = logging.getLogger(__name__)


def build_speculative_worker(
    config: RuntimeConfig,
    model_config: ModelConfig,
    replay: ReplayKind | None = None,
    sizes: list[int] | None = None,
    with_plain: bool = False,
    timings: GemmTimings | None = None,
    group: ParallelGroup = ALONE,
    followers: Followers | None = None,
) -> Worker:
    """The worker that `config.speculative` asks for, ready to run; arguments as for `build_worker`.

    Raises:
        ConfigError: draft and target do not fit, or the memory does not suffice.
    """
    assert config.speculative is not None
    worker = build_worker(config, model_config, replay, sizes, make_drafter, with_plain, timings, group, followers)
    if config.speculative.check_parity and group.rank == 0:
        check_parity(worker)
    if config.speculative.depths and not with_plain and group.rank == 0:
        start_controller(worker, config.speculative.tuning)
    return worker


def make_drafter(context: WorkerContext, target: DecoderModel) -> Drafter:
    """The configured drafter, loaded for its target."""
    config = context.config.speculative
    assert config is not None
    if config.algorithm == "NGRAM":
        return NgramDrafter(config.num_steps)
    if config.algorithm == "DFLASH":
        block_draft = load_block_draft(context, config, target)
        return DFlashWorker(block_draft, _draft_runner(context, config, block_draft), config)
    model = load_draft(context, config, target)
    return EagleWorker(model, _draft_runner(context, config, model), config)


def _draft_runner(context: WorkerContext, config: SpeculativeConfig, model: DraftModel | DFlashDraftModel) -> ModelRunner:
    return ModelRunner(
        cast(DecoderModel, model),
        model.config,
        config.attention_backend,
        context.dtype,
        context.device,
        tuning=context.config.device.tuning,
        group=context.group,
    )


def _draft_config(config: SpeculativeConfig, target: DecoderModel) -> tuple[str, DraftConfig]:
    """The folder of the draft model, and its architecture."""
    folder, algorithm = config.draft_model_path, config.algorithm
    assert folder is not None, "checked with the flags"
    assert algorithm not in ("NGRAM", "MTP"), "which have no draft model of their own"
    found = load_draft_config(folder, algorithm, target.config)
    quant = with_flag(found.model.quant, config.draft_quantization, "--speculative-draft-model-quantization")
    return folder, replace(found, model=replace(found.model, quant=quant))


def load_block_draft(context: WorkerContext, config: SpeculativeConfig, target: DecoderModel) -> DFlashDraftModel:
    """The DFlash draft with its weights.

    Raises:
        ConfigError: draft and target do not fit, or blocks are smaller than the depth.
    """
    folder, draft_config = _draft_config(config, target)
    tuning = context.config.device.tuning
    draft = DFlashDraftModel(draft_config, target, draft_group(config.draft_tp_size, draft_config.model, target.context, tuning))
    check_depth(draft.block.size, config.num_steps)
    draft.load(model_weights(context, draft.expected_weights(), folder, config.draft_load_format))
    log.info("draft: %s, %d layers, blocks of %d tokens", "DFlash", len(draft.layers), config.num_draft_tokens)
    return draft


def load_draft(context: WorkerContext, config: SpeculativeConfig, target: DecoderModel) -> DraftModel:
    """The draft model with its weights.

    Raises:
        ConfigError: draft and target do not fit, or the draft knows fewer tokens than a node has branches.
    """
    assert config.algorithm not in ("NGRAM", "DFLASH")
    token_map = load_token_map(config.token_map) if config.token_map else None
    tuning = context.config.device.tuning
    if config.algorithm == "MTP":
        served = context.config.model
        group = draft_group(config.draft_tp_size, target.config, target.context, tuning)
        return _loaded(context, config, MtpDraft(target, token_map, group), served.model_path, served.load_format)
    folder, draft_config = _draft_config(config, target)
    group = draft_group(config.draft_tp_size, draft_config.model, target.context, tuning)
    draft: DraftModel
    if config.algorithm == "STANDALONE":
        quantization = "int8" if draft_config.model.quant is None and context.config.model.quantization == "int8" else None
        shared = {"group": group, "head_group": target.context.group, "kv_dtype": context.kv_dtype, "exchange": context.exchange}
        fuse = target.context.fuse_shared
        model = build_model(draft_config.model, target.context.ops, context.dtype, context.device, quantization, **shared, fuse_shared=fuse)
        draft = StandaloneDraft(model)
    elif config.algorithm == "EAGLE3":
        draft = LlamaForCausalLMEagle3(draft_config, target, group)
    else:
        draft = LlamaForCausalLMEagle(draft_config, target, token_map, group)
    return _loaded(context, config, draft, folder, config.draft_load_format)


def _loaded(context: WorkerContext, config: SpeculativeConfig, draft: DraftModel, folder: str, load_format: str) -> DraftModel:
    """The draft with the weights in `folder`."""
    if config.topk > draft.vocab_size:
        raise ConfigError(f"--speculative-eagle-topk is {config.topk}; this draft knows {draft.vocab_size} tokens, so lower it")
    draft.load(model_weights(context, draft.expected_weights(), folder, load_format))
    kind = "MTP layer of " if config.algorithm == "MTP" else ""
    log.info("draft: %s%s, %d of %d tokens", kind, draft.config.architecture, draft.vocab_size, draft.config.vocab_size)
    return draft
