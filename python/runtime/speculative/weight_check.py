"""Compares checkpoints with their config.json before a start: builds models on torch's meta device, which allocates nothing, and loads them
from the headers of their files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing

import torch

from runtime.config.runtime_config import RuntimeConfig, SpeculativeConfig
from runtime.distributed.parallel_group import ParallelGroup
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.model_loader import Loadable, named
from runtime.model_executor.weight_loader import safetensors_weights
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel
from runtime.models.dflash import DFlashDraftModel
from runtime.models.draft_config import read_draft
from runtime.models.eagle import LlamaForCausalLMEagle
from runtime.models.eagle3 import LlamaForCausalLMEagle3
from runtime.models.mtp import MtpDraft
from runtime.models.registry import build_model
from runtime.speculative.draft_loader import draft_weights, read_token_map

META = torch.device("meta")
Make = Callable[[SpeculativeConfig, DecoderModel, torch.Tensor | None], Loadable]
DRAFTS: Mapping[str, Make] = {
    "EAGLE": lambda spec, target, tokens: LlamaForCausalLMEagle(read_draft(spec, target.config), target, tokens),
    "EAGLE3": lambda spec, target, _: LlamaForCausalLMEagle3(read_draft(spec, target.config), target),
    "DFLASH": lambda spec, target, tokens: DFlashDraftModel(read_draft(spec, target.config), target, tokens),
    "MTP": lambda _, target, tokens: MtpDraft(target, tokens),
    "STANDALONE": lambda spec, target, _: build_model(read_draft(spec, target.config).model, target.context.ops, target.dtype, META),
}
"""Makes the draft of a target, with the ids of a token map. Other algorithms have no weights, or weights that are not known here."""


def check_weights(config: RuntimeConfig, target_config: ModelConfig) -> None:
    """Refuse weights of the target or its draft that do not fit their config.json. Reads no numbers, except those of a draft's
    `d2t` and the groups of int4 columns.

    Raises:
        ConfigError: as `load` of the models, for tensors that are missing, unexpected or of a wrong shape or dtype; or the ranks cannot
            share the stored weights, which is not checked with groups of experts or of attention.
    """
    served, spec = config.model, config.speculative
    dtype: torch.dtype = getattr(torch, config.device.dtype)
    target = build_model(target_config, TorchOps(), dtype, META, fuse_shared=served.fuse_shared_experts)
    _check(target, served.model_path, served.load_format)
    parallel = config.parallel
    if target_config.quant is not None and parallel.tp_size > 1 and parallel.ep_size == parallel.dp_size == 1:
        for rank in (0, parallel.tp_size - 1):  # the largest and the smallest shards
            group = ParallelGroup(rank, parallel.tp_size)
            build_model(target_config, TorchOps(), dtype, META, group=group, fuse_shared=served.fuse_shared_experts)
    if spec is not None and spec.algorithm in DRAFTS:
        _check(DRAFTS[spec.algorithm](spec, target, read_token_map(spec)), *draft_weights(served, spec))


def _check(model: Loadable, folder: str, load_format: str) -> None:
    if load_format == "safetensors":
        with named(folder), closing(safetensors_weights(folder, progress=False)) as weights:
            model.load(weights)
