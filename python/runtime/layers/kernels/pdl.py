"""Programmatic dependent launch: a kernel starts before the previous one has ended (Hopper and newer)."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_sync(PDL: tl.constexpr):
    """Let the next kernel start as soon as there is room, and wait for the previous one: after this, its results may be
    read.

    This is safe along a stream because every kernel waits before it writes anything, and before it reads anything but weights and what was
    written before a kernel that waited first (`pdl_wait_first`): when one has ended, all before it have ended.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def pdl_wait_first(PDL: tl.constexpr):
    """Wait for the previous kernel, and only then let the next one start.

    What was written before this kernel is there when any later kernel starts, which may therefore read it before its own wait.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on this device may start before the previous one has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(pdl: bool) -> dict[str, bool]:
    """The keyword of a Triton launch that asks for it."""
    return {"launch_pdl": True} if pdl else {}
