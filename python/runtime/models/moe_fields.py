"""Reads the fields of a config.json that describe sparse MLPs. No torch."""

from __future__ import annotations

from runtime.models.config import MoeConfig, Scoring
from runtime.models.config_fields import ConfigFields

COUNTS = ("num_experts", "num_local_experts")
"""Fields that hold the number of experts; transformers 5 writes the second for families whose files had the first."""


def moe_fields(
    fields: ConfigFields,
    *,
    inner: str = "moe_intermediate_size",
    scoring: Scoring = "softmax",
    renormalize: bool,
    layers: tuple[bool, ...] | None = None,
    shared: int = 0,
    bias: bool = False,
) -> MoeConfig:
    """The sparse MLPs of a family without groups.

    Args:
        inner: the field that holds the size of one expert.
        layers: whether each layer is sparse; all of them by default.
        shared: intermediate size of the shared expert.

    Raises:
        ConfigError: a field is missing, not of its type, or does not fit the others.
    """
    experts = next((name for name in COUNTS if fields.get(name, None) is not None), COUNTS[0])
    count, top_k = fields.positive(experts), fields.positive("num_experts_per_tok")
    if top_k > count:
        raise fields.error(f"num_experts_per_tok is {top_k}; it must be at most {experts}, {count}")
    return MoeConfig(
        num_experts=count,
        top_k=top_k,
        intermediate_size=fields.positive(inner),
        scoring=scoring,
        renormalize=renormalize,
        shared_intermediate_size=shared,
        layers=layers or (True,) * fields.num_layers(),
        bias=bias,
    )


def sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Which layers are sparse in the Qwen families: every `decoder_sparse_step`-th, without `mlp_only_layers`."""
    step, dense = fields.positive("decoder_sparse_step", 1), set(fields.ids("mlp_only_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(fields.num_layers()))
