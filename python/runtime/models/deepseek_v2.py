"""DeepSeek-V2: latent attention, and a softmax router that may choose experts within groups, by the best expert of each group."""

from __future__ import annotations

from dataclasses import replace

from runtime.models import deepseek
from runtime.models.config import ModelConfig, MoeConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.moe_fields import expert_groups, moe_fields

DEFAULTS = {
    **deepseek.LAYER_DEFAULTS, "max_position_embeddings": 2048, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = "group_limited_greedy"


def parse(fields: ConfigFields) -> ModelConfig:
    """The architecture."""
    fields.only("mlp_bias", False)
    return deepseek.latent_config(fields, experts(fields))


def experts(fields: ConfigFields) -> MoeConfig | None:
    """The sparse MLPs: softmax scores, which are not renormalised, and expert groups if `topk_method` names them.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    if (name := deepseek.count_field(fields, "num_experts")) is None:
        return None
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)  # DeepSeek's code then leaves out the scaling factor, and that of transformers ignores it
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", GROUPED):
        raise fields.error(f"topk_method is {method!r}; only 'greedy' and {GROUPED!r} are supported")
    sparse, shared = deepseek.layers_with_experts(fields), deepseek.shared_size(fields)
    moe = moe_fields(fields, (name,), renormalize=False, layers=sparse, shared=shared)
    groups, top_groups = expert_groups(fields, name, moe.top_k) if method == GROUPED else (1, 1)
    scaling = fields.number("routed_scaling_factor", 1.0)
    return replace(moe, scaling=scaling, num_groups=groups, top_groups=top_groups, group_best=1)


block = deepseek.block
