"""The parallel part of the configuration: how many ranks share the model, and where they are."""

from __future__ import annotations

from runtime.config.machine import MachineFacts
from runtime.config.refusals import check_ranges
from runtime.config.runtime_config import DeviceConfig, ParallelConfig
from runtime.config.server_args import ServerArgs
from runtime.errors import ConfigError

MAX_RANKS = 64


def check_parallel(args: ServerArgs) -> None:
    """Refuse values that no machine can use."""
    check_ranges(args, tp_size=(1, MAX_RANKS))


def resolve_parallel(args: ServerArgs, device: DeviceConfig, machine: MachineFacts) -> ParallelConfig:
    """Place the ranks. Raises `ConfigError` where a rank of this node would have no GPU."""
    config = ParallelConfig(tp_size=args.tp_size, dp_size=args.dp_size, ep_size=args.ep_size)
    if device.device == "cuda" and config.ranks_per_node > len(machine.gpus):
        raise ConfigError(
            f"--tp-size {args.tp_size} needs {config.ranks_per_node} GPUs on this node; the driver reports {len(machine.gpus)}. "
            "Lower --tp-size, or check CUDA_VISIBLE_DEVICES."
        )
    return config
