"""Attention in plain torch over gathered pages: the CPU's own backend, and the reference twin of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from runtime.batch import ForwardMode
from runtime.forward_batch import ForwardBatch
from runtime.layers.attention.base import AttentionCaps, AttentionShape
from runtime.mem_cache.kv_pool import KVPool, PageTable

CAPS = AttentionCaps(needs_len_bounds=True, tree_mask=True, page_sizes=None, head_dims=None, cuda_graph=False, sliding_window=True)


@dataclass(frozen=True, slots=True)
class Segment:
    """B' requests of equal query count q, attended together over S gathered keys.

    Attributes:
        tokens: the rows of the pass they cover, B' * q of them.
        slots: int64 [B' * S], the KV slots of positions 0..S-1 of each request; those past a request's end are masked.
        rows: int64 [B'], which requests of the batch.
        num_keys: S.
        query_pos: int64 [B', q], the index of each query's own key.
        masks: by window, what is added to scores: [B', 1, q, S] in the KV dtype.
    """

    tokens: slice
    slots: torch.Tensor
    num_keys: int
    query_pos: torch.Tensor
    masks: dict[int, torch.Tensor]


class TorchNativeAttention:
    """`AttentionBackend` of gathers and `scaled_dot_product_attention`. Eager only: `plan` allocates, and reads `seq_len_bounds`.

    A pass of fixed width is one padded batch; an EXTEND pass is one segment per request.
    """

    caps = CAPS

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> None:
        self._shape = shape
        self._pool = kv_pool
        self._table = page_table
        self._dtype = kv_pool.k[0].dtype
        self._windows = tuple(sorted(set(shape.window)))
        self._group = shape.num_q_heads // shape.num_kv_heads
        self._steps: list[list[Segment]] = []

    def plan(self, batch: ForwardBatch, num_steps: int = 1) -> None:
        """Find the slots and masks of `num_steps` passes; every layer shares them."""
        if batch.mode == ForwardMode.EXTEND:
            self._steps = [self._extend_segments(batch)]
            return
        width = batch.tokens_per_req
        num_keys = int(batch.seq_len_bounds.max()) + (num_steps - 1) * width
        slots = self._slots(batch.req_pool_indices, num_keys)
        known_mask = batch.tree_mask is None or num_steps == 1
        self._steps = [
            [self._segment(batch, slice(0, batch.num_tokens), batch.seq_lens + step * width, width, num_keys, slots, known_mask)]
            for step in range(num_steps)
        ]

    def forward(self, q: torch.Tensor, layer_id: int, batch: ForwardBatch) -> torch.Tensor:
        """Attend. q [T, H, head_dim] -> [T, H * head_dim]."""
        segments = self._steps[batch.step]
        outs = [self._attend(q, layer_id, segment, batch) for segment in segments]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _extend_segments(self, batch: ForwardBatch) -> list[Segment]:
        assert batch.extend_lens is not None
        segments, start = [], 0
        for i, (width, num_keys) in enumerate(zip(batch.extend_lens.tolist(), batch.seq_len_bounds.tolist(), strict=True)):
            tokens = slice(start, start + width)
            slots = self._slots(batch.req_pool_indices[i : i + 1], num_keys)
            segments.append(self._segment(batch, tokens, batch.seq_lens[i : i + 1], width, num_keys, slots, True))
            start += width
        return segments

    def _slots(self, rows: torch.Tensor, num_keys: int) -> torch.Tensor:
        """KV slots of positions 0..num_keys-1 of each row, int64 [rows * num_keys]."""
        size = self._table.page_size
        num_pages = min(-(-num_keys // size), self._table.max_pages)
        pages = self._table.pages[:, :num_pages].index_select(0, rows).to(torch.int64)
        slots = (pages.unsqueeze(2) * size + torch.arange(size, device=pages.device)).flatten(1)
        return slots[:, :num_keys].reshape(-1)

    def _segment(
        self,
        batch: ForwardBatch,
        tokens: slice,
        seq_lens: torch.Tensor,
        width: int,
        num_keys: int,
        slots: torch.Tensor,
        known_mask: bool,
    ) -> Segment:
        offsets = torch.arange(width, device=seq_lens.device)
        query_pos = seq_lens.to(torch.int64)[:, None] - width + offsets
        num_keys = slots.numel() // len(seq_lens)
        segment = Segment(tokens, slots, num_keys, query_pos, {})
        if known_mask:
            for window in self._windows:
                segment.masks[window] = self._mask(segment, window, batch)
        return segment

    def _mask(self, segment: Segment, window: int, batch: ForwardBatch) -> torch.Tensor:
        """What to add to the scores, [B', 1, q, S]; finite, so that a row without any key stays finite too."""
        keys = torch.arange(segment.num_keys, device=segment.slots.device)
        seen = visible_keys(segment.query_pos, keys, window)
        if batch.tree_mask is not None:
            seen = tree_visible_keys(segment.query_pos, keys, window, batch, segment.tokens)
        floor = torch.finfo(self._dtype).min / 2
        return torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, floor).unsqueeze(1)

    def _attend(self, q: torch.Tensor, layer_id: int, segment: Segment, batch: ForwardBatch) -> torch.Tensor:
        requests, width = segment.query_pos.shape
        shape, window = self._shape, self._shape.window[layer_id]
        mask = segment.masks.get(window)
        if mask is None:
            mask = self._mask(segment, window, batch)
        k, v = (self._gather(cache, segment, requests) for cache in self._pool.flat(layer_id))
        # The query heads of one KV head become queries of it: no copy of K and V per head.
        queries = q[segment.tokens].view(requests, width, shape.num_kv_heads, self._group, shape.head_dim)
        queries = queries.permute(0, 2, 3, 1, 4).reshape(requests, shape.num_kv_heads, self._group * width, shape.head_dim)
        if width > 1:
            mask = mask.repeat(1, 1, self._group, 1)
        out = F.scaled_dot_product_attention(queries.to(k.dtype), k, v, attn_mask=mask, scale=shape.scale)
        out = out.view(requests, shape.num_kv_heads, self._group, width, shape.head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(requests * width, shape.num_q_heads * shape.head_dim).to(q.dtype)

    def _gather(self, cache: torch.Tensor, segment: Segment, requests: int) -> torch.Tensor:
        """Keys or values of the segment, a view [B', G, S, head_dim] of a copy."""
        rows = cache.index_select(0, segment.slots)
        return rows.view(requests, segment.num_keys, *cache.shape[1:]).transpose(1, 2)


def visible_keys(query_pos: torch.Tensor, keys: torch.Tensor, window: int) -> torch.Tensor:
    """Causal visibility, bool [B, q, S]: a query sees its own key and those before it, at most `window` before if that is not -1."""
    distance = query_pos[:, :, None] - keys
    seen = distance >= 0
    return seen if window < 0 else seen & (distance <= window)


def tree_visible_keys(query_pos: torch.Tensor, keys: torch.Tensor, window: int, batch: ForwardBatch, tokens: slice) -> torch.Tensor:
    """Visibility under `batch.tree_mask`, bool [B, q, S]: every key before the tail, and those of the tail whose bit is set.

    A window limits the keys before the tail, measured from the token's position in the text, not in the batch.
    """
    assert batch.tree_mask is not None
    bits = batch.tree_mask[tokens].view(query_pos.shape)
    tail = keys - (query_pos[:, -1:] + 1 - batch.tree_tail)  # [B, S]: index in the tail, negative before it
    in_tail = (bits[:, :, None] >> tail.clamp(0, 63)[:, None, :]) & 1 == 1
    inside = (tail >= 0) & (tail < batch.tree_tail)
    before = (tail < 0)[:, None, :]
    if window >= 0:
        before = before & (batch.positions[tokens].view(query_pos.shape)[:, :, None] - keys <= window)
    return before | (inside[:, None, :] & in_tail)
