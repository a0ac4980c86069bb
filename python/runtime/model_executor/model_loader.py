"""Loads models: builds them for this rank and fills their weights."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Protocol

from runtime.config.host_memory import MIB
from runtime.config.quant_config import SHARD_UNITS
from runtime.errors import ConfigError
from runtime.layers.backend_selection import select_ops
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.graph_capture import paused_gc
from runtime.model_executor.weight_loader import dummy_weights, safetensors_weights
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel
from runtime.models.registry import build_model
from runtime.models.weights import NamedTensors, Sliceable

log = logging.getLogger(__name__)


class Loadable(Protocol):
    """A target or a draft whose weights can be filled. See `DraftModel`."""

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `load` requires."""
        ...

    def load(self, weights: NamedTensors) -> None:
        """Fill the weights. Raises `ConfigError` for tensors that are missing, unexpected or of a wrong shape."""
        ...


def load_model(context: WorkerContext, config: ModelConfig, folder: str, load_format: str, quantization: str | None) -> DecoderModel:
    """Build a model and fill its weights."""
    with context.timed("load_weights"), paused_gc(freeze=False):  # each collection would visit all the small objects
        ops, why = select_ops(context.device, context.dtype, context.timings)
        log.info("block operations: %s", why)
        shared = context.attention_group, context.config.parallel.ep_size, context.kv_dtype, context.exchange
        fuse = context.config.model.fuse_shared_experts
        model = build_model(config, ops, context.dtype, context.device, quantization, *shared, fuse_shared=fuse)
        check_equal_shards(context, model)
        load_weights(context, model, folder, load_format)
    kind, seconds = f" with {quantization} linears" if quantization else "", context.info.startup_seconds["load_weights"]
    log.info("weights: %s, %.0f MiB, %s%s; loaded in %.1f s, %.0f MiB/s", config.architecture, model.weight_bytes / MIB,
             context.config.device.dtype, kind, seconds, model.weight_bytes / MIB / max(seconds, 1e-3))  # fmt: skip
    return model


def check_equal_shards(context: WorkerContext, model: DecoderModel) -> None:
    """Raise `ConfigError` if shards on GPUs have different sizes, because all ranks use the kernels that rank 0 chooses.

    Shards of experts that are split at multiples of columns may differ, because each rank chooses their kernels by its own sizes.
    """
    experts = [mlp.experts for mlp in model.sparse_mlps]
    sizes = [(each.count, each.size[0] if each.scheme.name in SHARD_UNITS else each.size) for each in experts]
    shapes = context.group.gather(([gemm.key(0) for gemm in model.gemms()], sizes))
    if context.device.type == "cuda" and any(other != shapes[0] for other in shapes):
        raise ConfigError(
            f"--tp-size {context.group.size} does not divide {model.config.architecture} into equal shards. Use another size."
        )


def load_weights(context: WorkerContext, model: Loadable, folder: str, load_format: str) -> None:
    """Fill the weights of a target or a draft. Raises `ConfigError` that names the folder."""
    with named(folder), closing(model_weights(context, model.expected_weights(), folder, load_format)) as weights:
        model.load(weights)  # after an error, closing ends the line of the progress bar


@contextmanager
def named(folder: str) -> Iterator[None]:
    """Name the folder of a checkpoint in each `ConfigError` of the `with` block: a server may have a target and a draft."""
    try:
        yield
    except ConfigError as error:
        if folder in str(error):  # it names a file there
            raise
        raise ConfigError(f"{folder}: {error}") from error


def model_weights(
    context: WorkerContext, shapes: dict[str, tuple[int, ...]], folder: str, load_format: str
) -> Generator[tuple[str, Sliceable]]:
    """The tensors of a checkpoint, or random ones."""
    if load_format == "dummy":
        return dummy_weights(shapes, context.dtype, context.device, seed=context.config.model.random_seed)
    return safetensors_weights(folder, progress=context.group.rank == 0)
