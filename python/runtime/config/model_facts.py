"""Facts about models that the configuration depends on, known before weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.quant_config import QuantConfig
from runtime.config.runtime_config import DType, LoadFormat
from runtime.sampling_params import NO_DEFAULTS, SamplingDefaults


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts about a model that `resolve` needs.

    Attributes:
        path: folder on this machine.
        load_format: format of the weights; dummy weights are random.
        tokenizer_path: folder of the tokenizer.
        name: default name in the API.
        dtype: dtype of the stored weights.
        max_context_len, head_dim: shape of the model.
        sinks: whether it has attention sinks.
        softcap: whether its attention scores have a soft cap.
        sparse: whether it has routed experts.
        recurrent: whether some layers have a recurrent state, which begins at a request's first token.
        has_mtp: whether the checkpoint has a layer for multi-token prediction.
        embedded: whether it is the embedded model.
        quant: the quantisation of the stored weights; None if they are not quantised.
        sampling: defaults of missing sampling fields, by --sampling-defaults.
    """

    path: str
    load_format: LoadFormat
    tokenizer_path: str
    name: str
    dtype: DType
    max_context_len: int
    head_dim: int
    sinks: bool = False
    softcap: bool = False
    sparse: bool = False
    recurrent: bool = False
    has_mtp: bool = False
    embedded: bool = False
    quant: QuantConfig | None = None
    sampling: SamplingDefaults = NO_DEFAULTS


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """The facts about a draft model that `resolve` needs.

    Attributes:
        path: folder on this machine.
        load_format: format of the weights.
        block_size: tokens of a block, for a draft that fills blocks; None for others.
    """

    path: str
    load_format: LoadFormat
    block_size: int | None = None
