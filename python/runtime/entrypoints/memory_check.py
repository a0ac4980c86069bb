"""Refuses to start on a CPU with too little memory, instead of being killed while loading."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil

from runtime.config.cache import USUAL_TOKENS
from runtime.config.host_memory import MIB, HostMemory
from runtime.config.runtime_config import RuntimeConfig
from runtime.errors import ConfigError
from runtime.models.config import ModelConfig

log = logging.getLogger(__name__)

PROCESSES = 448 * MIB
"""Memory of the processes without weights and KV: HTTP 102 MiB, detokenizer 68, torch in the scheduler 270. Measured on x86-64."""
SERVING = 128 * MIB
"""Memory of running requests: bodies, answers, activations."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUANTIZED_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 1.25}


def check_memory(config: RuntimeConfig, model: ModelConfig, memory: HostMemory) -> None:
    """Log the memory limit in force.

    Raises:
        ConfigError: the server does not fit; the message states how much memory it needs.
    """
    if config.device.device != "cpu":
        return
    available = min(memory.total, memory.available + psutil.Process().memory_info().rss)
    log.info("memory: %d MiB of %d MiB are available, by %s", available // MIB, memory.total // MIB, memory.source)
    needed = needed_bytes(config, model)
    if needed > available:
        raise ConfigError(
            f"The server needs at least {-(-needed // MIB):,} MiB of memory, but {available // MIB:,} MiB are available "
            f"({memory.source}). Raise the limit, or serve a smaller model."
        )


def needed_bytes(config: RuntimeConfig, model: ModelConfig) -> int:
    """The least memory that the server's processes need together; dummy weights are not counted."""
    size = _BYTES[config.device.dtype]
    kv_size = 1 if config.device.kv_cache_dtype == "fp8_e4m3" else size
    embedding = model.vocab_size * model.hidden_size
    stored = _file_bytes(config.model.model_path)
    parameters = stored // _BYTES.get(model.dtype, 2)
    weights = parameters * size
    if model.quant is not None and model.quant.method == "int4":
        weights = stored + max(0, stored - 2 * embedding * (1 if model.tie_embeddings else 2))  # their second form, for the kernel
    elif model.quant is not None:
        weights = stored
    elif config.model.quantization is not None:
        weights = int(max(0, parameters - embedding) * _QUANTIZED_BYTES[config.model.quantization]) + embedding * (size + 1)
    loading = embedding * 4 if parameters else 0  # the largest tensor, before it is converted
    draft = 0 if config.speculative is None else _file_bytes(config.speculative.draft_model_path or "")
    kv = model.num_layers * model.kv_columns * kv_size * min(model.max_context_len, USUAL_TOKENS)
    return PROCESSES + SERVING + weights + loading + draft + kv


def _file_bytes(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) if folder else 0
