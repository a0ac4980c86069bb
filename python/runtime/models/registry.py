"""Maps class names in config.json to model families; parses configurations and builds models. Imports torch only to
build.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from runtime.config.quant_config import with_flag
from runtime.errors import ConfigError
from runtime.model_files.checkpoint_folder import tensor_places
from runtime.model_files.tied_head import HEAD, has_own_head
from runtime.models import (
    arcee,
    deepseek,
    deepseek_v2,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4,
    glm4_lite,
    glm4_moe,
    gpt_oss,
    granite,
    hunyuan_dense,
    hunyuan_v1_moe,
    llama,
    mimo,
    minimax_m2,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    solar_open,
)
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import read_hf_config
from runtime.models.quant_fields import read_quantization
from runtime.models.sharing import check_experts

if TYPE_CHECKING:
    import torch

    from runtime.distributed.parallel_group import ParallelGroup
    from runtime.layers.moe.token_exchange import TokenExchange
    from runtime.layers.ops import BlockOps
    from runtime.models.block import DecoderBlock
    from runtime.models.decoder import DecoderModel
    from runtime.models.parts import ModelParts

log = logging.getLogger(__name__)


class Family(Protocol):
    """One model family: how its config.json is read and how a layer is built. Each family is a module with these names."""

    @property
    def DEFAULTS(self) -> Mapping[str, object]:
        """The values that transformers assumes for fields missing from config.json. Booleans not listed are false; sizes that
        every file gives have no default.
        """
        ...

    def parse(self, fields: ConfigFields) -> ModelConfig:
        """The architecture. Raises `ConfigError` for an unsupported variant."""
        ...

    def block(self, parts: ModelParts, prefix: str, layer: int) -> DecoderBlock:
        """Layer `layer`, made from the tensors `prefix`*. Layers may differ. A layer for multi-token prediction is layer 0 of its draft."""
        ...


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MinistralForCausalLM": mistral,
    "Ministral3ForCausalLM": ministral3,
    "Mistral3ForConditionalGeneration": mistral3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe,
    "MixtralForCausalLM": mixtral,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": gemma4,
    "GptOssForCausalLM": gpt_oss,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek,
    "GlmForCausalLM": glm,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeLiteForCausalLM": glm4_lite,
    "Glm4MoeForCausalLM": glm4_moe,
    "MiMoForCausalLM": mimo,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Exaone4ForCausalLM": exaone4,
    "GraniteForCausalLM": granite,
    "Ernie4_5ForCausalLM": ernie4_5,
    "HunYuanDenseV1ForCausalLM": hunyuan_dense,
    "ArceeForCausalLM": arcee,
    "Phi3ForCausalLM": phi3,
    "SmolLM3ForCausalLM": smollm3,
    "SeedOssForCausalLM": seed_oss,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe,
    "Dots1ForCausalLM": dots1,
    "OlmoeForCausalLM": olmoe,
    "SolarOpenForCausalLM": solar_open,
    "HunYuanMoEV1ForCausalLM": hunyuan_v1_moe,
    "ExaoneMoeForCausalLM": exaone_moe,
    "ExaoneMoEForCausalLM": exaone_moe,
}
EMBEDDING = "embed_tokens.weight"
MAX_CONTEXT = 2**23
"""The longest context that a config.json may give, in tokens; published models have at most 4 million."""
QUANTIZED_PARTS = ("scale", "packed", "qweight", "blocks")
"""Parts of the names of tensors that every quantised weight has."""
MTP_CLASSES = (
    "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "Glm4MoeForCausalLM", "MiMoForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip
"""The classes whose `parse` may return a `ModelConfig.mtp`."""


def load_hf_config(folder: str | Path) -> ModelConfig:
    """The architecture of the model in `folder`.

    Raises:
        ConfigError: config.json is missing or unreadable, or its architecture or one of its values is not supported.
    """
    return of_checkpoint(parse_hf_config(read_hf_config(folder), str(folder)), folder)


def of_checkpoint(config: ModelConfig, folder: str | Path) -> ModelConfig:
    """The architecture as the weights in `folder` have it, like in transformers: with their names, and with their own head if it is not the
    embedding, whatever `tie_word_embeddings` says. Without a layer for multi-token prediction if they lack it, as converted checkpoints do.
    """
    wanted = config.mtp is not None or config.moe is None  # reading the names of all experts may take a second
    names = tensor_places(Path(folder)).keys() if wanted else set[str]()
    if names and config.mtp is not None and not any(name.startswith(config.mtp.prefix) for name in names):
        log.info("no layer for multi-token prediction in the checkpoint: %s", folder)
        config = replace(config, mtp=None)
    config = _with_plain_mtp(config, names)
    if EMBEDDING in names and config.weight_prefix + EMBEDDING not in names:  # a model saved without its head, as embedding models are
        no_head = not config.tie_embeddings and HEAD not in names
        if no_head:
            log.warning("no LM head in %s: the model can give embeddings, but cannot generate text", folder)
        config = replace(config, weight_prefix="", tie_embeddings=config.tie_embeddings or no_head, no_head=no_head)
    if not config.tie_embeddings or not has_own_head(Path(folder), config.weight_prefix + EMBEDDING, config.head_prefix + HEAD):
        return config
    log.info("the LM head is not the embedding, although config.json has tie_word_embeddings: %s", folder)
    return replace(config, tie_embeddings=False)


def _with_plain_mtp(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """`config`, whose layer for multi-token prediction stays in 16 bits if none of its tensors belongs to a quantised weight: tools that do
    not load this layer copy it, and may not list it among the layers that they leave out.
    """
    if config.mtp is None or config.quant is None or not names:
        return config
    prefix = config.mtp.prefix
    if any(part in name.rpartition(".")[2] for name in names if name.startswith(prefix) for part in QUANTIZED_PARTS):
        return config
    return replace(config, quant=replace(config.quant, kept=(*config.quant.kept, f"re:{re.escape(prefix)}")))


def parse_hf_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The architecture that the fields of a config.json describe; `where` names the file in errors."""
    fields = ConfigFields(raw, where)
    return parse_family(family_of(fields.architecture(), where), fields)


def parse_family(family: Family, fields: ConfigFields) -> ModelConfig:
    """The architecture of a model or a draft head of `family`, and how its weights are stored."""
    if fields.given("is_causal") and not fields.flag("is_causal"):  # as in models for embeddings whose tokens see the later ones too
        raise fields.error("is_causal is false; only causal attention is supported")
    config = replace(family.parse(fields.with_defaults(family.DEFAULTS)), quant=read_quantization(fields))
    if config.max_context_len > MAX_CONTEXT:  # its rotary table alone would not fit into memory
        raise fields.error(
            f"max_position_embeddings and the rope scaling give a context of {config.max_context_len:,} tokens; at most {MAX_CONTEXT:,} "
            "are supported. Correct them."
        )
    return config


def family_of(architecture: str, where: str) -> Family:
    """The family of an architecture. Raises `ConfigError` if it is not supported."""
    if architecture not in FAMILIES:
        raise ConfigError(f"{where}: architecture {architecture} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def build_model(
    config: ModelConfig,
    ops: BlockOps,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    group: ParallelGroup | None = None,
    ep_size: int = 1,
    kv_dtype: torch.dtype | None = None,
    exchange: TokenExchange | None = None,
    head_group: ParallelGroup | None = None,
    fuse_shared: bool = True,
) -> DecoderModel:
    """A model with its weights allocated but not yet loaded.

    Args:
        quantization: None for the checkpoint's own; "fp8", "int4" or, on a CPU, "int8" to quantise the linears of blocks as they are
            loaded; on a CPU the last two also store the LM head in int8.
        group: the ranks that share the model; None for this process alone.
        ep_size: groups of these ranks that the experts of a sparse model are placed on.
        kv_dtype: dtype of a KV cache with scales; None for one in `dtype`.
        exchange: exchanges tokens between attention groups, which share the experts of a sparse model; None for one group.
        head_group: the ranks that share the LM head; `group` by default.
        fuse_shared: whether the shared expert of a sparse model is stacked with the routed ones if possible.

    Raises:
        ConfigError: the architecture or the quantisation is not supported, or the experts cannot be placed.
    """
    from runtime.distributed.parallel_group import ALONE
    from runtime.layers.quantization.registry import quant_scheme
    from runtime.models.context import ModelContext
    from runtime.models.decoder import DecoderModel

    check_experts(config, ep_size)
    family = family_of(config.architecture, "the model")
    quant = with_flag(config.quant, quantization)
    scheme = quant_scheme(quant, quantization)
    context = ModelContext(ops, dtype, device, scheme, group or ALONE, quant, ep_size, kv_dtype, exchange, head_group, fuse_shared)
    return DecoderModel(config, context, family.block)
