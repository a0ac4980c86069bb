"""Latent attention compared with the definition: kernels also under Triton's interpreter (TRITON_INTERPRET=1), backends on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import LatentConfig
from runtime.layers.attention.base import AttentionShape, AttentionSpec, plan_pass
from runtime.layers.attention.kernels.latent_decode import LatentShape, LatentWorkspace, latent_attention
from runtime.layers.attention.kernels.paged_keys import PagedKeys
from runtime.layers.attention.registry import build_backend
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.kernels.latent_rows import rotate_heads, write_latent
from runtime.layers.latent_heads import LatentHeads
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rope
from runtime.layers.torch_ops import rms_norm, rotate
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.mem_cache.kv_spec import KVSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
DTYPE = torch.float16
"""A dtype that both the interpreter and a GPU support."""
RANK, ROPE = 512, 64
TREE = (1, 3, 5, 11)
"""Rows of a tree mask of four nodes."""


def definition(
    q: torch.Tensor, cache: torch.Tensor, keys: PagedKeys, rank: int, scale: float, mask: torch.Tensor | None, tail: int
) -> torch.Tensor:
    """Attention for one query and head at a time, in float32."""
    rows, outs = cache.flatten(0, 1)[:, 0].float(), []
    width = len(q) // len(keys.rows)
    for i, query in enumerate(q.float()):
        length = int(keys.seq_lens[i // width])
        positions = torch.arange(length, device=q.device)
        pages = keys.pages[int(keys.rows[i // width])][positions // keys.page_size].long()
        own = rows[pages * keys.page_size + positions % keys.page_size]
        bit = positions - (length - tail)
        if mask is None:
            seen = positions <= length - width + i % width
        else:
            seen = (bit < 0) | ((int(mask[i]) >> bit.clamp(min=0)) & 1 == 1)
        outs.append((query @ own.T * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ own[:, :rank])
    return torch.stack(outs)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(
    ("lens", "width", "heads", "page_size", "config"),
    [
        ([3, 70], 1, 5, 1, LatentConfig(16, 16, 4, 2)),
        ([4, 133], 4, 5, 16, LatentConfig(32, 16, 4, 2)),
        ([64, 200, 31], 4, 20, 64, LatentConfig(16, 64, 4, 2)),
        ([300], 4, 6, 16, LatentConfig(32, 32, 8, 2, 2)),
        ([20], 1, 3, 16, LatentConfig(32, 32, 8, 2)),
    ],
)
def test_split_attention_follows_the_definition(
    lens: list[int], width: int, heads: int, page_size: int, config: LatentConfig, tree: bool
) -> None:
    torch.manual_seed(sum(lens))
    shape = LatentShape(len(lens), width, heads, 32, 16, 12, config)
    columns = -(-max(lens) // page_size)
    pages = torch.randperm((len(lens) + 1) * columns).int().view(-1, columns).to(DEVICE)
    cache = torch.randn(pages.numel(), page_size, 1, 48).to(DEVICE, DTYPE)
    rows = torch.arange(1, len(lens) + 1, dtype=torch.int32, device=DEVICE)
    keys = PagedKeys(pages, rows, torch.tensor(lens, dtype=torch.int32, device=DEVICE), page_size)
    q = torch.randn(len(lens) * width, heads, 48).to(DEVICE, DTYPE)
    mask = torch.tensor(TREE[:width] * len(lens), device=DEVICE) if tree else None
    tail = width if tree else 0
    got = latent_attention(q, cache, keys, shape, LatentWorkspace([shape], DEVICE), 0.2, tree_mask=mask, tail=tail)
    torch.testing.assert_close(got.float(), definition(q, cache, keys, 32, 0.2, mask, tail), rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("latent_queries", [True, False])
def test_rows_are_normed_rotated_and_stored(interleaved: bool, latent_queries: bool) -> None:
    torch.manual_seed(0)
    tokens, heads, rank, rope_dim, nope = 5, 6, 48, 16, 24

    def norm(width: int) -> RMSNorm:
        return RMSNorm(torch.randn(width, device=DEVICE), 1e-6)

    rope = Rope(torch.randn(64, rope_dim, device=DEVICE), interleaved)
    layout = LatentHeads(heads, nope, 20, norm(rank), rope, norm(40) if latent_queries else None)
    rows = torch.randn(tokens, layout.q_columns + layout.row_dim, device=DEVICE)
    positions, slots = torch.randint(0, 64, (tokens,), device=DEVICE), torch.randperm(20, device=DEVICE)[:tokens]
    cache = torch.zeros(20, 1, layout.row_dim, device=DEVICE)
    q, kv = write_latent(rows, layout, positions, slots, cache, pdl=False)
    want_q, latent, key = rows.split((layout.q_columns, rank, rope_dim), 1)
    if layout.q_norm is not None:
        want_q = rms_norm(want_q, layout.q_norm)
    want = torch.cat((rms_norm(latent, layout.kv_norm), rotate(key[:, None], rope, positions)[:, 0]), 1)
    torch.testing.assert_close(q, want_q)
    torch.testing.assert_close(kv, want)
    torch.testing.assert_close(cache[slots, 0], want)
    rows[1, layout.q_columns], rows[2, -1] = torch.nan, torch.inf
    write_latent(rows, layout, positions, slots, cache, pdl=False)
    assert cache.isfinite().all(), "NaN in a cache would reach other requests"
    torch.testing.assert_close(cache[slots[[0, 3, 4]], 0], want[[0, 3, 4]])
    x, out = torch.randn(tokens, heads, nope + rope_dim, device=DEVICE), torch.zeros(tokens, heads, rank + rope_dim, device=DEVICE)
    turned = rotate(x[..., nope:], rope, positions)
    rotate_heads(x[..., nope:], rope, positions, out[..., rank:], pdl=False)
    torch.testing.assert_close(out[..., rank:], turned)
    rotate_heads(x[..., nope:], rope, positions, x[..., nope:], pdl=False)
    torch.testing.assert_close(x[..., nope:], turned)


class Both:
    """A backend in bfloat16 and torch_native in float32 over the same latent rows."""

    def __init__(self, name: str, heads: int, batch: int, longest: int, page_size: int, width: int = 4) -> None:
        layer = AttentionSpec(0, heads, KVSpec("mla", 1, RANK + ROPE, RANK, torch.bfloat16), 0.07)
        self.layer, self.device, self.page_size = layer, torch.device("cuda"), page_size
        self.random = torch.Generator(self.device).manual_seed(heads + batch + longest)
        self.table = PageTable(batch + 1, longest, page_size, self.device)
        count = batch * self.table.max_pages
        self.table.pages[1:] = (torch.randperm(count, generator=self.random, device=self.device) + 1).view(batch, -1).int()
        shape = AttentionShape((layer,), batch, width, longest, tuning=H200)
        pools = [KVPool([replace(layer.kv, dtype=dtype)], count, page_size, self.device) for dtype in (torch.bfloat16, torch.float32)]
        pools[0].k[0].normal_(generator=self.random)
        pools[1].k[0].copy_(pools[0].k[0])
        self.backend = build_backend(name, shape, pools[0], self.table)
        self.reference = build_backend("torch_native", shape, pools[1], self.table)

    def error(self, batch: ForwardBatch) -> float:
        """The largest relative error of a token."""
        q = torch.randn((batch.num_tokens, self.layer.num_q_heads, RANK + ROPE), generator=self.random, device=self.device).bfloat16()
        got, want = (self.run(backend, q.to(dtype), batch) for backend, dtype in ((self.backend, q.dtype), (self.reference, torch.float32)))
        return float(((got.float() - want).norm(dim=1) / want.norm(dim=1)).max())

    def run(self, backend: Any, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        plan_pass(backend, batch)
        return backend.forward(q, self.layer, batch)

    def fixed(self, lens: list[int], width: int, tree: bool = False) -> ForwardBatch:
        batch = self.batch(ForwardMode.TARGET_VERIFY, lens, [width] * len(lens))
        mask = torch.tensor(TREE[:width] * len(lens), device=self.device) if tree else None
        return replace(batch, tokens_per_req=width, extend_lens=None, tree_mask=mask, tree_tail=width if tree else 0)

    def batch(self, mode: ForwardMode, lens: list[int], widths: list[int]) -> ForwardBatch:
        tokens = sum(widths)
        zeros = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        positions = np.concatenate([np.arange(n - w, n) for n, w in zip(lens, widths, strict=True)])
        return ForwardBatch(
            mode=mode,
            batch_size=len(lens),
            tokens_per_req=0,
            input_ids=zeros,
            positions=torch.from_numpy(positions).to(self.device),
            out_cache_loc=zeros,
            req_pool_indices=torch.arange(1, len(lens) + 1, device=self.device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=self.device),
            qo_indptr=torch.tensor([0, *np.cumsum(widths)], dtype=torch.int32, device=self.device),
            seq_len_bounds=np.array(lens, dtype=np.int32),
            extend_lens=np.array(widths, dtype=np.int32),
        )


SIZES = ((1, 1), (1, 1000), (1, 32768), (3, 4096), (16, 2048), (64, 1024))
"""(requests, keys of the longest request)."""


@on_a_gpu
@pytest.mark.parametrize("heads", [16, 20, 64])
@pytest.mark.parametrize(("batch", "longest"), SIZES)
@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_backends_agree_with_torch(name: str, batch: int, longest: int, heads: int) -> None:
    pytest.importorskip({"fa3": "sgl_kernel", "flashinfer": "flashinfer"}[name])
    if name == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    page_size = 64 if longest > 4096 else 16
    with torch.inference_mode():
        both = Both(name, heads, batch, max(longest, 8), page_size)
        lens = [max(longest - 37 * i, 5) for i in range(batch)] if longest > 1 else [1] * batch
        passes = [both.fixed(lens, 1)]
        if longest > 8:
            passes += [both.fixed(lens, 4), both.fixed(lens, 4, tree=True)]
            chunk = [min(n - 1, 200) for n in lens]
            passes.append(both.batch(ForwardMode.EXTEND, lens, chunk))
        for one in passes:
            assert both.error(one) < 2e-2
