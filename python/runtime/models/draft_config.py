"""The architecture of a draft model from its config.json, checked against the algorithm and the target. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.errors import ConfigError
from runtime.models import llama, qwen2
from runtime.models.config import ModelConfig
from runtime.models.hf_config import ConfigFields, read_hf_config
from runtime.models.registry import FAMILIES, Family, parse_family, parse_hf_config

DraftAlgorithm = Literal["EAGLE", "EAGLE3", "STANDALONE"]

DRAFT_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLMEagle": llama,
    "LlamaForCausalLMEagle3": llama,
    "Qwen2ForCausalLMEagle": qwen2,
    # The first published heads have their target's class name.
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
}
"""Which family's config.json a head's looks like, by class name."""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft's architecture.

    Attributes:
        model: its decoder; `max_context_len` is the target's, since published heads name the length they were trained
            on.
        aux_layers: EAGLE-3: target layers whose input the head reads, for `DecoderModel.forward`; () for other drafts.
    """

    model: ModelConfig
    aux_layers: tuple[int, ...]


def load_draft_config(folder: str | Path, algorithm: DraftAlgorithm, target: ModelConfig) -> DraftConfig:
    """The draft in `folder`, for `target`.

    Raises:
        ConfigError: config.json is unreadable or unsupported, is a draft of another algorithm, or does not fit the
            target.
    """
    raw, where = read_hf_config(folder), str(folder)
    name = _class_name(raw)
    fitting = _algorithms(name, raw, where)
    if algorithm not in fitting:
        raise ConfigError(f"{where} is {_described(fitting[0], name, raw)}")
    if algorithm == "STANDALONE":
        model = parse_hf_config(raw, where)
    elif name not in DRAFT_FAMILIES:
        raise ConfigError(f"{where}: an {algorithm} head of class {name} is not supported; supported are {', '.join(DRAFT_FAMILIES)}")
    else:
        model = parse_family(DRAFT_FAMILIES[name], ConfigFields({**raw, "architectures": [name]}, where))
    model = dataclasses.replace(model, max_context_len=target.max_context_len)
    _check_fit(model, target, algorithm)
    return DraftConfig(model, _aux_layers(raw, target.num_layers, where) if algorithm == "EAGLE3" else ())


def _class_name(raw: Mapping[str, Any]) -> str:
    return (raw.get("architectures") or ["LlamaForCausalLM"])[0]


def _algorithms(name: str, raw: Mapping[str, Any], where: str) -> tuple[DraftAlgorithm, ...]:
    """The algorithms that a draft of class `name` can serve, the most likely first: a head may look like a model of one
    layer.
    """
    if name not in DRAFT_FAMILIES and name not in FAMILIES:
        known = ", ".join(dict.fromkeys([*DRAFT_FAMILIES, *FAMILIES]))
        raise ConfigError(f"{where}: draft architecture {name} is not supported; supported are {known}")
    if name.endswith("Eagle3") or "draft_vocab_size" in raw:
        return ("EAGLE3",)
    if name not in FAMILIES:
        return ("EAGLE",)
    return ("EAGLE", "STANDALONE") if name in DRAFT_FAMILIES and raw.get("num_hidden_layers") == 1 else ("STANDALONE",)


def _described(algorithm: DraftAlgorithm, name: str, raw: Mapping[str, Any]) -> str:
    """What a draft for `algorithm` is, and what to do if the user asked for another algorithm."""
    if algorithm != "STANDALONE":
        return f"an {algorithm} head; use --speculative-algorithm {algorithm}"
    head = f", or name its class {name}Eagle in config.json if it is a head" if name in DRAFT_FAMILIES else ""
    return f"a whole model ({name}, num_hidden_layers {raw.get('num_hidden_layers')}); use --speculative-algorithm STANDALONE{head}"


def _check_fit(draft: ModelConfig, target: ModelConfig, algorithm: DraftAlgorithm) -> None:
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


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The target layers, by input, that EAGLE-3 heads read unless their config.json says otherwise: low, middle, high.

    Targets of fewer than 7 layers, for which no heads are published, give their last three streams.
    """
    if num_layers < 7:
        return (num_layers - 2, num_layers - 1, num_layers)
    return (2, num_layers // 2, num_layers - 3)


def _aux_layers(raw: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    head = raw.get("eagle_config") or {}
    ids = head.get("eagle_aux_hidden_state_layer_ids") if isinstance(head, dict) else head
    if ids is not None and not (isinstance(ids, list) and all(isinstance(i, int) for i in ids)):
        raise ConfigError(f"{where}: eagle_config is {head!r}; its eagle_aux_hidden_state_layer_ids must be a list of layer numbers")
    # The file counts layer outputs; the output of a layer is the input of the next.
    layers = default_aux_layers(num_layers) if ids is None else tuple(i + 1 for i in ids)
    if len(layers) != 3 or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
        raise ConfigError(f"{where}: EAGLE-3 needs three different layers of its target, ascending; got {list(layers)} of {num_layers}")
    return layers
