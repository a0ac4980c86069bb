"""Programmatic dependent launch: a kernel starts before the previous one has ended (Hopper and newer)."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_sync(PDL: tl.constexpr):
    """Trigger the next launch, and wait for the previous kernel; after this, its results can be read.
    This is safe along a stream because every kernel waits before it writes, and before it reads anything except weights and data written
    before a kernel with `pdl_wait_first`. Since all kernels wait, all earlier kernels have ended when one has.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def pdl_wait_first(PDL: tl.constexpr):
    """Wait for the previous kernel, and only then trigger the next launch.

    Data written before this kernel is therefore visible when any later kernel starts, which may read it before its own wait.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on this device may start before the previous one has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(pdl: bool) -> dict[str, bool]:
    """The keyword of a Triton launch that enables it."""
    return {"launch_pdl": True} if pdl else {}
