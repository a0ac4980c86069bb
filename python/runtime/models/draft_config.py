"""Reads a draft model's config.json and checks it against the algorithm and the target. Does not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config.draft_algorithms import SpecAlgorithm
from runtime.errors import ConfigError
from runtime.models import dflash_config, llama, mistral, qwen2, qwen3
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.dflash_config import DraftBlock
from runtime.models.eagle3_layout import EAGLE3_CLASS, FIRST_LAYOUT, Eagle3Layout, is_eagle3, read_aux_layers
from runtime.models.hf_config import read_hf_config, sliding_windows
from runtime.models.registry import FAMILIES, MTP_CLASSES, Family, of_checkpoint, parse_family, parse_hf_config
from runtime.models.speculators_layout import flattened, layer_type

DRAFT_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLMEagle": llama,
    EAGLE3_CLASS: llama,
    "Qwen2ForCausalLMEagle": qwen2,
    # The first published heads have their target's class name.
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
}
"""The family in whose format a head's config.json is written, by class name."""
LAYER_FAMILIES: dict[str, Family] = {"llama": llama, "qwen3": qwen3}
"""The family of a head's nested decoder layer, by its `model_type`."""
DFLASH_CLASS = "DFlashDraftModel"
MTP_HINT = "leave out --speculative-draft-model-path to draft with the target's layer for multi-token prediction"
"""For users of SGLang, which also takes the path of such a layer, or of the target."""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft's architecture.

    Attributes:
        model: its decoder; `max_context_len` is the target's, since published heads state their training length instead.
        aux_layers: EAGLE-3 and DFlash: target layers whose input the draft reads, for `DecoderModel.forward`; () for others.
        layout: EAGLE-3: the options in which published heads differ.
        draft_block: DFlash: how blocks are filled; None for other drafts.
    """

    model: ModelConfig
    aux_layers: tuple[int, ...] = ()
    layout: Eagle3Layout = FIRST_LAYOUT
    draft_block: DraftBlock | None = None


def load_draft_config(folder: str | Path, algorithm: SpecAlgorithm, target: ModelConfig) -> DraftConfig:
    """The draft in `folder`, for `target`.

    Raises:
        ConfigError: config.json is unreadable or unsupported, is a draft of another algorithm, or does not fit the
            target.
    """
    where = str(folder)
    raw = read_hf_config(folder)
    flat = flattened(raw, where)
    name = _class_name(flat, where)
    fitting = _algorithms(name, flat, where)
    if algorithm not in fitting:
        raise _of_another_algorithm(fitting[0], name, flat, where)
    if algorithm == "STANDALONE":
        model = of_checkpoint(parse_hf_config(raw, where), folder)
    elif algorithm == "DFLASH":
        layer_type(raw, "qwen3", ("qwen3",), where)
        model = dflash_config.parse(ConfigFields({**flat, "architectures": [name]}, where))
    else:
        nested = layer_type(raw, "llama", LAYER_FAMILIES, where)
        model = _parse_head(name, ConfigFields({**flat, "architectures": [name]}, where), algorithm, nested)
    model = dataclasses.replace(model, max_context_len=target.max_context_len)
    _check_fit(model, target, algorithm)
    if algorithm == "DFLASH":
        fields = ConfigFields(flat, where)
        layers, block = dflash_config.read_aux_layers(fields, target.num_layers), dflash_config.read_draft_block(fields, model)
        return DraftConfig(model, layers, draft_block=block)
    if algorithm != "EAGLE3":
        return DraftConfig(model)
    return DraftConfig(model, read_aux_layers(raw, target, where), Eagle3Layout.read(ConfigFields(flat, where)))


def _parse_head(name: str, fields: ConfigFields, algorithm: SpecAlgorithm, nested: str | None) -> ModelConfig:
    """The decoder of a head. `nested`: the type of its nested layer. Raises `ConfigError` if its class is not supported."""
    if name not in DRAFT_FAMILIES:
        raise fields.error(f"an {algorithm} head of class {name} is not supported; supported are {', '.join(DRAFT_FAMILIES)}")
    if nested is not None:
        return parse_family(LAYER_FAMILIES[nested], fields)
    model = parse_family(DRAFT_FAMILIES[name], fields)
    kinds = fields.get("layer_types", [])
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        return model
    return dataclasses.replace(model, window=sliding_windows(fields.with_defaults(mistral.DEFAULTS)) or model.window)


def _class_name(raw: Mapping[str, Any], where: str) -> str:
    """The class name of a draft, with `EAGLE3_CLASS` for all its variants; some files of heads name none."""
    name = ConfigFields(raw, where).architecture() if raw.get("architectures") else "LlamaForCausalLM"
    return EAGLE3_CLASS if "eagle3" in name.lower() else name


def _algorithms(name: str, raw: Mapping[str, Any], where: str) -> tuple[SpecAlgorithm, ...]:
    """The algorithms that a draft of class `name` can serve, the most likely first: a head may look like a model of one
    layer.
    """
    if "dflash" in name.lower() or "dflash_config" in raw:
        return ("DFLASH",)
    if name.endswith(("NextN", "MTP")):
        raise ConfigError(f"{where}: draft architecture {name} is not supported; {MTP_HINT}")
    if name not in DRAFT_FAMILIES and name not in FAMILIES:
        known = ", ".join(dict.fromkeys([*DRAFT_FAMILIES, DFLASH_CLASS, *FAMILIES]))
        raise ConfigError(f"{where}: draft architecture {name} is not supported; supported are {known}")
    if is_eagle3(name, raw):
        return ("EAGLE3",)
    if name not in FAMILIES:
        return ("EAGLE",)
    return ("EAGLE", "STANDALONE") if name in DRAFT_FAMILIES and raw.get("num_hidden_layers") == 1 else ("STANDALONE",)


def _of_another_algorithm(algorithm: SpecAlgorithm, name: str, raw: Mapping[str, Any], where: str) -> ConfigError:
    """The error for a draft that belongs to `algorithm` but was given for another one."""
    if algorithm == "DFLASH":
        return ConfigError(f"{where} is a DFLASH draft; use --speculative-algorithm DFLASH")
    if algorithm != "STANDALONE":
        return ConfigError(f"{where} is an {algorithm} head; use --speculative-algorithm {algorithm}")
    layers = raw.get("num_hidden_layers")
    hint = f", or name its class {name}Eagle in config.json if it is a head" if name in DRAFT_FAMILIES else ""
    hint = f", or {MTP_HINT}" if name in MTP_CLASSES else hint
    return ConfigError(f"{where} is a whole model ({name}, num_hidden_layers {layers}); use --speculative-algorithm STANDALONE{hint}")


def _check_fit(draft: ModelConfig, target: ModelConfig, algorithm: SpecAlgorithm) -> None:
    """Raise `ConfigError` if a draft cannot serve a target."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft has a vocabulary of {draft.vocab_size} and its target of {target.vocab_size}; "
            f"--speculative-algorithm {algorithm} needs one vocabulary for both"
        )
    if algorithm == "STANDALONE":
        return
    width = (draft.target_hidden_size or draft.hidden_size) if algorithm == "EAGLE3" else draft.hidden_size
    if width != target.hidden_size:
        raise ConfigError(f"the draft head was made for a target of hidden size {width}; this one's is {target.hidden_size}")
