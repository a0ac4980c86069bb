"""Speculative workers on the CPU whose drafts are often right: weights set by hand, so that acceptance lies between none and all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config.kernel_configs import TritonConfig
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.layers.bounded_head import BoundedHead
from runtime.layers.linear import Linear
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.build import build_worker
from runtime.model_executor.context import BuildOptions
from runtime.model_executor.followers import Followers
from runtime.models.block import SandwichBlock
from runtime.models.config import ModelConfig
from runtime.models.eagle import LlamaForCausalLMEagle
from runtime.models.eagle3 import LlamaForCausalLMEagle3
from runtime.speculative.registry import make_drafter
from unit.driver import EveryNth
from unit.tiny import tiny_model, tiny_runtime, tiny_speculative

VOCAB = 97
"""No multiple of any tile."""
RUNTIME = dict(max_running_requests=40, max_total_tokens=8192)


def model_config(**changes: Any) -> ModelConfig:
    """`tiny_model` with two layers, and of another vocabulary."""
    return tiny_model(**{"vocab_size": VOCAB, "num_layers": 2, "window": (-1, -1), **changes})


def three_layers() -> ModelConfig:
    """`model_config` with three layers."""
    return tiny_model(vocab_size=VOCAB)


def draft_folder(folder: Path, algorithm: str, layers: int = 2, **changes: Any) -> str:
    """config.json of a draft: heads with one layer and, for EAGLE-3, more KV heads than the target."""
    names = {
        "EAGLE": "LlamaForCausalLMEagle",
        "EAGLE3": "LlamaForCausalLMEagle3",
        "STANDALONE": "LlamaForCausalLM",
        "DFLASH": "DFlashDraftModel",
    }
    raw: dict[str, Any] = dict(
        architectures=[names[algorithm]], model_type="llama", vocab_size=VOCAB, hidden_size=64, intermediate_size=128,
        num_hidden_layers=layers if algorithm == "STANDALONE" else 1, num_attention_heads=4,
        num_key_value_heads=4 if algorithm == "EAGLE3" else 2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0,
        max_position_embeddings=256, tie_word_embeddings=False, torch_dtype="float32", eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    if algorithm == "DFLASH":
        raw |= {"num_hidden_layers": 2, "num_key_value_heads": 4, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0]}}
    if algorithm == "EAGLE3":
        raw |= {"draft_vocab_size": changes.pop("draft_vocab_size", VOCAB), "target_hidden_size": 64}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return str(folder)


def plain(
    replay: Any = None,
    sizes: list[int] | None = None,
    sharp: float = 1.0,
    model: ModelConfig | None = None,
    group: ParallelGroup = ALONE,
    followers: Followers | None = None,
    **runtime: Any,
) -> Any:
    """The same target without speculation."""
    config = tiny_runtime(**{**RUNTIME, **runtime})
    worker = build_worker(config, model or model_config(), options=BuildOptions(replay, sizes), group=group, followers=followers)
    calm(worker.parts.target.runner.model, sharp)
    return worker


def speculating(
    tmp_path: Path,
    algorithm: str = "EAGLE",
    replay: Any = None,
    sizes: list[int] | None = None,
    runtime: dict[str, Any] | None = None,
    sharp: float = 1.0,
    model: ModelConfig | None = None,
    head: dict[str, Any] | None = None,
    group: ParallelGroup = ALONE,
    followers: Followers | None = None,
    **spec: Any,
) -> Any:
    """A worker of a target and a draft that knows it well enough."""
    folder = None if algorithm == "NGRAM" else draft_folder(tmp_path / algorithm, algorithm, **(head or {}))
    if spec.get("topk", 1) == 1:
        spec.setdefault("num_draft_tokens", spec.get("num_steps", 3) + 1)
    config = tiny_runtime(
        tiny_speculative("", algorithm=algorithm, **{"draft_model_path": folder, **spec}), **{**RUNTIME, **(runtime or {})}
    )
    worker = build_worker(config, model or model_config(), make_drafter, BuildOptions(replay, sizes), group, followers)
    worker.parts.monitor.schedule = EveryNth(512)  # too few iterations to have a sample
    calm(worker.parts.target.runner.model, sharp)
    if algorithm == "STANDALONE":
        calm(worker.parts.drafter.model.model, sharp)
        if model is not None and model.delta is not None:  # its tensors differ, and thus the random numbers of all behind them
            worker.parts.drafter.model.model.lm_head.weight.copy_(worker.parts.target.runner.model.lm_head.weight)
        worker.parts.drafter.model.model.layers[0].attention.o_proj.weight.mul_(2.5)
    elif algorithm == "DFLASH":
        teach_block_draft(worker.parts.drafter.model, worker.parts.target.runner.model)
    elif algorithm != "NGRAM":
        teach(worker.parts.drafter.model, worker.parts.target.runner.model.lm_head.weight)
    return worker


def use_head_bounds(patch: pytest.MonkeyPatch) -> None:
    """From now on LM heads have bounds on a CPU too, where all tokens are scored instead."""

    def bounded_head(ops: TorchOps, head: Linear) -> BoundedHead:
        bounded = BoundedHead(head)
        bounded.choices[1] = TritonConfig(128, 128, 4, 4)
        return bounded

    patch.setattr(TorchOps, "bounded_head", bounded_head)


def exact_product(self: Linear, x: torch.Tensor, in_prompt: bool = False) -> torch.Tensor:
    """`Linear.__call__` in float64, rounded once: the bits of a row no longer depend on how many rows are multiplied beside it."""
    out = (x.double() @ self.weight.double().T).to(x.dtype)
    return out if self.bias is None else out + self.bias


def calm(model: Any, sharp: float) -> None:
    """Attention that matters, but less than the token itself; `sharp` multiplies the logits."""
    for layer in model.layers:
        if isinstance(layer, SandwichBlock):  # the norms after attention and MLP would undo a factor of the projections
            layer.attn_out_norm.weight.mul_(0.02)
            layer.mlp_out_norm.weight.mul_(0.02)
            continue
        storage = layer.attention.o_proj.storage
        (storage.weight if storage.scale is None else storage.scale).mul_(0.4)
    model.lm_head.weight.mul_(8.0 * sharp)


def teach_block_draft(draft: Any, target: Any) -> None:
    """The draft goes by the embedding of the block's first token, and a little by the context; it leaves masked tokens out."""
    mask = target.embed[draft.draft_block.mask_id]
    others = torch.eye(len(mask)) - torch.outer(mask, mask) / mask.dot(mask)
    draft._context_norm.weight.mul_(0.05)
    for layer in draft.layers:
        layer.attention.heads.q_norm.weight.mul_(0.1)  # attends to all alike
        layer.attention.qkv_proj.weight[-len(others) :] = others  # as many KV heads as query heads
        layer.attention.o_proj.weight.copy_(20.0 * torch.eye(len(others)))


def teach(head: Any, target_head: torch.Tensor) -> None:
    """The head goes by the embedding of the token it reads, as the target mostly does, and a little by all else it is fed."""
    hidden = head.config.hidden_size
    eye = torch.eye(hidden)
    if isinstance(head, LlamaForCausalLMEagle):
        head.fc.weight[:, :hidden] = 50 * eye
        head.fc.weight[:, hidden:] *= 1.5
        head.layers[0].attention.o_proj.weight.mul_(12.0)
        return
    assert isinstance(head, LlamaForCausalLMEagle3)
    layer = head.layers[0]
    q, k, v = layer.attention.qkv_proj.weight.split(hidden)  # as many KV heads as query heads
    for part, gain in ((q, 1.6), (k, 1.6), (v, 1.0)):
        part.mul_(2.0)
        part[:, :hidden] += gain * eye  # a token attends to itself most, and carries its embedding
    layer.attention.o_proj.weight.copy_(eye)
    if head.fc is not None:
        head.fc.weight.mul_(8.0)
    head.lm_head.weight.copy_(target_head if head.to_target is None else target_head[head.to_target])
