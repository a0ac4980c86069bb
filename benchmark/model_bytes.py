"""The bytes that a model reads, computed from the tensors of its checkpoint, for any family, weight format and draft."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from benchmark.random_checkpoint import stored_bytes, target_of
from benchmark.step_bytes import Experts, ModelRoof, StepBytes
from runtime.layers.attention.base import AttentionSpec
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel
from runtime.models.dflash import DFlashDraftModel
from runtime.models.draft_config import load_draft_config
from runtime.models.eagle import LlamaForCausalLMEagle
from runtime.models.eagle3 import LlamaForCausalLMEagle3
from runtime.models.mtp import MtpDraft

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
UNREAD = (EMBEDDING, HEAD, "d2t", "t2d")
"""Name endings of tensors that a pass does not read completely; the head is counted separately."""
FUSE = ("fc.weight", "eh_proj.weight", "input_proj.weight")
"""Name endings of the layers that fuse the inputs of a draft. Only the first draft pass of an iteration reads that of an EAGLE-3 head."""
WHOLE = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "gate.weight", "router.weight", *FUSE)
"""Name endings of large tensors that are not sharded."""


def roof_of(folder: Path, algorithm: str | None, draft: Path | None = None, hot_tokens: int | None = None) -> ModelRoof:
    """The roof of the target in `folder`, with the draft in `draft` or with the MTP layer in the target's checkpoint.

    Args:
        algorithm: the value of `--speculative-algorithm`; None for no drafts.
        hot_tokens: number of LM head rows that an MTP layer reads; None for all.
    """
    target = target_of(folder)
    own = _step_bytes(target.expected_weights(), target.config, target.attention_specs, target.config.vocab_size)
    own = replace(own, states=sum(2 * 4 * state.num_heads * state.key_dim * state.value_dim for state in target.state_specs))
    if algorithm is None:
        return ModelRoof(own, StepBytes(0.0, None, 0.0))
    model = _draft_of(target, algorithm, draft)
    vocab = hot_tokens or model.vocab_size
    once = FUSE if algorithm == "EAGLE3" else ()
    read = _step_bytes(model.expected_weights(), model.config, model.attention_specs, vocab, once)
    return ModelRoof(own, read, one_pass=algorithm == "DFLASH")


def _draft_of(
    target: DecoderModel, algorithm: str, folder: Path | None
) -> MtpDraft | DFlashDraftModel | LlamaForCausalLMEagle | LlamaForCausalLMEagle3:
    if algorithm == "MTP":
        return MtpDraft(target)
    assert folder is not None, "a draft of its own"
    if algorithm == "DFLASH":
        return DFlashDraftModel(load_draft_config(folder, "DFLASH", target.config), target)
    if algorithm == "EAGLE3":
        return LlamaForCausalLMEagle3(load_draft_config(folder, "EAGLE3", target.config), target)
    return LlamaForCausalLMEagle(load_draft_config(folder, "EAGLE", target.config), target)


def _step_bytes(
    tensors: Mapping[str, tuple[int, ...]], config: ModelConfig, specs: Iterable[AttentionSpec], vocab: int, once: tuple[str, ...] = ()
) -> StepBytes:
    """The bytes that a pass of a model with these tensors reads, if its head scores `vocab` tokens."""
    sizes = {name: size for name, size in stored_bytes(tensors).items() if not name.endswith(UNREAD)}
    # Absorbed attention reads the key and value halves in 16 bits, whatever their stored format.
    sizes |= {name: math.prod(tensors[name]) * 2 for name in sizes if name.endswith("kv_b_proj.weight")}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    first = sum(size for name, size in sizes.items() if once and name.endswith(once))
    head = vocab * config.hidden_size * 2
    whole = sum(size for name, size in sizes.items() if name.endswith(WHOLE) and not (once and name.endswith(once)))
    windows = {spec.window for spec in specs if spec.window >= 0}
    assert len(windows) <= 1, "one window for all layers that have one"
    full = sum(spec.kv.bytes_per_slot for spec in specs if spec.window < 0)
    limited = sum(spec.kv.bytes_per_slot for spec in specs if spec.window >= 0)
    experts, moe = None, config.moe
    if moe is not None and routed:
        layers = sum(moe.layers)
        experts = Experts(moe.num_experts, moe.top_k, routed / layers / moe.num_experts, layers)
    window = max(windows, default=-1) + 1
    fixed = sum(sizes.values()) - routed - first + head
    return StepBytes(fixed, experts, full, limited, window, first, whole, shared_kv=config.latent is not None)
