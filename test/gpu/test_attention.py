"""FA3, split attention and FlashInfer against torch attention in float32, eager and captured, over random page tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from gpu.attention_kinds import BF16, CAUSAL_KINDS, FP16, MAX_LEN, SINK_KINDS, TREE_KINDS, Kind
from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200, DeviceTuning
from runtime.config.resolve import resolve
from runtime.errors import ConfigError
from runtime.layers.attention.base import AttentionBackend, AttentionShape, AttentionSpec, plan_pass
from runtime.layers.attention.registry import backend_class, build_backend
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.mem_cache.kv_spec import KVSpec
from unit.test_server_args import HOPPER, LLAMA, args

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
B = 7
TOLERANCE = {BF16: 1e-2, FP16: 2e-3}
"""Relative error allowed for 16-bit operands."""


@dataclass
class World:
    """A pool of random keys and values over two layers, and a float32 copy for torch attention."""

    kind: Kind
    layers: tuple[AttentionSpec, ...]
    slow_layers: tuple[AttentionSpec, ...]
    fast: AttentionBackend
    slow: AttentionBackend
    pages: PageTable
    rng: np.random.Generator


@pytest.fixture(autouse=True)
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """With "fa3 split", split-KV attention runs every fixed-width pass that it supports; with "fa3", none. Returns the passes it ran."""
    name, ran = request.node.callspec.params["name"], list[object]()
    if name.startswith("fa3"):
        from runtime.layers.attention import fa3 as flash_attention

        split_attention = flash_attention.split_attention

        def listed(*given: object, **more: object) -> torch.Tensor:
            ran.append(given[4])
            return split_attention(*given, **more)

        monkeypatch.setattr(DeviceTuning, "split_wins", lambda *_shape: name != "fa3")
        monkeypatch.setattr(flash_attention, "split_attention", listed)
    return ran


def plain(head_dim: int, page_size: int, width: int, window: int = -1, steps: int = 1, tail: int = 0) -> Kind:
    """A kind of the ordinary model: bfloat16, 8 heads over 2, and a window, if any, in one of two layers."""
    return Kind((BF16, head_dim, "full" if window < 0 else "mixed"), window, 4, 2, page_size, width, B, steps, tail)


def make_world(name: str, kind: Kind, seed: int = 0) -> World:
    """With "fa3 8-bit", keys and values are in e4m3, with scales."""
    torch.manual_seed(seed)
    device = torch.device("cuda")
    table = PageTable(kind.batch + 1, MAX_LEN, kind.page_size, device)
    num_pages = kind.batch * table.max_pages
    scaled = name == "fa3 8-bit"
    scales = torch.tensor([0.25, 2.0] if scaled else [1.0, 1.0], device=device)
    wide = KVSpec("gqa", kind.kv_heads, kind.head_dim, kind.head_dim, torch.float32)
    kv = replace(wide, dtype=torch.float8_e4m3fn if scaled else kind.dtype, scaled=scaled)
    pool, reference = (KVPool([spec] * 2, num_pages, kind.page_size, device) for spec in (kv, wide))
    for caches, copies, scale in zip((pool.k, pool.v), (reference.k, reference.v), scales, strict=True):
        for cache, copy in zip(caches, copies, strict=True):
            cache.copy_(copy.normal_() / scale)
            copy.copy_(cache).mul_(scale)
    layers = tuple(AttentionSpec(i, kind.num_q_heads, kv, kind.head_dim**-0.5, kind.windows[i], sinks(kind)) for i in range(2))
    shape = AttentionShape(
        layers=tuple(replace(layer, kv_scales=scales) for layer in layers) if scaled else layers,
        max_batch_size=kind.batch,
        max_tokens_per_req=kind.width,
        max_context_len=MAX_LEN,
        tuning=H200,
        dtype=kind.dtype,
    )
    plain_shape = replace(shape, layers=tuple(replace(layer, kv=wide) for layer in layers))
    fast, slow = build_backend(name.split()[0], shape, pool, table), build_backend("torch_native", plain_shape, reference, table)
    world = World(kind, shape.layers, plain_shape.layers, fast, slow, table, np.random.default_rng(seed))
    shuffle(world)
    return world


def sinks(kind: Kind) -> torch.Tensor | None:
    """Sinks as large as the largest scores, so that omitting one is detected; rounded to bfloat16, the dtype that FA3 accepts."""
    return (3 + torch.randn(kind.num_q_heads, device="cuda")).to(BF16) if kind.sinks else None


def shuffle(world: World) -> None:
    """Reassign all pages at random, in place."""
    pages = world.pages.pages[1:]
    pages.copy_((torch.randperm(pages.numel(), device=pages.device) + 1).view(pages.shape))


def queries(kind: Kind, tokens: int) -> torch.Tensor:
    return torch.randn((tokens, kind.num_q_heads, kind.head_dim), device="cuda").to(kind.dtype)


def fixed_batch(kind: Kind) -> ForwardBatch:
    """Persistent buffers for passes of one size; initially all rows are padding."""
    ints, size, width = {"dtype": torch.int64, "device": "cuda"}, kind.batch, kind.width
    least = max(width, kind.tail)
    return ForwardBatch(
        mode=ForwardMode.DECODE if width == 1 else ForwardMode.TARGET_VERIFY,
        batch_size=size,
        tokens_per_req=width,
        input_ids=torch.zeros(size * width, **ints),
        positions=torch.zeros(size * width, **ints),
        out_cache_loc=torch.zeros(size * width, **ints),
        req_pool_indices=torch.zeros(size, **ints),
        seq_lens=torch.full((size,), least, dtype=torch.int32, device="cuda"),
        qo_indptr=torch.arange(size + 1, dtype=torch.int32, device="cuda") * width,
        seq_len_bounds=np.full(size, least, dtype=np.int32),
        tree_mask=torch.ones(size * width, **ints) if kind.tail else None,
        tree_tail=kind.tail,
    )


def load(world: World, batch: ForwardBatch, lens: list[int]) -> None:
    """Put requests of these lengths into the batch in place; the rest is padding. Length bounds are up to 8 above the lengths.

    Each request has at least the keys of its own queries and of its tree tail.
    """
    size, width, count = batch.batch_size, batch.tokens_per_req, len(lens)
    least = max(width, batch.tree_tail)
    full = np.array([max(length, least) for length in lens] + [least] * (size - count), dtype=np.int32)
    rows = np.zeros(size, dtype=np.int64)
    rows[:count] = world.rng.permutation(size)[:count] + 1
    batch.set_rows(torch.from_numpy(rows))
    batch.seq_lens.copy_(torch.from_numpy(full))
    slack = world.rng.integers(0, 9, size).astype(np.int32)
    slack[0] = 8
    batch.seq_len_bounds = np.where(rows > 0, full + slack, full).astype(np.int32)
    ends = torch.from_numpy(full).cuda().long()
    batch.positions.copy_((ends[:, None] - width + torch.arange(width, device="cuda")).flatten())
    if batch.tree_mask is not None:
        batch.tree_mask.copy_(random_mask(batch))


def random_mask(batch: ForwardBatch) -> torch.Tensor:
    """Random tree masks in which each query sees itself."""
    width = batch.tokens_per_req
    own = torch.arange(batch.tree_tail - width, batch.tree_tail, device="cuda").repeat(batch.batch_size)
    return torch.randint(0, 2**62, (batch.batch_size * width,), device="cuda") | (torch.ones_like(own) << own)


def at_step(batch: ForwardBatch, step: int, masks: list[torch.Tensor]) -> ForwardBatch:
    """A later pass of the same plan; a tree has its own mask in `masks`."""
    ahead = step * batch.tokens_per_req
    one = replace(batch, pass_index=step, seq_lens=batch.seq_lens + ahead, positions=batch.positions + ahead)
    return one if batch.tree_mask is None else replace(one, tree_tail=batch.tree_tail + ahead, tree_mask=masks[step])


def check(world: World, batch: ForwardBatch, q: torch.Tensor, got: list[torch.Tensor]) -> None:
    plan_pass(world.slow, batch)
    for layer, out in enumerate(got):
        compare(world, batch, q, layer, out)


def compare(world: World, batch: ForwardBatch, q: torch.Tensor, layer: int, out: torch.Tensor) -> None:
    where, want = f"layer {layer}, pass {batch.pass_index}", world.slow.forward(q.float(), world.slow_layers[layer], batch).double()
    assert torch.isfinite(out).all(), f"{where}: not finite"
    per_token = (out.double() - want).norm(dim=1) / want.norm(dim=1)
    worst = per_token.max()
    assert worst < TOLERANCE[world.kind.dtype], f"{where}: relative error {worst:.1e} at token {per_token.argmax()}"


def captured(run: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


LENGTHS = ([1020, 129, 2040, 700, 5, 257], [2288, 2290, 2279, 2272, 2291, 2288, 2289], [9, 130, 64, 6, 128])
"""Some length bounds are in the next chunk of FlashInfer's planner (a multiple of 128 keys), which must have no effect."""


@pytest.mark.parametrize(
    ("name", "head_dim", "page_size", "width", "window"),
    [
        ("fa3", 128, 1, 1, -1),
        ("fa3", 128, 64, 4, -1),
        ("fa3", 64, 16, 4, 100),
        ("fa3", 64, 1, 1, 100),
        ("fa3", 256, 16, 1, -1),
        ("fa3 split", 128, 1, 1, -1),
        ("fa3 split", 128, 64, 4, -1),
        ("fa3 split", 64, 16, 8, 100),
        ("fa3 split", 64, 1, 1, 100),
        ("fa3 split", 256, 16, 1, -1),
        ("fa3 split", 256, 64, 5, -1),
        ("fa3 split", 128, 64, 9, -1),
        ("fa3 8-bit", 128, 64, 4, -1),
        ("fa3 8-bit", 64, 16, 1, 100),
        ("fa3 8-bit", 256, 16, 2, -1),
        ("flashinfer", 128, 1, 1, -1),
        ("flashinfer", 128, 16, 4, -1),
        ("flashinfer", 64, 64, 4, -1),
    ],
)
def test_a_captured_pass_follows_lengths_and_tables_that_change(name: str, head_dim: int, page_size: int, width: int, window: int) -> None:
    world = make_world(name, plain(head_dim, page_size, width, window))
    batch = fixed_batch(world.kind)
    q = queries(world.kind, B * width)

    def run() -> list[torch.Tensor]:
        return [world.fast.forward(q, world.layers[layer], batch) for layer in (0, 1)]

    plan_pass(world.fast, batch)
    graph, out = captured(run)
    for lens in LENGTHS:
        q.normal_()
        load(world, batch, lens)
        plan_pass(world.fast, batch)
        torch.cuda.synchronize()  # in a model other kernels run between a plan and its first use, and early launches may rely on it
        eager = [layer.clone() for layer in run()]
        for layer in out:
            layer.fill_(float("nan"))
        plan_pass(world.fast, batch)
        graph.replay()
        check(world, batch, q, out)
        assert all(torch.equal(a, b) for a, b in zip(eager, out, strict=True)), "replay differs from the same pass run eagerly"


@pytest.mark.parametrize("name", ["fa3 split", "fa3 8-bit"])
@pytest.mark.parametrize(("batch_size", "width", "window"), [(30, 4, -1), (48, 1, 20), (52, 1, -1), (52, 4, 20), (64, 8, -1)])
def test_a_captured_pass_of_many_requests_follows_their_lengths(name: str, batch_size: int, width: int, window: int) -> None:
    world = make_world(name, replace(plain(128, 64, width, window), kv_heads=8, batch=batch_size))
    batch, q = fixed_batch(world.kind), queries(world.kind, batch_size * width)

    def run() -> list[torch.Tensor]:
        return [world.fast.forward(q, world.layers[layer], batch) for layer in (0, 1)]

    plan_pass(world.fast, batch)
    graph, out = captured(run)
    for count in (batch_size, batch_size - 7):
        load(world, batch, random_lengths(world.rng, width, 500, count))
        plan_pass(world.fast, batch)
        graph.replay()
        check(world, batch, q, out)


def prompts(rows: list[int], prefixes: list[int], queries: list[int]) -> ForwardBatch:
    """An EXTEND batch."""
    before, new = np.array(prefixes, dtype=np.int32), np.array(queries, dtype=np.int32)
    lens, indptr = before + new, np.concatenate(([0], np.cumsum(new))).astype(np.int32)
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(before, new, strict=True)])
    total = int(indptr[-1])
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        batch_size=len(lens),
        tokens_per_req=0,
        input_ids=torch.zeros(total, dtype=torch.int64, device="cuda"),
        positions=torch.from_numpy(positions).cuda(),
        out_cache_loc=torch.zeros(total, dtype=torch.int64, device="cuda"),
        req_pool_indices=torch.tensor(rows, device="cuda"),
        seq_lens=torch.from_numpy(lens).cuda(),
        qo_indptr=torch.from_numpy(indptr).cuda(),
        seq_len_bounds=lens,
        extend_lens=new,
    )


@pytest.mark.parametrize(("name", "page_size"), [("fa3", 1), ("fa3", 64), ("fa3 8-bit", 16), ("flashinfer", 16)])
def test_a_ragged_extend_sees_its_prefix(name: str, page_size: int) -> None:
    world = make_world(name, plain(128, page_size, 1))
    batch = prompts([3, 1, 7, 2, 5], [0, 5, 700, 0, 63], [1, 300, 17, 64, 129])
    q = queries(world.kind, batch.num_tokens)
    plan_pass(world.fast, batch)
    check(world, batch, q, [world.fast.forward(q, world.layers[layer], batch) for layer in (0, 1)])


def random_lengths(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    """Log-uniform lengths: each doubling of the length above `low` is equally likely."""
    return [low - 1 + math.floor((high - low + 1) ** u) for u in rng.random(count)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["fa3", "fa3 split", "flashinfer"], CAUSAL_KINDS + TREE_KINDS),
        *itertools.product(["fa3", "fa3 split"], SINK_KINDS),
    ],
    ids=str,
)
def test_passes_of_every_kind_are_torchs_eager_and_captured(name: str, kind: Kind, splits: list[object]) -> None:
    world = make_world(name, kind, seed=len(str(kind)))
    batch, low = fixed_batch(kind), max(kind.width, kind.tail)
    masks = [] if batch.tree_mask is None else [batch.tree_mask, *(torch.ones_like(batch.tree_mask) for _ in range(1, kind.steps))]
    qs = [queries(kind, kind.batch * kind.width) for _ in range(kind.steps)]

    def run() -> list[torch.Tensor]:
        steps = [at_step(batch, step, masks) for step in range(kind.steps)]
        return [world.fast.forward(q, world.layers[layer], one) for one, q in zip(steps, qs, strict=True) for layer in (0, 1)]

    plan_pass(world.fast, batch, kind.steps)
    graph, out = captured(run)
    for turn in range(4):
        count = int(world.rng.integers(1, kind.batch + 1)) if turn else kind.batch
        shuffle(world)
        load(world, batch, random_lengths(world.rng, low, kind.longest, count) if turn else [kind.longest] * count)
        for q in qs:
            q.normal_()
        for step, mask in enumerate(masks[1:], 1):
            mask.copy_(random_mask(at_step(batch, step, masks)))
        plan_pass(world.fast, batch, kind.steps)
        torch.cuda.synchronize()  # as in a model, where other kernels run between a plan and its first use
        eager = run()
        for layer in out:
            layer.fill_(float("nan"))
        plan_pass(world.fast, batch, kind.steps)
        graph.replay()
        plan_pass(world.slow, batch, kind.steps)
        for at, (one, again) in enumerate(zip(out, eager, strict=True)):
            compare(world, at_step(batch, at // 2, masks), qs[at // 2], at % 2, one)
            assert torch.equal(one, again), "replay differs from the same pass run eagerly"
    from runtime.layers.attention.kernels.split_shape import supports

    supported = supports(kind.width, kind.num_q_heads, kind.kv_heads)
    assert bool(splits) == (name == "fa3 split" and supported), "split-KV attention ran what it supports"


@pytest.mark.parametrize(
    ("name", "kind"),
    [*itertools.product(["fa3", "flashinfer"], CAUSAL_KINDS), *(("fa3", kind) for kind in SINK_KINDS if not kind.tail)],
    ids=str,
)
def test_prompts_of_every_kind_are_torchs(name: str, kind: Kind) -> None:
    world = make_world(name, kind, seed=len(str(kind)))
    for _ in range(3):
        count = int(world.rng.integers(1, min(kind.batch, 6) + 1))
        new = random_lengths(world.rng, 1, 700, count)
        prefixes = [0 if world.rng.random() < 0.3 else random_lengths(world.rng, 1, MAX_LEN - n, 1)[0] for n in new]
        shuffle(world)
        batch = prompts((world.rng.permutation(kind.batch)[:count] + 1).tolist(), prefixes, new)
        q = queries(kind, batch.num_tokens)
        plan_pass(world.fast, batch)
        check(world, batch, q, [world.fast.forward(q, world.layers[layer], batch) for layer in (0, 1)])


@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_what_a_backend_takes_is_what_resolve_lets_through(name: str) -> None:
    taken = backend_class(name).caps.head_dims
    assert taken is not None
    for head_dim in range(16, 576, 16):
        asked = replace(LLAMA, head_dim=head_dim)
        if head_dim in taken:
            assert resolve(args(attention_backend=name), HOPPER, asked).device.attention_backend == name
        else:
            with pytest.raises(ConfigError, match=f"--attention-backend {name} .*head dimension {head_dim}, only .* Use torch_native"):
                resolve(args(attention_backend=name), HOPPER, asked)


@pytest.mark.parametrize(("name", "head_dim"), [*itertools.product(["fa3", "flashinfer"], [32, 80, 96, 192]), ("flashinfer", 512)])
def test_a_head_dimension_without_kernels_is_refused_when_built(name: str, head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"Attention backend {name} does not support head dimension {head_dim}, only 64, 128, 256"):
        make_world(name, plain(head_dim, 16, 1))


@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_float32_is_refused_when_built(name: str) -> None:
    with pytest.raises(ConfigError, match=f"Attention backend {name} does not support float32, only bfloat16 and float16"):
        make_world(name, replace(plain(128, 16, 1), kernel=(torch.float32, 128, "full")))


@pytest.mark.parametrize("name", ["fa3", "fa3 split", "flashinfer"])
@pytest.mark.parametrize("masked", ["mixed", "window"])
def test_a_tree_beside_a_window_is_refused_when_planned(name: str, masked: str) -> None:
    world = make_world(name, replace(plain(128, 16, 4, tail=4), kernel=(BF16, 128, masked), window=100))
    with pytest.raises(ConfigError, match=f"full attention in every layer with {name.split()[0]}. Use --speculative-eagle-topk 1"):
        plan_pass(world.fast, fixed_batch(world.kind))


@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_prompts_queued_behind_a_busy_device_keep_their_plans(name: str) -> None:
    world = make_world(name, plain(128, 16, 1))
    batches = [prompts([3, 1], [0, 5], [700, 300]), prompts([7], [700], [17]), prompts([2, 5, 4], [0, 63, 1000], [64, 129, 900])]
    qs = [queries(world.kind, batch.num_tokens) for batch in batches]
    torch.cuda._sleep(200_000_000)  # about 0.1 s, in which the host plans all three
    outs = []
    for batch, q in zip(batches, qs, strict=True):
        plan_pass(world.fast, batch)
        outs.append([world.fast.forward(q, world.layers[layer], batch) for layer in (0, 1)])
    for batch, q, out in zip(batches, qs, outs, strict=True):
        check(world, batch, q, out)


@pytest.mark.parametrize(
    ("name", "page_size", "tail"),
    [("fa3", 16, 4), ("fa3", 1, 64), ("fa3 split", 16, 4), ("fa3 split", 1, 64), ("fa3 8-bit", 16, 4), ("flashinfer", 16, 4)],
)
def test_a_tree_mask_hides_branches_in_a_captured_pass(name: str, page_size: int, tail: int) -> None:
    width = 4
    world = make_world(name, plain(128, page_size, width, tail=tail))
    batch = fixed_batch(world.kind)
    load(world, batch, [tail] * B)
    q = queries(world.kind, B * width)
    plan_pass(world.fast, batch)
    graph, out = captured(lambda: [world.fast.forward(q, world.layers[0], batch)])
    for lens in ([1020, 129, 2040, tail, 66, tail + 1], [2288] * B):
        q.normal_()
        load(world, batch, lens + [tail] * (B - len(lens)))
        plan_pass(world.fast, batch)
        out[0].fill_(float("nan"))
        graph.replay()
        check(world, batch, q, out)


@pytest.mark.parametrize("name", ["fa3", "fa3 split", "flashinfer"])
@pytest.mark.parametrize("tree", [False, True])
def test_one_plan_serves_every_pass_of_a_draft(name: str, tree: bool) -> None:
    width, steps = 2, 3
    world = make_world(name, plain(128, 16, width, steps=steps, tail=width if tree else 0))
    batch = fixed_batch(world.kind)
    load(world, batch, [1020, 129, 700, width, 257])
    plan_pass(world.fast, batch, steps)
    plan_pass(world.slow, batch, steps)
    for step in range(steps):
        one = replace(batch, pass_index=step, seq_lens=batch.seq_lens + step * width, positions=batch.positions + step * width)
        if tree:
            one = replace(one, tree_tail=width * (step + 1))
            one = replace(one, tree_mask=random_mask(one))
        q = queries(world.kind, B * width)
        compare(world, one, q, 0, world.fast.forward(q, world.layers[0], one))


@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("name", ["flashinfer"])
def test_a_plan_serves_until_a_length_leaves_its_block(name: str, width: int, window: int) -> None:
    world = make_world(name, plain(128, 16, width, window))
    batch, q = fixed_batch(world.kind), queries(world.kind, B * width)
    plan_pass(world.fast, batch)
    graph, out = captured(lambda: [world.fast.forward(q, world.layers[layer], batch) for layer in (0, 1)])
    (plan,) = world.fast._fixed.values()
    one, made, lens = next(iter(plan.passes.values())), 0, [1000, 129, 700, 255, 30, 512, 5]
    for turn in range(32):
        before = one.planned
        load(world, batch, lens)  # each time in other rows and with other length bounds
        plan_pass(world.fast, batch)
        again = one.planned is not before
        assert again == (-(-batch.seq_len_bounds // 256) * 256 != before[0]).any()
        made += again
        graph.replay()
        check(world, batch, q, out)
        lens = [n + int(world.rng.integers(0, 8)) for n in lens] if turn != 16 else lens[::-1]
    assert 1 < made < 24


@pytest.mark.parametrize("name", ["fa3", "fa3 split", "flashinfer"])
def test_a_wider_pass_allocates_no_workspace(name: str) -> None:
    """Partial results of 128 requests with 8 queries take a third of a GiB, and graphs keep the memory that they were captured with."""
    kind = replace(plain(128, 16, 8), group=4, kv_heads=8, batch=64)
    world = make_world(name, kind)
    plan_pass(world.fast, fixed_batch(replace(kind, width=4)))
    before = torch.cuda.memory_allocated()
    batch = fixed_batch(kind)
    plan_pass(world.fast, batch)
    assert torch.cuda.memory_allocated() - before < 1 << 20
    q = queries(kind, batch.num_tokens)
    check(world, batch, q, [world.fast.forward(q, world.layers[0], batch)])


@pytest.mark.parametrize("name", ["fa3 split"])
def test_a_short_prompt_may_be_wider_than_every_window(name: str) -> None:
    """Graphs of short prompts are fixed-width passes of one request; workspaces are sized for windows."""
    kind = plain(128, 16, 16)
    world = make_world(name, replace(kind, width=1))
    one = replace(kind, batch=1)
    batch = fixed_batch(one)
    plan_pass(world.fast, batch)
    q = queries(one, batch.num_tokens)
    check(world, batch, q, [world.fast.forward(q, layer, batch) for layer in world.layers])


@pytest.mark.parametrize("name", ["fa3", "fa3 split", "flashinfer"])
def test_planning_a_known_size_never_waits_for_the_device(name: str) -> None:
    world = make_world(name, plain(128, 16, 1))
    batch = fixed_batch(world.kind)
    load(world, batch, [700, 30])
    plan_pass(world.fast, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            plan_pass(world.fast, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    q = queries(world.kind, B)
    check(world, batch, q, [world.fast.forward(q, world.layers[0], batch)])
