"""Makes the drafters of EAGLE heads, MTP layers and standalone models: an `EagleWorker` each, with another draft model."""

from __future__ import annotations

from runtime.layers.quantization.dense import DENSE
from runtime.model_executor.context import WorkerContext
from runtime.models.decoder import DecoderModel
from runtime.models.draft_config import read_draft
from runtime.models.eagle import LlamaForCausalLMEagle
from runtime.models.eagle3 import LlamaForCausalLMEagle3
from runtime.models.mtp import MtpDraft
from runtime.models.registry import build_model
from runtime.models.standalone import StandaloneDraft
from runtime.speculative.draft_loader import loaded, read_token_map, sharing_ranks
from runtime.speculative.eagle_worker import EagleWorker


def eagle(context: WorkerContext, target: DecoderModel) -> EagleWorker:
    """The drafter of an EAGLE head."""
    config = read_draft(context.speculative, target.config)
    group = sharing_ranks(context, config.model, target)
    return EagleWorker(*loaded(context, LlamaForCausalLMEagle(config, target, read_token_map(context.speculative), group)))


def eagle3(context: WorkerContext, target: DecoderModel) -> EagleWorker:
    """The drafter of an EAGLE-3 head."""
    config = read_draft(context.speculative, target.config)
    return EagleWorker(*loaded(context, LlamaForCausalLMEagle3(config, target, sharing_ranks(context, config.model, target))))


def mtp(context: WorkerContext, target: DecoderModel) -> EagleWorker:
    """The drafter of the layer for multi-token prediction in the target's checkpoint."""
    tokens, group = read_token_map(context.speculative), sharing_ranks(context, target.config, target)
    return EagleWorker(*loaded(context, MtpDraft(target, tokens, group)))


def standalone(context: WorkerContext, target: DecoderModel) -> EagleWorker:
    """The drafter of a small model, stored like the target's LM head if a flag quantises the target and the draft's checkpoint is not."""
    config, own = read_draft(context.speculative, target.config).model, target.context
    heads = own.scheme.heads(context.device)
    quantization = None if config.quant is not None or own.quant is not None or heads is DENSE else heads.name
    group = sharing_ranks(context, config, target)
    shared = {"group": group, "head_group": own.group, "kv_dtype": context.kv_dtype, "exchange": context.exchange}
    model = build_model(config, own.ops, context.dtype, context.device, quantization, **shared, fuse_shared=own.fuse_shared)
    return EagleWorker(*loaded(context, StandaloneDraft(model, target.config.vocab_size, read_token_map(context.speculative))))
