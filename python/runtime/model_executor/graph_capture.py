"""Recording functions as CUDA graphs: the shared memory pool, and what is paused or measured around a capture."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

GraphKey = tuple[int, int, str]
"""Requests, tokens and variant of a captured pass."""
Replay = Callable[[], None]
"""Runs a captured pass over the persistent inputs."""


class GraphPool:
    """The one memory pool and stream of all CUDA graphs in this process."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def capture(self, key: GraphKey, function: Callable[[], None]) -> Replay:
        """Run `function` once on the pool's stream, which loads its kernels and allocates libraries' workspaces, then record it.

        Raises `RuntimeError` if that fails, `OutOfMemoryError` if memory does not suffice.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            function()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.handle, stream=self.stream):
            function()
        return graph.replay


class CallPool:
    """Replays by calling the function again: the same padded buffers without CUDA graphs, for tests and checks."""

    def capture(self, key: GraphKey, function: Callable[[], None]) -> Replay:
        """The function itself."""
        return function


@contextmanager
def paused_gc(freeze: bool) -> Iterator[None]:
    """Disable garbage collection: it is slow with many live objects, and during capture it may free tensors of the recording stream.

    `freeze` speeds up the collections that torch starts itself before it records a CUDA graph.
    """
    was_enabled = gc.isenabled()
    if freeze:
        gc.collect()
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if freeze:
            gc.unfreeze()


def device_bytes() -> int:
    """Bytes of the GPU in use by all processes; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free
