"""What the configuration depends on in a model, known before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.runtime_config import DType, LoadFormat


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What `resolve` must know of a model before it is loaded.

    Attributes:
        path: its folder on this machine.
        load_format: whether its weights are read or made up.
        tokenizer_path: the folder of its tokenizer.
        name: what to call it in the API.
        dtype: the type its weights are kept in.
        max_context_len, vocab_size, head_dim: its shape.
        embedded: whether it is the default that comes with the server.
    """

    path: str
    load_format: LoadFormat
    tokenizer_path: str
    name: str
    dtype: DType
    max_context_len: int
    vocab_size: int
    head_dim: int
    embedded: bool = False
