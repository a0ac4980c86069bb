"""Reads what the config.json of a DFlash draft says in addition to its decoder. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.models import qwen3
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.hf_config import attention_bias, decoder_config, read_hf_config, sliding_windows
from runtime.models.speculators_layout import KIND

BLOCK_SIZE = 16
"""The block size if the file gives none."""
SECOND_VERSION = ("conv_kernel_size", "selector_rank")
"""Fields by which drafts of DFlash 2, which have other layers, are recognised."""
OTHER_DRAFTERS: dict[str, object] = {"projector_type": "dflash", "sample_from_anchor": False, "shift_label": False}
"""Fields of drafts of speculators and SpecForge whose other values mean another way of drafting, such as DSpark and Domino."""


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """How a draft fills blocks.

    Attributes:
        size: tokens of a block: the last committed one and the masked ones that are drafted.
        mask_id: id of the mask token.
        embed_scale: factor applied to the target's embeddings.
        causal: for each layer, whether its queries see the keys of the block up to their own only.
    """

    size: int
    mask_id: int
    embed_scale: float
    causal: tuple[bool, ...]


def read_block_size(folder: str | Path) -> int:
    """Number of tokens per block of the draft in `folder`. Raises `ConfigError` if the file is not that of a DFlash draft, or if a block is
    too small for a draft.
    """
    fields = ConfigFields(read_hf_config(folder), str(folder))
    size = _own_fields(fields).positive("block_size", BLOCK_SIZE)
    if size == 1:
        raise fields.error("block_size is 1; a block needs a second token to draft one")
    return size


def parse(fields: ConfigFields) -> ModelConfig:
    """The decoder: Qwen 3's layers, of which those with a window are named by `layer_types`.

    Raises:
        ConfigError: a field is missing, not of its type, or not supported.
    """
    own = _own_fields(fields)
    for name, supported in OTHER_DRAFTERS.items():
        if (value := own.get(name, supported)) != supported:
            raise fields.error(f"{name} is {value!r}; only {supported!r} is supported")
    fields = fields.with_defaults(qwen3.DEFAULTS)
    window = sliding_windows(fields) if fields.given("layer_types") else None
    return decoder_config(fields, **attention_bias(fields), qk_norm=True, window=window)


def read_draft_block(fields: ConfigFields, model: ModelConfig) -> DraftBlock:
    """How the draft `model` fills blocks.

    Raises:
        ConfigError: a field is missing, or the draft is of a later version.
    """
    own = _own_fields(fields)
    for name in SECOND_VERSION:
        if own.get(name, None) is not None:
            raise fields.error(f"{name} is given: drafts of DFlash 2 are not supported")
    # Older drafts of speculators, which lack the field, were trained without causal layers.
    windowed = not fields.with_defaults({"sliding_window_non_causal": fields.given(KIND)}).flag("sliding_window_non_causal")
    given = fields.given("is_causal")
    each = (fields.flag("is_causal"),) * model.num_layers if given else tuple(windowed and window >= 0 for window in model.window)
    mask_id = own.count("mask_token_id", model.vocab_size)
    if mask_id >= model.vocab_size:
        raise fields.error(f"mask_token_id must be a token id below {model.vocab_size}")
    return DraftBlock(own.positive("block_size", BLOCK_SIZE), mask_id, own.number("input_embedding_scale", 1.0), each)


def read_aux_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """The target layers whose input the draft reads. `target_layer_ids` numbers layers by output, which is the next layer's input; drafts
    of speculators number them by input.
    """
    name, shift = ("aux_hidden_state_layer_ids", 0) if fields.given(KIND) else ("target_layer_ids", 1)
    ids = _own_fields(fields).ids(name, "the number of a layer")
    if not ids or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < num_layers - shift:
        raise fields.error(f"{name} must name layers of the target, ascending, below its last of {num_layers}; got {ids}")
    return tuple(i + shift for i in ids)


def _own_fields(fields: ConfigFields) -> ConfigFields:
    """The fields of `dflash_config`, which may also be top-level fields."""
    return fields.under("dflash_config")
