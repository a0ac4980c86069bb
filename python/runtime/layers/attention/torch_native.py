"""Attention in plain torch over gathered pages: the CPU's backend, and the reference for the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.layers.attention.base import AttentionBackend, AttentionShape, AttentionSpec
from runtime.layers.attention.stable_shapes import ROW_BLOCK, HeadKind, StableShapes, any_shapes, find_stable_shapes
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable

PADDED_KEYS = 128
"""Mean padding keys per request above which requests run separately: a call takes as long as about 100 keys."""
MAX_WINDOW = 64
"""Queries above which a request runs separately: it is a prompt, and torch masks a causal prompt faster than a mask in memory does."""


@dataclass(frozen=True, slots=True)
class Segment:
    """B' requests of q queries each, attended together over S gathered keys.

    Attributes:
        tokens: their B' * q rows of the pass.
        pages: int64 [B' * pages per request], the pages of each request in order; if they are consecutive, a slice of slots to read in
            place.
        num_keys: S.
        query_pos: int64 [B', q], the index of each query's own key.
        unmasked: windows of causal layers that need no mask because the prompt starts at position 0.
        masks: results of `mask_rows` in the KV dtype, by window, causality and group of query heads, each with the tree mask from which it
            was computed.
    """

    tokens: slice
    pages: torch.Tensor | slice
    num_keys: int
    query_pos: torch.Tensor
    unmasked: frozenset[int] = frozenset()
    masks: dict[tuple[int, bool, int], tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict, init=False)


class TorchNativeAttention(AttentionBackend):
    """`AttentionBackend` of gathered pages and `scaled_dot_product_attention`.

    Eager only: `prepare` allocates and reads `seq_len_bounds`. A fixed-width pass is one padded batch; a pass over prompts or ragged
    windows has one segment per run of equal widths of at most `MAX_WINDOW`. If lengths are `uneven`, each request has a separate segment.
    Layers with a soft cap, and on other devices than a CPU those with sinks, use `explicit_attention`.
    """

    caps = ATTENTION_CAPS["torch_native"]

    def __init__(self, shape: AttentionShape, kv_pool: KVPool, page_table: PageTable) -> None:
        self._pool = kv_pool
        self._table = page_table
        self._windows = shape.windows
        self._shapes = find_stable_shapes(head_kinds(shape)) if page_table.pages.device.type == "cpu" else any_shapes()
        self._passes: list[list[Segment]] = []

    def prepare(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        """Find the pages of the passes. The first layer computes the masks, because a draft's tree is known only then."""
        if not batch.tokens_per_req:
            self._passes = [self._extend_segments(batch)]
            return
        self._passes = [[] for _ in range(num_passes)]
        width, bounds = batch.tokens_per_req, batch.seq_len_bounds
        count = 1 if uneven(bounds) else len(bounds)
        for first in range(0, len(bounds), count):
            rows, tokens = slice(first, first + count), slice(first * width, (first + count) * width)
            pages, num_keys = self._pages(batch.req_pool_indices[rows], int(bounds[rows].max()) + (num_passes - 1) * width)
            for pass_index, segments in enumerate(self._passes):
                positions = query_positions(batch.seq_lens[rows] + pass_index * width, width)
                segments.append(Segment(tokens, pages, num_keys, positions))

    def forward(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        """Attend. q [T, H, key_dim] -> [T, H * value_dim]."""
        outs = [self._attend(q, layer, segment, batch) for segment in self._passes[batch.pass_index]]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _extend_segments(self, batch: ForwardBatch) -> list[Segment]:
        assert batch.extend_lens is not None
        segments, start, end = list[Segment](), 0, 0
        widths, bounds = batch.extend_lens.tolist(), batch.seq_len_bounds
        while end < len(widths):
            i, width, end = end, widths[end], end + 1
            if width == 0:
                continue
            while width <= MAX_WINDOW and end < len(widths) and widths[end] == width:
                end += 1
            count = 1 if uneven(bounds[i:end]) else end - i
            for first in range(i, end, count):
                rows, tokens = slice(first, first + count), slice(start, start + count * width)
                seq_len = int(bounds[rows].max())
                pages, num_keys = self._pages(batch.req_pool_indices[rows], seq_len)
                unmasked = frozenset(w for w in self._windows if w < 0 or w >= width - 1) if width == seq_len else frozenset[int]()
                segments.append(Segment(tokens, pages, num_keys, query_positions(batch.seq_lens[rows], width), unmasked))
                start = tokens.stop
        return segments

    def _pages(self, rows: torch.Tensor, written: int) -> tuple[torch.Tensor | slice, int]:
        """The pages to read for each row, of which positions 0..written-1 are valid, and the number of positions to read."""
        size = self._table.page_size
        num_keys = self._shapes.key_count(written)
        count, used = -(-num_keys // size), -(-written // size)
        pages = self._table.pages[:, :count].index_select(0, rows)
        if count > self._table.max_pages:
            pages = F.pad(pages, (0, count - self._table.max_pages))
        pages = pages.reshape(-1).to(torch.int64)
        if rows.shape[0] == 1 and pages.device.type == "cpu":
            listed = pages.numpy()
            first = int(listed[0])
            in_pool = first + count <= self._pool.k[0].shape[0]
            if in_pool and np.array_equal(listed[:used], np.arange(first, first + used)):
                return slice(first * size, first * size + num_keys), num_keys
        return pages, num_keys

    def _mask_for(self, segment: Segment, layer: AttentionSpec, batch: ForwardBatch, dtype: torch.dtype, group: int) -> torch.Tensor:
        """The mask of a layer, cached for layers with the same window and causality."""
        key = (layer.window, layer.causal, group)
        made = segment.masks.get(key)
        if made is None or made[0] is not batch.tree_mask:
            made = (batch.tree_mask, mask_rows(self._mask(segment, layer, batch, dtype), group, self._shapes))
            segment.masks[key] = made
        return made[1]

    def _mask(self, segment: Segment, layer: AttentionSpec, batch: ForwardBatch, dtype: torch.dtype) -> torch.Tensor:
        """The values to add to scores, [B', 1, q, S]; finite, so that the softmax of a row without keys is finite."""
        keys = torch.arange(segment.num_keys, device=segment.query_pos.device)
        if batch.tree_mask is None:
            seen = visible_keys(segment.query_pos, keys, layer.window, layer.causal)
        else:
            seen = tree_visible_keys(segment.query_pos, keys, layer.window, batch, segment.tokens)
        floor = torch.finfo(dtype).min / 2
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, floor).unsqueeze(1)

    def _attend(self, q: torch.Tensor, layer: AttentionSpec, segment: Segment, batch: ForwardBatch) -> torch.Tensor:
        requests, width = segment.query_pos.shape
        caches = self._pool.flat(layer.layer_id)
        k = gather(caches[0], segment, self._pool.page_size)
        v = k if layer.kv.kind == "mla" else gather(caches[1], segment, self._pool.page_size)
        if layer.kv_scales is not None:
            k, v = (cache.to(q.dtype) * scale.to(q.dtype) for cache, scale in zip((k, v), layer.kv_scales, strict=True))
        queries = q[segment.tokens].view(requests, width, layer.num_q_heads, -1).type_as(k)
        if layer.softcap or (layer.sinks is not None and k.device.type != "cpu"):
            mask = self._mask_for(segment, layer, batch, k.dtype, 1)[:, :, :width]
            out = explicit_attention(queries.transpose(1, 2), k, v, mask, layer).transpose(1, 2).flatten(2)
        elif layer.causal and layer.window in segment.unmasked:
            out = stable_attention(queries, k, v, None, layer, self._shapes)
        else:
            group = self._group(requests, width, layer.num_q_heads // k.shape[1])
            out = stable_attention(queries, k, v, self._mask_for(segment, layer, batch, k.dtype, group), layer, self._shapes, group)
        return out.flatten(0, 1).type_as(q)

    def _group(self, requests: int, width: int, heads: int) -> int:
        """How many query heads of a KV head share a GEMM: all, or one, because a single request's window is faster without the copy."""
        few = width < self._shapes.min_rows or (requests > 1 and width * heads <= ROW_BLOCK)
        return heads if few else 1


def stable_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    layer: AttentionSpec,
    shapes: StableShapes,
    group: int = 1,
) -> torch.Tensor:
    """Attend with the same bits for a query in every pass on a CPU. Returns [B, q, H * value_dim].

    The queries of a group of heads become rows of one GEMM. If there are too few, rows of zeros are added.

    Args:
        q: [B, q, H, key_dim].
        k, v: [B, G, S, key_dim] and [B, G, S, value_dim], S from `shapes.key_count`; whole latent rows for both, because torch's kernel
            takes only values as wide as keys.
        mask: from `mask_rows`, added to the scores; None for causal attention from position 0.
        layer: with sinks only on a CPU.
        shapes: the shapes that give the same bits.
        group: number of query heads that share a GEMM: 1, or H / G with a mask.
    """
    batch, width, num_heads, dim = q.shape
    if width == 1:
        rows = q.view(batch, num_heads // group, group, dim)
    else:
        rows = q.view(batch, width, num_heads // group, group, dim).transpose(1, 2).flatten(2, 3)
    count = width * group
    if missing := shapes.missing_rows(count):
        rows = F.pad(rows, (0, 0, 0, missing))
    if layer.sinks is None:
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=True)
    else:
        out = _attention_with_sinks(rows, k, v, mask, layer.scale, layer.sinks.float().view(-1, group).repeat(1, width))
    if out.shape[2:] != (count, layer.kv.value_dim):
        out = out[:, :, :count, : layer.kv.value_dim]
    return out.reshape(batch, 1, -1) if width == 1 else out.view(*out.shape[:2], width, group, -1).transpose(1, 2).flatten(2)


def _attention_with_sinks(
    rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, sinks: torch.Tensor
) -> torch.Tensor:
    """torch's attention on a CPU, multiplied by the share of the softmax that is not the sink's; `sinks` [heads, rows], without padding.

    The sigmoid is written out, because `torch.sigmoid` rounds differently in the last elements of a tensor.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sums = attend(rows, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
    count = sinks.shape[1]
    return out[:, :, :count] / (1 + torch.exp(sinks - log_sums[:, :, :count]))[..., None]


def mask_rows(mask: torch.Tensor, group: int, shapes: StableShapes) -> torch.Tensor:
    """`mask` [B, 1, q, S] repeated for the rows of `stable_attention`; a single row is broadcast."""
    width = mask.shape[2]
    if width == 1:
        return mask
    rows, missing = mask if group == 1 else mask.repeat_interleave(group, dim=2), shapes.missing_rows(width * group)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def head_kinds(shape: AttentionShape) -> frozenset[HeadKind]:
    """The kinds of heads of the layers."""
    kinds = ((layer.kv, shape.dtype if layer.kv.scaled else layer.kv.dtype) for layer in shape.layers)
    return frozenset(HeadKind(kv.key_dim, kv.key_dim if kv.kind == "mla" else kv.value_dim, dtype) for kv, dtype in kinds)


def uneven(seq_lens: npt.NDArray[np.int32]) -> bool:
    """Whether attention is faster for each request separately than for all together, padded to the longest."""
    lens = seq_lens.tolist()  # numpy takes ten times as long for a few requests
    return max(lens) * len(lens) - sum(lens) > PADDED_KEYS * len(lens)


def explicit_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, layer: AttentionSpec) -> torch.Tensor:
    """Attention with sinks or a soft cap by its definition, in float32. Returns [B, H, q, value_dim].

    Args:
        q: [B, H, q, key_dim].
        k, v: [B, G, S, key_dim] and [B, G, S, value_dim].
        mask: [B, 1, q, S], added to the scores.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (part.float().repeat_interleave(group, dim=1) for part in (k, v))
    scores = q.float() @ keys.transpose(2, 3) * layer.scale
    if layer.softcap:
        scores = (scores / layer.softcap).tanh() * layer.softcap
    scores = scores + mask
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
    return scores.softmax(dim=3)[..., : keys.shape[2]] @ values


def gather(slots: torch.Tensor, segment: Segment, page_size: int) -> torch.Tensor:
    """Keys or values of each request, [B', G, S, dim], from `slots` of all requests; a view if pages are consecutive."""
    if isinstance(segment.pages, slice):
        return slots[segment.pages].transpose(0, 1).unsqueeze(0)
    pages = slots.view(-1, page_size, *slots.shape[1:]).index_select(0, segment.pages)
    return pages.view(segment.query_pos.shape[0], -1, *slots.shape[1:])[:, : segment.num_keys].transpose(1, 2)


def query_positions(seq_lens: torch.Tensor, width: int) -> torch.Tensor:
    """The key index of each of the last `width` tokens: int32 [B] -> int64 [B, width]."""
    return seq_lens[:, None] + torch.arange(-width, 0, device=seq_lens.device)


def visible_keys(query_pos: torch.Tensor, keys: torch.Tensor, window: int, causal: bool) -> torch.Tensor:
    """Visibility, bool [B, q, S]: a query sees its own key and the `window` keys before it (all if -1); without `causal` also later
    keys.
    """
    distance = query_pos[:, :, None] - keys
    seen = distance >= 0 if causal else (keys <= query_pos[:, -1:, None]).expand_as(distance)
    return seen if window < 0 else seen & (distance <= window)


def tree_visible_keys(query_pos: torch.Tensor, keys: torch.Tensor, window: int, batch: ForwardBatch, tokens: slice) -> torch.Tensor:
    """Visibility under `batch.tree_mask`, bool [B, q, S]: every key before the tail, and keys of the tail by bit.

    A window is measured in positions of the sequence, not of the batch: in the tail, along the token's branch.
    """
    assert batch.tree_mask is not None
    bits = batch.tree_mask[tokens].view(query_pos.shape)
    tail = keys - (query_pos[:, -1:] + 1 - batch.tree_tail)  # [B, S]: index in the tail, negative before it
    in_tail = (bits[:, :, None] >> tail.clamp(0, 63)[:, None, :]) & 1 == 1
    branch = in_tail & ((tail >= 0) & (tail < batch.tree_tail))[:, None, :]
    before = (tail < 0)[:, None, :]
    if window >= 0:
        before = before & (batch.positions[tokens].view(query_pos.shape)[:, :, None] - keys <= window)
        branch = branch & (branch.sum(2, keepdim=True) - branch.cumsum(2) <= window)  # parents come before their children
    return before | branch
