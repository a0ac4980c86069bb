"""Which form of the block operations this machine runs, chosen once at start."""

from __future__ import annotations

import torch

from runtime.layers.ops import BlockOps
from runtime.layers.torch_ops import TorchOps


def select_ops(device: torch.device, dtype: torch.dtype) -> tuple[BlockOps, str]:
    """The operations for a device, and why they were chosen, for the log."""
    if device.type != "cuda":
        return TorchOps(), "torch: the device is a CPU"
    if dtype is torch.float32:
        return TorchOps(), "torch: fused kernels are for 16-bit weights"
    from runtime.layers.cuda_ops import CudaOps

    return CudaOps(), "fused Triton and sgl_kernel operations: the device is a CUDA GPU"
