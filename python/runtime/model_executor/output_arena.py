"""The memory shared by graph runners for their outputs.

Outputs in one arena are never in use at the same time. Each `ModelRunner` has an arena of the size of its largest graph runner's outputs:

    arena     written by                           read until
    target    verify of every depth, plain decode  the step has accepted its tokens, copied log-probabilities to the host
                                                   and filled the inputs of draft-extend
              short prompts                        the step has sampled, and the draft model has processed the prompt
    draft     draft decode of every depth          the step has accepted: it reads draft probabilities after verify

A step runs either short prompts or one verify pass. Draft-extend has no outputs. An iteration graph writes the outputs of its passes here,
and its result to a separate arena. All work is on one stream, so a pass never overwrites outputs that an earlier copy still reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.model_executor.input_buffers import BufferSpec

ALIGNMENT = 512
"""Bytes at which each buffer starts, as with the CUDA allocator."""


class OutputArena:
    """Owner of the storage. It grows until a captured graph refers to its address.

    Attributes:
        storage: uint8 [bytes of the largest runner's outputs].
        frozen: whether a captured graph refers to the address.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.storage = torch.zeros(0, dtype=torch.uint8)
        self.frozen = False

    def reserve(self, specs: Sequence[BufferSpec], requests: int, tokens: int) -> int:
        """Enlarge the arena for these buffers if needed; returns the bytes by which it grew."""
        wanted = sum(_aligned(spec.bytes(requests, tokens)) for spec in specs)
        grown = wanted - self.storage.numel()
        if grown <= 0:
            return 0
        assert not self.frozen, "a graph holds the address of the arena"
        self.storage = torch.zeros(0, dtype=torch.uint8)  # free the old storage first
        self.storage = torch.zeros(wanted, dtype=torch.uint8, device=self._device)
        return grown

    def buffers(self, specs: Sequence[BufferSpec], requests: int, tokens: int) -> dict[str, torch.Tensor]:
        """The reserved buffers, by name; each [rows, *tail]."""
        views, start = {}, 0
        for spec in specs:
            size = spec.bytes(requests, tokens)
            views[spec.name] = self.storage[start : start + size].view(spec.dtype).view(spec.shape(requests, tokens))
            start += _aligned(size)
        return views


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
