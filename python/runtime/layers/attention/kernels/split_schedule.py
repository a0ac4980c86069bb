"""Schedules of split-KV attention from the lengths on the device: shares of similar length, or whole requests, the longest first."""

# Only Triton's types describe kernel[grid](...).
# pyright: reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_SCHEDULED = 128
"""Maximum requests of one schedule; a single program compares all of them."""
MAX_SHARES = 32
"""Maximum splits of one request."""
ORDERED_AT_ONCE = 16
"""Requests whose positions one program computes."""
COMPARED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class WorkSchedule:
    """The shares of a pass, in the order in which their programs start.

    Attributes:
        items: int32. Of a pass with shares [(splits + 1) * B], packed by `pack`: the longest first, those of a request adjacent, then -1.
            Of a pass over whole requests [B]: their numbers, the longest first.
        arrived: int32 [B, parts], number of finished shares by request and part; zero between passes.
    """

    items: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def empty(cls, batch: int, parts: int, splits: int, device: torch.device) -> WorkSchedule:
        """Space for `batch` requests, allocated once. `splits`: 0 for whole requests."""
        ints = torch.zeros(batch * (splits + 1 + parts), dtype=torch.int32, device=device)
        items = batch * (splits + 1)
        return cls(ints[:items], ints[items:].view(batch, parts))


def schedule_shares(lens: torch.Tensor, splits: int, tile: int, out: WorkSchedule) -> None:
    """Split requests of lens int32 [B] into shares of whole tiles of `tile` keys, not much longer than the mean share.

    With s = `splits`, a share has at most (1 + 1 / 4s) / s of the mean length, so requests of equal length get s shares each, and all
    requests together get fewer than (s + 1) B. The order is longest processing time first (Graham 1969). Can be captured.
    """
    batch, space = len(lens), len(out.items)
    assert batch <= MAX_SCHEDULED, f"a schedule has at most {MAX_SCHEDULED} requests; got {batch}"
    block = triton.next_power_of_2(batch)
    _schedule_kernel[(1,)](
        lens, out.items, batch, space, splits,
        TILE=tile, MOST=MAX_SHARES, BLOCK=block, SPACE=triton.next_power_of_2(space), num_warps=max(min(block * block // 1024, 8), 1),
    )  # fmt: skip


def order_requests(lens: torch.Tensor, tile: int, out: torch.Tensor) -> None:
    """Order requests of lens int32 [B] by their tiles of `tile` keys, the longest first, then by number. Can be captured.

    out: int32 [B].
    """
    _order_kernel[(triton.cdiv(len(lens), ORDERED_AT_ONCE),)](
        lens, out, len(lens), TILE=tile, OWN=ORDERED_AT_ONCE, OTHERS=COMPARED_AT_ONCE, num_warps=4
    )


@triton.jit
def pack(request, share, shares):
    """An item: request, index of the share, and number of its shares, ten bits each."""
    return request + (share << 10) + (shares << 20)


@triton.jit
def unpack(item):
    """Request, share and number of shares of an item; -1 gives a share beyond the last, which has no work."""
    return tl.maximum(item, 0) & 1023, (item >> 10) & 1023, tl.maximum(item, 1 << 20) >> 20


@triton.jit(do_not_specialize=["count", "space", "splits"], do_not_specialize_on_alignment=["lens_ptr", "items_ptr"])
def _schedule_kernel(
    lens_ptr, items_ptr, count, space, splits, TILE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, SPACE: tl.constexpr,
):  # fmt: skip
    """One program: the shares of each request, and the position of its items."""
    i = tl.arange(0, BLOCK)
    inside = i < count
    tiles = tl.where(inside, tl.cdiv(tl.load(lens_ptr + i, mask=inside, other=0), TILE), 0)
    cap = tl.maximum(tl.cdiv(tl.sum(tiles, 0) * (4 * splits + 1), 4 * splits * splits * count), 1)
    shares = tl.where(inside, tl.minimum(tl.maximum(tl.cdiv(tiles, cap), 1), MOST), 0)
    # sort key: longest shares first, then request number
    key = tl.cdiv(tiles, tl.maximum(shares, 1)) * BLOCK + (BLOCK - 1 - i)
    before = key[None, :] > key[:, None]
    first = tl.sum(tl.where(before, shares[None, :] + tl.zeros_like(before).to(tl.int32), 0), 1)
    for share in range(0, tl.max(shares, 0)):
        tl.store(items_ptr + first + share, pack(i, share, shares), mask=inside & (share < shares))
    item = tl.arange(0, SPACE)
    tl.store(items_ptr + item, -1, mask=(item >= tl.sum(shares, 0)) & (item < space))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["lens_ptr", "order_ptr"])
def _order_kernel(lens_ptr, order_ptr, count, TILE: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr):
    """The positions of OWN requests: how many others come before each."""
    i = tl.program_id(0) * OWN + tl.arange(0, OWN)
    own = tl.cdiv(tl.load(lens_ptr + i, mask=i < count, other=0), TILE)
    position = tl.zeros((OWN,), dtype=tl.int32)
    for start in range(0, count, OTHERS):
        j = start + tl.arange(0, OTHERS)
        tiles = tl.cdiv(tl.load(lens_ptr + j, mask=j < count, other=0), TILE)
        longer = tiles[None, :] > own[:, None]
        earlier = (tiles[None, :] == own[:, None]) & (j[None, :] < i[:, None])
        position += tl.sum(((longer | earlier) & (j < count)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + position, i, mask=i < count)
