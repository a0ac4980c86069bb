"""Makes the drafter of each algorithm, with its draft model loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar, cast

import torch

from runtime.config.draft_algorithms import SpecAlgorithm
from runtime.config.quant_config import CPU_ONLY, with_flag
from runtime.config.runtime_config import SpeculativeConfig
from runtime.config.speculative import check_depth
from runtime.distributed.parallel_group import ParallelGroup
from runtime.errors import ConfigError
from runtime.model_executor.build import MakeDrafter
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.drafter import Drafter, NoDrafter
from runtime.model_executor.model_loader import load_weights
from runtime.model_executor.model_runner import ModelRunner
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel
from runtime.models.dflash import DFlashDraftModel
from runtime.models.draft_config import DraftConfig, load_draft_config
from runtime.models.draft_head import DraftHead, DraftModel
from runtime.models.eagle import LlamaForCausalLMEagle
from runtime.models.eagle3 import LlamaForCausalLMEagle3
from runtime.models.mtp import MtpDraft
from runtime.models.registry import build_model
from runtime.models.standalone import StandaloneDraft
from runtime.models.token_map import load_token_map
from runtime.speculative.dflash_drafter import DFlashDrafter
from runtime.speculative.draft_group import draft_group
from runtime.speculative.eagle_worker import EagleWorker
from runtime.speculative.ngram_drafter import NgramDrafter

log = logging.getLogger(__name__)
Draft = TypeVar("Draft", bound=DraftModel | DFlashDraftModel)


def make_drafter(context: WorkerContext, target: DecoderModel) -> Drafter:
    """The configured drafter, loaded for its target. Raises `ConfigError` if they do not fit."""
    config = context.config.speculative
    return NoDrafter() if config is None else DRAFTERS[config.algorithm](context, target)


# ---- one function per algorithm


def eagle(context: WorkerContext, target: DecoderModel) -> Drafter:
    """The drafter of an EAGLE head."""
    config = _config(context, "EAGLE", target)
    return EagleWorker(*_loaded(context, LlamaForCausalLMEagle(config, target, _token_map(context), _group(context, config.model, target))))


def eagle3(context: WorkerContext, target: DecoderModel) -> Drafter:
    """The drafter of an EAGLE-3 head."""
    config = _config(context, "EAGLE3", target)
    return EagleWorker(*_loaded(context, LlamaForCausalLMEagle3(config, target, _group(context, config.model, target))))


def mtp(context: WorkerContext, target: DecoderModel) -> Drafter:
    """The drafter of the layer for multi-token prediction in the target's checkpoint."""
    return EagleWorker(*_loaded(context, MtpDraft(target, _token_map(context), _group(context, target.config, target))))


def standalone(context: WorkerContext, target: DecoderModel) -> Drafter:
    """The drafter of a small model, quantised like the target's LM head if the target is int8 or int4 and the draft's checkpoint is not."""
    config, own = _config(context, "STANDALONE", target).model, target.context
    quantization = own.scheme.heads.name if config.quant is None and context.config.model.quantization in CPU_ONLY else None
    shared = {"group": _group(context, config, target), "head_group": own.group, "kv_dtype": context.kv_dtype, "exchange": context.exchange}
    model = build_model(config, own.ops, context.dtype, context.device, quantization, **shared, fuse_shared=own.fuse_shared)
    return EagleWorker(*_loaded(context, StandaloneDraft(model)))


def dflash(context: WorkerContext, target: DecoderModel) -> Drafter:
    """The drafter of a DFlash draft. Raises `ConfigError` also if the depth exceeds its blocks."""
    config = _config(context, "DFLASH", target)
    draft = DFlashDraftModel(config, target, _group(context, config.model, target))
    check_depth(draft.draft_block.size, context.speculative.num_steps)
    return DFlashDrafter(*_loaded(context, draft))


DRAFTERS: dict[SpecAlgorithm, MakeDrafter] = {
    "EAGLE": eagle,
    "EAGLE3": eagle3,
    "MTP": mtp,
    "DFLASH": dflash,
    "STANDALONE": standalone,
    "NGRAM": lambda context, target: NgramDrafter(context.speculative.num_steps),
}
"""Makes the drafter of each algorithm in `config/draft_algorithms.py`."""


# ---- draft models


def _config(context: WorkerContext, algorithm: SpecAlgorithm, target: DecoderModel) -> DraftConfig:
    """The architecture of a draft that has its own folder."""
    spec = context.speculative
    assert spec.draft_model_path is not None, "checked with the flags"
    found = load_draft_config(spec.draft_model_path, algorithm, target.config)
    quant = with_flag(found.model.quant, spec.draft_quantization, "--speculative-draft-model-quantization")
    return replace(found, model=replace(found.model, quant=quant))


def _token_map(context: WorkerContext) -> torch.Tensor | None:
    path = context.speculative.token_map
    return load_token_map(path) if path else None


def _group(context: WorkerContext, draft: ModelConfig, target: DecoderModel) -> ParallelGroup:
    return draft_group(context.speculative.draft_tp_size, draft, target.context, context.config.device.tuning)


def _loaded(context: WorkerContext, draft: Draft) -> tuple[Draft, ModelRunner, SpeculativeConfig]:
    """The arguments of a drafter: the draft with its weights, from its own folder or else from the target's; its runner; and the
    configuration. The draft's vocabulary needs a token for each branch of a node.
    """
    spec, served = context.speculative, context.config.model
    if spec.topk > draft.vocab_size:
        raise ConfigError(f"--speculative-eagle-topk is {spec.topk}; this draft has {draft.vocab_size} tokens. Use a smaller value.")
    own = None if spec.draft_model_path is None else (spec.draft_model_path, spec.draft_load_format)
    load_weights(context, draft, *(own or (served.model_path, served.load_format)))
    if spec.draft_candidates and isinstance(draft, DraftHead):
        draft.find_candidates()
    log.info("draft: %s, %s, %d of %d tokens", spec.algorithm, draft.config.architecture, draft.vocab_size, draft.config.vocab_size)
    decoder, tuning = cast(DecoderModel, draft), context.config.device.tuning
    runner = ModelRunner(decoder, spec.attention_backend, context.dtype, context.device, tuning=tuning, group=context.group)
    return draft, runner, spec
