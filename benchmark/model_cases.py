"""The models of the matrix: their shapes and drafts, and tiny versions for smoke runs on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmark import random_checkpoint
from benchmark.model_bytes import roof_of
from benchmark.shapes import CONFIGS
from benchmark.step_bytes import ModelRoof
from runtime.model_files.checkpoint_folder import INDEX

SEED = ("--random-seed", "1")
TINY: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"num_hidden_layers": 3, "max_position_embeddings": 1024, "sliding_window": 32, "rotary_dim": 8, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    **{"num_experts_per_tok": 2, "experts_per_token": 2, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 16, "num_global_key_value_heads": 1, "global_head_dim": 32},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"shared_expert_intermediate_size": 32, "full_attention_interval": 3},
    **{"draft_vocab_size": 256, "target_hidden_size": 64, "eos_token_id": 1},
}
"""Sizes of a tiny model, for fields that its config.json has."""
TINY_FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--max-total-tokens",
    "4096",
    "--max-running-requests",
    "8",
    "--cpu-threads",
    "1",
    "--skip-server-warmup",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One model of the matrix.

    Attributes:
        title: its name in the tables.
        shape, draft: folders in `benchmark/configs`; without a draft, MTP uses a layer of the target's checkpoint.
        peers: tok/s of one request with a peer, from the sum of its published kernel times; None if not published.
        changes: config.json fields of the target with other values.
        hot_tokens: size of the MTP layer's token map; None for all tokens.
        accept_lengths: the synthetic accept lengths.
        steps: draft depth that the roof is computed for.
        fixed: servers use the depth `steps`, not their default, so that iterations of two servers can be compared.
        tp_size: number of GPUs that share the model.
        groups: number of attention groups of these GPUs. With several, tables have no roof, because each group reads its own weights.
        in_file: whether it is loaded from a checkpoint file. Other weights are created on the device, because the disk is too small, or
            because the model is dense and its time does not depend on them.
        flags: further flags of every server.
    """

    title: str
    shape: str
    draft: str | None = None
    algorithm: str = "EAGLE3"
    peers: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hot_tokens: int | None = None
    accept_lengths: tuple[str, ...] = ("2.5",)
    steps: int = 3
    fixed: bool = False
    tp_size: int = 1
    groups: int = 1
    in_file: bool = True
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """A case whose files are in a folder: the flags of its server, those of its drafts, and its roof, if known."""

    folder: Path
    target_flags: tuple[str, ...]
    draft_flags: tuple[str, ...]
    roof: ModelRoof | None


BLOCKS = ("--max-running-requests", "16", "--cuda-graph-max-bs", "16", "--context-length", "4096")
"""Limits for blocks: the logits of a block of 16 tokens take 16 MiB per request."""
CASES = {
    "qwen3-30b-a3b": Case("Qwen3-30B-A3B, bf16", "qwen3-30b-a3b", "qwen3-30b-a3b-eagle3", peers="250"),
    "qwen3-30b-a3b-fp8": Case("Qwen3-30B-A3B-FP8", "qwen3-30b-a3b-fp8", "qwen3-30b-a3b-eagle3", peers="275 to 300"),
    "qwen3-30b-a3b-fp8-groups": Case(
        "Qwen3-30B-A3B-FP8, two attention groups", "qwen3-30b-a3b-fp8", "qwen3-30b-a3b-eagle3", tp_size=2, groups=2,
    ),
    "qwen3-30b-a3b-gptq": Case("Qwen3-30B-A3B, int4 (GPTQ)", "qwen3-30b-a3b-gptq", "qwen3-30b-a3b-eagle3"),
    "llama-3-8b": Case("Llama 3 8B, bf16", "llama-3-8b", "llama-3-8b-eagle", "EAGLE", in_file=False),
    "llama-3-8b-awq": Case("Llama 3 8B, int4 (AWQ)", "llama-3-8b-awq", "llama-3-8b-eagle", "EAGLE", in_file=False),
    "gpt-oss-20b": Case("gpt-oss-20b, MXFP4", "gpt-oss-20b", "gpt-oss-20b-eagle3", peers="345"),
    "gpt-oss-120b": Case("gpt-oss-120b, MXFP4", "gpt-oss-120b", "gpt-oss-20b-eagle3", in_file=False),
    "qwen3.5-35b-a3b": Case(
        "Qwen3.5-35B-A3B, bf16", "qwen3.5-35b-a3b", algorithm="MTP", in_file=False, flags=("--context-length", "32768"),
    ),
    "glm-4.7-flash": Case("GLM-4.7-Flash, bf16", "glm-4.7-flash", algorithm="MTP", flags=("--context-length", "8192")),
    "mimo-7b": Case("MiMo-7B, bf16, drafts from 32,000 hot tokens", "mimo-7b", algorithm="MTP", hot_tokens=32000),
    "gemma-4-31b": Case(
        "Gemma 4 31B, bf16, blocks of 16", "gemma-4-31b", "gemma-4-31b-dflash", "DFLASH",
        accept_lengths=("3", "5", "7"), steps=15, in_file=False, flags=BLOCKS,
    ),
    "llama-3-70b": Case("Llama 3 70B, bf16", "llama-3-70b", "llama-3-70b-eagle3", tp_size=4, in_file=False),
    "minimax-m2.5": Case("MiniMax-M2.5, FP8", "minimax-m2.5", "minimax-m2.5-eagle3", tp_size=2, in_file=False),
    **{
        f"deepseek-v3-{layers}-layers": Case(
            f"DeepSeek-V3, FP8, its first {layers} layers", "deepseek-v3", algorithm="MTP",
            changes={"num_hidden_layers": layers}, fixed=True, tp_size=2, in_file=False, flags=("--context-length", "4096"),
        )
        for layers in (8, 4)
    },
}  # fmt: skip


def prepare(case: Case, folder: Path) -> Served:
    """Write the case's config.json, and its checkpoint if it is loaded from a file."""
    target = folder / f"{case.shape}-{case.changes['num_hidden_layers']}" if case.changes else folder / case.shape
    if not case.in_file:
        random_checkpoint.write_config(CONFIGS / case.shape, target, case.changes)
    elif not (target / INDEX).is_file():  # which is written last
        random_checkpoint.write(CONFIGS / case.shape, target, case.changes)
    draft = None if case.draft is None else CONFIGS / case.draft
    roof = None if case.groups > 1 else roof_of(target, case.algorithm, draft, case.hot_tokens).of_ranks(case.tp_size)
    ranks = ("--tp-size", str(case.tp_size)) if case.tp_size > 1 else ()
    if case.groups > 1:
        ranks += ("--dp-size", str(case.groups), "--enable-dp-attention", "--ep-size", str(case.tp_size))
    made = () if case.in_file else ("--load-format", "dummy")
    return _served(case, target, draft, (*ranks, *made), roof)


def prepare_tiny(case: Case, folder: Path) -> Served:
    """Write a tiny model of the case's family and formats, and its checkpoint, for one process on a CPU."""
    layers = {"num_hidden_layers": case.changes["num_hidden_layers"]} if case.changes else {}
    target = folder / f"tiny-{case.shape}"
    random_checkpoint.write(CONFIGS / case.shape, target, _tiny(case.shape) | layers)
    draft = None
    if case.draft is not None:
        draft = folder / f"tiny-{case.draft}"
        random_checkpoint.write_config(CONFIGS / case.draft, draft, _tiny(case.draft) | {"num_hidden_layers": 1})
    return _served(dataclasses.replace(case, hot_tokens=case.hot_tokens and 256, flags=()), target, draft, TINY_FLAGS, None)


def _tiny(shape: str) -> dict[str, Any]:
    """The fields of a shape's config.json that are smaller in a tiny model."""
    config = random_checkpoint.read_config(CONFIGS / shape)
    text = config.get("text_config", config)
    changes = {name: value for name, value in TINY.items() if name in text}
    if "kv_lora_rank" in text:
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    if "group_size" in (quant := text.get("quantization_config", {})):
        changes["quantization_config"] = quant | {"group_size": 32}
    if text.get("n_group") == 1:
        changes["n_group"] = 1
    if text.get("layer_types"):
        changes["layer_types"] = text["layer_types"][-TINY["num_hidden_layers"] :]
    if "eagle_config" in text:
        changes["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    if "dflash_config" in text:
        changes["dflash_config"] = text["dflash_config"] | {"target_layer_ids": [0, 1]}
    return changes


def _served(case: Case, target: Path, draft: Path | None, flags: tuple[str, ...], roof: ModelRoof | None) -> Served:
    drafts: tuple[str, ...] = ("--speculative-algorithm", case.algorithm)
    if draft is not None:
        drafts += ("--speculative-draft-model-path", str(draft), "--speculative-draft-load-format", "dummy")
    if case.fixed:
        drafts += ("--speculative-num-steps", str(case.steps))
    if case.hot_tokens is not None:
        torch.save(list(range(case.hot_tokens)), target / "hot_tokens.pt")
        drafts += ("--speculative-token-map", str(target / "hot_tokens.pt"))
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "none", *flags)  # the tokenizer is synthetic
    return Served(target, ("--model-path", str(target), *SEED, "--disable-radix-cache", *case.flags, *flags), drafts, roof)
