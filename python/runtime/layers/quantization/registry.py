"""The quantisation scheme of a model: the checkpoint's, or the one named by --quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from runtime.config.quant_config import QuantConfig, Quantization
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.fp8 import BlockFp8, RowFp8
from runtime.layers.quantization.int4 import Int4
from runtime.layers.quantization.int8 import Int8
from runtime.layers.quantization.mxfp4 import Mxfp4
from runtime.layers.quantization.scheme import QuantScheme


def _fp8(quant: QuantConfig | None) -> QuantScheme:
    assert quant is not None, "`with_flag` describes weights in FP8"
    return BlockFp8(quant.scale_name, quant.stored) if quant.scales == "block" else RowFp8(quant.scale_name)


SCHEMES: dict[str, Callable[[QuantConfig | None], QuantScheme]] = {
    "int8": lambda _: Int8(),
    "int4": lambda quant: Int4(None if quant is None else quant.int4),
    "fp8": _fp8,
    "mxfp4": lambda _: Mxfp4(),
}
"""Functions that make the scheme of each name in `Quantization`, from the model's `QuantConfig` if it has one."""
assert get_args(Quantization) == tuple(SCHEMES), "every name has a scheme, and the reverse"


def quant_scheme(quant: QuantConfig | None, flag: str | None = None) -> QuantScheme:
    """The scheme of the checkpoint's quantised layers, or else the one named by `--quantization`; `none` if there is neither."""
    name = flag if quant is None else quant.method
    return DENSE if name is None else SCHEMES[name](quant)
