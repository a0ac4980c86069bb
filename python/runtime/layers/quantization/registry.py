"""The quantisation scheme of a model: that of its checkpoint, or the one that a flag names."""

from __future__ import annotations

import torch

from runtime.config.quant_config import QuantConfig
from runtime.errors import ConfigError
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.fp8 import BlockFp8, RowFp8
from runtime.layers.quantization.int8 import Int8
from runtime.layers.quantization.mxfp4 import Mxfp4
from runtime.layers.quantization.scheme import QuantScheme

SCHEMES: dict[str, QuantScheme] = {"int8": Int8()}
"""Schemes of flags that apply to every linear layer."""
CPU_ONLY = frozenset({"int8"})


def quant_scheme(flag: str | None, quant: QuantConfig | None, device: torch.device) -> QuantScheme:
    """The scheme named by `--quantization`, otherwise the one that `quant` describes, otherwise none.

    Raises:
        ConfigError: the name is unknown, or the scheme does not run on this device.
    """
    if quant is not None:
        return described_scheme(quant)
    if flag is None:
        return DENSE
    if flag not in SCHEMES:
        raise ConfigError(f"--quantization {flag!r} is unknown; use one of: fp8, {', '.join(SCHEMES)}")
    if flag in CPU_ONLY and device.type != "cpu":
        raise ConfigError(f"--quantization {flag} works on --device cpu only, not on {device.type}; leave it out")
    return SCHEMES[flag]


def described_scheme(quant: QuantConfig) -> QuantScheme:
    """The scheme of the layers that `quant` does not keep in 16 bits."""
    if quant.method == "mxfp4":
        return Mxfp4()
    return BlockFp8(quant.scale_name, quant.stored) if quant.scales == "block" else RowFp8(quant.scale_name)
