"""The parallel part of the configuration: the number of ranks that share the model, and their nodes."""

from __future__ import annotations

import importlib.util

from runtime.config.machine import MachineFacts
from runtime.config.node_address import NodeAddress
from runtime.config.runtime_config import DeviceConfig, ParallelConfig, part_of_flags
from runtime.config.server_args import ServerArgs
from runtime.errors import ConfigError


def check_parallel(args: ServerArgs) -> None:
    """Raise `ConfigError` for values that are invalid on any machine."""
    if not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(f"--node-rank must be between 0 and {args.nnodes - 1}, below --nnodes {args.nnodes}; got {args.node_rank}.")
    if args.tp_size % args.nnodes:
        raise ConfigError(f"--tp-size {args.tp_size} is not a multiple of --nnodes {args.nnodes}: each node has the same number of ranks.")
    if (args.nnodes > 1) != (args.dist_init_addr is not None):
        raise ConfigError("--nnodes and --dist-init-addr HOST:PORT belong together: give the address of node 0 to all nodes, or neither.")
    if args.ep_size < 1 or args.tp_size % args.ep_size:
        raise ConfigError(f"--ep-size must divide --tp-size {args.tp_size}, whose ranks share the experts; got {args.ep_size}.")
    _check_groups(args)
    if args.dist_init_addr is not None:
        NodeAddress.parse(args.dist_init_addr)
    if args.distributed_executor_backend == "ray":
        _check_ray(args)


def _check_groups(args: ServerArgs) -> None:
    if args.dp_size < 1 or (args.tp_size % args.dp_size and args.enable_dp_attention):
        raise ConfigError(f"--dp-size must divide --tp-size {args.tp_size}, whose ranks it groups; got {args.dp_size}.")
    if args.enable_dp_attention and args.dp_size == 1:
        raise ConfigError("--enable-dp-attention has no effect with one group. Give --dp-size, or leave it out.")
    if args.dp_size > 1 and not args.enable_dp_attention:
        raise ConfigError(
            f"--dp-size {args.dp_size} without --enable-dp-attention is not supported. Start one server per copy behind sglang-router; "
            "docs/operations.md shows how."
        )
    if args.enable_dp_attention and args.enable_mixed_chunk:
        raise ConfigError("--enable-mixed-chunk is not possible with --enable-dp-attention: all groups run one kind of pass. Leave it out.")


def _check_ray(args: ServerArgs) -> None:
    if args.tp_size == 1:
        raise ConfigError("--distributed-executor-backend ray has no effect with one rank. Give --tp-size, or leave it out.")
    if args.node_rank:
        raise ConfigError("--node-rank must be 0 with --distributed-executor-backend ray: Ray starts the ranks of the other nodes.")
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--distributed-executor-backend ray needs Ray. Install it with: pip install 'talon-runtime[ray]'")


def resolve_parallel(args: ServerArgs, device: DeviceConfig, machine: MachineFacts) -> ParallelConfig:
    """Place the ranks. Raises `ConfigError` if a rank of this node would have no GPU."""
    config = part_of_flags(ParallelConfig, args, executor=args.distributed_executor_backend)
    if device.device == "cuda" and config.executor == "mp" and config.ranks_per_node > len(machine.gpus):
        raise ConfigError(
            f"--tp-size {args.tp_size} needs {config.ranks_per_node} GPUs on this node; the driver reports {len(machine.gpus)}. "
            "Lower --tp-size, or check CUDA_VISIBLE_DEVICES."
        )
    return config
