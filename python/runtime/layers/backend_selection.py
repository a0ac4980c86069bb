"""Chooses the implementation of block operations and sampling for this machine, once at start-up."""

from __future__ import annotations

from typing import Literal

import torch

from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.ops import BlockOps
from runtime.layers.sampler import TorchSampling
from runtime.layers.sampling_tables import SamplingOps
from runtime.layers.torch_ops import TorchOps


def select_ops(device: torch.device, dtype: torch.dtype, timings: GemmTimings) -> tuple[BlockOps, str]:
    """The block operations for a device, and the reason of the choice, for the log.

    Args:
        timings: read and filled by `autotune`; models that share it run equal GEMMs by equal kernels.
    """
    if device.type != "cuda":
        return TorchOps(), "torch: the device is a CPU"
    if dtype is torch.float32:
        return TorchOps(), "torch: fused kernels are for 16-bit weights"
    try:
        from runtime.layers.cuda_ops import CudaOps
    except ImportError as error:
        return TorchOps(), f"torch, which is slower: fused kernels cannot be loaded ({error}); install the 'cuda' extra"
    return CudaOps(timings), "fused Triton and sgl_kernel operations: the device is a CUDA GPU"


def select_sampling(device: torch.device, backend: Literal["triton", "pytorch"]) -> tuple[SamplingOps, str]:
    """The sampling operations for a device, and the reason of the choice, for the log. `backend`: from --sampling-backend."""
    if device.type != "cuda":
        return TorchSampling(), "torch: the device is a CPU"
    if backend == "pytorch":
        return TorchSampling(), "torch: --sampling-backend pytorch"
    try:
        from runtime.layers.kernels.sampling import TritonSampling
    except ImportError as error:
        return TorchSampling(), f"torch, which is slower: Triton cannot be loaded ({error}); install the 'cuda' extra"
    return TritonSampling(), "Triton kernels: the device is a CUDA GPU"
