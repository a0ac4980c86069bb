"""The quantisation of a model's linear layers, in its checkpoint or while loading. No torch."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.errors import ConfigError

Quantization = Literal["int8", "int4", "fp8", "mxfp4"]
"""The names of the schemes; `--quantization` takes these, `FormatFlag` and none."""
FormatFlag = Literal["awq", "gptq"]
"""Formats of int4 checkpoints that `--quantization` takes."""
CPU_ONLY: frozenset[Quantization] = frozenset({"int8"})
"""Schemes with kernels only for CPUs."""
STORED_ONLY: frozenset[Quantization | FormatFlag] = frozenset({"mxfp4", "awq", "gptq"})
"""Schemes and formats that need a checkpoint in them."""
ALWAYS_KEPT = ("lm_head", "embed_tokens", "gate", "router", "shared_expert_gate", "eh_proj", "fc")
"""Layers that are never quantised in quantised checkpoints, listed or not: heads, routers, inputs of draft heads."""
INT4_GROUP = 32
"""Columns with one scale in int4 weights that are quantised while loading; the least in a checkpoint."""
BLOCK = 128
"""Rows and columns of a block with one scale."""


class ShardUnit(NamedTuple):
    """How ranks may cut the intermediate size of an expert.

    Attributes:
        columns: a rank's shard is a multiple of this, if the whole size is; ranks may have different numbers of units.
        required: whether more ranks than units are refused; otherwise they get smaller shards.
    """

    columns: int = 1
    required: bool = True


SHARD_UNITS: dict[str, ShardUnit] = {
    # Ranks may have uneven shards instead of zero padding: no rank stores more than with padding, and none reads zeros. The unit is two
    # groups of columns with one scale, because the kernels for many tokens need inner sizes that are multiples of 64.
    "mxfp4": ShardUnit(64),
    "int4": ShardUnit(INT4_GROUP),  # or the larger groups of a checkpoint
    "fp8": ShardUnit(32, required=False),  # in smaller blocks, tensor cores cannot multiply e4m3 by e4m3
}
"""The units of the schemes whose scales cover several columns, by the scheme's name; those of other schemes are single columns."""


def shard_unit(scheme: str, group: int | None) -> ShardUnit:
    """The unit of a scheme. `group`: columns with one scale in int4 weights."""
    unit = SHARD_UNITS.get(scheme, ShardUnit())
    return unit if group is None else unit._replace(columns=group)


@functools.lru_cache
def block_length(size: int, count: int) -> int:
    """The largest power of two, at most `BLOCK`, that divides `size` entries into `count` blocks."""
    found = next((length for length in (128, 64, 32, 16, 8, 4, 2, 1) if -(-size // length) == count), None)
    assert found is not None, f"expected scales of blocks of a power of two up to {BLOCK}; got {count} for {size}"
    return found


@dataclass(frozen=True, slots=True)
class LayerNames:
    """A checkpoint's list of layer names, compiled: it may hold hundreds, and is asked about tens of thousands of layers.

    Attributes:
        exact: the names without `*`; they match whole components anywhere in a layer's name.
        lengths: the numbers of components that these names have.
        patterns: match the names with `*` and those of the regular expressions, each from its beginning.
    """

    exact: frozenset[str]
    lengths: tuple[int, ...]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, names: tuple[str, ...]) -> LayerNames:
        """Compile names in the form of `QuantConfig.kept`."""
        given = [name[3:] for name in names if name.startswith("re:")]  # not joined: groups of two may have one name, or one number
        plain = [name for name in names if not name.startswith("re:")]
        wild = "|".join(re.escape(name).replace(r"\*", ".*") for name in plain if "*" in name)
        patterns = [*([rf"(?:.*\.)?(?:{wild})(?:\.|$)"] if wild else []), *given]
        exact = frozenset(name for name in plain if "*" not in name)
        lengths = tuple(sorted({name.count(".") + 1 for name in exact}))
        return cls(exact, lengths, tuple(map(re.compile, patterns)))

    def match(self, layer: str) -> bool:
        """Whether any name matches the layer's."""
        words = layer.split(".")
        for length in self.lengths:
            for start in range(len(words) - length + 1):
                if ".".join(words[start : start + length]) in self.exact:
                    return True
        return any(pattern.match(layer) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class Int4Format:
    """How a checkpoint stores int4 weights: `(code - zero point) * scale`, with codes from 0 to 15.

    Attributes:
        name: the tool that writes them; it packs eight codes in an int32 word.
        group: neighbouring columns of a row with one scale and one zero point.
        zeros: whether it has zero points; otherwise all of them are 8.
        zero_offset: added to the stored zero points.
        ordered: whether it has the groups of the columns, which may be in another order (activation order).
    """

    name: Literal["awq", "gptq", "compressed-tensors"]
    group: int
    zeros: bool = True
    zero_offset: int = 0
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """The quantisation of a model.

    Attributes:
        method: FP8 is e4m3 with float32 scales; MXFP4 is e2m1 with a power of two per 32 columns; int4 is described by `int4`.
        scales: the range of one FP8 scale: 128 x 128 entries, or a row, which includes one scale for the whole tensor.
        scale_name: the suffix of the FP8 scales' tensor, in place of `weight`.
        other_scale_name: another suffix of the same tensor, which some checkpoints use; "" for none.
        stored: whether the checkpoint has quantised weights; otherwise they are quantised while loading.
        kept: names of layers that stay in 16 bits. A name matches whole components anywhere in a layer's name, `*` matches any characters,
            and `re:` introduces a regular expression.
        only: names of the only layers that are quantised, in the same form; () for all.
        int4: the format of int4 weights.
    """

    method: Literal["fp8", "mxfp4", "int4"]
    scales: Literal["block", "row"] = "block"
    scale_name: str = "weight_scale_inv"
    other_scale_name: str = ""
    stored: bool = True
    kept: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    int4: Int4Format | None = None

    _kept: LayerNames = field(init=False, repr=False, compare=False)
    _only: LayerNames = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_kept", LayerNames.of(self.kept))
        object.__setattr__(self, "_only", LayerNames.of(self.only))

    @property
    def format(self) -> str:
        """The name of the checkpoint's format, for messages; `--quantization` takes all but compressed-tensors."""
        return self.method if self.int4 is None else self.int4.name

    def keeps(self, layer: str) -> bool:
        """Whether the layer of this name, without `.weight`, stays in 16 bits."""
        if layer.rpartition(".")[2] in ALWAYS_KEPT or self._kept.match(layer):
            return True
        return bool(self.only) and not self._only.match(layer)


ON_LOAD = QuantConfig("fp8", stored=False)
"""`--quantization fp8` for a checkpoint in 16 or 32 bits."""


def scheme_name(quant: QuantConfig | None, flag: str | None) -> str:
    """The name of the scheme in which a model's linear layers are stored: as its checkpoint says, or else the flag."""
    if quant is None:
        return flag or "none"
    return "fp8-row" if quant.method == "fp8" and quant.scales == "row" else quant.method


def with_flag(stored: QuantConfig | None, flag: str | None, name: str = "--quantization") -> QuantConfig | None:
    """The quantisation that results from the flag `name` and the checkpoint's quantisation `stored`.

    Raises:
        ConfigError: the weights are already quantised in another way, or the flag needs a checkpoint in its format.
    """
    if flag is None or flag == "none" or (stored is not None and flag in (stored.method, stored.format)):
        return stored
    if stored is not None:
        raise ConfigError(f"{name} {flag} is not possible: the checkpoint's weights are {stored.format} already. Leave it out.")
    if flag in STORED_ONLY:
        raise ConfigError(f"{name} {flag} needs a checkpoint in {flag}. Use fp8 or int4, which quantize 16-bit weights, or leave it out.")
    return ON_LOAD if flag == "fp8" else None
