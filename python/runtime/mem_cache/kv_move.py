"""Moves KV slots of all layers in one launch: a tree's accepted path after verify, or the first positions of cached pages."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _move(tables, source, target, group, row_elements, BLOCK: tl.constexpr, ELEMENT: tl.constexpr):
    # One program per (request, tensor). Sources increase and are never below their targets, so copying in order overwrites no later source.
    base = tl.load(tables + tl.program_id(1)).to(tl.pointer_type(ELEMENT))
    first = tl.program_id(0) * group
    offsets = tl.arange(0, BLOCK)
    inside = offsets < row_elements
    for j in range(0, group):
        s = tl.load(source + first + j)
        t = tl.load(target + first + j)
        if s != t:
            row = tl.load(base + s * row_elements + offsets, mask=inside)
            tl.store(base + t * row_elements + offsets, row, mask=inside)


def move_slots(pointers: torch.Tensor, source: torch.Tensor, target: torch.Tensor, group: int, row_bytes: int) -> None:
    """Copy slots in place. Safe to capture.

    Args:
        pointers: int64 [N] on the device: addresses of N tensors whose slots are `row_bytes` apart.
        source, target: int64 [B * group]: within each request's `group`, `source` increases and is never below `target`; except for slot 0,
            no slot of one group is a source or target of another.
        row_bytes: an even number.
    """
    elements = row_bytes // 2
    grid = (source.shape[0] // group, pointers.shape[0])  # in this order, because only the first dimension may exceed 65,535
    _move[grid](pointers, source, target, group, elements, BLOCK=triton.next_power_of_2(elements), ELEMENT=tl.int16)
