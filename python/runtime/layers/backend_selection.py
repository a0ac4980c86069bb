"""Which form of the block operations and of sampling this machine runs, chosen once at start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import torch

from runtime.layers.linear import Linear
from runtime.layers.ops import BlockOps
from runtime.layers.sampler import TorchSampling
from runtime.layers.sampling_tables import SamplingOps
from runtime.layers.torch_ops import TorchOps


class DecoderLike(Protocol):
    """What tuning reads of a model."""

    @property
    def layers(self) -> Sequence[Any]:
        """Decoder layers."""
        ...

    @property
    def lm_head(self) -> Linear:
        """The head."""
        ...


def tune_ops(
    ops: BlockOps, model: DecoderLike, rows: list[int], timed: bool, others: Iterable[Callable[[], object]] = ()
) -> dict[str, str]:
    """Compile what the model's products need at these numbers of rows and, if `timed`, keep the fastest way for each.

    `others`: runs of other kernels, which are compiled beside these where these are compiled.

    Returns:
        A line for each product; empty where there is nothing to choose.
    """
    prepare = getattr(ops, "prepare", None)
    return {} if prepare is None else prepare(model.layers, model.lm_head, rows, timed, others)


def select_ops(device: torch.device, dtype: torch.dtype) -> tuple[BlockOps, str]:
    """The operations for a device, and why they were chosen, for the log."""
    if device.type != "cuda":
        return TorchOps(), "torch: the device is a CPU"
    if dtype is torch.float32:
        return TorchOps(), "torch: fused kernels are for 16-bit weights"
    try:
        from runtime.layers.cuda_ops import CudaOps
    except ImportError as error:
        return TorchOps(), f"torch, which is slower: fused kernels cannot be loaded ({error}); install the 'cuda' extra"
    return CudaOps(), "fused Triton and sgl_kernel operations: the device is a CUDA GPU"


def select_sampling(device: torch.device, backend: Literal["triton", "pytorch"]) -> tuple[SamplingOps, str]:
    """The operations of sampling for a device, and why they were chosen, for the log. `backend`: what was asked for."""
    if device.type != "cuda":
        return TorchSampling(), "torch: the device is a CPU"
    if backend == "pytorch":
        return TorchSampling(), "torch: --sampling-backend pytorch"
    try:
        from runtime.layers.kernels.sampling import TritonSampling
    except ImportError as error:
        return TorchSampling(), f"torch, which is slower: Triton cannot be loaded ({error}); install the 'cuda' extra"
    return TritonSampling(), "Triton kernels: the device is a CUDA GPU"
