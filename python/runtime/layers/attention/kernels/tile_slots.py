"""The slots of a tile of keys, for kernels that read a paged KV cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_slots(pages_ptr, tile, length, TILE: tl.constexpr, PAGE: tl.constexpr):
    """The slots of one tile of keys, int64 [TILE]; slots beyond the end are valid but meaningless."""
    position = tile * TILE + tl.arange(0, TILE)
    if PAGE % TILE == 0:
        page = tl.load(pages_ptr + tile * TILE // PAGE, mask=tile * TILE < length, other=0)
        return page.to(tl.int64) * PAGE + position % PAGE
    else:
        page = tl.load(pages_ptr + position // PAGE, mask=position < length, other=0)
        return page.to(tl.int64) * PAGE + position % PAGE
