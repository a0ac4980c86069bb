"""Start-up check of backends that depend on private parts of a package: a small pass against torch_native."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from runtime.batch import ForwardMode
from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend, AttentionShape, AttentionSpec, plan_pass
from runtime.layers.attention.registry import backend_class, build_backend
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Largest relative error of a token's output."""
WIDTH, MAX_LEN = 4, 512
LENGTHS = ((260, 131, 5), (300, 17, 129))
"""KV lengths of the live requests. One plan, made for `BOUNDS`, covers both sets."""
BOUNDS = (301, 133, 131)


def check_backend(name: str, shape: AttentionShape, page_size: int, device: torch.device) -> None:
    """Compare fixed-width, tree and ragged passes of a backend with torch_native, if `caps.self_check` is set.

    Raises:
        ConfigError: results differ.
    """
    if not backend_class(name).caps.self_check:
        return
    with torch.inference_mode():
        worst = _Check(name, shape, page_size, device).worst()
    limit = TOLERANCE[shape.layers[0].kv.dtype]
    if not worst <= limit:  # NaN fails too
        raise ConfigError(
            f"Attention backend {name} gives wrong results on this machine: relative error {worst:.1e}, the limit is {limit:.0e}. "
            "Reinstall the 'cuda' extra, or use another --attention-backend."
        )


class _Check:
    """A backend and torch_native over the same random keys and values; three requests and one padding row."""

    def __init__(self, name: str, shape: AttentionShape, page_size: int, device: torch.device) -> None:
        by_window = {layer.window: layer for layer in shape.layers}.values()
        layers = tuple(replace(layer, layer_id=i) for i, layer in enumerate(by_window))
        self._width = min(WIDTH, shape.max_tokens_per_req)
        self._shape = replace(shape, layers=layers, max_batch_size=4, max_tokens_per_req=self._width, max_context_len=MAX_LEN, max_prompt=0)
        self._device = device
        self._random = torch.Generator(device).manual_seed(0)
        self._table = PageTable(4, MAX_LEN, page_size, device)
        pages = torch.randperm(3 * self._table.max_pages, generator=self._random, device=device) + 1
        self._table.pages[1:] = pages.view(3, -1).to(torch.int32)
        pools = [KVPool([replace(a.kv, dtype=t) for a in layers], 3 * self._table.max_pages, page_size, device)
                 for t in (layers[0].kv.dtype, torch.float32)]  # fmt: skip
        for cache, copy in zip((*pools[0].k, *pools[0].v), (*pools[1].k, *pools[1].v), strict=True):
            cache.normal_(generator=self._random)
            copy.copy_(cache)
        self._backend = build_backend(name, self._shape, pools[0], self._table)
        self._reference = build_backend("torch_native", self._shape, pools[1], self._table)

    def worst(self) -> float:
        """The largest relative error of any token in any pass; NaN if a result is not finite."""
        passes = [self._fixed(lengths, tree=False) for lengths in LENGTHS]
        if self._shape.windows == (-1,) and self._backend.caps.tree_mask and not self._shape.layers[0].softcap:
            passes += [self._fixed(lengths, tree=True) for lengths in LENGTHS]
        passes.append(self._ragged())
        return float(torch.stack([self._error(batch) for batch in passes]).max())

    def _error(self, batch: ForwardBatch) -> torch.Tensor:
        errors = []
        for layer in self._shape.layers:
            shape = (batch.num_tokens, layer.num_q_heads, layer.kv.key_dim)
            q = torch.randn(shape, generator=self._random, device=self._device).to(layer.kv.dtype)
            got, want = _run(self._backend, q, layer, batch).float(), _run(self._reference, q.float(), layer, batch)
            errors.append(((got - want).norm(dim=1) / want.norm(dim=1)).max())
        return torch.stack(errors).max()

    def _fixed(self, lengths: tuple[int, ...], tree: bool) -> ForwardBatch:
        """A pass of `width` queries per request with bounds above the lengths; `tree` adds a causal tree mask."""
        lens = np.array([*(max(n, self._width) for n in lengths), self._width], dtype=np.int32)
        batch = self._batch(ForwardMode.TARGET_VERIFY, [1, 2, 3, 0], lens, np.full(4, self._width, dtype=np.int32))
        bounds = np.array([*BOUNDS, self._width], dtype=np.int32)
        mask = ((2 << torch.arange(self._width, device=self._device)) - 1).repeat(4) if tree else None
        return replace(
            batch, tokens_per_req=self._width, seq_len_bounds=bounds, extend_lens=None, tree_mask=mask, tree_tail=self._width if tree else 0
        )

    def _ragged(self) -> ForwardBatch:
        lens = np.array([40, 131, 5], dtype=np.int32)
        return self._batch(ForwardMode.EXTEND, [1, 2, 3], lens, np.array([40, 3, 1], dtype=np.int32))

    def _batch(self, mode: ForwardMode, rows: list[int], lens: np.ndarray, widths: np.ndarray) -> ForwardBatch:
        positions = np.concatenate([np.arange(n - w, n) for n, w in zip(lens, widths, strict=True)])
        zeros = torch.zeros(len(positions), dtype=torch.int64, device=self._device)
        return ForwardBatch(
            mode=mode,
            batch_size=len(rows),
            tokens_per_req=0,
            input_ids=zeros,
            positions=torch.from_numpy(positions).to(self._device, torch.int64),
            out_cache_loc=zeros,
            req_pool_indices=torch.tensor(rows, device=self._device),
            seq_lens=torch.from_numpy(lens.copy()).to(self._device),
            qo_indptr=torch.from_numpy(np.concatenate([[0], widths.cumsum()]).astype(np.int32)).to(self._device),
            seq_len_bounds=lens,
            extend_lens=widths,
        )


def _run(backend: AttentionBackend, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
    plan_pass(backend, batch)
    return backend.forward(q, layer, batch)
