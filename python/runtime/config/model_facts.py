"""What the configuration depends on in models, known before their weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.quant_config import QuantConfig
from runtime.config.runtime_config import DType, LoadFormat
from runtime.sampling_params import NO_DEFAULTS, SamplingDefaults


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What `resolve` must know of a model before it is loaded.

    Attributes:
        path: folder on this machine.
        load_format: format of the weights; dummy weights are random.
        tokenizer_path: folder of the tokenizer.
        name: default name in the API.
        dtype: type of the stored weights.
        max_context_len, vocab_size, head_dim: shape of the model.
        sinks: whether its attention has sinks.
        has_mtp: whether the checkpoint holds a layer for multi-token prediction.
        embedded: whether it is the model that comes with the server.
        quant: how the stored weights are quantised; None for plain numbers.
        sampling: what requests that leave sampling fields out are sampled with, as --sampling-defaults chooses.
    """

    path: str
    load_format: LoadFormat
    tokenizer_path: str
    name: str
    dtype: DType
    max_context_len: int
    vocab_size: int
    head_dim: int
    sinks: bool = False
    has_mtp: bool = False
    embedded: bool = False
    quant: QuantConfig | None = None
    sampling: SamplingDefaults = NO_DEFAULTS


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What `resolve` must know of a draft model.

    Attributes:
        path: folder on this machine.
        load_format: format of the weights.
        block_size: tokens of a block, for a draft that fills blocks; None for others.
    """

    path: str
    load_format: LoadFormat
    block_size: int | None = None
