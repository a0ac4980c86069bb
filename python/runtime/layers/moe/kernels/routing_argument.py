"""The routing of some tokens as a parameter of the CUDA kernels."""

from __future__ import annotations

import ctypes

from runtime.layers.moe.router import Routing


class RoutingArgument(ctypes.Structure):
    """`Routing` in the CUDA sources."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("ids", "weights")), *((name, ctypes.c_int) for name in ("first", "experts")))


def routing_argument(routing: Routing, first: int, experts: int) -> RoutingArgument:
    """The kernel parameter of a process that has this many experts from `first` on."""
    return RoutingArgument(routing.ids.data_ptr(), routing.weights.data_ptr(), first, experts)
