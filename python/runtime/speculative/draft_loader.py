"""Loads the draft model of a drafter: its token map, its ranks and its weights."""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar, cast

import torch

from runtime.config.device_tuning import DeviceTuning
from runtime.config.runtime_config import ServedModelConfig, SpeculativeConfig
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.errors import ConfigError
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.model_loader import Loadable, load_weights
from runtime.model_executor.model_runner import ModelRunner
from runtime.models.config import ModelConfig
from runtime.models.context import ModelContext
from runtime.models.decoder import DecoderModel
from runtime.models.draft_head import DraftHead
from runtime.models.sharing import faster_replicated
from runtime.models.token_map import load_token_map

log = logging.getLogger(__name__)


class LoadableDraft(Loadable, Protocol):
    """A draft model before its weights are filled.

    Attributes:
        config: its decoder.
        vocab_size: the number of ids that it scores.
    """

    config: ModelConfig
    vocab_size: int


Draft = TypeVar("Draft", bound=LoadableDraft)


def read_token_map(spec: SpeculativeConfig) -> torch.Tensor | None:
    """The ids of --speculative-token-map, as `load_token_map`; None without that flag."""
    return None if spec.token_map is None else load_token_map(spec.token_map)


def draft_weights(served: ServedModelConfig, spec: SpeculativeConfig) -> tuple[str, str]:
    """The folder and the format of a draft's weights: its own, or the target's if the draft is a layer of its checkpoint."""
    if spec.draft_model_path is None:
        return served.model_path, served.load_format
    return spec.draft_model_path, spec.draft_load_format


def sharing_ranks(context: WorkerContext, draft: ModelConfig, target: DecoderModel) -> ParallelGroup:
    """The ranks that share the blocks of `draft`."""
    return draft_group(context.speculative.draft_tp_size, draft, target.context, context.config.device.tuning)


def draft_group(asked: int | None, draft: ModelConfig, target: ModelContext, tuning: DeviceTuning) -> ParallelGroup:
    """The ranks that share the blocks of `draft`. `asked`: the flag; 1 replicates, None decides by size.

    A sharded block reads fewer weights but needs two all-reduces, so small dense blocks are faster replicated on GPUs. All ranks make the
    same choice. The LM head is always sharded: its exchange carries one token per row.
    """
    replicated = asked == 1
    if asked is None and target.device.type != "cpu" and draft.moe is None:
        sum_bytes = tuning.nccl_sum_bytes if target.group.fused is None else tuning.sum_bytes
        replicated = faster_replicated(draft, target.group.size, sum_bytes)
    return ALONE if replicated else target.group


def loaded(context: WorkerContext, draft: Draft) -> tuple[Draft, ModelRunner, SpeculativeConfig]:
    """The arguments of a drafter: the draft with its weights, from its own folder or else from the target's; its runner; and the
    configuration. The draft's vocabulary needs a token for each branch of a node.
    """
    spec = context.speculative
    if spec.topk > draft.vocab_size:
        raise ConfigError(f"--speculative-eagle-topk is {spec.topk}; this draft has {draft.vocab_size} tokens. Use a smaller value.")
    load_weights(context, draft, *draft_weights(context.config.model, spec))
    if spec.draft_candidates and isinstance(draft, DraftHead):
        draft.find_candidates()
    log.info("draft: %s, %s, %d of %d tokens", spec.algorithm, draft.config.architecture, draft.vocab_size, draft.config.vocab_size)
    decoder, tuning = cast(DecoderModel, draft), context.config.device.tuning
    runner = ModelRunner(decoder, spec.attention_backend, context.dtype, context.device, tuning=tuning, group=context.group)
    return draft, runner, spec
