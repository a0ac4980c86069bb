"""The graph part of the configuration: the batch sizes to capture."""

from __future__ import annotations

import logging

from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.config.refusals import flag_of
from runtime.config.runtime_config import DeviceConfig, GraphConfig
from runtime.config.server_args import MAX_GRAPH_SIZE, ServerArgs
from runtime.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_LARGEST = 256
GPU_FLAGS = (
    "disable_cuda_graph",
    "disable_draft_extend_cuda_graph",
    "disable_draft_decode_cuda_graph",
    "enable_iteration_graph",
    "disable_head_bounds",
)
"""Flags that have no effect on a CPU."""


def resolve_graphs(args: ServerArgs, device: DeviceConfig) -> GraphConfig:
    """Choose the batch sizes to capture; none if the device or the attention backend cannot capture."""
    sizes = _sizes(args, device)
    if args.enable_iteration_graph and device.device == "cuda" and not sizes:
        raise ConfigError("--enable-iteration-graph has no effect: nothing is captured. Leave it out.")
    if args.enable_iteration_graph and args.enable_dp_attention:
        raise ConfigError("--enable-iteration-graph has no effect with --enable-dp-attention. Leave it out.")
    if args.enable_iteration_graph and args.disable_iteration_graph:
        raise ConfigError("--enable-iteration-graph and --disable-iteration-graph contradict each other. Give one of the two.")
    return GraphConfig(
        cuda_graph_bs=sizes,
        cuda_graph_padding=not args.disable_cuda_graph_padding,
        head_bounds=bool(sizes) and not args.disable_head_bounds,
        iteration_graph=False if args.disable_iteration_graph else args.enable_iteration_graph or None,
    )


def default_graph_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes up to and including `largest`, in steps of 1, 2, 4, 8 and then 16, so that little is padded."""
    ladder = [*range(1, 9), *range(10, 33, 2), *range(36, 65, 4), *range(72, 257, 8), *range(272, largest + 16, 16)]
    return tuple(sorted({size for size in ladder if size < largest} | {largest}))


def _sizes(args: ServerArgs, device: DeviceConfig) -> tuple[int, ...]:
    if problem := _no_graphs(args, device):
        for name in ("cuda_graph_bs", "cuda_graph_max_bs", "disable_cuda_graph_padding"):
            if getattr(args, name) not in (None, False):
                raise ConfigError(f"{flag_of(name)} has no effect: {problem}. Leave it out.")
        return ()
    if args.cuda_graph_bs is not None:
        return _given_sizes(args, args.cuda_graph_bs)
    running = args.max_running_requests
    largest = args.cuda_graph_max_bs or min(DEFAULT_LARGEST, running or DEFAULT_LARGEST)
    if running is not None and largest < running:
        log.warning("batches above %d run eagerly: --max-running-requests is %d", largest, running)
    return default_graph_sizes(largest)


def _no_graphs(args: ServerArgs, device: DeviceConfig) -> str:
    """Why nothing is captured; empty if graphs are captured."""
    if device.device == "cpu":
        # Command lines written for a GPU may have flags without effect on a CPU.
        for name in GPU_FLAGS:
            if getattr(args, name):
                log.warning("%s: no effect because there are no graphs on a CPU", flag_of(name))
        return "CUDA graphs need CUDA, and this server runs on a CPU"
    if not ATTENTION_CAPS[device.attention_backend].cuda_graph:
        log.info("no CUDA graphs: %s attention cannot be captured", device.attention_backend)
        return f"--attention-backend {device.attention_backend} cannot be captured, unlike fa3 and flashinfer"
    return "--disable-cuda-graph turns all graphs off" if args.disable_cuda_graph else ""


def _given_sizes(args: ServerArgs, given: tuple[int, ...]) -> tuple[int, ...]:
    sizes = tuple(sorted(set(given)))
    if not sizes or sizes[0] < 1 or sizes[-1] > MAX_GRAPH_SIZE:
        raise ConfigError(f"--cuda-graph-bs must list batch sizes between 1 and {MAX_GRAPH_SIZE}; got {' '.join(map(str, given))}.")
    if args.cuda_graph_max_bs is not None and sizes[-1] > args.cuda_graph_max_bs:
        raise ConfigError(f"--cuda-graph-bs lists {sizes[-1]}, above --cuda-graph-max-bs {args.cuda_graph_max_bs}. Give one of the two.")
    return sizes
