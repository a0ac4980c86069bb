"""The config.json of drafts published for the speculators library, which nests the decoder layer's fields. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from runtime.errors import ConfigError

LAYER, KIND = "transformer_layer_config", "speculators_model_type"
KINDS = ("eagle3", "dflash")


def flattened(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a draft, with those of a nested decoder layer moved to the top level. Such a draft has an LM head of its own, whatever
    its layer's copy of the target's configuration says.

    Raises:
        ConfigError: the draft is of a kind that is not supported, or its layer is not an object.
    """
    if (kind := raw.get(KIND, KINDS[0])) not in KINDS:
        raise ConfigError(f"{where}: {KIND} is {kind!r}; supported are {', '.join(KINDS)}")
    layer = raw.get(LAYER)
    if layer is None:
        return dict(raw)
    if not isinstance(layer, dict):
        raise ConfigError(f"{where}: {LAYER} is {layer!r}; it must be an object")
    outer = {name: value for name, value in raw.items() if value is not None and name != LAYER}
    return {**layer, **outer, "tie_word_embeddings": False}


def layer_type(raw: Mapping[str, Any], default: str, supported: Collection[str], where: str) -> str | None:
    """The `model_type` of a nested decoder layer, or `default` if it has none; None if no layer is nested.

    Raises:
        ConfigError: it is not one of `supported`.
    """
    if not raw.get(LAYER):
        return None
    kind = str(raw[LAYER].get("model_type", default))
    if kind not in supported:
        raise ConfigError(f"{where}: a decoder layer of model_type {kind} is not supported; supported are {', '.join(supported)}")
    return kind
