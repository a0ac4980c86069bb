"""The published layouts of EAGLE-3 heads: class names, config.json fields, and which target layers they read. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import ConfigError
from runtime.models.config import ModelConfig
from runtime.models.config_fields import ConfigFields
from runtime.models.speculators_layout import LAYER

EAGLE3_CLASS = "LlamaForCausalLMEagle3"
"""SGLang's class name of EAGLE-3 heads; heads of all classes with "Eagle3" in their name are read as this one."""
AUX_FIELD = "eagle_aux_hidden_state_layer_ids"
COUNTED_BY_FIRST = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
"""Targets whose heads count layer inputs, unless the first layer that they name is 1."""


@dataclass(frozen=True, slots=True)
class Eagle3Layout:
    """Options in which EAGLE-3 heads differ.

    Attributes:
        norm_before_fc: the concatenated target states are normed before the projection (`input_norm`).
        fc_norm: each target state is normed separately (`fc_norm.0` and so on).
        norm_before_residual: the residual stream starts with the normed state instead of the state.
        norm_output: draft steps after the first read the final-normed state.
        use_aux_hidden_state: if false, which only `eagle_config` can say, the head reads the target's last state, without `fc`.
    """

    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    use_aux_hidden_state: bool = True

    @classmethod
    def read(cls, fields: ConfigFields) -> Eagle3Layout:
        """The layout that a config.json gives, in top-level fields or in `eagle_config`.

        Raises:
            ConfigError: a field is not true or false.
        """
        inner = fields.mapping("eagle_config")

        def flag(*names: str) -> bool:
            return any(each.flag(name) for each in (fields, inner) for name in names)

        reads_three = inner.filled(use_aux_hidden_state=True).flag("use_aux_hidden_state")
        norms = flag("norm_before_fc"), flag("fc_norm", "use_aux_norm")
        return cls(*(norms if reads_three else (False, False)), flag("norm_before_residual"), flag("norm_output"), reads_three)


FIRST_LAYOUT = Eagle3Layout()
"""The layout of the first release."""


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The target layers whose input EAGLE-3 heads read unless their config.json says otherwise: low, middle, high.

    For targets of fewer than 7 layers, for which no heads are published, the last three streams.
    """
    if num_layers < 7:
        return (num_layers - 2, num_layers - 1, num_layers)
    return (2, num_layers // 2, num_layers - 3)


def read_aux_layers(raw: Mapping[str, Any], target: ModelConfig, where: str) -> tuple[int, ...]:
    """The target layers whose input a head reads.

    `eagle_config` numbers layers by output, which is the next layer's input. The heads of speculators number them by
    input; so do heads that name a layer past the last one, and some heads for `COUNTED_BY_FIRST`.

    Raises:
        ConfigError: the file does not name three different layers of the target in ascending order.
    """
    nested = raw.get("eagle_config") or {}
    ids = nested.get(AUX_FIELD) if isinstance(nested, dict) else nested
    ids, by_output = (ids, True) if ids else (raw.get(AUX_FIELD), LAYER not in raw)
    if ids and not (isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)):
        raise ConfigError(f"{where}: {AUX_FIELD} is {ids!r}; it must be a list of layer numbers")
    num_layers = target.num_layers
    if not ids:
        layers = default_aux_layers(num_layers)
    elif not by_output or max(ids) == num_layers or (target.architecture in COUNTED_BY_FIRST and ids[0] != 1):
        layers = tuple(ids)
    else:
        layers = tuple(i + 1 for i in ids)
    if len(layers) != 3 or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
        raise ConfigError(f"{where}: EAGLE-3 needs three different layers of its target, ascending; got {list(layers)} of {num_layers}")
    return layers
