"""Reads the fields of a config.json that describe sparse MLPs. Does not import torch."""

from __future__ import annotations

from runtime.models.config import MoeConfig, Scoring
from runtime.models.config_fields import ConfigFields


def moe_fields(
    fields: ConfigFields,
    counts: tuple[str, ...],
    *,
    top_k: str = "num_experts_per_tok",
    inner: str = "moe_intermediate_size",
    scoring: Scoring = "softmax",
    correction: bool = False,
    renormalize: bool,
    layers: tuple[bool, ...] | None = None,
    shared: int = 0,
    bias: bool = False,
) -> MoeConfig:
    """The sparse MLPs of a family without expert groups.

    Args:
        counts: the fields that may hold the number of experts; the first wins, as in transformers, and the last has a default.
        top_k: the field that holds how many of them a token is routed to.
        inner: the field that holds the size of one expert.
        correction: whether the router has a correction bias.
        layers: whether each layer is sparse; all of them by default.
        shared: intermediate size of the shared expert.

    Raises:
        ConfigError: a field is missing, not of its type, or does not fit the others.
    """
    count = fields.named(*counts)
    experts, chosen = fields.positive(count), fields.positive(top_k)
    if chosen > experts:
        raise fields.error(f"{top_k} is {chosen}; it must be at most {count}, {experts}")
    return MoeConfig(
        num_experts=experts,
        top_k=chosen,
        intermediate_size=fields.positive(inner),
        scoring=scoring,
        correction=correction,
        renormalize=renormalize,
        shared_intermediate_size=shared,
        layers=layers or (True,) * fields.num_layers(),
        bias=bias,
    )


def expert_groups(fields: ConfigFields, count: str, top_k: int) -> tuple[int, int]:
    """The number of groups of experts, and how many of them a token keeps before it chooses `top_k` experts.

    Raises:
        ConfigError: the experts cannot be grouped like this, or the kept groups have too few.
    """
    experts, groups, kept = fields.positive(count), fields.positive("n_group"), fields.positive("topk_group")
    if experts % groups:
        raise fields.error(f"{count} is {experts}; it must be a multiple of n_group, {groups}")
    size = experts // groups
    if groups > 1 and size < 2:
        raise fields.error(f"n_group is {groups}; a group needs two of the experts, and {count} is {experts}")
    if kept > groups:
        raise fields.error(f"topk_group is {kept}; it must be at most n_group, {groups}")
    if top_k > kept * size:
        raise fields.error(f"num_experts_per_tok is {top_k}; it must be at most {kept * size}, the experts of topk_group, {kept}, groups")
    return groups, kept


def sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Which layers are sparse in the Qwen families: every `decoder_sparse_step`-th except `mlp_only_layers`."""
    step, dense = fields.positive("decoder_sparse_step"), set(fields.ids("mlp_only_layers", "the number of a layer"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(fields.num_layers()))


def named_layers(fields: ConfigFields) -> tuple[bool, ...] | None:
    """Which layers are sparse by `mlp_layer_types`; None if the file lacks it.

    Raises:
        ConfigError: it does not name the kind of each layer.
    """
    count, kinds = fields.num_layers(), fields.get("mlp_layer_types", None)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in ("dense", "sparse") for kind in kinds):
        raise fields.error(f"mlp_layer_types must name dense or sparse for each of {count} layers")
    return tuple(kind == "sparse" for kind in kinds)
