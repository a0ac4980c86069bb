from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.layers.attention import torch_native
from runtime.layers.attention.base import AttentionShape, AttentionSpec, plan_pass
from runtime.layers.attention.torch_native import TorchNativeAttention
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.mem_cache.kv_spec import KVSpec
from runtime.model_executor.window import prompts_and_windows

CPU = torch.device("cpu")
H, G, HEAD = 6, 2, 8
MAX_LEN = 64
LONG = 1104
GQA = KVSpec("gqa", G, HEAD, HEAD, torch.float32)


@dataclass
class World:
    """A pool full of noise, a table of scattered pages, and a backend over both."""

    pool: KVPool
    table: PageTable
    backend: TorchNativeAttention
    layers: tuple[AttentionSpec, ...]

    @classmethod
    def make(
        cls,
        rng: np.random.Generator,
        page_size: int,
        windows: tuple[int, ...] = (-1,),
        neighbours: bool = False,
        layers: tuple[AttentionSpec, ...] | None = None,
    ) -> World:
        rows, per_row = 5, MAX_LEN // page_size
        if layers is None:
            layers = tuple(AttentionSpec(i, H, GQA, HEAD**-0.5, window) for i, window in enumerate(windows))
        pool = KVPool([layer.kv for layer in layers], rows * per_row, page_size, CPU)
        for cache in (*pool.v, *pool.k):
            cache.copy_(torch.from_numpy(rng.standard_normal(cache.shape).astype(np.float32)))
        table = PageTable(rows + 1, MAX_LEN, page_size, CPU)
        ids = np.arange(1, rows * per_row + 1) if neighbours else rng.permutation(rows * per_row) + 1
        table.pages[1:] = torch.from_numpy(ids.reshape(rows, per_row).astype(np.int32))
        shape = AttentionShape(layers, 8, 8, MAX_LEN, tuning=H200)
        return cls(pool, table, TorchNativeAttention(shape, pool, table), layers)


def make_batch(
    mode: ForwardMode, rows: list[int], seq_lens: list[int], widths: list[int], table: PageTable, slack: int = 0
) -> ForwardBatch:
    positions = torch.cat([torch.arange(n - w, n) for n, w in zip(seq_lens, widths, strict=True)])
    token_rows = torch.tensor(rows).repeat_interleave(torch.tensor(widths))
    extend = mode == ForwardMode.EXTEND
    return ForwardBatch(
        mode=mode,
        batch_size=len(rows),
        tokens_per_req=0 if extend else widths[0],
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions,
        out_cache_loc=table.slots(token_rows, positions),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        qo_indptr=torch.tensor([0, *np.cumsum(widths)], dtype=torch.int32),
        seq_len_bounds=np.array(seq_lens, dtype=np.int32) + slack,
        extend_lens=np.array(widths, dtype=np.int32) if extend else None,
    )


def sees(query: int, key: int, seq_len: int, window: int, position: int, tail: int, bits: int) -> bool:
    """The definition of visibility, one query and one key at a time."""
    if tail and key >= seq_len - tail:
        later = bits >> (key - (seq_len - tail))
        return bool(later & 1) and (window < 0 or later.bit_count() - 1 <= window)
    return key <= query and (window < 0 or position - key <= window)


def slow_attention(q: torch.Tensor, world: World, layer: AttentionSpec, batch: ForwardBatch, step: int = 0) -> torch.Tensor:
    """Attention by its definition: a loop over requests, queries and heads."""
    group, sinks = layer.num_q_heads // layer.kv.num_heads, layer.sinks
    out = torch.zeros(q.shape[0], layer.num_q_heads, layer.kv.value_dim)
    ends = batch.qo_indptr.tolist()
    k_flat, v_flat = world.pool.flat(layer.layer_id)
    masks = [0] * q.shape[0] if batch.tree_mask is None else batch.tree_mask.tolist()
    for r, row in enumerate(batch.req_pool_indices.tolist()):
        width = ends[r + 1] - ends[r]
        seq_len = int(batch.seq_lens[r]) + step * width
        slots = world.table.slots(torch.full((seq_len,), row), torch.arange(seq_len))
        for i in range(width):
            token, query = ends[r] + i, seq_len - width + i
            position = int(batch.positions[token])
            keys = [j for j in range(seq_len) if sees(query, j, seq_len, layer.window, position, batch.tree_tail, masks[token])]
            for head in range(layer.num_q_heads):
                k, v = k_flat[slots[keys], head // group], v_flat[slots[keys], head // group]
                scores = k @ q[token, head] * layer.scale
                scores = layer.softcap * (scores / layer.softcap).tanh() if layer.softcap else scores
                weights = scores.exp()
                total = weights.sum() + (0.0 if sinks is None else sinks[head].exp())
                out[token, head] = weights @ v / total
    return out.flatten(1)


def check(world: World, batch: ForwardBatch, rng: np.random.Generator) -> None:
    plan_pass(world.backend, batch)
    for layer in world.layers:
        shape = (batch.num_tokens, layer.num_q_heads, layer.kv.key_dim)
        q = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        torch.testing.assert_close(world.backend.forward(q, layer, batch), slow_attention(q, world, layer, batch), rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True, params=[0, LONG])
def padded_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one width are attended alone where their lengths differ at all, and always together."""
    monkeypatch.setattr(torch_native, "PADDED_KEYS", request.param)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_extend_with_prefixes_follows_the_definition(page_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World.make(rng, page_size, windows=(-1, 5))
    widths = rng.integers(1, 9, size=4).tolist()
    seq_lens = [w + int(p) for w, p in zip(widths, [0, *rng.integers(0, 20, size=3)], strict=True)]
    check(world, make_batch(ForwardMode.EXTEND, [2, 5, 1, 3], seq_lens, widths, world.table), rng)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("slack", [0, 7])
def test_prompts_and_windows_in_one_pass_follow_the_definition(width: int, page_size: int, slack: int) -> None:
    """The windows' lengths are bounds on the host, and what pads them stays out."""
    rng = np.random.default_rng(width + slack)
    world = World.make(rng, page_size, windows=(-1, 5))
    prompts = make_batch(ForwardMode.EXTEND, [2, 5], [6, 20], [6, 3], world.table)
    windows = make_batch(ForwardMode.TARGET_VERIFY, [1, 3, 4, 0], [width, 33, 12, width], [width] * 4, world.table, slack)
    both = prompts_and_windows(prompts, windows, 3)
    assert (both.batch_size, both.num_tokens) == (5, 9 + 3 * width)
    assert both.positions.tolist() == prompts.positions.tolist() + windows.positions[: 3 * width].tolist()
    assert both.out_cache_loc.tolist() == prompts.out_cache_loc.tolist() + windows.out_cache_loc[: 3 * width].tolist()
    check(world, both, rng)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("slack", [0, 7])
def test_fixed_width_passes_follow_the_definition(width: int, page_size: int, slack: int) -> None:
    rng = np.random.default_rng(width)
    world = World.make(rng, page_size, windows=(-1, 3, 0))
    seq_lens = (rng.integers(width, 40, size=3)).tolist()
    batch = make_batch(ForwardMode.TARGET_VERIFY, [4, 1, 2], seq_lens, [width] * 3, world.table, slack)
    check(world, batch, rng)


@pytest.mark.parametrize("page_size", [1, 4])
def test_neighbouring_pages_read_in_place_give_the_same(page_size: int) -> None:
    rng = np.random.default_rng(0)
    world = World.make(rng, page_size, neighbours=True)
    batch = make_batch(ForwardMode.DECODE, [3], [21], [1], world.table)
    check(world, batch, rng)
    assert isinstance(world.backend._passes[0][0].pages, slice), "the fast path was taken"
    check(world, make_batch(ForwardMode.EXTEND, [3, 4], [9, 30], [9, 5], world.table), rng)


@pytest.mark.parametrize("window", [-1, 4, 1])
@pytest.mark.parametrize("seed", range(3))
def test_tree_masks_follow_the_definition(window: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World.make(rng, 4, windows=(window,))
    batch = make_batch(ForwardMode.TARGET_VERIFY, [1, 2], [20, 9], [6, 6], world.table)
    tail = int(rng.integers(6, 9))
    # Every query sees its own key, as every node of a tree does.
    own = 1 << torch.arange(tail - 6, tail).repeat(2)
    batch = replace(batch, tree_mask=torch.from_numpy(rng.integers(0, 1 << tail, size=12)) | own, tree_tail=tail)
    check(world, batch, rng)


def test_a_tree_of_64_nodes_uses_every_bit() -> None:
    rng = np.random.default_rng(0)
    world = World.make(rng, 16)
    batch = make_batch(ForwardMode.TARGET_VERIFY, [1], [64], [64], world.table)
    causal = [(1 << (i + 1)) - 1 for i in range(64)]
    signed = torch.tensor([m - (1 << 64) if m >> 63 else m for m in causal])
    q = torch.randn(64, H, HEAD)
    plan_pass(world.backend, batch)
    expected = world.backend.forward(q, world.layers[0], batch)
    tree = replace(batch, tree_mask=signed, tree_tail=64)
    plan_pass(world.backend, tree)
    torch.testing.assert_close(world.backend.forward(q, world.layers[0], tree), expected)


@pytest.mark.parametrize("tree", [False, True])
def test_each_step_of_a_plan_sees_earlier_steps(tree: bool) -> None:
    rng = np.random.default_rng(1)
    world = World.make(rng, 4)
    first = make_batch(ForwardMode.DECODE, [2, 3], [11, 5], [2, 2], world.table, slack=3)
    plan_pass(world.backend, replace(first, tree_mask=torch.zeros(4, dtype=torch.int64), tree_tail=2) if tree else first, num_passes=3)
    for step in range(3):
        batch = replace(first, pass_index=step)
        if tree:
            tail = 2 * (step + 1)
            own = 1 << torch.tensor([tail - 2, tail - 1] * 2)
            batch = replace(batch, tree_mask=torch.from_numpy(rng.integers(0, 1 << tail, size=4)) | own, tree_tail=tail)
        q = torch.randn(4, H, HEAD)
        torch.testing.assert_close(
            world.backend.forward(q, world.layers[0], batch), slow_attention(q, world, world.layers[0], batch, step), rtol=1e-4, atol=1e-5
        )


def test_planning_reads_a_changed_tree_mask_again() -> None:
    rng = np.random.default_rng(2)
    world = World.make(rng, 4)
    batch = make_batch(ForwardMode.TARGET_VERIFY, [1], [12], [3], world.table)
    batch = replace(batch, tree_mask=torch.tensor([1, 3, 7]), tree_tail=3)
    check(world, batch, rng)
    assert batch.tree_mask is not None
    batch.tree_mask.copy_(torch.tensor([1, 3, 5]))
    check(world, batch, rng)


@pytest.mark.parametrize("width", [1, 4])
def test_padding_rows_are_finite_and_change_no_result(width: int) -> None:
    rng = np.random.default_rng(3)
    world = World.make(rng, 4)
    alone = make_batch(ForwardMode.DECODE, [1], [17], [width], world.table)
    padded = make_batch(ForwardMode.DECODE, [1, 0, 0], [17, width, width], [width] * 3, world.table)
    q = torch.randn(3 * width, H, HEAD)
    plan_pass(world.backend, padded)
    out = world.backend.forward(q, world.layers[0], padded)
    assert torch.isfinite(out).all()
    plan_pass(world.backend, alone)
    torch.testing.assert_close(out[:width], world.backend.forward(q[:width], world.layers[0], alone), rtol=1e-5, atol=1e-6)


SINKS = torch.linspace(-2.0, 2.0, H)


@pytest.mark.parametrize("width", [1, 4])
def test_sinks_follow_the_formula(width: int) -> None:
    rng = np.random.default_rng(4)
    layers = tuple(AttentionSpec(i, H, GQA, HEAD**-0.5, window, SINKS) for i, window in enumerate((-1, 3)))
    world = World.make(rng, 4, layers=layers)
    check(world, make_batch(ForwardMode.TARGET_VERIFY, [4, 1, 2], [width, 17, 30], [width] * 3, world.table, 5), rng)
    check(world, make_batch(ForwardMode.EXTEND, [2, 5, 1], [7, 9, 20], [7, 3, 1], world.table), rng)
    tree = make_batch(ForwardMode.TARGET_VERIFY, [1, 2], [20, 9], [width, width], world.table)
    check(world, replace(tree, tree_mask=1 << torch.arange(width).repeat(2), tree_tail=width), rng)


@pytest.mark.parametrize("width", [1, 4])
def test_a_soft_cap_follows_the_formula(width: int) -> None:
    rng = np.random.default_rng(4)
    layers = tuple(AttentionSpec(i, H, GQA, 1.0, window, softcap=2.0) for i, window in enumerate((-1, 3)))
    world = World.make(rng, 4, layers=layers)
    check(world, make_batch(ForwardMode.TARGET_VERIFY, [4, 1, 2], [width, 17, 30], [width] * 3, world.table, 5), rng)
    check(world, make_batch(ForwardMode.EXTEND, [2, 5, 1], [7, 9, 20], [7, 3, 1], world.table), rng)
    tree = make_batch(ForwardMode.TARGET_VERIFY, [1, 2], [20, 9], [width, width], world.table)
    check(world, replace(tree, tree_mask=1 << torch.arange(width).repeat(2), tree_tail=width), rng)


def test_layers_may_differ_and_latent_caches_work() -> None:
    rng = np.random.default_rng(5)
    latent = KVSpec("mla", 1, 12, 8, torch.float32)
    wide = KVSpec("gqa", 3, 16, 4, torch.float32)
    layers = (AttentionSpec(0, H, GQA, 0.3), AttentionSpec(1, 5, latent, 0.2), AttentionSpec(2, 3, wide, 0.25, window=4))
    world = World.make(rng, 4, layers=layers)
    assert [spec.bytes_per_slot for spec in world.pool.specs] == [2 * G * HEAD * 4, 12 * 4, 3 * 20 * 4]
    check(world, make_batch(ForwardMode.TARGET_VERIFY, [4, 1, 2], [4, 17, 30], [4] * 3, world.table, 5), rng)
    check(world, make_batch(ForwardMode.EXTEND, [2, 5, 1], [7, 9, 20], [7, 3, 1], world.table), rng)
    before = [cache.flatten(0, 1).clone() for cache in (*world.pool.k, *world.pool.v)]
    source, target = torch.tensor([5, 9, 0, 40]), torch.tensor([4, 5, 0, 33])
    world.pool.move(source, target, 2)
    for cache, old in zip((*world.pool.k, *world.pool.v), before, strict=True):
        assert torch.equal(cache.flatten(0, 1)[target], old[source])


def per_head(num_kv_heads: int, sinks: torch.Tensor | None = None, dtype: torch.dtype = torch.float32) -> AttentionSpec:
    """Nine heads of the embedded model's size."""
    return AttentionSpec(0, 9, KVSpec("gqa", num_kv_heads, 64, 64, dtype), 0.125, sinks=sinks)


def long_world(layer: AttentionSpec) -> World:
    """One request per row over a pool of noise; the rows' pages lie side by side."""
    rng = np.random.default_rng(0)
    pages = LONG // 16
    layers = (layer,)
    pool = KVPool([layers[0].kv], 2 * pages, 16, CPU)
    for cache in (*pool.k, *pool.v):
        cache.copy_(torch.from_numpy(rng.standard_normal(cache.shape).astype(np.float32)))
    table = PageTable(3, LONG, 16, CPU)
    table.pages[1:] = torch.arange(1, 2 * pages + 1, dtype=torch.int32).view(2, pages)
    return World(pool, table, TorchNativeAttention(AttentionShape(layers, 8, 8, LONG, tuning=H200), pool, table), layers)


class Calls:
    """Counts the keys of each call of attention."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        self._world, self._keys = long_world(per_head(3)), list[int]()
        whole = torch_native.stable_attention
        monkeypatch.setattr(
            torch_native, "stable_attention", lambda q, k, *rest: self._keys.append(k.shape[0] * k.shape[2]) or whole(q, k, *rest)
        )

    def of(self, mode: ForwardMode, rows: list[int], seq_lens: list[int], widths: list[int], ragged: int = 0) -> list[int]:
        """Keys of each call of a pass, the requests' padding included. `ragged`: `max_queries` of a capturable pass."""
        batch = make_batch(mode, rows, seq_lens, widths, self._world.table)
        self._keys.clear()
        plan_pass(self._world.backend, replace(batch, max_queries=ragged))
        self._world.backend.forward(torch.zeros(batch.num_tokens, 9, 64), self._world.layers[0], batch)
        return list(self._keys)


@pytest.mark.parametrize("widths", [[1, 1], [4, 4]])
def test_a_long_request_pads_no_short_one(widths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    for mode, ragged in ((ForwardMode.TARGET_VERIFY, 0), (ForwardMode.EXTEND, widths[0]), (ForwardMode.EXTEND, 0)):
        assert calls.of(mode, [1, 2], [1024, 30], widths, ragged) == [1024, 32]
        assert calls.of(mode, [1, 2], [64, 30], widths, ragged) == [2 * 64], "lengths that differ little are one call"


def test_windows_beside_prompts_are_one_call_and_each_prompt_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    assert calls.of(ForwardMode.EXTEND, [1, 2, 1, 2], [96, 96, 30, 40], [96, 96, 4, 4]) == [96, 96, 2 * 48]
    assert calls.of(ForwardMode.EXTEND, [1, 2, 1, 2], [96, 30, 30, 1024], [4, 4, 4, 4]) == [96, 32, 32, 1024], "lengths far apart"


def test_keys_may_be_padded_beyond_the_page_table() -> None:
    world = World.make(np.random.default_rng(6), 4)
    short = PageTable(6, 24, 4, CPU)
    short.pages[:] = world.table.pages[:, :6]
    backend = TorchNativeAttention(AttentionShape(world.layers, 8, 8, 24, tuning=H200), world.pool, short)
    batch = make_batch(ForwardMode.TARGET_VERIFY, [1, 2], [22, 24], [2, 2], world.table)
    q = torch.randn(4, H, HEAD)
    outs = []
    for each in (world.backend, backend):
        plan_pass(each, batch)
        outs.append(each.forward(q, world.layers[0], batch))
    assert torch.equal(*outs)


KINDS = {
    "grouped": per_head(3),
    "one query head per KV head": per_head(9),
    "sinks": per_head(3, torch.linspace(-2.0, 2.0, 9)),
    "bfloat16": per_head(3, dtype=torch.bfloat16),
    "latent": AttentionSpec(0, 9, KVSpec("mla", 1, 96, 64, torch.float32), 0.125),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 5, 34, 97, 257, 300, 417, 513, 770, 1090])
def test_a_query_gets_the_same_bits_in_every_pass(length: int, kind: str) -> None:
    """Alone, in a window, beside a longer request, in a prompt, and in a prompt behind a cached prefix."""
    world = long_world(KINDS[kind])
    shape = (LONG, 9, KINDS[kind].kv.key_dim)
    queries = torch.from_numpy(np.random.default_rng(1).standard_normal(shape).astype(np.float32)).to(KINDS[kind].kv.dtype)

    def run(mode: ForwardMode, rows: list[int], seq_lens: list[int], widths: list[int]) -> torch.Tensor:
        batch = make_batch(mode, rows, seq_lens, widths, world.table)
        plan_pass(world.backend, batch)
        return world.backend.forward(queries[batch.positions], world.layers[0], batch)

    prompt = run(ForwardMode.EXTEND, [1], [length], [length])
    both = run(ForwardMode.EXTEND, [2, 1], [40, length], [40, length])
    assert torch.equal(both[40:], prompt)
    for position in sorted({0, length // 2, max(0, length - 2), length - 1}):
        ends = position + 1
        assert torch.equal(run(ForwardMode.DECODE, [1], [ends], [1]), prompt[position:ends]), position
        assert torch.equal(run(ForwardMode.DECODE, [1, 2], [ends, 1000], [1, 1])[:1], prompt[position:ends]), position
        if position >= 3:
            assert torch.equal(run(ForwardMode.TARGET_VERIFY, [1], [ends], [4]), prompt[position - 3 : ends]), position
            assert torch.equal(run(ForwardMode.TARGET_VERIFY, [1], [ends], [2]), prompt[position - 1 : ends]), position
            for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND):
                assert torch.equal(run(mode, [1, 2], [ends, 900], [4, 4])[:4], prompt[position - 3 : ends]), position
    for prefix in (16, 48, 256):
        if prefix < length:
            assert torch.equal(run(ForwardMode.EXTEND, [1], [length], [length - prefix]), prompt[prefix:]), prefix
