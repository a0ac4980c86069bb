"""FA3 over a prefix that all requests share, against torch attention, captured, with prefixes and lengths that change; and its kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from gpu.test_attention import World, captured, check, fixed_batch, load, make_world, plain, queries
from runtime.layers.attention.base import plan_pass
from runtime.layers.attention.kernels.shared_prefix import merge_prefix, split_pages
from runtime.layers.attention.kernels.split_decode import LN_2
from runtime.layers.forward_batch import ForwardBatch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
RUNS = (
    (0, [1020, 129, 2040, 700, 5, 257]),
    (512, [1020, 529, 2040, 700, 600, 557]),
    (1024, [1030, 1029, 2040, 1700, 1600]),
    (2048, [2288, 2290, 2279, 2272, 2291, 2288, 2289]),
)
"""Shared keys, and the lengths of the requests; the rest is padding."""


@pytest.mark.parametrize(
    ("head_dim", "page_size", "width", "size"),
    [
        (128, 64, 4, 8),
        (128, 64, 1, 16),
        (128, 128, 6, 16),
        (128, 64, 4, 32),
        (128, 64, 2, 48),
        (128, 64, 40, 8),
        (64, 16, 4, 16),
        (256, 64, 4, 24),
    ],
)
def test_a_captured_pass_follows_the_shared_prefix(head_dim: int, page_size: int, width: int, size: int) -> None:
    """A window of 40 tokens is too wide for split-KV attention."""
    world = make_world("fa3", replace(plain(head_dim, page_size, width), batch=size))
    assert world.fast.caps.shared_prefix
    batch = fixed_batch(world.kind)
    batch.shared_lens = torch.zeros(world.kind.batch, dtype=torch.int32, device="cuda")
    q = queries(world.kind, world.kind.batch * width)

    def run() -> list[torch.Tensor]:
        return [world.fast.forward(q, world.layers[layer], batch) for layer in (0, 1)]

    plan_pass(world.fast, batch)
    graph, out = captured(run)
    for shared, lens in RUNS:
        q.normal_()
        pages = world.pages.pages[1:, : shared // page_size]
        own = pages.clone()
        lens = [max(length, shared + width) for length in (lens * size)[: size - 1]]
        load(world, batch, lens)
        pages.copy_(pages[:1].clone().expand_as(pages))
        batch.shared_lens.fill_(shared)
        plan_pass(world.fast, batch)
        eager = [layer.clone() for layer in run()]
        for layer in out:
            layer.fill_(float("nan"))
        plan_pass(world.fast, batch)
        graph.replay()
        live = slice(0, len(lens) * width)
        check_live(world, batch, q, out, live)
        assert all(torch.equal(a[live], b[live]) for a, b in zip(eager, out, strict=True)), "replay differs from the same pass run eagerly"
        pages.copy_(own)


def check_live(world: World, batch: ForwardBatch, q: torch.Tensor, out: list[torch.Tensor], live: slice) -> None:
    """Compare live rows; those of padding, which have fewer keys than the prefix, only have to be finite."""
    for layer in out:
        assert torch.isfinite(layer).all()
    plan_pass(world.slow, batch)
    for i, layer in enumerate(out):
        want = world.slow.forward(q.float(), world.slow_layers[i], batch).double()
        layer[live.stop :].copy_(want[live.stop :])
    check(world, batch, q, out)


def test_only_full_causal_attention_without_sinks_shares() -> None:
    assert not make_world("fa3", plain(128, 64, 4, window=100)).fast.caps.shared_prefix
    assert not make_world("fa3 8-bit", plain(128, 64, 4)).fast.caps.shared_prefix


def test_pages_after_the_prefix() -> None:
    pages = torch.randperm(6 * 1500, device="cuda", dtype=torch.int32).view(6, 1500)
    rows = torch.tensor([1, 2, 5, 0], dtype=torch.int32, device="cuda")
    lens = torch.tensor([100, 48, 23999, 4], dtype=torch.int32, device="cuda")
    shared = torch.full((4,), 48, dtype=torch.int32, device="cuda")
    own_pages, own_lens = torch.full((4, 1500), -1, dtype=torch.int32, device="cuda"), torch.full_like(lens, -1)
    split_pages(pages, rows, lens, shared, 16, own_pages, own_lens)
    assert own_lens.tolist() == [52, 0, 23951, 0]
    assert torch.equal(own_pages[:, :-3], pages[rows.long(), 3:])
    assert not own_pages[:, -3:].any()


@pytest.mark.parametrize(("heads", "dim"), [(32, 128), (7, 64), (6, 256)])
def test_parts_are_merged_where_they_have_keys(heads: int, dim: int) -> None:
    torch.manual_seed(0)
    own, shared = (torch.tensor(lens, dtype=torch.int32, device="cuda") for lens in ([5, 0, 300], [64, 64, 64]))
    scores = torch.randn((6, heads, 364), device="cuda", dtype=torch.float64)
    values = torch.randn((6, heads, 364, dim), device="cuda", dtype=torch.float64)
    counts = own.repeat_interleave(2)[:, None, None]
    at = torch.arange(364, device="cuda")
    parts = []
    for inside in (at < counts, at >= 300):
        hidden = scores.masked_fill(~inside, float("-inf"))
        parts.append(((hidden.softmax(-1)[..., None, :] @ values)[..., 0, :], hidden.logsumexp(-1)))
    whole = scores.masked_fill(~((at < counts) | (at >= 300)), float("-inf")).softmax(-1)
    want = (whole[..., None, :] @ values)[..., 0, :]
    (out, lse), (prefix_out, prefix_lse) = ((rows.to(torch.bfloat16), sums.float().t().contiguous().t()) for rows, sums in parts)
    got = merge_prefix(out.clone(), lse, prefix_out, prefix_lse, own, shared, lse_in_bits=False)
    in_bits = merge_prefix(out.clone(), (lse / LN_2).contiguous(), prefix_out, prefix_lse, own, shared, lse_in_bits=True)
    torch.testing.assert_close(in_bits, got)
    assert (got.double() - want).norm() / want.norm() < 5e-3
    alone = merge_prefix(out.clone(), lse, prefix_out * float("nan"), prefix_lse, own, torch.zeros_like(shared), lse_in_bits=False)
    with_keys = own.repeat_interleave(2) > 0
    assert torch.equal(alone[with_keys], out[with_keys])
    assert not alone[~with_keys].any(), "no keys at all"
