"""Programmatic dependent launch: a kernel starts before the previous one has ended (Hopper and newer)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_sync(PDL: tl.constexpr):
    """Let the next kernel start as soon as there is room, and wait for the previous one: after this, its results may be
    read.

    This is safe along a stream because every kernel waits before it reads or writes anything but weights: when one has
    ended, all before it have ended.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def launch_options(pdl: bool) -> dict[str, bool]:
    """The keyword of a Triton launch that asks for it."""
    return {"launch_pdl": True} if pdl else {}
