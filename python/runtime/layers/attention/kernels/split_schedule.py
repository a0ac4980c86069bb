"""Shares of requests for programs that go from one to the next: by the lengths of a pass, on the device."""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_DEALT = 128
"""Requests that one program compares with each other."""
MAX_SHARES = 32
"""Shares of one request."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Who takes what. A request's shares stand next to each other.

    Attributes:
        items: int32 [(splits + 1) * B], see `pack`: the longest shares first; -1 where there is none.
        arrived: int32 [B, G], zero between passes: the shares of a request and KV head that are done.
    """

    items: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def empty(cls, batch: int, num_kv_heads: int, splits: int, device: torch.device) -> Deal:
        """Room for `batch` requests, made once."""
        ints = torch.zeros(batch * (splits + 1 + num_kv_heads), dtype=torch.int32, device=device)
        items = batch * (splits + 1)
        return cls(ints[:items], ints[items:].view(batch, num_kv_heads))


def deal(lens: torch.Tensor, splits: int, tile: int, out: Deal) -> None:
    """Cut requests of lens int32 [B] into shares that are at most a little longer than the mean one. `tile` keys are not cut.

    A share has at most (1 + 1 / 4s) / s of the mean length, s being `splits`, so that alike requests get `splits` shares each; all
    together get less than (s + 1) B, whatever the lengths. Source of the order: Graham 1969, longest processing time first.
    """
    batch, room = len(lens), len(out.items)
    assert batch <= MAX_DEALT, f"at most {MAX_DEALT} requests are dealt out, not {batch}"
    block = triton.next_power_of_2(batch)
    _deal_kernel[(1,)](
        lens, out.items, batch, room, splits,
        TILE=tile, MOST=MAX_SHARES, BLOCK=block, ROOM=triton.next_power_of_2(room), num_warps=max(min(block * block // 1024, 8), 1),
    )  # fmt: skip


@triton.jit
def pack(request, share, shares):
    """An item: the request, which of its shares, and how many it has, ten bits each."""
    return request + (share << 10) + (shares << 20)


@triton.jit
def unpack(item):
    """Request, share and shares of an item; of -1 a share beyond all, so that nothing is left to do."""
    return tl.maximum(item, 0) & 1023, (item >> 10) & 1023, tl.maximum(item, 1 << 20) >> 20


@triton.jit(do_not_specialize=["count", "room", "splits"], do_not_specialize_on_alignment=["lens_ptr", "items_ptr"])
def _deal_kernel(
    lens_ptr, items_ptr, count, room, splits, TILE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One program: the shares of each request, and where its items begin among those of all."""
    i = tl.arange(0, BLOCK)
    inside = i < count
    tiles = tl.where(inside, tl.cdiv(tl.load(lens_ptr + i, mask=inside, other=0), TILE), 0)
    cap = tl.maximum(tl.cdiv(tl.sum(tiles, 0) * (4 * splits + 1), 4 * splits * splits * count), 1)
    shares = tl.where(inside, tl.minimum(tl.maximum(tl.cdiv(tiles, cap), 1), MOST), 0)
    # by falling length of a share, then by number: one key that all can be compared by
    key = tl.cdiv(tiles, tl.maximum(shares, 1)) * BLOCK + (BLOCK - 1 - i)
    before = key[None, :] > key[:, None]
    first = tl.sum(tl.where(before, shares[None, :] + tl.zeros_like(before).to(tl.int32), 0), 1)
    for share in range(0, tl.max(shares, 0)):
        tl.store(items_ptr + first + share, pack(i, share, shares), mask=inside & (share < shares))
    item = tl.arange(0, ROOM)
    tl.store(items_ptr + item, -1, mask=(item >= tl.sum(shares, 0)) & (item < room))
