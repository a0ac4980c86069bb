"""Quantisation schemes by the name of their flag."""

from __future__ import annotations

import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.int8 import Int8
from runtime.layers.quantization.scheme import QuantScheme

SCHEMES: dict[str, QuantScheme] = {"int8": Int8()}
CPU_ONLY = frozenset({"int8"})


def quant_scheme(name: str | None, device: torch.device) -> QuantScheme:
    """The scheme that `--quantization` names; None for unquantised weights.

    Raises:
        ConfigError: the name is unknown, or the scheme does not run on this device.
    """
    if name is None:
        return DENSE
    if name not in SCHEMES:
        raise ConfigError(f"--quantization {name!r} is unknown; use one of: {', '.join(SCHEMES)}")
    if name in CPU_ONLY and device.type != "cpu":
        raise ConfigError(f"--quantization {name} works on --device cpu only, not on {device.type}; leave it out")
    return SCHEMES[name]
